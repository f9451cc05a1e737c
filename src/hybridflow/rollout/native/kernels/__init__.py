"""Triton kernels of a decode step. Importing this room needs triton, so whoever uses it imports it when a GPU is there.

All launches fit into a captured CUDA graph: grids follow from shapes, and nothing waits for the device.
"""

from hybridflow.rollout.native.kernels.activations import gated_act
from hybridflow.rollout.native.kernels.attention import decode_attention, plan_attention
from hybridflow.rollout.native.kernels.joint_attention import attend_and_store
from hybridflow.rollout.native.kernels.norms import add_rms_norm, rms_norm
from hybridflow.rollout.native.kernels.products import add_shares, multiply, multiply_gated
from hybridflow.rollout.native.kernels.rotary import rotate_and_store
from hybridflow.rollout.native.kernels.sampling import sample
from hybridflow.rollout.native.plans import AttentionPlan, ProductPlan

__all__ = [
    "AttentionPlan",
    "ProductPlan",
    "add_rms_norm",
    "add_shares",
    "attend_and_store",
    "decode_attention",
    "gated_act",
    "multiply",
    "multiply_gated",
    "plan_attention",
    "rms_norm",
    "rotate_and_store",
    "sample",
]

"""Triton kernels of a decode step. Importing this room needs triton, so whoever uses it imports it when a GPU is there.

All launches fit into a captured CUDA graph: grids follow from shapes, and nothing waits for the device.
"""

from hybridflow.rollout.native.kernels.activations import gated_act
from hybridflow.rollout.native.kernels.attention import (
    AttentionPlan,
    build_attention_workspace,
    decode_attention,
    plan_attention,
)
from hybridflow.rollout.native.kernels.norms import add_rms_norm, rms_norm
from hybridflow.rollout.native.kernels.rotary import rotate_and_store
from hybridflow.rollout.native.kernels.sampling import sample

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "build_attention_workspace",
    "decode_attention",
    "gated_act",
    "plan_attention",
    "rms_norm",
    "rotate_and_store",
    "sample",
]

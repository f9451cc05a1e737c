"""Training on one device or on several that share rows, tokens, matrices and storage: micro-batches by token budget, one optimizer
step a mini-batch, exact resume."""

from hybridflow.train_engine.backends import Backend, describe_devices, find_versions, get_available_backends
from hybridflow.train_engine.building import build_workload, estimate_row_memory
from hybridflow.train_engine.engine import NonFiniteError, TrainEngine
from hybridflow.train_engine.logprobs import compute_batch_logprobs
from hybridflow.train_engine.memory import (
    PLAIN_ROW_MEMORY,
    MemoryEstimate,
    OutOfMemoryError,
    RowMemory,
    Workload,
    compute_memory,
    plan_checkpointing,
    read_shape,
)
from hybridflow.train_engine.mesh import Layout, Mesh, ParallelConfig, build_mesh, check_heads, plan_layout
from hybridflow.train_engine.micro_batches import ModelWork, compute_model_work, compute_row_costs
from hybridflow.train_engine.optimizer import OptimizerSettings
from hybridflow.train_engine.ranks import DriftError, Ranks, join_ranks
from hybridflow.train_engine.schedule import ScheduleSettings
from hybridflow.train_engine.settings import TrainSettings
from hybridflow.train_engine.sharding import compute_box
from hybridflow.train_engine.tensor_parallel import check_tensor_parallel

__all__ = [
    "PLAIN_ROW_MEMORY",
    "Backend",
    "DriftError",
    "Layout",
    "MemoryEstimate",
    "Mesh",
    "ModelWork",
    "NonFiniteError",
    "OptimizerSettings",
    "OutOfMemoryError",
    "ParallelConfig",
    "Ranks",
    "RowMemory",
    "ScheduleSettings",
    "TrainEngine",
    "TrainSettings",
    "Workload",
    "build_mesh",
    "build_workload",
    "check_heads",
    "check_tensor_parallel",
    "compute_batch_logprobs",
    "compute_box",
    "compute_memory",
    "compute_model_work",
    "compute_row_costs",
    "describe_devices",
    "estimate_row_memory",
    "find_versions",
    "get_available_backends",
    "join_ranks",
    "plan_checkpointing",
    "plan_layout",
    "read_shape",
]

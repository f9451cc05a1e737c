"""Training on one device or on several as replicas: micro-batches by token budget, one optimizer step a mini-batch, exact resume."""

from hybridflow.train_engine.engine import NonFiniteError, TrainEngine, TrainSettings
from hybridflow.train_engine.logprobs import compute_batch_logprobs
from hybridflow.train_engine.micro_batches import compute_row_costs
from hybridflow.train_engine.optimizer import OptimizerSettings
from hybridflow.train_engine.ranks import DriftError, Ranks, join_ranks
from hybridflow.train_engine.schedule import ScheduleSettings

__all__ = [
    "DriftError",
    "NonFiniteError",
    "OptimizerSettings",
    "Ranks",
    "ScheduleSettings",
    "TrainEngine",
    "TrainSettings",
    "compute_batch_logprobs",
    "compute_row_costs",
    "join_ranks",
]

"""Training on one device: micro-batches by token budget, one optimizer step a mini-batch, exact resume."""

from hybridflow.train_engine.engine import NonFiniteError, TrainEngine, TrainSettings
from hybridflow.train_engine.logprobs import compute_batch_logprobs
from hybridflow.train_engine.optimizer import OptimizerSettings
from hybridflow.train_engine.schedule import ScheduleSettings

__all__ = [
    "NonFiniteError",
    "OptimizerSettings",
    "ScheduleSettings",
    "TrainEngine",
    "TrainSettings",
    "compute_batch_logprobs",
]

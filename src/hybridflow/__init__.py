"""hybridflow: post-training of large language models, from a laptop CPU to a GPU cluster."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.batch import Batch as Batch
    from hybridflow.config import load_config as load_config
    from hybridflow.data import DataSettings as DataSettings
    from hybridflow.flow.rl_job import RLConfig as RLConfig
    from hybridflow.flow.sft_job import SFTConfig as SFTConfig
    from hybridflow.flow.trainer import RLTrainer as RLTrainer
    from hybridflow.flow.trainer import SFTTrainer as SFTTrainer
    from hybridflow.roles.policy import ModelSettings as ModelSettings
    from hybridflow.train_engine import get_available_backends as get_available_backends
    from hybridflow.types import SamplingParams as SamplingParams

__version__ = "0.1.0"

# Before torch loads OpenMP. Its threads spin while they wait, and with any other busy process on the machine they wait for a thread
# that does not run: steps were seen to take 25 times as long. Passive threads sleep instead, and are as fast on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Imported when first used: torch and its company take seconds, and `hybridflow --help` needs none of them.
_HOMES = {
    "Batch": "hybridflow.batch",
    "DataSettings": "hybridflow.data",
    "ModelSettings": "hybridflow.roles.policy",
    "RLConfig": "hybridflow.flow.rl_job",
    "RLTrainer": "hybridflow.flow.trainer",
    "SFTConfig": "hybridflow.flow.sft_job",
    "SFTTrainer": "hybridflow.flow.trainer",
    "SamplingParams": "hybridflow.types",
    "get_available_backends": "hybridflow.train_engine",
    "load_config": "hybridflow.config",
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridflow' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

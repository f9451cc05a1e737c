"""Rollout: how samples are generated."""

from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.native import NativeEngine, NativeSettings

__all__ = ["NativeEngine", "NativeSettings", "RolloutEngine"]

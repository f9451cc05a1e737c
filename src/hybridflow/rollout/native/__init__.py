"""The native rollout engine: needs only torch and runs on the trainer's own weights."""

from hybridflow.rollout.native.engine import NativeEngine, NativeSettings

__all__ = ["NativeEngine", "NativeSettings"]

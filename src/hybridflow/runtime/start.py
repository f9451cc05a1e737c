"""Which runtime a run gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hybridflow.config import ConfigError
from hybridflow.runtime.api import Runtime, RuntimeSettings
from hybridflow.runtime.inprocess import InProcessRuntime
from hybridflow.types import Numerics


def runs_in_process(settings: RuntimeSettings) -> bool:
    """Whether all roles run in this process; `RAY_ADDRESS=local` in the environment says so, whatever the settings say."""
    return settings.kind == "local" or os.environ.get("RAY_ADDRESS") == "local"


def start_runtime(settings: RuntimeSettings) -> Runtime:
    """The runtime that the settings ask for."""
    if runs_in_process(settings):
        return InProcessRuntime()
    try:
        from hybridflow.runtime.ray_runtime import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "runtime.kind: 'ray' needs the package ray; pip install 'hybridflow[ray]', or set runtime.kind=local"
        ) from None
    return RayRuntime(settings)


@contextlib.contextmanager
def open_runtime(settings: RuntimeSettings) -> Iterator[Runtime]:
    """A runtime that is shut down on the way out, however that is left."""
    runtime = start_runtime(settings)
    try:
        yield runtime
    finally:
        runtime.shutdown()


def worker_threads(settings: RuntimeSettings, numerics: Numerics) -> int:
    """Arithmetic threads of a worker; 0 leaves the process's own setting (on Ray, one a core of its slot). Exact mode pins one, so that
    sums keep their order everywhere."""
    if settings.threads_per_worker:
        return settings.threads_per_worker
    return 1 if numerics == "exact" else 0

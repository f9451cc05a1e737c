"""The runtime on a Ray cluster, joined or started here."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading

import ray
from ray.exceptions import RayError

from hybridflow.config import ConfigError
from hybridflow.runtime.api import RuntimeSettings
from hybridflow.runtime.placement import plan_placement
from hybridflow.runtime.ray_transport import RayTransport, answers, read_inventory
from hybridflow.runtime.scheduler import Scheduler


class RayRuntime(Scheduler):
    """The scheduler over Ray. Raises ConfigError where the cluster has not what the placement asks for; nothing has started then."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            on_sigterm = signal.getsignal(signal.SIGTERM)
            # Ray by itself would join any cluster that it finds on this machine.
            address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
            _join(address, settings.num_cpus if address == "local" else None)
            if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
                # Ray's own handler ends the process in the middle of whatever it is doing.
                signal.signal(signal.SIGTERM, on_sigterm)
        try:
            placement = plan_placement(settings.placement, read_inventory(), settings.placement.roles())
            transport = RayTransport(placement, start_timeout_s=settings.start_timeout_s)
        except BaseException:
            self._leave()
            raise
        super().__init__(transport, settings, placement)
        # What is imported stays; the collector would go through its million objects again and again while a step is dispatched.
        gc.collect()
        gc.freeze()

    def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        super().shutdown()
        gc.unfreeze()
        self._leave()

    def _leave(self) -> None:
        if self._owns_cluster and ray.is_initialized():
            ray.shutdown()


def _join(address: str, num_cpus: int | None) -> None:
    """Starts or joins a cluster. Raises ConfigError where that fails."""
    if address == "local":
        # Where a signal to the whole process group has ended this cluster, Ray would look for it for a minute.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    host, _, port = address.rpartition(":")
    # Ray by itself tries for more than a minute.
    if port.isdigit() and not answers(host, int(port)):
        raise ConfigError(f"runtime.address: nothing answers at '{address}'; see that `ray start --head` runs there")
    try:
        ray.init(
            address=address, num_cpus=num_cpus, include_dashboard=False, log_to_driver=True, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"runtime.address: '{address}' could not be joined ({str(error).strip().splitlines()[0]}); see that `ray start` runs there, "
            "with this version of ray, and that this process has its token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)"
        ) from None

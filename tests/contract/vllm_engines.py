"""vLLM's engines for the tests: in this process, in one of its own, or for a server. On a machine with a GPU they run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_server import MEMORY_SHARE, ON_GPU, start_server

from hybridflow.rollout.vllm import RECEIVER, VllmEngine, VllmSettings, build_vllm_engine
from hybridflow.rollout.vllm_service import VllmServiceEngine, connect_vllm_service

SETTINGS = VllmSettings(gpu_memory_utilization=MEMORY_SHARE, enforce_eager=True) if ON_GPU else VllmSettings()
_urls: dict[str, str] = {}
_kept: list[VllmEngine] = []


def build_vllm(directory: Path, *, own_process: bool = False, **options: Any) -> VllmEngine:
    """An engine; on a GPU always in a process of its own, since there vLLM allows one engine that can sleep in a process."""
    own_process = own_process or ON_GPU
    engine = build_vllm_engine(directory, SETTINGS, on_gpu=ON_GPU, own_process=own_process, **options)
    return engine if own_process else keep(engine)


def keep(engine: VllmEngine) -> VllmEngine:
    """Keeps one in this process as long as the session: its end takes along the process groups that all of a process share."""
    _kept.append(engine)
    return engine


def connect_vllm(directory: Path) -> VllmServiceEngine:
    """An engine for the server, which has the model of the first directory asked for; others may differ in their texts alone."""
    if "tied" not in _urls:
        _urls["tied"] = start_server(directory, RECEIVER)
    return connect_vllm_service(directory, VllmSettings(url=_urls["tied"], timeout_s=60.0))

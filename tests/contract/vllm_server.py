"""vLLM for the tests: in this process, in one of its own, or a server, which is started once and ended with the session.

On a machine with a GPU it runs there.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hybridflow.rollout.vllm import RECEIVER, VllmEngine, VllmSettings, build_vllm_engine
from hybridflow.rollout.vllm_service import VllmServiceEngine, connect_vllm_service

ON_GPU = torch.cuda.is_available()
SETTINGS = VllmSettings(gpu_memory_utilization=0.1, enforce_eager=True) if ON_GPU else VllmSettings()
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


def start_server(directory: Path, extension: str | None = None, adapter_rank: int | None = None) -> str:
    """Starts one on a free port of this machine, that takes adapters where a rank is given; its address. It may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tempfile.NamedTemporaryFile("w", prefix="vllm-server-", suffix=".txt", delete=False)  # noqa: SIM115
    more = ["--worker-extension-cls", extension] if extension else []
    more += ["--gpu-memory-utilization", str(SETTINGS.gpu_memory_utilization), "--enable-sleep-mode"] if ON_GPU else []
    more += ["--enable-lora", "--max-lora-rank", str(adapter_rank)] if adapter_rank else []
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(directory), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64"),
            *("--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log", *more),
        ],
        env=os.environ
        | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    atexit.register(_end, server, Path(log.name))
    return f"http://127.0.0.1:{port}"


def _end(server: subprocess.Popen[bytes], log: Path) -> None:
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
    log.unlink()

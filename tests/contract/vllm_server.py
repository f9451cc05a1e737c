"""A vLLM server for the tests that talk to one: started once, by the first that asks, and ended with the session."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from hybridflow.rollout.vllm import RECEIVER, VllmSettings
from hybridflow.rollout.vllm_service import VllmServiceEngine, connect_vllm_service

_urls: dict[str, str] = {}


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

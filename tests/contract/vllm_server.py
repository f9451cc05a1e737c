"""A server of vLLM for the tests, which ends with the session. On a machine with a GPU it runs there."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()
MEMORY_SHARE = 0.1
"""Of a GPU's memory, for each engine: several live side by side."""


def start_server(directory: Path, extension: str | None = None, adapter_rank: int | None = None) -> str:
    """Starts one on a free port of this machine, that takes adapters where a rank is given; its address. It may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tempfile.NamedTemporaryFile("w", prefix="vllm-server-", suffix=".txt", delete=False)  # noqa: SIM115
    more = ["--worker-extension-cls", extension] if extension else []
    more += ["--gpu-memory-utilization", str(MEMORY_SHARE), "--enable-sleep-mode"] if ON_GPU else []
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

"""Seconds of calls, the GPU's work included."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """For the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def time_call(call: Callable[[], object], meet: Callable[[], object] = wait) -> float:
    """Seconds of a call that starts and ends when `meet` returns: when the GPU is done, and where ranks meet, all of them."""
    meet()
    started_s = time.perf_counter()
    call()
    meet()
    return time.perf_counter() - started_s


def read_peak_bytes() -> int:
    """Most that was allocated on the GPU."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0

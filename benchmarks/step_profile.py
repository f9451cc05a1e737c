"""Where the time of a training step goes on a GPU, by the kind of kernel."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "compiled element-wise": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa|cudnn.*(fprop|bprop)|kernel_cutlass",
    "communication": r"nccl",
    "matrix products": r"nvjet|gemm|cutlass|cublas|xmma",
    "optimizer": r"adam|multi_tensor|foreach|l2norm",
    "copies": r"memcpy|memset|copy_kernel|CatArray",
}
"""The first kind whose pattern a kernel's name has; the rest is element-wise kernels that nobody compiled."""


def print_profile(step: Callable[[], object]) -> None:
    """Runs one step under the profiler and prints milliseconds by kind, idle time and the longest kernels."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = [
        event for event in found.events() if event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    by_kind, by_name = defaultdict(float), defaultdict(float)
    for event in kernels:
        milliseconds = event.time_range.elapsed_us() / 1e3
        by_kind[_name_kind(event.name)] += milliseconds
        by_name[event.name[:90]] += milliseconds
    whole_ms = (max(end for _, end in spans) - min(spans)[0]) / 1e3
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:25]
    print(json.dumps({"profile_ms": {kind: round(ms, 2) for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])},
                      "idle_ms": round(whole_ms - cover(spans) / 1e3, 2), "whole_ms": round(whole_ms, 2),
                      "longest_ms": {name: round(ms, 2) for name, ms in longest}}, indent=1), flush=True)  # fmt: skip


def _name_kind(kernel: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other element-wise"
    )


def cover(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans from a start to an end."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered

"""Kernels that follow each other closely: the next one is launched while the one before it ends, and waits for what that wrote."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel begins with `wait_for_inputs`: programmatic dependent launch where the GPU knows it (Hopper)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def prefetch(at: tl.tensor) -> None:
    """Brings the lines of the L2 cache that these addresses lie in there, without waiting; they must be of memory that is there."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr) -> None:
    """Before a kernel reads or writes anything: waits until all before it has been written, and lets the next one be launched.

    What was there before the kernel before it began, such as weights, may be read earlier: that one has waited too.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

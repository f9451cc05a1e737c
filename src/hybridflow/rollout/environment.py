"""Environment variables that engines of others read when they start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

FULL_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton's products of float32, which attention is made of there, would be in TF32."""


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables for a block, and for processes that it starts for as long as these live."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

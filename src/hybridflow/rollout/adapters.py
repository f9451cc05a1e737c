"""New versions of a LoRA adapter for an engine that keeps the base: checked, and laid in memory as a PEFT directory that it reads."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models import AdapterForm, describe_form, write_adapter
from hybridflow.rollout.base import WatchedWeights
from hybridflow.rollout.buckets import WeightFilesError, find_memory_directory

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Those that vLLM has places for, whichever of its versions."""


@dataclass(frozen=True)
class ServedAdapter:
    """The adapter that an engine is given: `ServedAdapter(form, {"model.layers.0.mlp.up_proj.lora_A.weight": Size([16, 64]), ...})`."""

    form: AdapterForm
    shapes: Mapping[str, torch.Size]

    @property
    def max_rank(self) -> int:
        """The smallest of vLLM's places that its matrices fit into."""
        return next(rank for rank in MAX_RANKS if rank >= self.form.rank)


@contextlib.contextmanager
def written_adapter(
    adapter: ServedAdapter | None, weights: Iterable[tuple[str, Tensor]], place: str | None = None
) -> Iterator[tuple[str, bool]]:
    """A directory that holds these values of the adapter until the block ends, and whether they are finite.

    adapter: None, for an engine that was built without one, raises ValueError.
    place:   where it is made; None takes memory.
    """
    if adapter is None:
        raise ValueError("the engine was built without an adapter; send it the weights, merged")
    watched = WatchedWeights(weights, adapter.shapes, checks_finite=True)
    with tempfile.TemporaryDirectory(prefix="hybridflow-", dir=place or find_memory_directory()) as directory:
        try:
            write_adapter(directory, describe_form(adapter.form, adapter.shapes), dict(watched))
        except OSError as error:
            raise WeightFilesError(
                f"an adapter could not be written to {directory} ({error}); make room there"
            ) from None
        watched.check()
        yield directory, watched.is_finite

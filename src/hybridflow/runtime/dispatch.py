"""References inside arguments: taken out before a call travels, put back as data beside the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.batch import Batch
from hybridflow.types import BatchRef, MetricsRef, Ref, merge_metrics


@dataclass(frozen=True)
class _Slot:
    """Stands in an argument where the reference with this number was."""

    index: int


@dataclass(frozen=True)
class _BatchSlot:
    slots: tuple[_Slot, ...]


@dataclass(frozen=True)
class _MetricsSlot:
    slots: tuple[_Slot, ...]


def flatten_refs(value: Any) -> tuple[Any, list[Ref[Any]]]:
    """The value with every reference replaced by a numbered slot, and the references in that order.

    Looks into lists, tuples, dicts, `BatchRef` and `MetricsRef`; anything else travels as it is.
    """
    refs: list[Ref[Any]] = []

    def take(item: Any) -> Any:
        if isinstance(item, Ref):
            refs.append(item)
            return _Slot(len(refs) - 1)
        if isinstance(item, BatchRef):
            return _BatchSlot(tuple(take(chunk) for chunk in item.chunks))
        if isinstance(item, MetricsRef):
            return _MetricsSlot(tuple(take(part) for part in item.parts))
        return _map_children(item, take)

    return take(value), refs


def restore_refs(skeleton: Any, values: Sequence[Any]) -> Any:
    """The inverse of `flatten_refs` with data for references: a `BatchRef` comes back as a `Batch`, a `MetricsRef` merged."""

    def put(item: Any) -> Any:
        if isinstance(item, _Slot):
            return values[item.index]
        if isinstance(item, _BatchSlot):
            return Batch.concat([put(slot) for slot in item.slots])
        if isinstance(item, _MetricsSlot):
            return merge_metrics([put(slot) for slot in item.slots])
        return _map_children(item, put)

    return put(skeleton)


def _map_children(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: change(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(change(value) for value in item)
    return item

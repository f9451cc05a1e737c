"""References inside arguments: taken out before a call travels, put back as data beside the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    chunks: tuple[Mapping[str, _Slot], ...]


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
            return _BatchSlot(tuple({name: take(part) for name, part in chunk.parts.items()} for chunk in item.chunks))
        if isinstance(item, MetricsRef):
            return _MetricsSlot(tuple(take(part) for part in item.parts))
        return _map_children(item, take)

    return take(value), refs


def restore_refs(skeleton: Any, values: Sequence[Any]) -> Any:
    """The inverse of `flatten_refs` with data for references.

    A `BatchRef` comes back as a `Batch`: its chunks one below the other, the parts of each side by side, a column that several parts
    have taken from the first. A `MetricsRef` comes back merged over calls and workers.
    """

    def put(item: Any) -> Any:
        if isinstance(item, _Slot):
            return values[item.index]
        if isinstance(item, _BatchSlot):
            return Batch.concat([_join_parts([put(slot) for slot in parts.values()]) for parts in item.chunks])
        if isinstance(item, _MetricsSlot):
            return merge_metrics([metrics for slot in item.slots for metrics in put(slot)])
        return _map_children(item, put)

    return put(skeleton)


def _join_parts(parts: Sequence[Batch]) -> Batch:
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.merge(part.select(name for name in part.column_names if name not in joined))
    return joined


def _map_children(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: change(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(change(value) for value in item)
    return item

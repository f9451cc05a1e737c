"""What the columns of a Batch are called, which types they have, and how Python values become them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS, _IDS = pa.list_(pa.float32()), pa.list_(pa.int32())
COLUMN_TYPES: Mapping[str, pa.DataType] = {
    "prompt_id": pa.int64(),
    "group_id": pa.int64(),
    "sample_id": pa.int64(),
    "policy_version_min": pa.int64(),
    "policy_version_max": pa.int64(),
    "state": pa.int8(),
    "prompt": pa.string(),
    "response": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": _IDS,
    "tokens": _IDS,
    "loss_mask": pa.list_(pa.uint8()),
    "rollout_logprobs": _FLOATS,
    "kept_counts": _IDS,
    "trainer_logprobs": _FLOATS,
    "ref_logprobs": _FLOATS,
    "advantages": _FLOATS,
    "reward": pa.float64(),
    "reward_error": pa.string(),
    "rollout_error": pa.string(),
}
"""The columns the framework speaks of, of this type in every Batch; others (an `answer`) keep what they came with."""
REWARD_COMPONENT = "reward/"
"""Prefix of the columns, and so of the metrics, of what each of several rewards gave: float64, NaN for nothing."""
PER_TOKEN = ("loss_mask", "rollout_logprobs", "kept_counts", "trainer_logprobs", "ref_logprobs", "advantages")
"""Columns that have the length of `tokens` in every row."""
_NULLABLE = ("reward", "reward_error", "rollout_error")


@dataclass(frozen=True)
class Ragged:
    """One ragged column: row i is `values[offsets[i]:offsets[i + 1]]`.

    values:  [sum of lengths], read-only where it is a view of a Batch.
    offsets: [rows + 1] int64, from 0; as int32 these are the `cu_seqlens` of a packed forward.
    """

    values: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        row = range(len(self))[row]
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]


def to_arrow(name: str, values: Any, wanted: pa.DataType | None = None) -> pa.Array:
    """One column as an Arrow array (copied, unless it is one), as `wanted`, else as in `COLUMN_TYPES`.

    Raises ValueError naming the column, and the row where one value is to blame.
    """
    wanted = wanted or COLUMN_TYPES.get(name)
    try:
        array = _convert(name, values, wanted)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(
            f"column '{name}' is not {wanted or 'of one type'}: {error}; give its rows one type"
        ) from error
    if not is_plain(array.type):
        raise ValueError(f"column '{name}' is {array.type}; a batch keeps numbers, strings, lists and structs")
    return array if wanted is None else cast(name, array, wanted)


def cast(name: str, array: pa.Array, wanted: pa.DataType, first_row: int = 0) -> pa.Array:
    """The array in another type of the same kind (integers of any width, lists of them, ...), never losing a value.

    first_row: the number of the array's first row, for the message. Raises ValueError naming column and row.
    """
    if array.type == wanted:
        return array
    if not _same_kind(array.type, wanted):
        raise ValueError(f"column '{name}' is {array.type} and must be {wanted}; convert it")
    try:
        return array.cast(wanted)
    except pa.ArrowInvalid as error:
        row = first_row + _first_uncastable(array, wanted)
        raise ValueError(f"column '{name}', row {row}: {error}; it must fit {wanted}") from error


def one_array(name: str, column: pa.ChunkedArray) -> pa.Array:
    """The chunks of a column in one array: the same memory if there is one chunk, else a copy."""
    if column.num_chunks == 1:
        return column.chunk(0)
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        raise ValueError(f"column '{name}' holds more than 2**31 - 1 values, too many for one array; split() the batch")
    return whole


def check_columns(batch: pa.RecordBatch, first_row: int = 0) -> pa.RecordBatch:
    """Give the record batch back if it keeps the rules of the columns that the framework speaks of.

    Types as in `COLUMN_TYPES`, no nulls but in rewards; `PER_TOKEN` columns as long as `tokens`; a
    `loss_mask` of 0 and 1 that is 0 at a row's first token, which nothing predicts.
    first_row: the number of its first row, for the message. Raises ValueError naming column and row.
    """
    for name in COLUMN_TYPES.keys() & set(batch.schema.names):
        if batch.column(name).type != COLUMN_TYPES[name]:
            raise ValueError(
                f"column '{name}' is {batch.column(name).type} and must be {COLUMN_TYPES[name]}; convert it"
            )
        if name not in _NULLABLE:
            refuse_nulls(name, batch.column(name), first_row)
    if "loss_mask" in batch.schema.names:
        _check_loss_mask(batch.column("loss_mask"), first_row)
    if "tokens" in batch.schema.names:
        for name in [name for name in PER_TOKEN if name in batch.schema.names]:
            _check_aligned(name, batch, first_row)
    return batch


def refuse_nulls(name: str, array: pa.Array, first_row: int = 0) -> None:
    """Raise ValueError, naming the row, if the column or one of its lists holds a null."""
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"column '{name}', row {row}: the value is missing; every row needs one")
    if pa.types.is_list(array.type) and list_values(array).null_count:
        position = int(np.flatnonzero(list_values(array).is_null().to_numpy(zero_copy_only=False))[0])
        row = first_row + _row_of(list_offsets(array), position)
        raise ValueError(f"column '{name}', row {row}: a value of the list is missing; lists hold no nulls")


def list_values(array: pa.ListArray) -> pa.Array:
    """The values of a list array's rows, one after the other, without copying; also where it is a slice."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.values.slice(first, last - first)


def list_offsets(array: pa.ListArray) -> np.ndarray:
    """Where each row starts in `list_values(array)`, and where the last one ends: int64 [rows + 1], from 0."""
    offsets: np.ndarray = array.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def is_plain(kind: pa.DataType) -> bool:
    """Whether a batch keeps values of this type: nothing that needs code or a dictionary to be understood."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_plain(field.type) for field in kind)
    simple = (pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string, pa.types.is_null)
    return any(test(kind) for test in simple)


def _convert(name: str, values: Any, wanted: pa.DataType | None) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return one_array(name, values)
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, Ragged):
        return _build_list(name, np.asarray(values.values), np.asarray(values.offsets), wanted)
    if _is_tensor(values):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return _build_list(name, values.reshape(-1), np.arange(len(values) + 1) * values.shape[1], wanted)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        # A copy: Arrow would share the caller's array, and a later write to it would change the batch.
        return pa.array(values.copy())
    rows = list(values)
    if wanted is not None and pa.types.is_list(wanted) or _looks_ragged(rows):
        return _convert_rows(name, rows, wanted)
    return pa.array(rows, type=wanted)


def _convert_rows(name: str, rows: list[Any], wanted: pa.DataType | None) -> pa.Array:
    missing = [index for index, row in enumerate(rows) if row is None]
    if missing:
        if wanted is None:
            return pa.array(rows)
        raise ValueError(f"column '{name}', row {missing[0]}: the list is missing; give an empty one")
    rows = [row.detach().cpu().numpy() if _is_tensor(row) else row for row in rows]
    # Empty rows stay out of the concatenation: numpy takes [] for floats, and they would turn ids into floats.
    filled = [row for row in rows if len(row)]
    offsets = np.cumsum([0, *map(len, rows)])
    values = np.concatenate(filled) if filled else np.empty(0, np.uint8)
    if values.ndim != 1 or values.dtype.kind not in "biuf" or (not filled and wanted is None):
        return pa.array([row.tolist() if isinstance(row, np.ndarray) else row for row in rows], type=wanted)
    return _build_list(name, values, offsets, wanted)


def _build_list(name: str, values: np.ndarray, offsets: np.ndarray, wanted: pa.DataType | None) -> pa.Array:
    if len(values) >= 2**31:
        raise ValueError(f"column '{name}' has {len(values)} values, more than 2**31 - 1; concat() several batches")
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    ragged = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values.copy()))
    compact = {"i": pa.int32(), "u": pa.int32(), "f": pa.float32()}[values.dtype.kind]
    return cast(name, ragged, wanted or pa.list_(pa.uint8() if values.dtype == np.uint8 else compact))


def _looks_ragged(rows: Sequence[Any]) -> bool:
    first = next((row for row in rows if row is not None), None)
    return isinstance(first, (list, tuple, np.ndarray)) or _is_tensor(first)


def _is_tensor(value: Any) -> bool:
    # torch is slow to import; where nobody has, nothing is a tensor.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _same_kind(source: pa.DataType, target: pa.DataType) -> bool:
    if (pa.types.is_list(source) or pa.types.is_large_list(source)) and pa.types.is_list(target):
        return _same_kind(source.value_type, target.value_type)
    whole = pa.types.is_integer(source) or pa.types.is_boolean(source)
    number = whole or pa.types.is_floating(source)
    text = pa.types.is_string(source) or pa.types.is_large_string(source)
    fits = (pa.types.is_integer(target) and whole, pa.types.is_floating(target) and number)
    return pa.types.is_null(source) or (pa.types.is_string(target) and text) or any(fits)


def _first_uncastable(array: pa.Array, wanted: pa.DataType) -> int:
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            # Taken, not sliced: a cast of a sliced list converts the values of all rows.
            array.take(pa.array(range(low, middle))).cast(wanted)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _check_loss_mask(array: pa.ListArray, first_row: int) -> None:
    mask, offsets = list_values(array).to_numpy(), list_offsets(array)
    odd = np.flatnonzero(mask > 1)
    if odd.size:
        row = first_row + _row_of(offsets, int(odd[0]))
        raise ValueError(f"column 'loss_mask', row {row}: {mask[odd[0]]} is neither 0 nor 1 (1 counts)")
    filled = np.flatnonzero(np.diff(offsets))
    counted = filled[mask[offsets[filled]] == 1]
    if counted.size:
        raise ValueError(
            f"column 'loss_mask', row {first_row + counted[0]}: nothing predicts the first token; set it to 0"
        )


def _check_aligned(name: str, batch: pa.RecordBatch, first_row: int) -> None:
    lengths, wanted = (np.diff(list_offsets(batch.column(column))) for column in (name, "tokens"))
    odd = np.flatnonzero(lengths != wanted)
    if odd.size:
        row, have, need = odd[0], lengths[odd[0]], wanted[odd[0]]
        raise ValueError(f"column '{name}', row {first_row + row}: {have} values for {need} tokens; give one per token")


def _row_of(offsets: np.ndarray, position: int) -> int:
    return int(np.searchsorted(offsets, position, side="right")) - 1

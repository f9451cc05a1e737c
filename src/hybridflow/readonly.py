"""Read-only torch views of memory that somebody else owns: Arrow buffers, Ray's object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.utils.dlpack
from torch import Tensor


class ReadOnlyError(RuntimeError):
    """A write to a read-only view was refused; nothing was written."""


class ReadOnlyTensor(Tensor):
    """A tensor over borrowed memory whose every write through torch is refused with `ReadOnlyError`.

    Refused, before anything is written: in-place methods, item assignment, `out=`, `set_` and `resize_`, foreach
    and optimizer kernels, and all of these through a slice, view, `detach()` or `.data` of it (aliases are read-only
    too). `numpy()` gives a read-only array over the same memory; `__dlpack__` is refused.
    What allocates (arithmetic, `clone()`, `long()`, `to("cuda")`, indexing by a tensor) gives an ordinary tensor;
    so do `copy.deepcopy` and pickle.

    Torch has no read-only memory, so this is a guard, not a wall: a raw `data_ptr()` or `untyped_storage()`, and a
    kernel that lies about what it writes (a custom C++ or Triton kernel), are not stopped.
    A guarded call costs some microseconds of Python: `clone()` first where a view enters many small operations.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        borrowed = {_storage_address(tensor) for tensor in _iter_readonly((args, kwargs))}
        return _mark_aliases(result, borrowed)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The same memory as a numpy array that numpy itself keeps read-only (`force` changes nothing)."""
        array = self._unguarded().numpy()
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as Python numbers in nested lists."""
        return self.numpy().tolist()

    def __dlpack__(self, **_: Any) -> Any:
        raise ReadOnlyError("a read-only view cannot be exported by DLPack: use numpy() to read or clone() to write")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied: Any = self.clone()
        return copied.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnlyTensor({self._unguarded()!r})"

    def _unguarded(self) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return self.as_subclass(Tensor)


def readonly_view(array: pa.Array) -> Tensor:
    """The values of an Arrow array without nulls as a read-only tensor over the same memory.

    array: fixed-width integers or floats; the view keeps its buffer alive.
    """
    return Tensor._make_subclass(ReadOnlyTensor, torch.utils.dlpack.from_dlpack(array))


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if next(_iter_readonly(value), None) is not None:
            raise ReadOnlyError(f"{func} would write to a read-only view of a Batch: clone() it first")


def _iter_readonly(value: Any) -> Iterator[ReadOnlyTensor]:
    if isinstance(value, ReadOnlyTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iter_readonly(item)
    elif isinstance(value, dict):
        yield from _iter_readonly(tuple(value.values()))


def _mark_aliases(result: Any, borrowed: set[int]) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_mark_aliases(item, borrowed) for item in result)
    if isinstance(result, Tensor) and not isinstance(result, ReadOnlyTensor) and _storage_address(result) in borrowed:
        return Tensor._make_subclass(ReadOnlyTensor, result)
    return result


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0

"""cuDNN's attention over packed rows, through its own frontend (package nvidia-cudnn-frontend).

Not through torch's binding: over packed rows that builds a graph at every call and returns wrong gradients (seen with torch 2.11).

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.models.attention_kernel import KernelRows, SavedTensors

_MIN_ROWS, _MIN_LEN = 8, 512


@dataclass(frozen=True)
class _Form:
    """What a graph is built for. Rows and lengths are rounded up to powers of two, so that a run needs few."""

    device: int
    num_rows: int
    max_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    num_tokens: int


class Cudnn:
    """See `FusedKernel`. A graph takes a tenth of a second to build, at its first use for a power of two of rows and of their length."""

    takes_keys = False

    def why_not(self) -> str | None:
        """See `FusedKernel`."""
        if importlib.util.find_spec("cudnn") is None:
            return "nvidia-cudnn-frontend is not installed: pip install nvidia-cudnn-frontend==1.18.0"
        return None

    def forward(self, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, rows: KernelRows) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        form = _read_form(query_THK, key_TNK, rows)
        out_THK = torch.empty_like(query_THK)
        softmax_TH = query_THK.new_empty(query_THK.shape[:2], dtype=torch.float32)
        tensors = (*_place_rows(rows.cu_seqlens, form), query_THK, key_TNK, value_TNK, out_THK, softmax_TH)
        _execute(_build_forward(form), tensors, form.device)
        return out_THK, softmax_TH.view(query_THK.shape[1], query_THK.shape[0])

    def backward(self, grad_THK: Tensor, saved: SavedTensors, rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
        """See `FusedKernel`."""
        query_THK, key_TNK, value_TNK = saved[:3]
        form = _read_form(query_THK, key_TNK, rows)
        grads = torch.empty_like(query_THK), torch.empty_like(key_TNK), torch.empty_like(value_TNK)
        _execute(_build_backward(form), (*_place_rows(rows.cu_seqlens, form), *saved, grad_THK, *grads), form.device)
        return grads


def _round_up(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _read_form(query_THK: Tensor, key_TNK: Tensor, rows: KernelRows) -> _Form:
    tokens, heads, size = query_THK.shape
    num_rows, longest = _round_up(rows.cu_seqlens.numel() - 1, _MIN_ROWS), _round_up(rows.max_len, _MIN_LEN)
    # Bounds the sums of the gradient at the queries, and nothing else.
    room = -(-tokens // 4096) * 4096
    return _Form(
        query_THK.device.index, num_rows, longest, heads, key_TNK.shape[1], size, rows.scale, rows.window, room
    )


def _place_rows(cu_seqlens: Tensor, form: _Form) -> tuple[Tensor, ...]:
    """Where each row begins in queries, in keys and in the softmax's numbers, and how long it is; rows without tokens at the end."""
    missing = form.num_rows + 1 - cu_seqlens.numel()
    starts = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])
    sizes = (form.num_heads * form.head_dim, form.num_kv_heads * form.head_dim, form.num_heads)
    return *(starts * size for size in sizes), starts.diff()


@functools.cache
def _cudnn() -> Any:
    import cudnn

    return cudnn


@functools.cache
def _handle(device: int) -> Any:
    return _cudnn().create_handle()


def _select_handle(device: int) -> Any:
    handle = _handle(device)
    _cudnn().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: Any
    tensors: tuple[Any, ...]
    workspace_bytes: int


def _execute(built: _Graph, tensors: tuple[Tensor, ...], device: int) -> None:
    workspace = torch.empty(max(1, built.workspace_bytes), dtype=torch.uint8, device=f"cuda:{device}")
    built.graph.execute(dict(zip(built.tensors, tensors, strict=True)), workspace, handle=_select_handle(device))


class _Builder:
    """The tensors of one graph."""

    def __init__(self, form: _Form) -> None:
        types = _cudnn().data_type
        self.form, self._types = form, types
        self.graph = _cudnn().pygraph(
            io_data_type=types.BFLOAT16,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=_select_handle(form.device),
        )
        self.at_query, self.at_key, self.at_softmax = (
            self._numbers(name, form.num_rows + 1) for name in ("at_query", "at_key", "at_softmax")
        )
        self.lengths = self._numbers("lengths", form.num_rows)

    def _numbers(self, name: str, count: int) -> Any:
        return self.graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=self._types.INT32)

    def heads(self, name: str, num_heads: int) -> Any:
        """An input of this many heads."""
        return self.shape(self.graph.tensor(name=name, **self._form_of(num_heads)), num_heads)

    def shape(self, tensor: Any, num_heads: int) -> Any:
        """Lays a tensor of this many heads out over the packed rows."""
        form = self._form_of(num_heads)
        tensor.set_dim(form["dim"]).set_stride(form["stride"])
        return tensor.set_ragged_offset(self.at_query if num_heads == self.form.num_heads else self.at_key)

    def _form_of(self, num_heads: int) -> dict[str, list[int]]:
        rows, length, size = self.form.num_rows, self.form.max_len, self.form.head_dim
        return {
            "dim": [rows, num_heads, length, size],
            "stride": [length * num_heads * size, size, num_heads * size, 1],
        }

    def softmax(self, tensor: Any) -> Any:
        """Lays the softmax's numbers out."""
        rows, length, heads = self.form.num_rows, self.form.max_len, self.form.num_heads
        tensor.set_dim([rows, heads, length, 1]).set_stride([length * heads, 1, heads, 1])
        return tensor.set_data_type(self._types.FLOAT).set_ragged_offset(self.at_softmax)

    def softmax_input(self) -> Any:
        """The softmax's numbers as an input."""
        rows, length, heads = self.form.num_rows, self.form.max_len, self.form.num_heads
        return self.softmax(
            self.graph.tensor(name="softmax", dim=[rows, heads, length, 1], stride=[length * heads, 1, heads, 1])
        )

    def options(self) -> dict[str, Any]:
        """What both directions are told."""
        band = {"sliding_window_length": self.form.window} if self.form.window else {}
        lengths = {"use_padding_mask": True, "seq_len_q": self.lengths, "seq_len_kv": self.lengths}
        return {"attn_scale": self.form.scale, "use_causal_mask": True, **lengths, **band}

    def finish(self, *tensors: Any) -> _Graph:
        """Plans the graph; the tensors after the four of the rows, in the order of execution."""
        modes = _cudnn().heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        rows = (self.at_query, self.at_key, self.at_softmax, self.lengths)
        return _Graph(self.graph, (*rows, *tensors), self.graph.get_workspace_size())


@functools.cache
def _build_forward(form: _Form) -> _Graph:
    builder = _Builder(form)
    query, key, value = (builder.heads(name, heads) for name, heads in zip("qkv", _head_counts(form), strict=True))
    out, softmax = builder.graph.sdpa(name="forward", q=query, k=key, v=value, generate_stats=True, **builder.options())
    builder.shape(out.set_output(True), form.num_heads)
    builder.softmax(softmax.set_output(True))
    return builder.finish(query, key, value, out, softmax)


@functools.cache
def _build_backward(form: _Form) -> _Graph:
    builder = _Builder(form)
    query, key, value = (builder.heads(name, heads) for name, heads in zip("qkv", _head_counts(form), strict=True))
    out, grad_out = builder.heads("out", form.num_heads), builder.heads("grad_out", form.num_heads)
    softmax = builder.softmax_input()
    grads = builder.graph.sdpa_backward(
        name="backward",
        q=query,
        k=key,
        v=value,
        o=out,
        dO=grad_out,
        stats=softmax,
        max_total_seq_len_q=form.num_tokens,
        max_total_seq_len_kv=form.num_tokens,
        **builder.options(),
    )
    for grad, heads in zip(grads, _head_counts(form), strict=True):
        builder.shape(grad.set_output(True), heads)
    return builder.finish(query, key, value, out, softmax, grad_out, *grads)


def _head_counts(form: _Form) -> tuple[int, int, int]:
    return form.num_heads, form.num_kv_heads, form.num_kv_heads

"""How trainers share one model, as far as it can be seen before any of them starts: checked, told, and its memory estimated."""

from __future__ import annotations

import torch

from hybridflow.config import ConfigError
from hybridflow.models import LoraSettings, check_lora, check_targets, resolve_lora
from hybridflow.roles.policy import ModelSettings, read_config, resolve_device, resolve_dtype
from hybridflow.runtime.placement import DEVICE_TYPES, Kind
from hybridflow.train_engine import (
    PLAIN_ROW_MEMORY,
    Layout,
    RowMemory,
    TrainSettings,
    build_workload,
    check_heads,
    check_tensor_parallel,
    plan_layout,
)
from hybridflow.train_engine.backends import check_liger
from hybridflow.train_engine.layers import check_layers, plan_compile
from hybridflow.train_engine.memory import GIB, MODES, LayerMode, MemoryEstimate, ModelShape, compute_memory, read_shape
from hybridflow.train_engine.settings import check_sharing
from hybridflow.types import Numerics


def check_training(
    model: ModelSettings, train: TrainSettings, numerics: Numerics, num_trainers: int | None, kind: Kind | None = None
) -> Layout | None:
    """The layout of the trainers. Raises ConfigError for what can be seen to be wrong with it without loading the model.

    num_trainers: None where the cluster will tell; then there is no layout yet.
    kind:         what the placement says of the trainers' devices; None leaves it to the model's settings.
    """
    if train.lora is not None:
        _check_adapter(train.lora, train, model)
    on_gpu = (DEVICE_TYPES[kind] if kind else resolve_device(model.device)) != "cpu"
    check_sharing(train.share_prompts, exact=numerics == "exact")
    _check_liger(model, train, numerics, on_gpu=on_gpu)
    check_layers(
        train.gradient_checkpointing,
        train.compile,
        train.activation_offload,
        on_gpu=on_gpu,
        exact=numerics == "exact",
    )
    _check_offload(train, on_gpu=on_gpu)
    _check_split(train, model)
    if num_trainers is None:
        return None
    layout = plan_layout(train.parallel_config, num_trainers)
    _check_layout(layout, train, numerics)
    return layout


def _check_liger(model: ModelSettings, train: TrainSettings, numerics: Numerics, *, on_gpu: bool) -> None:
    if not train.liger:
        return
    if numerics == "exact":
        raise ConfigError(
            "train.liger is true, but numerics 'exact' computes norms by kernels of its own; write false, or numerics=fast"
        )
    check_liger(read_config(model).model_type, on_gpu=on_gpu)


def _check_layout(layout: Layout, train: TrainSettings, numerics: Numerics) -> None:
    if train.offload == "parameters" and layout.shard == 1:
        raise ConfigError(
            "train.offload: 'parameters' keeps shards on the host, and train.parallel_config.shard "
            f"({train.parallel_config.shard}) over {layout.data * layout.sequence} makes none; place more trainers, or set "
            "train.offload=optimizer"
        )
    if numerics == "exact" and (layout.tensor, layout.sequence, layout.shard) != (1, 1, 1):
        raise ConfigError(
            "numerics: 'exact' holds where every trainer has the whole model and whole rows, and train.parallel_config splits them; "
            "set its tp, sp and shard to 1, or set numerics=fast"
        )


def _check_offload(train: TrainSettings, *, on_gpu: bool) -> None:
    if train.offload != "none" and not on_gpu:
        raise ConfigError(
            f"train.offload is {train.offload}, but the model is not on a GPU: what it would move is in the host's memory already; "
            "write none"
        )


def _check_split(train: TrainSettings, model: ModelSettings) -> None:
    """Before the trainers are counted, so that nobody is sent for as many as the model cannot use."""
    split = Layout(tensor=train.parallel_config.tp, sequence=train.parallel_config.sp)
    if split.size > 1:
        config = read_config(model)
        check_heads(split, config.num_attention_heads, config.num_key_value_heads)
        check_tensor_parallel(config, split.tensor)


def _check_adapter(lora: LoraSettings, train: TrainSettings, model: ModelSettings) -> None:
    check_lora(lora)
    if train.parallel_config.tp > 1:
        raise ConfigError(
            f"train.lora: an adapter is not split over matrices, and train.parallel_config.tp is {train.parallel_config.tp}; set tp=1 "
            "(shard=0 splits the storage instead), or take train.lora out"
        )
    # A model with code of its own is not built before its worker is.
    if not model.trust_remote_code:
        check_targets(read_config(model), resolve_lora(lora).target_modules)


def describe_layout(layout: Layout) -> str:
    """`data 2 × sequence 1 × tensor 2; weights in 2 shards, 1 copy`."""
    copies = f"{layout.replicate} {'copy' if layout.replicate == 1 else 'copies'}"
    storage = f"weights in {layout.shard} shards, {copies}" if layout.shard > 1 else f"weights whole, {copies}"
    return f"data {layout.data} × sequence {layout.sequence} × tensor {layout.tensor}; {storage}"


def describe_memory(
    model: ModelSettings,
    train: TrainSettings,
    layout: Layout,
    kind: Kind | None,
    dtype: str | None,
    *,
    numerics: Numerics = "fast",
    expected: RowMemory = PLAIN_ROW_MEMORY,
) -> str:
    """The estimate of a trainer's peak: `9.8 GiB a trainer (weights 2.4 GiB, gradients 1.2 GiB, ..., backward 310.0 MiB)`.

    kind, dtype: what the placement says of the trainers' devices; None leaves it to the model's settings.
    """
    device = torch.device(DEVICE_TYPES[kind] if kind else resolve_device(model.device))
    shape = read_shape(read_config(model))
    trained = None if train.lora is None else _count_adapter(shape, resolve_lora(train.lora).rank)
    workload = build_workload(
        *(train, layout, shape, resolve_dtype(dtype or model.dtype, device), trained),
        on_gpu=device.type == "cuda",
        exact=numerics == "exact",
        expected=expected,
    )
    compiled = not workload.exact and plan_compile(train.compile, workload)
    estimates = {mode: compute_memory(workload, LayerMode(mode, compiled, train.activation_offload)) for mode in MODES}
    checkpointing = "none" if workload.exact else train.gradient_checkpointing
    if checkpointing != "auto":
        return _format_estimate(estimates[checkpointing])
    totals = ", ".join(f"{mode} {_format_bytes(estimate.total)}" for mode, estimate in estimates.items())
    return f"a trainer, by gradient_checkpointing: {totals}; the first that fits is taken"


def _format_estimate(estimate: MemoryEstimate) -> str:
    parts = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "activations": estimate.activations,
        "backward": estimate.backward,
    }
    told = ", ".join(f"{name} {_format_bytes(num_bytes)}" for name, num_bytes in parts.items())
    return f"{_format_bytes(estimate.total)} a trainer ({told})"


def _format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.1f} MiB"


def _count_adapter(shape: ModelShape, rank: int) -> int:
    """Weights of an adapter at all matrices of the layers, which is the most that there are."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sides = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + inner)
    return shape.num_layers * rank * sides

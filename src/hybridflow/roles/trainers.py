"""How trainers share one model, as far as it can be seen before any of them starts: checked, told, and its memory estimated."""

from __future__ import annotations

import torch

from hybridflow.config import ConfigError
from hybridflow.models import LoraSettings, check_lora
from hybridflow.roles.policy import ModelSettings, read_config, resolve_device, resolve_dtype
from hybridflow.runtime.placement import DEVICE_TYPES, Kind
from hybridflow.train_engine import Layout, TrainSettings, check_heads, check_tensor_parallel, plan_layout
from hybridflow.train_engine.memory import GIB, MODES, MemoryEstimate, ModelShape, Workload, compute_memory, read_shape
from hybridflow.types import Numerics


def check_training(
    model: ModelSettings, train: TrainSettings, numerics: Numerics, num_trainers: int | None
) -> Layout | None:
    """The layout of the trainers. Raises ConfigError for what can be seen to be wrong with it without loading the model.

    num_trainers: None where the cluster will tell; then there is no layout yet.
    """
    if train.lora is not None:
        _check_adapter(train.lora, train)
    if num_trainers is None:
        return None
    layout = plan_layout(train.parallel_config, num_trainers)
    if numerics == "exact" and (layout.tensor, layout.sequence, layout.shard) != (1, 1, 1):
        raise ConfigError(
            "numerics: 'exact' holds where every trainer has the whole model and whole rows, and train.parallel_config splits them; "
            "set its tp, sp and shard to 1, or set numerics=fast"
        )
    if layout.tensor > 1 or layout.sequence > 1:
        config = read_config(model)
        check_heads(layout, config.num_attention_heads, config.num_key_value_heads)
        check_tensor_parallel(config, layout.tensor)
    return layout


def _check_adapter(lora: LoraSettings, train: TrainSettings) -> None:
    check_lora(lora)
    if train.parallel_config.tp > 1:
        raise ConfigError(
            f"train.lora: an adapter is not split over matrices, and train.parallel_config.tp is {train.parallel_config.tp}; set tp=1 "
            "(shard=0 splits the storage instead), or take train.lora out"
        )


def describe_layout(layout: Layout) -> str:
    """`data 2 × sequence 1 × tensor 2; weights in 2 shards, 1 copy`."""
    copies = f"{layout.replicate} {'copy' if layout.replicate == 1 else 'copies'}"
    storage = f"weights in {layout.shard} shards, {copies}" if layout.shard > 1 else f"weights whole, {copies}"
    return f"data {layout.data} × sequence {layout.sequence} × tensor {layout.tensor}; {storage}"


def describe_memory(
    model: ModelSettings, train: TrainSettings, layout: Layout, kind: Kind | None, dtype: str | None
) -> str:
    """The estimate of a trainer's peak: `9.8 GiB a trainer (weights 2.4, gradients 1.2, optimizer 2.4, activations 3.5, logits 0.3)`.

    kind, dtype: what the placement says of the trainers' devices; None leaves it to the model's settings.
    """
    device = torch.device(DEVICE_TYPES[kind] if kind else resolve_device(model.device))
    shape = read_shape(read_config(model))
    workload = Workload(
        shape,
        resolve_dtype(dtype or model.dtype, device),
        train.micro_batch_tokens,
        tensor=layout.tensor,
        sequence=layout.sequence,
        shard=layout.shard,
        replicas=layout.data * layout.sequence,
        trained_weights=None if train.lora is None else _count_adapter(shape, train.lora.rank),
        on_host=train.offload,
    )
    compiled = device.type == "cuda" if train.compile == "auto" else train.compile
    estimates = {
        mode: compute_memory(workload, checkpointing=mode, compiled=compiled, offload=train.activation_offload)
        for mode in MODES
    }
    if train.gradient_checkpointing != "auto":
        return _format_estimate(estimates[train.gradient_checkpointing])
    totals = ", ".join(f"{mode} {estimate.total / GIB:.1f} GiB" for mode, estimate in estimates.items())
    return f"a trainer, by gradient_checkpointing: {totals}; the first that fits is taken"


def _format_estimate(estimate: MemoryEstimate) -> str:
    parts = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "activations": estimate.activations,
        "logits": estimate.logits,
    }
    told = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
    return f"{estimate.total / GIB:.1f} GiB a trainer ({told})"


def _count_adapter(shape: ModelShape, rank: int) -> int:
    """Weights of an adapter at all matrices of the layers, which is the most that there are."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sides = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + inner)
    return shape.num_layers * rank * sides

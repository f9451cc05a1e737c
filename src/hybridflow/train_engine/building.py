"""From the settings and the layout to the model that trains: it is edited, and its layers are told how to run."""

from __future__ import annotations

import torch

from hybridflow.models import LanguageModel, apply_lora, has_adapter
from hybridflow.train_engine.backends import apply_liger, check_precision
from hybridflow.train_engine.layers import TrainLayers, resolve_layers
from hybridflow.train_engine.memory import ModelShape, RowMemory, Workload, read_budget, read_shape
from hybridflow.train_engine.mesh import Layout, Mesh
from hybridflow.train_engine.segments import estimate_keys_per_token
from hybridflow.train_engine.settings import TrainSettings, resolve_sharing
from hybridflow.train_engine.sharding import apply_sharding
from hybridflow.train_engine.tensor_parallel import apply_tensor_parallel
from hybridflow.types import Numerics, SamplingParams


def apply_settings(model: LanguageModel, settings: TrainSettings, mesh: Mesh, seed: int) -> frozenset[str]:
    """Adapter, kernels, tensor parallel and sharding, in this order; the names of weights whose gradient is in parts over `tensor`.

    seed: draws a new adapter.
    """
    partial = frozenset[str]()
    check_precision(model.dtype, model.device, liger=settings.liger)
    if settings.lora is not None and not has_adapter(model):
        apply_lora(model, settings.lora, seed)
    if settings.liger:
        apply_liger(model)
    if mesh.layout.tensor > 1:
        partial = apply_tensor_parallel(model, mesh)
    if mesh.layout.shard > 1:
        apply_sharding(
            model,
            mesh,
            reshard_after_forward=settings.reshard_after_forward,
            offload_parameters=settings.offload == "parameters",
        )
    return partial


def build_layers(model: LanguageModel, settings: TrainSettings, mesh: Mesh, expected: RowMemory) -> TrainLayers:
    """How the decoder layers run in training; the same on all ranks, which share each pass. A collective."""
    trained = sum(weight.numel() for weight in model.module.parameters() if weight.requires_grad)
    workload = build_workload(
        settings,
        mesh.layout,
        read_shape(model.config),
        model.dtype,
        trained if has_adapter(model) else None,
        on_gpu=model.device.type == "cuda",
        exact=model.numerics == "exact",
        expected=expected,
    )
    budget_bytes = int(min(numbers[0] for numbers in mesh.world.gather([read_budget(model.device)])))
    mode = resolve_layers(
        model,
        workload,
        budget_bytes,
        checkpointing=settings.gradient_checkpointing,
        compiled=settings.compile,
        offload=settings.activation_offload,
    )
    return TrainLayers(model, workload, mode)


def build_workload(
    settings: TrainSettings,
    layout: Layout,
    shape: ModelShape,
    dtype: torch.dtype,
    trained_weights: int | None,
    *,
    on_gpu: bool,
    exact: bool,
    expected: RowMemory,
) -> Workload:
    """What one rank of the layout has to hold and to run; the other arguments as of `Workload`."""
    return Workload(
        shape,
        dtype,
        settings.micro_batch_tokens,
        tensor=layout.tensor,
        sequence=layout.sequence,
        shard=layout.shard,
        replicas=layout.degree("tokens"),
        trained_weights=trained_weights,
        on_host=settings.offload,
        on_gpu=on_gpu,
        exact=exact,
        expected=expected,
    )


def estimate_row_memory(
    settings: TrainSettings, numerics: Numerics, sampling: SamplingParams, prompt_tokens: int | None
) -> RowMemory:
    """What rows drawn in this way take, if responses are as long as they may be, prompts too, and attention serves rows that share them.

    prompt_tokens: of the longest prompt; None takes those of the longest response.
    """
    if not resolve_sharing(settings.share_prompts, exact=numerics == "exact", served=True):
        return RowMemory(sampling.shaping)
    most = sampling.max_new_tokens
    lengths = (prompt_tokens or most, most, settings.micro_batch_tokens)
    return RowMemory(sampling.shaping, estimate_keys_per_token(sampling.samples_per_prompt, *lengths))

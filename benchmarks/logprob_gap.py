"""How far rollout and trainer stand apart, why, and what exact numerics cost.

    python benchmarks/logprob_gap.py --shape qwen3-0.6b                        # fast numerics
    python benchmarks/logprob_gap.py --shape qwen3-0.6b --numerics exact
    python benchmarks/logprob_gap.py --shape qwen2.5-1.5b --parts cost         # exact against fast, training and decoding
    python benchmarks/logprob_gap.py --model DIR                               # a Hugging Face directory

Weights of a shape are random: the family's own initialisation (normal, standard deviation 0.02, no scaling by depth), drawn in bfloat16.
Prints one JSON line a part, as each is done; differences are absolute, in nats, of log-probabilities of sampled tokens, temperature 1:

- gap:       what the native engine sampled, against the training path over the same tokens.
- shape:     the same draws in a smaller company, as far as the tokens agree (until rounding moves a draw): rollout against rollout; and
             the training path over rows alone against rows packed. `share`: the first over the mean gap, what the batch's shape explains.
- reference: both sides against float32 arithmetic on the same bfloat16 weights. Errors that do not correlate are independent roundings;
             then the gap is the root of the sum of both squares, and only equal bits or wider numbers make it smaller. With the head's
             logits in float32 (`float32_head`) one sees what their rounding adds.
- cost:      tokens a second, exact and fast, of decoding and of an update (the second of two); `--compile` as train.compile, for fast.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from cases import build_parser, print_line
from shapes import SHAPES, build_model
from timing import time_call
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.algorithms.losses import PolicyLoss
from hybridflow.batch import Batch
from hybridflow.data import build_character_tokenizer
from hybridflow.models import (
    Head,
    LanguageModel,
    Packed,
    compute_logprobs,
    load_model,
    load_tokenizer,
    predicted_positions,
)
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.train_engine import TrainEngine, TrainSettings, compute_batch_logprobs
from hybridflow.types import SamplingParams

PARTS = ("gap", "shape", "reference", "cost")
_MICRO_BATCH_TOKENS = 16384

R = TypeVar("R")


@dataclass(frozen=True)
class Case:
    """A model, and what it is asked."""

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Batch
    samples: int
    new_tokens: int

    def generate(self, prompts: Batch, new_tokens: int) -> tuple[Batch, float]:
        """Samples of some of the prompts, and the seconds they took; other prompts and lengths change no key of a draw."""
        sampling = SamplingParams(
            temperature=1.0, max_new_tokens=new_tokens, samples_per_prompt=self.samples, ignore_eos=True
        )
        engine = NativeEngine(self.model, self.tokenizer, NativeSettings())
        # Graphs are captured and kernels compiled in the first call.
        engine.generate(prompts, dataclasses.replace(sampling, max_new_tokens=min(new_tokens, 16)), step=1)
        found = time_work(lambda: engine.generate(prompts, sampling, step=0))
        engine.sleep()
        return found

    def score(self, samples: Batch, model: LanguageModel | None = None) -> tuple[np.ndarray, float]:
        """Log-probabilities of all tokens by the training path, and its seconds."""
        model = model or self.model
        parts, seconds = time_work(
            lambda: compute_batch_logprobs(model, samples, temperature=1.0, micro_batch_tokens=_MICRO_BATCH_TOKENS)
        )
        return np.concatenate(parts), seconds


def time_work(work: Callable[[], R]) -> tuple[R, float]:
    """What it returns, and its seconds."""
    found: list[R] = []
    seconds = time_call(lambda: found.append(work()))
    return found[0], seconds


def main() -> None:
    """Samples, scores and prints."""
    arguments = _parse()
    case = _build(arguments)
    device = case.model.device
    tell(
        "run", model=arguments.model or arguments.shape, numerics=arguments.numerics, dtype=str(case.model.dtype),
        device=torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu", torch=torch.__version__,
        weights="of the directory" if arguments.model else "random, normal, std 0.02",
    )  # fmt: skip
    case.model.numerics = arguments.numerics
    wanted = set(arguments.parts)
    if wanted & {"gap", "shape", "reference"}:
        measure_gaps(case, wanted)
    if "cost" in wanted:
        measure_costs(case, json.loads(arguments.compile) if arguments.compile != "auto" else "auto")


def tell(part: str, **values: Any) -> None:
    """One line, at once; floats with three digits that mean something."""
    rounded = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in values.items()}
    print_line({"part": part, **rounded})


def describe(name: str, differences: np.ndarray) -> dict[str, float]:
    """Mean and maximum."""
    sizes = np.abs(differences.astype(np.float64))
    return {f"{name}_mean": float(sizes.mean()), f"{name}_max": float(sizes.max())}


def measure_gaps(case: Case, wanted: set[str]) -> None:
    """The parts gap, shape and reference, on the same samples."""
    samples, rollout_s = case.generate(case.prompts, case.new_tokens)
    trained, trainer_s = case.score(samples)
    mask = samples.ragged("loss_mask").values.numpy().astype(bool)
    sampled = samples.ragged("rollout_logprobs").values.numpy()
    gap = np.abs(sampled - trained)[mask]
    tell(
        "gap", tokens=int(mask.sum()), **describe("gap", gap), gap_p99=float(np.quantile(gap, 0.99)),
        exactly_equal=float((gap == 0).mean()), rollout_tokens_per_s=round(mask.sum() / rollout_s),
        trainer_tokens_per_s=round(mask.size / trainer_s), mean_logprob=float(sampled[mask].mean()),
    )  # fmt: skip
    if "shape" in wanted:
        measure_shape(case, samples, float(gap.mean()))
    if "reference" in wanted:
        measure_reference(case, samples.slice(0, min(64, samples.num_rows)))


def measure_shape(case: Case, samples: Batch, gap_mean: float) -> None:
    """The same rows in other company."""
    few = case.prompts.slice(0, max(case.prompts.num_rows // 4, 1))
    again, _ = case.generate(few, max(case.new_tokens // 2, 1))
    differences = []
    prompt_tokens = len(case.prompts.pylist("prompt_tokens")[0])
    for row in range(again.num_rows):
        tokens = [batch.arrays("tokens")[row][prompt_tokens:] for batch in (samples, again)]
        length = len(tokens[1])
        moved = np.flatnonzero(tokens[0][:length] != tokens[1])
        part = slice(prompt_tokens, prompt_tokens + (int(moved[0]) if moved.size else length))
        differences.append(np.subtract(*(batch.arrays("rollout_logprobs")[row][part] for batch in (samples, again))))
    alike = np.concatenate(differences)
    tell(
        "shape", compared_tokens=len(alike), of=again.num_rows * max(case.new_tokens // 2, 1),
        **describe("rollout_other_batch", alike), share=float(np.abs(alike).mean() / gap_mean) if gap_mean else 0.0,
    )  # fmt: skip
    rows = [
        torch.from_numpy(row.astype(np.int64)) for row in samples.slice(0, min(64, samples.num_rows)).arrays("tokens")
    ]
    for name, head in (("own_head", case.model.head), ("float32_head", widen(case.model.head))):
        packed = score_rows(case.model, rows, head, prompt_tokens)
        alone = torch.cat([score_rows(case.model, [row], head, prompt_tokens) for row in rows])
        tell("shape", trainer=name, **describe("packed_to_alone", (packed - alone).numpy()))


def measure_reference(case: Case, samples: Batch) -> None:
    """Both sides against float32 on the same weights."""
    model = LanguageModel(copy.deepcopy(case.model.module).float())
    truth, _ = case.score(samples, model)
    trained, _ = case.score(samples)
    mask = samples.ragged("loss_mask").values.numpy().astype(bool)
    errors = [(side - truth)[mask] for side in (samples.ragged("rollout_logprobs").values.numpy(), trained)]
    tell(
        "reference", tokens=int(mask.sum()), **describe("rollout_error", errors[0]), **describe("trainer_error", errors[1]),
        correlation=float(np.corrcoef(*errors)[0, 1]),
        gap_if_independent=float(np.sqrt(sum((error.astype(np.float64) ** 2).mean() for error in errors))),
        gap_root_mean_square=float(np.sqrt(((errors[0] - errors[1]).astype(np.float64) ** 2).mean())),
    )  # fmt: skip
    prompt_tokens = len(case.prompts.pylist("prompt_tokens")[0])
    rows = [torch.from_numpy(row.astype(np.int64)) for row in samples.arrays("tokens")]
    wide = score_rows(case.model, rows, widen(case.model.head), prompt_tokens)
    tell("reference", trainer="float32_head", **describe("trainer_error", wide.numpy() - truth[mask]))


def widen(head: Head) -> Head:
    """The head with logits that are not rounded below float32."""
    return dataclasses.replace(head, exact=head.weight.device.type == "cuda")


@torch.no_grad()
def score_rows(model: LanguageModel, rows: list[Tensor], head: Head, prompt_tokens: int) -> Tensor:
    """Log-probabilities of the responses of rows that are packed into one pass."""
    lengths = torch.tensor([len(row) for row in rows])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    tokens, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, int(lengths.max())))
    index, token_index = predicted_positions(cu_seqlens)
    counts = positions[token_index] >= prompt_tokens
    targets, places = (part[counts].to(model.device) for part in (tokens[token_index], index))
    return compute_logprobs(hidden, targets, head, rows=places)[0].float().cpu()


def measure_costs(case: Case, compiled: bool | str) -> None:
    """Decoding and updates, exact and then fast."""
    for numerics in ("exact", "fast"):
        case.model.numerics = numerics
        new_tokens = max(case.new_tokens // 4, 8)
        samples, decode_s = case.generate(case.prompts, new_tokens)
        tell(
            "cost",
            numerics=numerics,
            decode_tokens_per_s=round(samples.num_rows * new_tokens / decode_s),
            rows=samples.num_rows,
        )
        measure_update(case, samples, compiled if numerics == "fast" else "auto")


def measure_update(case: Case, samples: Batch, compiled: bool | str) -> None:
    """Two updates, the first of which compiles."""
    engine = TrainEngine(case.model, TrainSettings(micro_batch_tokens=_MICRO_BATCH_TOKENS, compile=compiled))
    batch = samples.with_column("advantages", [np.ones(len(row), np.float32) for row in samples.arrays("tokens")])
    loss = PolicyLoss(old_logprobs="rollout_logprobs")
    (metrics, first_s), (_, second_s) = [time_work(lambda: engine.update(batch, loss)) for _ in range(2)]
    tell(
        "cost", numerics=case.model.numerics, update_tokens_per_s=round(int(samples.lengths("tokens").sum()) / second_s),
        first_update_s=first_s, first_ratio_max_minus_1=float(metrics["policy/ratio_max"].value) - 1,
        layers=str(engine.layers.mode),
    )  # fmt: skip


def _build(arguments: argparse.Namespace) -> Case:
    device = torch.device(arguments.device)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[arguments.dtype]
    if arguments.model:
        model = load_model(arguments.model, device=device, dtype=dtype)
        tokenizer = load_tokenizer(arguments.model)
    else:
        # Responses of random weights are not text; any tokenizer serves to make strings of them.
        model, tokenizer = build_model(arguments.shape, device, dtype), build_character_tokenizer("0123456789")
    tokens = np.random.default_rng(0).integers(3, model.vocab_size, size=(arguments.prompts, arguments.prompt_tokens))
    prompts = Batch.from_columns(
        prompt_id=range(arguments.prompts), group_id=range(arguments.prompts), prompt=[""] * arguments.prompts,
        prompt_tokens=list(tokens.astype(np.int32)),
    )  # fmt: skip
    return Case(model, tokenizer, prompts, arguments.samples, arguments.new_tokens)


def _parse() -> argparse.Namespace:
    parser = build_parser(__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model")
    which.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--numerics", choices=["fast", "exact"], default="fast")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["gap", "shape", "reference"])
    parser.add_argument("--compile", choices=["auto", "true", "false"], default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    for name, default in (("prompts", 32), ("samples", 8), ("prompt-tokens", 64), ("new-tokens", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()

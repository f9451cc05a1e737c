"""Layout invariance: what a gang of ranks gives for a mini-batch, and the same written out by hand in one process in float64.

The reference is a plain Transformers module that attends by a softmax over a triangle, one row at a time, with the loss as a formula
of this file, torch.autograd for its gradient, and AdamW as four lines. Nothing of the package is in it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from processes import Place, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hybridflow.algorithms.losses import PolicyLoss, SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, LoraSettings, fresh_model
from hybridflow.train_engine import (
    OptimizerSettings,
    ParallelConfig,
    Ranks,
    ScheduleSettings,
    TrainEngine,
    TrainSettings,
    building,
    join_ranks,
)
from hybridflow.types import Metrics, RowState, merge_metrics

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
_WIDE = _SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": _SHAPE | {"model_type": "qwen3", "vocab_size": 40, "head_dim": 8, "tie_word_embeddings": True},
    "untied": _SHAPE | {"model_type": "qwen2", "vocab_size": 41, "tie_word_embeddings": False},
    "tied, odd vocabulary": _SHAPE | {"model_type": "llama", "vocab_size": 43, "tie_word_embeddings": True},
    "one kv head": _SHAPE
    | {"model_type": "llama", "vocab_size": 40, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "dropout": _SHAPE
    | {"model_type": "qwen3", "vocab_size": 40, "head_dim": 8, "tie_word_embeddings": True, "attention_dropout": 0.5},
    "wide, tied": _WIDE | {"model_type": "qwen3", "head_dim": 64, "vocab_size": 512, "tie_word_embeddings": True},
    "wide, untied": _WIDE | {"model_type": "qwen2", "vocab_size": 515, "tie_word_embeddings": False},
}
"""Norms of queries and keys and a tied head (qwen3); biases and a vocabulary that no degree divides (qwen2).
The wide ones are for GPUs, whose attention kernels want heads of 64."""
TRAIN_LOSSES: dict[str, SFTLoss | PolicyLoss] = {
    "sft, tokens": SFTLoss(),
    "sft, sequences": SFTLoss(normalization="sequence_mean"),
    "policy, tokens": PolicyLoss(
        clip_low=0.1, clip_high=0.1, kl_coefficient=0.3, kl_estimator="k3", entropy_coefficient=0.05, temperature=0.7
    ),
    "policy, sequences": PolicyLoss(
        kl_coefficient=0.2, kl_estimator="k2", entropy_coefficient=0.1, normalization="sequence_mean"
    ),
}
STEPS = 3
LENGTHS: dict[str, tuple[int, ...]] = {
    "short": (3, 17, 9, 2, 30, 12, 5, 8, 6, 7, 1),
    "long": (30, 170, 90, 2, 300, 120, 50, 801, 60, 70, 1),
    "groups": (13, 27, 12, 19, 33, 16, 25, 14, 13, 15, 1),
}
PROMPTS: dict[str, tuple[int, ...]] = {"groups": (11, 11, 11, 11, 15, 15, 15, 12, 12, 12, 0)}
"""Tokens that a row begins with and shares with every other row of as many; none of them counts."""
NUM_ROWS = 11
MASKED_ROWS = (8, 9, 10)
"""Rows without a token that counts: all masked, rejected, and one of a single token that nothing predicts."""
LR, BETAS, EPS, DECAY, MAX_NORM = 2e-3, (0.9, 0.99), 1e-6, 0.1, 0.5
RATES = (LR / 2, LR, LR * 2 / 3)
"""One step of warm-up, then down to 0 at step 4: so the schedule moves once an update."""
TEMPERATURE = 0.8
"""Of `log_prob`."""
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WEIGHT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""After three steps, of a tensor's largest entry; also the relative one of numbers that are reported."""


class Key(NamedTuple):
    """What the hand-written numbers depend on: `Key("tied", "policy, tokens", "short")`."""

    model: str
    loss: str
    rows: str


@dataclass(frozen=True)
class Case:
    """What is trained: `Case("tied", "policy, tokens", "uneven", micro_batch_tokens=40)`.

    split: how the rows lie over data ranks, see `plan_split`.
    more:  further fields of `TrainSettings`, as pairs.
    rows:  their lengths, see `LENGTHS`.
    """

    model: str
    loss: str
    split: str = "even"
    micro_batch_tokens: int = 40
    more: tuple[tuple[str, Any], ...] = ()
    rows: str = "short"

    @property
    def reference(self) -> Key:
        """What the hand-written numbers depend on."""
        return Key(self.model, self.loss, self.rows)


class Part(NamedTuple):
    """A rank's box of a whole tensor."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray


@dataclass
class Found:
    """What one rank has after a case; weights and gradients as boxes, `owned` the names that it would write."""

    gradient: dict[str, Part]
    metrics: list[Metrics] = field(default_factory=list)
    log_prob: dict[int, np.ndarray] = field(default_factory=dict)
    weights: dict[str, Part] = field(default_factory=dict)
    moments: dict[str, Part] = field(default_factory=dict)
    owned: frozenset[str] = frozenset()
    gathered: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Expected:
    """The same from one process, by hand: whole tensors by name, one number a step for each metric."""

    gradient: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    log_prob: list[np.ndarray]


start_ranks = functools.partial(run_ranks, timeout_s=100.0)
"""Several cases in the same processes, on a machine that may be busy."""

# --- rows -----------------------------------------------------------------------------------------------------------


def build_rows(seed: int, kind: str = "short") -> Batch:
    """Rows with gaps in their masks, one row rejected and two without a token that counts."""
    rng, lengths = np.random.default_rng(seed), LENGTHS[kind]
    tokens = [rng.integers(0, 40, length).astype(np.int32) for length in lengths]
    masks = [(rng.random(length) < 0.6).astype(np.uint8) for length in lengths]
    for row, mask in enumerate(masks):
        mask[-1], mask[0] = 1, 0
        if row in MASKED_ROWS and row != 9:
            mask[:] = 0
    for row, count in enumerate(PROMPTS.get(kind, ())):
        tokens[row][:count], masks[row][:count] = np.arange(count) * 7 % 40, 0
    floats = {
        name: [rng.normal(mean, 0.3, length).astype(np.float32) for length in lengths]
        for name, mean in (("rollout_logprobs", -3.7), ("advantages", 0.2), ("ref_logprobs", -3.6))
    }
    states = np.array([RowState.REJECTED if row == 9 else RowState.OK for row in range(NUM_ROWS)], np.int8)
    return Batch.from_columns(tokens=tokens, loss_mask=masks, state=states, **floats)


def plan_split(split: str, data: int) -> list[list[int]]:
    """Rows of each data rank. `idle`: the last has none. `masked`: the last has only rows without a token that counts."""
    rows = list(range(NUM_ROWS))
    if data == 1:
        return [rows]
    if split == "even":
        return [rows[rank::data] for rank in range(data)]
    if split == "uneven":
        return [[*rows[data - 1 :]], *([row] for row in rows[: data - 1])]
    if split == "idle":
        return [*(rows[rank :: data - 1] for rank in range(data - 1)), []]
    if split == "masked":
        kept = [row for row in rows if row not in MASKED_ROWS]
        return [*(kept[rank :: data - 1] for rank in range(data - 1)), list(MASKED_ROWS)]
    raise ValueError(f"split '{split}' is not known")


# --- models ---------------------------------------------------------------------------------------------------------


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def keep_norms_in_their_type() -> None:
    """Transformers' norms round to float32 whatever comes in, which would hide everything below 1e-7; in this process no more."""
    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        norm.forward = _norm


def build_model(name: str, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> LanguageModel:
    """The same numbers in every dtype but for rounding; norms are not 1 and biases not 0, in steps that bfloat16 has."""
    model = fresh_model(MODELS[name], seed=seed, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() == 1:
                weight += (torch.randn(weight.shape, generator=generator) * 8).round().clamp(-32, 32).to(weight) / 64
    return model


def _attend_by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float, **ignored: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ value).transpose(1, 2), None


def build_plain(model: LanguageModel) -> Any:
    """The same weights in float64 in a module of Transformers alone."""
    AttentionInterface.register("by_hand", _attend_by_hand)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="by_hand").double()
    plain.load_state_dict(model.module.state_dict())
    return plain.to(model.device).eval()


def to_array(tensor: Tensor) -> np.ndarray:
    """A copy in float64."""
    return tensor.detach().cpu().double().numpy().copy()


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copies in float64."""
    return {name: to_array(tensor) for name, tensor in tensors.items()}


# --- by hand --------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """The tokens of one row that count: log-probability and entropy with gradient, and the columns."""

    logprobs: Tensor
    entropy: Tensor
    columns: dict[str, Tensor]


def _read_row(plain: Any, tokens: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of tokens 1 to the last."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(plain.device)
    logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / temperature
    logp = logits - logits.logsumexp(-1, keepdim=True)
    return logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _iter_counted_rows(plain: Any, rows: Batch, temperature: float) -> Iterable[_Row]:
    names = ("rollout_logprobs", "advantages", "ref_logprobs")
    columns = {name: rows.pylist(name) for name in names}
    for row, (tokens, mask) in enumerate(zip(rows.pylist("tokens"), rows.pylist("loss_mask"), strict=True)):
        counts = torch.tensor(mask[1:], dtype=torch.bool)
        if rows.numpy("state")[row] != RowState.OK or not counts.any():
            continue
        logprobs, entropy = _read_row(plain, np.array(tokens), temperature)
        kept = {
            name: torch.tensor(columns[name][row][1:], dtype=torch.float64)[counts].to(logprobs.device)
            for name in names
        }
        counts = counts.to(logprobs.device)
        yield _Row(logprobs[counts], entropy[counts], kept)


def _policy_terms(loss: PolicyLoss, row: _Row) -> Tensor:
    advantages, log_ratio = row.columns["advantages"], row.logprobs - row.columns["rollout_logprobs"]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    x = row.logprobs - row.columns["ref_logprobs"]
    kl = (-x).exp() - 1 + x if loss.kl_estimator == "k3" else x * x / 2
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -objective + loss.kl_coefficient * kl - loss.entropy_coefficient * row.entropy


def compute_loss_by_hand(plain: Any, rows: Batch, loss: SFTLoss | PolicyLoss) -> tuple[Tensor, dict[str, float]]:
    """The mean loss, with gradient, and what is reported beside it."""
    counted = list(_iter_counted_rows(plain, rows, loss.temperature))
    terms = [_policy_terms(loss, row) if isinstance(loss, PolicyLoss) else -row.logprobs for row in counted]
    if loss.normalization == "token_mean":
        mean = torch.cat(terms).sum() / sum(term.numel() for term in terms)
    else:
        mean = torch.stack([term.mean() for term in terms]).sum() / len(terms)
    if not isinstance(loss, PolicyLoss):
        return mean, {"sft/loss": mean.item()}
    gaps = torch.cat([(row.logprobs - row.columns["rollout_logprobs"]).detach() for row in counted])
    x = torch.cat([(row.logprobs - row.columns["ref_logprobs"]).detach() for row in counted])
    kl = (-x).exp() - 1 + x if loss.kl_estimator == "k3" else x * x / 2
    return mean, {
        "policy/loss": mean.item(),
        "policy/entropy": torch.cat([row.entropy for row in counted]).mean().item(),
        "policy/kl_to_reference": kl.mean().item(),
        "policy/ratio_mean": gaps.exp().mean().item(),
        "policy/ratio_max": gaps.exp().max().item(),
        "policy/logprob_gap_max": gaps.abs().max().item(),
    }


class _AdamWByHand:
    """Weights of one dimension do not decay; the gradient is scaled to `MAX_NORM` where it is larger."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], count: int, lr: float, grad_norm: float) -> None:
        scale = min(1.0, MAX_NORM / (grad_norm + 1e-6))
        for name, weight in self.weights.items():
            gradient = gradients[name] * scale
            self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * gradient
            self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * gradient * gradient
            if weight.dim() > 1:
                weight -= lr * DECAY * weight
            first, second = self.first[name] / (1 - BETAS[0] ** count), self.second[name] / (1 - BETAS[1] ** count)
            weight -= lr * first / (second.sqrt() + EPS)


def compute_norm(gradients: Mapping[str, Tensor]) -> float:
    """The L2 norm of all together."""
    return math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))


def train_by_hand(model: LanguageModel, loss: SFTLoss | PolicyLoss, steps: Sequence[Batch]) -> Expected:
    """One optimizer step on each batch; the gradient is that of the first."""
    plain = build_plain(model)
    weights = dict(plain.named_parameters())
    adamw = _AdamWByHand(weights)
    first: dict[str, np.ndarray] = {}
    reported = []
    for count, rows in enumerate(steps, start=1):
        mean, metrics = compute_loss_by_hand(plain, rows, loss)
        gradients = dict(zip(weights, torch.autograd.grad(mean, list(weights.values())), strict=True))
        first = first or to_arrays(gradients)
        grad_norm = compute_norm(gradients)
        lr = RATES[count - 1]
        adamw.step(gradients, count, lr, grad_norm)
        reported.append(metrics | {"train/grad_norm": grad_norm, "train/lr": lr} | _count_rows(rows))
    with torch.no_grad():
        logprobs = [_log_prob_by_hand(plain, np.array(tokens)) for tokens in steps[0].pylist("tokens")]
    return Expected(first, reported, to_arrays(weights), logprobs)


def _count_rows(rows: Batch) -> dict[str, float]:
    counted = [length for row, length in enumerate(rows.lengths("tokens")) if row not in MASKED_ROWS]
    return {
        "train/rows": len(counted),
        "train/tokens": float(sum(counted)),
        "train/skipped_steps": 0,
        "train/nonfinite_steps": 0,
    }


def _log_prob_by_hand(plain: Any, tokens: np.ndarray) -> np.ndarray:
    if len(tokens) == 1:
        return np.zeros(1)
    return np.concatenate([np.zeros(1), _read_row(plain, tokens, TEMPERATURE)[0].cpu().numpy()])


def reference_worker(place: Place, keys: Sequence[Key], dtype: torch.dtype, device: str = "cpu") -> dict[Key, Expected]:
    """The hand-written numbers of each key, from weights rounded to `dtype`; in a process of its own, whose norms change."""
    keep_norms_in_their_type()
    found = {}
    for key in keys:
        steps = [build_rows(step, key.rows) for step in range(STEPS)]
        found[key] = train_by_hand(build_model(key.model, dtype, device), TRAIN_LOSSES[key.loss], steps)
    return found


# --- by the engine --------------------------------------------------------------------------------------------------


def build_settings(case: Case, parallel: Mapping[str, int]) -> TrainSettings:
    """The optimizer of `_AdamWByHand`, and this layout."""
    return TrainSettings(
        micro_batch_tokens=case.micro_batch_tokens,
        optimizer=OptimizerSettings(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, max_grad_norm=MAX_NORM),
        schedule=ScheduleSettings(kind="linear", warmup_steps=1, total_steps=STEPS + 1),
        parallel_config=ParallelConfig(**parallel),
        **dict(case.more),
    )


def find_device(place: Place, kind: str) -> torch.device:
    """Rank 1 on GPUs is on the second of them."""
    return torch.device("cuda", place.rank) if kind == "cuda" else torch.device(kind)


def join(place: Place, kind: str = "cpu") -> Ranks:
    """This rank's gang."""
    return join_ranks(
        rank=place.rank,
        size=place.size,
        rendezvous=place.rendezvous,
        device=find_device(place, kind),
        timeout_s=60.0,
    )


def find_own_rows(place: Place, parallel: Mapping[str, int], split: str) -> list[int]:
    """The rows of this rank's data index: ranks that differ in sequence or tensor alone have the same."""
    per_data = parallel.get("tp", 1) * parallel.get("sp", 1)
    return plan_split(split, place.size // per_data)[place.rank // per_data]


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch | None:
    """None where a rank has no rows."""
    return batch.take(list(rows)) if rows else None


def cut(engine: TrainEngine, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Each local tensor with its box of the whole one; by the names of the state."""
    layout = engine.state_layout()
    boxes = {name: layout[name] for name in tensors}
    return {name: Part(box.global_shape, box.offsets, to_array(tensors[name])) for name, box in boxes.items()}


def read_state(engine: TrainEngine, prefix: str) -> dict[str, Part]:
    """The boxes of all state tensors below a prefix, by the rest of their names."""
    return strip(
        cut(engine, {name: x for name, x in engine.state_tensors().items() if name.startswith(prefix)}), prefix
    )


def strip(parts: Mapping[str, Part], prefix: str) -> dict[str, Part]:
    """The same without the prefix of their names."""
    return {name.removeprefix(prefix): part for name, part in parts.items()}


def run_case(place: Place, ranks: Ranks, case: Case, parallel: Mapping[str, int], model: LanguageModel) -> Found:
    """The gradient of the first mini-batch, then three updates, then `log_prob` of the first rows."""
    engine = TrainEngine(model, build_settings(case, parallel), ranks)
    own = find_own_rows(place, parallel, case.split)
    steps = [build_rows(step, case.rows) for step in range(STEPS)]
    found = Found(accumulate(engine, take_rows(steps[0], own), case))
    found.metrics = [engine.update(take_rows(step, own), TRAIN_LOSSES[case.loss]) for step in steps]
    logprobs = engine.log_prob(steps[0].take(own), TEMPERATURE, only_masked=False)
    found.log_prob = dict(zip(own, logprobs, strict=True))
    found.weights = read_state(engine, "model/")
    found.moments = read_state(engine, "optimizer/exp_avg/")
    found.owned = frozenset(engine.owned_state())
    found.gathered = to_arrays(dict(engine.iter_weights()))
    return found


def accumulate(engine: TrainEngine, rows: Batch | None, case: Case) -> dict[str, Part]:
    """The gradient of one mini-batch, this rank's boxes."""
    engine.accumulate(rows, TRAIN_LOSSES[case.loss])
    gradients = {f"model/{name}": gradient for name, gradient in engine.optimizer.gradients().items()}
    return strip(cut(engine, gradients), "model/")


def layout_worker(
    place: Place, cases: Sequence[tuple[Case, torch.dtype]], parallel: Mapping[str, int], device: str = "cpu"
) -> list[Found]:
    """All cases one after the other in the same gang."""
    if all(dtype != torch.bfloat16 for _, dtype in cases):
        keep_norms_in_their_type()
    ranks, where = join(place, device), find_device(place, device)
    found = [run_case(place, ranks, case, parallel, build_model(case.model, dtype, where)) for case, dtype in cases]
    ranks.leave()
    return found


# --- a state that moves, steps without a token, neighbours -----------------------------------------------------------


@dataclass
class Saved:
    """What one rank would write after two steps."""

    boxes: dict[str, Part]
    steps: dict[str, Any]


def start_engine(place: Place, case: Case, parallel: Mapping[str, int], **changes: Any) -> TrainEngine:
    """In a process of its own, whose norms change; float64."""
    keep_norms_in_their_type()
    settings = dataclasses.replace(build_settings(case, parallel), **changes)
    return TrainEngine(build_model(case.model, torch.float64), settings, join(place))


def save_worker(place: Place, case: Case, parallel: Mapping[str, int]) -> Saved:
    """All but the last step."""
    engine = start_engine(place, case, parallel)
    own = find_own_rows(place, parallel, case.split)
    for step in range(STEPS - 1):
        engine.update(take_rows(build_rows(step), own), TRAIN_LOSSES[case.loss])
    engine.ranks.leave()
    owned = engine.owned_state()
    boxes = cut(engine, {name: tensor for name, tensor in engine.state_tensors().items() if name in owned})
    return Saved(boxes, dict(engine.state_json()))


def resume_worker(
    place: Place, case: Case, parallel: Mapping[str, int], whole: Mapping[str, np.ndarray], steps: Mapping[str, Any]
) -> Found:
    """The last step, from whole tensors of which each rank takes its boxes; the engine's own weights are others beforehand."""
    engine = start_engine(place, case, parallel)
    own = find_own_rows(place, parallel, case.split)
    engine.update(take_rows(build_rows(9), own), TRAIN_LOSSES[case.loss])
    boxes = cut(engine, engine.state_tensors())
    loaded = {
        name: torch.from_numpy(whole[name][find_box(boxes[name])]).to(tensor.dtype)
        for name, tensor in engine.state_tensors().items()
    }
    engine.load_state(loaded, steps)
    metrics = [engine.update(take_rows(build_rows(STEPS - 1), own), TRAIN_LOSSES[case.loss])]
    engine.ranks.leave()
    return Found({}, metrics, weights=read_state(engine, "model/"))


def skip_worker(place: Place, parallel: Mapping[str, int]) -> tuple[dict[str, Part], dict[str, Part], Metrics, int]:
    """A step over rows none of whose tokens counts: the state before and after it."""
    case = Case("tied", "policy, sequences")
    engine = start_engine(place, case, parallel)
    rows = build_rows(0).take(find_own_rows(place, parallel, case.split))
    nothing = rows.with_column("loss_mask", [[0] * length for length in rows.lengths("tokens")])
    before = cut(engine, engine.state_tensors())
    metrics = engine.update(nothing, TRAIN_LOSSES[case.loss])
    engine.ranks.leave()
    return before, cut(engine, engine.state_tensors()), metrics, engine.steps_taken


PERTURBED_ROW = 4


def perturb_worker(place: Place, parallel: Mapping[str, int]) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """`log_prob` of each row, all of them in one micro-batch, before and after the tokens of one row change."""
    case = Case("tied", "sft, tokens", micro_batch_tokens=1000)
    engine = start_engine(place, case, parallel)
    own = find_own_rows(place, parallel, case.split)
    rows = build_rows(0)
    tokens = rows.pylist("tokens")
    tokens[PERTURBED_ROW] = [(token + 7) % 40 for token in tokens[PERTURBED_ROW]]
    found = [
        dict(zip(own, engine.log_prob(version.take(own), TEMPERATURE, only_masked=False), strict=True))
        for version in (rows, rows.with_column("tokens", tokens))
    ]
    engine.ranks.leave()
    return found[0], found[1]


def names_worker(place: Place, case: Case, parallel: Mapping[str, int]) -> Found:
    """A gradient where the names of partial weights come in another order on each rank, as those of a set do between processes."""
    right = building.apply_tensor_parallel
    building.apply_tensor_parallel = lambda *args: _Reversed(right(*args), place.rank)
    own = find_own_rows(place, parallel, case.split)
    found = Found(accumulate(start_engine(place, case, parallel), take_rows(build_rows(0), own), case))
    return found


class _Reversed(frozenset[str]):
    """A set whose order is its rank's own."""

    def __new__(cls, names: Iterable[str], rank: int) -> _Reversed:
        made = super().__new__(cls, names)
        made.rank = rank
        return made

    rank: int

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), reverse=self.rank % 2 == 1))


# --- an adapter -----------------------------------------------------------------------------------------------------

ADAPTER = LoraSettings(rank=4, alpha=10.0)
ADAPTER_SCALE = 2.5
ADAPTER_CASE = Case("tied", "policy, tokens", "uneven")


@dataclass
class AdapterFound:
    """One rank's boxes: of the adapter at first, of its gradient before the last step and of itself after it."""

    start: dict[str, Part]
    gradient: dict[str, Part]
    weights: dict[str, Part]
    merged: dict[str, np.ndarray]
    base_before: np.ndarray
    base_after: np.ndarray


@dataclass
class AdapterExpected:
    """The same by hand, whole."""

    gradient: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    merged: dict[str, np.ndarray]


def adapter_worker(place: Place, parallel: Mapping[str, int]) -> AdapterFound:
    """Two updates, then the gradient of the third mini-batch (at first one half of an adapter is 0), and its update."""
    case = ADAPTER_CASE
    engine = start_engine(place, case, parallel, lora=ADAPTER)
    own = find_own_rows(place, parallel, case.split)
    start, before = read_state(engine, "model/"), _read_base(engine)
    steps = [take_rows(build_rows(step), own) for step in range(STEPS)]
    for rows in steps[:-1]:
        engine.update(rows, TRAIN_LOSSES[case.loss])
    gradient = accumulate(engine, steps[-1], case)
    engine.update(steps[-1], TRAIN_LOSSES[case.loss])
    merged = to_arrays(dict(engine.iter_weights()))
    engine.ranks.leave()
    return AdapterFound(start, gradient, read_state(engine, "model/"), merged, before, _read_base(engine))


def _read_base(engine: TrainEngine) -> np.ndarray:
    frozen = [weight for weight in engine.model.module.parameters() if not weight.requires_grad]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in frozen]
    return np.concatenate([to_array(weight).ravel() for weight in local])


class _WithAdapter:
    """A plain module whose weights are base + scale * B A, each time that it is called."""

    def __init__(self, plain: Any, adapter: dict[str, Tensor]) -> None:
        self._plain = plain
        self._adapter = adapter
        self.device = plain.device

    def merge(self) -> dict[str, Tensor]:
        merged = {name: weight.detach() for name, weight in self._plain.named_parameters()}
        for name, lora_A in self._adapter.items():
            if ".lora_A." in name:
                base = name.replace(".lora_A.", ".")
                merged[base] = merged[base] + ADAPTER_SCALE * self._adapter[name.replace("lora_A", "lora_B")] @ lora_A
        return merged

    def __call__(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self._plain, self.merge(), (), inputs)


def adapter_reference_worker(place: Place, start: Mapping[str, np.ndarray]) -> AdapterExpected:
    """`adapter_worker` by hand, from the adapter that it began with."""
    keep_norms_in_their_type()
    adapter = {name: torch.from_numpy(values).requires_grad_() for name, values in start.items()}
    plain = _WithAdapter(build_plain(build_model(ADAPTER_CASE.model, torch.float64)), adapter)
    adamw = _AdamWByHand(adapter)
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        mean, _ = compute_loss_by_hand(plain, build_rows(step), TRAIN_LOSSES[ADAPTER_CASE.loss])
        gradients = dict(zip(adapter, torch.autograd.grad(mean, list(adapter.values())), strict=True))
        adamw.step(gradients, step + 1, RATES[step], compute_norm(gradients))
    return AdapterExpected(to_arrays(gradients), to_arrays(adapter), to_arrays(plain.merge()))


# --- comparing ------------------------------------------------------------------------------------------------------


def assemble(by_rank: Sequence[Mapping[str, Part]]) -> dict[str, np.ndarray]:
    """Whole tensors from the boxes of all ranks, each entry from the first that has it; NaN where no rank has it."""
    whole: dict[str, np.ndarray] = {}
    for parts in by_rank:
        for name, part in parts.items():
            target = whole.setdefault(name, np.full(part.shape, np.nan))
            box = target[find_box(part)]
            assert box.shape == part.values.shape, f"'{name}': {part.values.shape} at {part.offsets} of {part.shape}"
            box[...] = np.where(np.isnan(box), part.values, box)
    return whole


def list_replica_gaps(by_rank: Sequence[Mapping[str, Part]], what: str) -> list[str]:
    """One line for each box that differs, in any bit, from what a rank before it has there."""
    whole = assemble(by_rank)
    return [
        f"{what} '{name}' on rank {rank} has other values than a rank before it"
        for rank, parts in enumerate(by_rank)
        for name, part in parts.items()
        if not np.array_equal(whole[name][find_box(part)], part.values, equal_nan=True)
    ]


def find_box(part: Part) -> tuple[slice, ...]:
    """Where a part stands in its whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.values.shape, strict=True))


def count_writers(by_rank: Sequence[tuple[Mapping[str, Part], frozenset[str]]], prefix: str) -> dict[str, np.ndarray]:
    """How many ranks write each entry of a checkpoint."""
    counts: dict[str, np.ndarray] = {}
    for parts, owned in by_rank:
        for name, part in parts.items():
            count = counts.setdefault(name, np.zeros(part.shape, np.int64))
            if f"{prefix}/{name}" in owned:
                count[find_box(part)] += 1
    return counts


def list_gaps(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], tolerance: float, what: str
) -> list[str]:
    """One line for each tensor that is missing or differs, relative to its largest entry, by more than `tolerance`."""
    lines = [f"{what} '{name}' is on one side alone" for name in sorted(set(ours) ^ set(theirs))]
    for name in sorted(set(ours) & set(theirs)):
        gap = float(np.abs(ours[name] - theirs[name]).max(initial=0.0))
        largest = float(np.abs(theirs[name]).max(initial=1e-300))
        if not gap <= tolerance * largest:
            lines.append(f"{what} '{name}' differs by {gap:.3g}, {gap / largest:.3g} of its largest entry")
    return lines


def list_metric_gaps(by_rank: Sequence[Metrics], expected: Mapping[str, float], tolerance: float) -> list[str]:
    """One line for each metric that, merged over ranks, is not the expected number."""
    merged = merge_metrics(by_rank)
    lines = []
    for name, value in expected.items():
        if name not in merged:
            lines.append(f"metric '{name}' is missing")
        elif not math.isclose(merged[name].value, value, rel_tol=tolerance, abs_tol=1e-12):
            lines.append(f"metric '{name}' is {merged[name].value:.17g} instead of {value:.17g}")
    return lines


def list_gradient_gaps(found: Sequence[Found], expected: Expected, dtype: torch.dtype) -> list[str]:
    """The gradient of the first mini-batch; ranks that hold the same entry have the same bits of it."""
    gradients = [rank.gradient for rank in found]
    lines = list_replica_gaps(gradients, "gradient")
    return lines + list_gaps(assemble(gradients), expected.gradient, GRADIENT_TOLERANCE[dtype], "gradient")


def list_mismatches(found: Sequence[Found], expected: Expected, dtype: torch.dtype) -> list[str]:
    """Everything in which the ranks together differ from the reference; empty where the layout changes nothing."""
    lines = list_gradient_gaps(found, expected, dtype)
    weights = [rank.weights for rank in found]
    lines += list_replica_gaps(weights, "weight")
    lines += list_gaps(assemble(weights), expected.weights, WEIGHT_TOLERANCE[dtype], "weight")
    for step, metrics in enumerate(expected.metrics):
        gaps = list_metric_gaps([rank.metrics[step] for rank in found], metrics, WEIGHT_TOLERANCE[dtype])
        lines += [f"step {step}: {line}" for line in gaps]
    return lines + list_log_prob_gaps(found, expected, 1e-6 if dtype == torch.float64 else 1e-4)


def list_log_prob_gaps(found: Sequence[Found], expected: Expected, tolerance: float) -> list[str]:
    """`log_prob` returns float32: 1e-6 is its rounding."""
    lines, seen = [], set()
    for rank, result in enumerate(found):
        for row, values in result.log_prob.items():
            seen.add(row)
            gap = float(np.abs(values - expected.log_prob[row]).max())
            if not gap < tolerance:
                lines.append(f"log_prob of row {row} on rank {rank} differs by {gap:.3g}")
    return lines + [f"log_prob of row {row} is missing" for row in range(NUM_ROWS) if row not in seen]

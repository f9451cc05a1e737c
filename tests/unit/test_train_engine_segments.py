"""Rows that begin alike: what goes together, what is computed, and that no gradient, loss or log-probability tells the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SMALL
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hybridflow.algorithms.losses import PolicyLoss, SFTLoss
from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.models.attention import AttentionForm
from hybridflow.models.attention_padded import SharedPlan
from hybridflow.train_engine import TrainEngine, TrainSettings
from hybridflow.train_engine.segments import (
    MAX_KEYS_PER_TOKEN,
    MIN_SAVED,
    RowGroup,
    add_up,
    build_segments,
    estimate_keys_per_token,
    find_groups,
)
from hybridflow.train_engine.settings import SharingSetting, resolve_sharing
from hybridflow.types import Numerics, RowState, Shaping

VOCAB = 40
CONFIG = SMALL | {
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "qwen2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 11, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 17},
}
# Prompts and their responses; the third prompt is the second one and more, the fourth has one response, the last is too short to share.
PROMPTS = (20, 33, 40, 15, 4)
RESPONSES = ((5, 9, 1, 30), (7, 7), (12, 3, 8), (10,), (6, 6))


def build_rows(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, VOCAB, 64)
    prompts = [rng.integers(0, VOCAB, length) for length in PROMPTS]
    prompts[1], prompts[2] = begin[: PROMPTS[1]], begin[: PROMPTS[2]]
    tokens, masks = [], []
    for prompt, responses in zip(prompts, RESPONSES, strict=True):
        for length in responses:
            tokens.append(np.concatenate([prompt, rng.integers(0, VOCAB, length)]).astype(np.int32))
            mask = np.zeros(len(tokens[-1]), np.uint8)
            mask[len(prompt) :] = rng.random(length) < 0.8
            mask[len(prompt)] = 1
            masks.append(mask)
    count = len(tokens)
    states = np.full(count, int(RowState.OK), np.int8)
    states[1] = int(RowState.REJECTED)
    floats = {
        name: [rng.normal(middle, 0.3, len(row)).astype(np.float32) for row in tokens]
        for name, middle in (("rollout_logprobs", -3.7), ("advantages", 0.2), ("ref_logprobs", -3.6))
    }
    order = rng.permutation(count)
    kept = [(mask * (1 + row % 9)).astype(np.int32) for row, mask in zip(tokens, masks, strict=True)]
    columns: dict[str, Any] = {"tokens": tokens, "loss_mask": masks, "kept_counts": kept, **floats}
    shuffled = {name: [values[row] for row in order] for name, values in columns.items()}
    return Batch.from_columns(**shuffled, state=states[order])


def build_engine(family: str, *, share: bool, budget: int = 4096, **more: Any) -> TrainEngine:
    model = fresh_model({"model_type": family, **CONFIG, **FAMILIES[family]}, seed=1, dtype=torch.float64)
    return TrainEngine(model, TrainSettings(micro_batch_tokens=budget, share_prompts=share, **more))


LOSSES = {
    "sft": SFTLoss(),
    "policy": PolicyLoss(kl_coefficient=0.2, entropy_coefficient=0.1, normalization="sequence_mean", temperature=0.7),
    "penalised": PolicyLoss(temperature=0.7, shaping=Shaping(repetition_penalty=1.3)),
    "cut": PolicyLoss(temperature=0.7, shaping=Shaping(repetition_penalty=0.9, top_p=0.7)),
}


@pytest.fixture
def norms_in_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' norms round to float32 whatever comes in, which would hide everything below 1e-7."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for kind in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(kind, "forward", norm)
    monkeypatch.setattr(Gemma2RMSNorm, "forward", lambda self, hidden: self._norm(hidden) * (1.0 + self.weight))


@pytest.mark.usefixtures("norms_in_their_type")
@pytest.mark.parametrize("budget", [4096, 50, 1])
@pytest.mark.parametrize(
    ("family", "loss"),
    [*((family, "policy") for family in FAMILIES), *(("qwen3", loss) for loss in ("sft", "penalised", "cut"))],
)
def test_gradients_and_metrics_are_those_of_rows_by_themselves(family: str, loss: str, budget: int) -> None:
    rows = build_rows()
    found = []
    for share in (False, True):
        engine = build_engine(family, share=share, budget=budget, gradient_checkpointing="selective")
        engine.accumulate(rows, LOSSES[loss])
        gradients = {name: gradient.clone() for name, gradient in engine.optimizer.gradients().items()}
        found.append((gradients, engine.update(rows, LOSSES[loss])))
    (plain, plain_metrics), (shared, metrics) = found
    assert plain.keys() == shared.keys()
    for name, gradient in plain.items():
        assert (shared[name] - gradient).abs().max() < 1e-10 * gradient.abs().max(), name
    assert metrics.keys() == plain_metrics.keys() | {"train/shared_tokens"}
    for name in plain_metrics.keys() - {"train/micro_batches"}:
        assert metrics[name].value == pytest.approx(plain_metrics[name].value, rel=1e-9, abs=1e-12), name
    assert metrics["train/rows"].value == 11
    saved = metrics["train/shared_tokens"].value
    if budget == 4096:
        # Each prompt but its last token, once for each row beyond the first; the rejected row takes no part.
        assert saved == 19 * 2 + 32 * 1 + 39 * 2 + 3 * 1
    elif budget == 50:
        assert 0 < saved < 19 * 2 + 32 + 39 * 2 + 3
    else:
        assert saved == 0


def test_log_probabilities_are_those_of_rows_by_themselves() -> None:
    rows = build_rows()
    plain, shared = (build_engine("qwen3", share=share).log_prob(rows, 0.8) for share in (False, True))
    assert max(np.abs(one - other).max() for one, other in zip(plain, shared, strict=True)) < 1e-6
    everything = [build_engine("qwen3", share=share).log_prob(rows, 0.8, only_masked=False) for share in (False, True)]
    assert all(np.array_equal(one, other) for one, other in zip(*everything, strict=True))


def test_exact_numerics_refuse_to_share() -> None:
    model = fresh_model({"model_type": "qwen3", **CONFIG, **FAMILIES["qwen3"]}, seed=1, numerics="exact")
    with pytest.raises(
        ConfigError, match="train.share_prompts is true, but numerics 'exact' computes each row by itself"
    ):
        TrainEngine(model, TrainSettings(share_prompts=True))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_where_nothing_is_set_rows_share_unless_numerics_are_exact(numerics: Numerics) -> None:
    model = fresh_model({"model_type": "qwen3", **CONFIG, **FAMILIES["qwen3"]}, seed=1, numerics=numerics)
    metrics = TrainEngine(model, TrainSettings()).update(build_rows(), PolicyLoss())
    assert metrics["train/rows"].value == 11
    assert ("train/shared_tokens" in metrics) == (numerics == "fast")
    if numerics == "fast":
        assert metrics["train/shared_tokens"].value == 19 * 2 + 32 * 1 + 39 * 2 + 3 * 1


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_groups_hold_each_row_once_begin_alike_and_keep_to_the_budget(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    prompts = [rng.integers(0, 3, length) for length in data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))]
    chosen = [prompts[data.draw(st.integers(0, len(prompts) - 1))] for _ in range(data.draw(st.integers(1, 12)))]
    tokens = [np.concatenate([prompt, rng.integers(0, 3, rng.integers(1, 20))]).astype(np.int32) for prompt in chosen]
    scored = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(tokens, chosen, strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    budget = data.draw(st.integers(1, 120))
    flat, flags = np.concatenate(tokens), np.concatenate(scored)
    groups = find_groups(flat, offsets, flags, range(len(tokens)), budget)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(tokens)))
    lengths = np.diff(offsets)
    computed = add_up(groups, lengths, lambda values: values.astype(np.float64))
    segments = build_segments(groups, lengths)
    assert segments.lengths.sum() == computed.sum()
    for group, count in zip(groups, computed, strict=True):
        saved = (len(group.rows) - 1) * group.trunk
        assert group.trunk == 0 if len(group.rows) == 1 else saved >= MIN_SAVED * lengths[list(group.rows)].sum() > 0
        assert count <= budget or len(group.rows) == 1
        first = tokens[group.rows[0]]
        assert all(np.array_equal(tokens[row][: group.trunk], first[: group.trunk]) for row in group.rows)
        assert not any(scored[row][: group.trunk + 1].any() for row in group.rows if group.trunk)
    keys = segments.build_keys(padding=3)
    assert (keys is None) == all(not group.trunk for group in groups)
    if keys is not None:
        # What a segment attends to are the tokens of its row up to its end.
        values = np.concatenate(
            [tokens[row][a:b] for row, a, b in zip(segments.rows, segments.starts, segments.ends, strict=True)]
        )
        parts = np.split(keys.index_C.numpy(), keys.cu_seqlens.numpy()[1:-1])
        for part, row, end in zip(parts, segments.rows, segments.ends, strict=False):
            assert np.array_equal(values[part], tokens[row][:end])
        assert parts[-1].tolist() == list(range(len(values), len(values) + 3))


@pytest.mark.parametrize(
    ("setting", "exact", "served", "shared"),
    [
        ("auto", False, True, True), ("auto", False, False, False), ("auto", True, True, False), (True, False, False, True),
        (False, False, True, False),
    ],
)  # fmt: skip
def test_auto_shares_where_attention_serves_it(
    setting: SharingSetting, exact: bool, served: bool, shared: bool
) -> None:
    assert resolve_sharing(setting, exact=exact, served=served) is shared


def test_cudnn_alone_takes_whole_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model({"model_type": "qwen3", **CONFIG, **FAMILIES["qwen3"]}, seed=1)
    assert model.shares_keys
    for kernel, shares in (
        ("cudnn", False),
        ("flash_attn_4", True),
        ("torch", True),
        ("padded", True),
        ("exact", True),
    ):
        monkeypatch.setattr(LanguageModel, "packed_attention", kernel)
        assert model.shares_keys is shares, kernel


@pytest.mark.parametrize(("trunk", "branch", "shared"), [(5, 6, True), (2, 13, False), (2, 12, True), (0, 1, False)])
def test_rows_share_what_saves_an_eighth_of_their_tokens(trunk: int, branch: int, shared: bool) -> None:
    """Eight samples of a short prompt: 7 trunks of 8 (trunk + branch) tokens."""
    row = np.arange(trunk + branch, dtype=np.int32)
    scored = np.tile(np.arange(row.size) > trunk, 8)
    groups = find_groups(np.tile(row, 8), np.arange(9) * row.size, scored, range(8), 1000)
    assert [group.rows for group in groups] == ([tuple(range(8))] if shared else [(number,) for number in range(8)])
    assert [group.trunk for group in groups] == ([trunk] if shared else [0] * 8)


def test_rows_by_themselves_beside_branches_take_no_mask() -> None:
    """One over all their tokens would grow with the square of a prompt."""
    groups = [RowGroup((0, 1), 20), RowGroup((2,), 0)]
    segments = build_segments(groups, np.array([25, 27, 40]))
    keys = segments.build_keys(padding=0)
    assert keys is not None
    plan = SharedPlan(segments.lengths, keys, torch.device("cpu"))
    form = AttentionForm(0.5)
    masks = [plan._mask(bucket, form, 2) for bucket in range(len(plan.queries.buckets))]
    assert [mask is None for mask in masks] == [True, False]
    assert masks[1] is not None and masks[1].shape[-2:] == (2 * 7, 27)
    windowed = [plan._mask(bucket, AttentionForm(0.5, window=30), 2) for bucket in range(2)]
    assert windowed[0] is not None and windowed[1] is not None


def test_keys_that_branches_copy_are_bounded_by_what_is_computed() -> None:
    tokens = np.concatenate([np.arange(104)] * 40).astype(np.int32)
    scored = np.tile(np.arange(104) >= 101, 40)
    groups = find_groups(tokens, np.arange(41) * 104, scored, range(40), max_tokens=10_000)
    held = computed = 0
    for group in groups:
        segments = build_segments([group], np.full(40, 104))
        keys = segments.build_keys(padding=0)
        assert keys is not None and len(keys.index_C) <= MAX_KEYS_PER_TOKEN * segments.lengths.sum()
        held, computed = held + len(keys.index_C), computed + int(segments.lengths.sum())
    assert 5 <= len(groups) <= 7
    assert estimate_keys_per_token(40, 101, 3, 10_000) == held / computed
    assert estimate_keys_per_token(40, 101, 3, 50) == estimate_keys_per_token(1, 101, 3, 10_000) == 1.0


def test_a_group_that_is_too_large_is_cut_and_each_part_has_the_trunk() -> None:
    tokens = np.concatenate([np.arange(20)] * 5).astype(np.int32)
    scored = np.tile(np.arange(20) >= 15, 5)
    groups = find_groups(tokens, np.arange(6) * 20, scored, range(5), max_tokens=28)
    assert groups == [RowGroup((0, 1), 14), RowGroup((2, 3), 14), RowGroup((4,), 0)]
    assert add_up(groups, np.full(5, 20), lambda lengths: lengths.astype(float)).tolist() == [26.0, 26.0, 20.0]

"""TrainEngine: one gradient for every split, one denominator, the same forward in both passes, exact resume."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SMALL
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.algorithms.losses import LossSum, MetricSum, Normalization, PolicyLoss, SFTLoss
from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel, LoraSettings, apply_lora, fresh_model
from hybridflow.train_engine import (
    Layout,
    Mesh,
    NonFiniteError,
    OptimizerSettings,
    Ranks,
    ScheduleSettings,
    TrainEngine,
    TrainSettings,
)
from hybridflow.train_engine.mesh import Axis
from hybridflow.train_engine.tensor_parallel import apply_tensor_parallel
from hybridflow.types import UNSHAPED, Reduce, RowState, Shaping

VOCAB = 40
CONFIG = SMALL | {"model_type": "qwen3", "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True}
LENGTHS = [3, 17, 9, 2, 30, 12, 5, 8]
SPLITS = {"one": 1000, "three": 35, "per row": 1}
LOSSES = {
    "sft, token mean": SFTLoss(),
    "sft, sequence mean": SFTLoss(normalization="sequence_mean"),
    "policy, token mean": PolicyLoss(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.01, temperature=0.7),
    "policy, sequence mean": PolicyLoss(normalization="sequence_mean"),
}


def build_model(dtype: torch.dtype = torch.float32, **changes: Any) -> LanguageModel:
    numerics = changes.pop("numerics", "fast")
    return fresh_model({**CONFIG, **changes}, seed=0, dtype=dtype, numerics=numerics)


def build_engine(model: LanguageModel, **changes: Any) -> TrainEngine:
    """`lr`, `weight_decay` and the like go to the optimizer, the rest to `TrainSettings`."""
    names = OptimizerSettings.__dataclass_fields__
    optimizer = OptimizerSettings(
        **{"lr": 1e-2, **{name: changes.pop(name) for name in list(changes) if name in names}}
    )
    return TrainEngine(model, TrainSettings(optimizer=optimizer, **changes))


def build_rows(lengths: list[int], seed: int = 0, states: list[RowState] | None = None) -> Batch:
    """Rows with a random mask (at least the last token, never the first) and the columns that a policy loss reads."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
    masks = [(rng.random(length) < 0.6).astype(np.uint8) for length in lengths]
    for mask in masks:
        mask[-1], mask[0] = 1, 0
    floats = {
        name: [rng.normal(shift, 0.3, length).astype(np.float32) for length in lengths]
        for name, shift in (("rollout_logprobs", -3.7), ("advantages", 0.2))
    }
    return Batch.from_columns(
        tokens=tokens,
        loss_mask=masks,
        state=np.array(states or [RowState.OK] * len(lengths), dtype=np.int8),
        **floats,
    )


def build_reference(model: LanguageModel) -> Any:
    """The same weights in float64, as Transformers runs them by itself."""
    config = copy.deepcopy(model.config)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    reference.load_state_dict(model.module.state_dict())
    return reference.eval()


def reference_logprobs(reference: Any, tokens: list[int]) -> Tensor:
    """Log-probability of each token of one row by itself, 0 at the first: [T] float64, from whole logits."""
    logits_TV = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return torch.cat([logprobs.new_zeros(1), logprobs])


def smooth_norms(model: LanguageModel) -> None:
    """Transformers' norms compute in float32 whatever comes in, which finite differences in float64 would see as noise."""

    def smooth(norm: Any) -> Any:
        return lambda x: norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    for module in model.module.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = smooth(module)


def gradients(engine: TrainEngine, batch: Batch, loss: Any) -> dict[str, Tensor]:
    engine.accumulate(batch, loss)
    return {name: gradient.clone() for name, gradient in engine.optimizer.gradients().items()}


def weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.module.named_parameters()}


def relative_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any entry, relative to the largest entry of its tensor."""
    assert set(ours) == set(theirs)
    return max(
        float((ours[name].double() - theirs[name].double()).abs().max() / theirs[name].double().abs().max())
        for name in ours
    )


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@dataclass
class ProbeLoss:
    """A sum of -logprob that keeps what it was given; `own_mask` makes it count a token too few, as a faulty loss would."""

    columns: tuple[str, ...] = ()
    needs_entropy: bool = False
    normalization: Normalization = "token_mean"
    temperature: float = 1.0
    shaping: Shaping = UNSHAPED
    own_mask: bool = False
    seen: list[tuple[Tensor, Mapping[str, Tensor]]] = field(default_factory=list)

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        self.seen.append((logprobs_T.detach().clone(), columns))
        weight = weights_T[:-1].sum() if self.own_mask else weights_T.sum()
        total = -(logprobs_T * weights_T).sum()
        return LossSum(total, weight, {"probe/seen": MetricSum(mask_T.sum(), mask_T.sum(), Reduce.SUM)})


@pytest.mark.parametrize("name", LOSSES)
def test_float64_gradient_is_the_same_for_every_split(name: str) -> None:
    model, batch = build_model(torch.float64), build_rows(LENGTHS)
    found = {}
    for split, max_tokens in SPLITS.items():
        engine = build_engine(model, micro_batch_tokens=max_tokens)
        found[split] = gradients(engine, batch, LOSSES[name])
        assert (
            engine.accumulate(batch, LOSSES[name])[1]["train/micro_batches"].value
            == {"one": 1, "three": 3, "per row": 8}[split]
        )
    assert relative_gap(found["three"], found["one"]) < 1e-10
    assert relative_gap(found["per row"], found["one"]) < 1e-10


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_float32_gradient_is_the_same_for_every_split(numerics: str) -> None:
    model, batch = build_model(numerics=numerics), build_rows(LENGTHS)
    found = [
        gradients(build_engine(model, micro_batch_tokens=max_tokens), batch, LOSSES["policy, token mean"])
        for max_tokens in SPLITS.values()
    ]
    assert relative_gap(found[1], found[0]) < 1e-5
    assert relative_gap(found[2], found[0]) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean"])
def test_gradient_equals_the_one_of_single_rows_through_transformers(tied: bool, normalization: Normalization) -> None:
    model, batch = build_model(torch.float64, tie_word_embeddings=tied), build_rows(LENGTHS)
    reference = build_reference(model)
    rows = list(zip(batch.pylist("tokens"), batch.pylist("loss_mask"), strict=True))
    sums, counts = [], []
    for tokens, mask in rows:
        weights_T = torch.tensor(mask, dtype=torch.float64)
        scale = 1.0 if normalization == "token_mean" else 1.0 / weights_T.sum()
        sums.append(-(reference_logprobs(reference, tokens) * weights_T).sum() * scale)
        counts.append(float(weights_T.sum()) if normalization == "token_mean" else 1.0)
    (sum(sums) / sum(counts)).backward()
    expected = {name: weight.grad for name, weight in reference.named_parameters()}

    ours = gradients(build_engine(model, micro_batch_tokens=40), batch, SFTLoss(normalization=normalization))
    assert relative_gap(ours, expected) < 1e-10


def test_gradient_equals_finite_differences() -> None:
    model, batch, loss = build_model(torch.float64), build_rows(LENGTHS), LOSSES["policy, token mean"]
    smooth_norms(model)
    engine = build_engine(model, micro_batch_tokens=40)
    found = gradients(engine, batch, loss)
    generator = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(g.shape, generator=generator, dtype=torch.float64) for name, g in found.items()}

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for name, weight in model.module.named_parameters():
                weight += distance * direction[name]
        totals, _ = engine.accumulate(batch, loss)
        with torch.no_grad():
            for name, weight in model.module.named_parameters():
                weight -= distance * direction[name]
        return totals.read({})[0]

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    assert slope == pytest.approx(sum(float((found[name] * direction[name]).sum()) for name in found), rel=1e-6)


def test_repeating_every_row_changes_no_gradient() -> None:
    model, batch = build_model(torch.float64), build_rows(LENGTHS)
    for loss in LOSSES.values():
        once = gradients(build_engine(model, micro_batch_tokens=40), batch, loss)
        twice = gradients(build_engine(model, micro_batch_tokens=40), batch.repeat(2), loss)
        assert relative_gap(twice, once) < 1e-10


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_a_change_in_one_row_moves_no_other_row(numerics: str) -> None:
    engine = build_engine(build_model(numerics=numerics))
    batch = build_rows(LENGTHS)
    before = engine.log_prob(batch, 1.0, only_masked=False)
    tokens = batch.pylist("tokens")
    tokens[4] = [(token + 1) % 40 for token in tokens[4]]
    after = engine.log_prob(batch.with_column("tokens", tokens), 1.0, only_masked=False)
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old, new) == (row != 4)


def test_log_prob_is_aligned_to_tokens_and_equals_whole_logits() -> None:
    model, batch = build_model(torch.float64), build_rows([*LENGTHS, 1])
    reference = build_reference(model)
    every = build_engine(model, micro_batch_tokens=30).log_prob(batch, 1.0, only_masked=False)
    masked = build_engine(model, micro_batch_tokens=30).log_prob(batch, 1.0)
    for tokens, mask, row, row_masked in zip(
        batch.pylist("tokens"), batch.pylist("loss_mask"), every, masked, strict=True
    ):
        expected = reference_logprobs(reference, tokens).detach().numpy()
        assert row.dtype == np.float32
        assert row[0] == 0.0
        np.testing.assert_allclose(row, expected, rtol=1e-6)
        np.testing.assert_array_equal(row_masked, np.where(mask, row, 0.0))


def test_exact_mode_log_prob_equals_the_training_forward_bit_for_bit() -> None:
    model, batch = build_model(numerics="exact"), build_rows(LENGTHS)
    logprobs = build_engine(model, micro_batch_tokens=1000).log_prob(batch, 0.7)
    batch = batch.with_column("trainer_logprobs", logprobs)
    for max_tokens in SPLITS.values():
        loss = ProbeLoss(temperature=0.7, columns=("trainer_logprobs",))
        build_engine(model, micro_batch_tokens=max_tokens, lr=0.0).update(batch, loss)
        assert all(torch.equal(logprobs_T, columns["trainer_logprobs"]) for logprobs_T, columns in loss.seen)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_lr_zero_keeps_weights_bit_equal_and_the_ratio_at_one(numerics: str) -> None:
    model, batch = build_model(numerics=numerics), build_rows(LENGTHS)
    engine = build_engine(model, lr=0.0, weight_decay=0.1, micro_batch_tokens=40)
    before = weights(model)
    batch = batch.with_column("trainer_logprobs", engine.log_prob(batch, 0.7))
    loss = PolicyLoss(old_logprobs="trainer_logprobs", temperature=0.7)
    for _ in range(10):
        metrics = engine.update(batch, loss)
        exact = {
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "kl_to_rollout": 0.0,
            "clip_fraction_low": 0.0,
            "clip_fraction_high": 0.0,
        }
        assert {name: metrics[f"policy/{name}"].value for name in exact} == exact
    assert equal(weights(model), before)


def test_dropout_never_wakes_up() -> None:
    for checkpointing in ("none", "full"):
        model, batch = build_model(attention_dropout=0.5), build_rows(LENGTHS)
        engine = build_engine(model, lr=0.0, gradient_checkpointing=checkpointing)
        quiet = gradients(engine, batch, SFTLoss())
        logprobs = engine.log_prob(batch, 1.0)
        model.module.train()
        assert all(np.array_equal(a, b) for a, b in zip(engine.log_prob(batch, 1.0), logprobs, strict=True))
        model.module.train()
        assert equal(gradients(engine, batch, SFTLoss()), quiet)
        assert not any(module.training for module in model.module.modules())


def test_checkpointing_computes_layers_again_and_changes_no_gradient() -> None:
    model, batch = build_model(), build_rows(LENGTHS)
    plain = gradients(build_engine(model), batch, SFTLoss())
    calls: list[int] = []
    hook = model.module.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    again = gradients(build_engine(model, gradient_checkpointing="full"), batch, SFTLoss())
    assert len(calls) == 2
    hook.remove()
    assert equal(again, plain)


def test_rows_that_are_not_ok_take_no_part_and_no_denominator() -> None:
    model = build_model(torch.float64)
    states = [RowState.OK] * len(LENGTHS)
    states[1], states[4], states[6] = RowState.REJECTED, RowState.FAILED, RowState.EMPTY
    batch = build_rows(LENGTHS, states=states)
    kept = batch.filter(batch.numpy("state") == RowState.OK)
    for loss in LOSSES.values():
        engine = build_engine(model, micro_batch_tokens=40)
        assert relative_gap(gradients(engine, batch, loss), gradients(engine, kept, loss)) < 1e-10
    assert engine.update(batch, loss)["train/rows"].value == 5
    logprobs = engine.log_prob(batch, 1.0)
    assert [bool(row.any()) for row in logprobs] == [state == RowState.OK for state in states]


def test_a_loss_that_counts_by_another_mask_is_refused() -> None:
    model = build_model()
    before = weights(model)
    with pytest.raises(ValueError, match=r"weights add up to .*, but loss_mask gives"):
        build_engine(model, micro_batch_tokens=40).update(build_rows(LENGTHS), ProbeLoss(own_mask=True))
    assert equal(weights(model), before)


def test_metrics_are_the_same_for_every_split() -> None:
    model, batch, loss = build_model(torch.float64), build_rows(LENGTHS), LOSSES["policy, token mean"]
    found = [build_engine(model, micro_batch_tokens=size, lr=0.0).update(batch, loss) for size in SPLITS.values()]
    for name, metric in found[0].items():
        if name != "train/micro_batches":
            for other in found[1:]:
                assert (other[name].weight, other[name].reduce) == (pytest.approx(metric.weight), metric.reduce)
                assert other[name].value == pytest.approx(metric.value, rel=1e-9), name
    assert found[0]["train/tokens"].value == sum(LENGTHS)
    assert found[0]["train/rows"].value == len(LENGTHS)


def test_metrics_equal_hand_written_values() -> None:
    model, batch = build_model(torch.float64), build_rows(LENGTHS)
    reference = build_reference(model)
    total = sum(
        float((reference_logprobs(reference, tokens).detach() * torch.tensor(mask)).sum())
        for tokens, mask in zip(batch.pylist("tokens"), batch.pylist("loss_mask"), strict=True)
    )
    count = sum(map(sum, batch.pylist("loss_mask")))
    engine = build_engine(model, micro_batch_tokens=40)
    norm = torch.cat([g.flatten() for g in gradients(engine, batch, SFTLoss()).values()]).norm()
    metrics = engine.update(batch, SFTLoss())
    assert metrics["sft/loss"].value == pytest.approx(-total / count, rel=1e-10)
    assert metrics["sft/loss"].weight == count
    assert metrics["train/grad_norm"].value == pytest.approx(float(norm), rel=1e-10)
    assert engine.update(batch, ProbeLoss())["probe/seen"].value == count


class DividingLoss(SFTLoss):
    """Divides by what counts, as a user's loss may."""

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor | None, mask_T: Tensor, *others: Any) -> LossSum:
        found = super().__call__(logprobs_T, entropy_T, mask_T, *others)
        return LossSum(found.total / mask_T.sum() * mask_T.sum(), found.weight, found.metrics)


def test_rows_without_a_token_that_counts_are_not_asked_about() -> None:
    batch = build_rows(LENGTHS)
    masks = [mask if row % 3 else np.zeros_like(mask) for row, mask in enumerate(batch.arrays("loss_mask"))]
    engine = build_engine(build_model(torch.float64), micro_batch_tokens=1)
    found = gradients(engine, batch.with_column("loss_mask", masks), DividingLoss())
    expected = gradients(engine, batch.take([1, 2, 4, 5, 7]), SFTLoss())
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-14), name
    metrics = engine.update(batch.with_column("loss_mask", masks), DividingLoss())
    assert (metrics["train/skipped_steps"].value, metrics["train/rows"].value) == (0, 5)


def test_a_tied_weight_is_trained_once() -> None:
    model, batch = build_model(torch.float64), build_rows(LENGTHS)
    engine = build_engine(model, lr=0.1, max_grad_norm=0.0)
    gradient = gradients(engine, batch, SFTLoss())["model.embed_tokens.weight"]
    expected = torch.nn.Parameter(model.head_weight.detach().clone())
    expected.grad = gradient.clone()
    torch.optim.AdamW([expected], lr=0.1, weight_decay=0.0).step()
    engine.update(batch, SFTLoss())
    assert torch.allclose(model.head_weight, expected, rtol=1e-12, atol=0.0)
    assert model.head_weight is model.module.get_input_embeddings().weight


def test_bfloat16_on_the_cpu_trains_through_masters_at_fixed_addresses() -> None:
    batch = build_rows(LENGTHS)
    exact = gradients(build_engine(build_model(), micro_batch_tokens=40), batch, SFTLoss())
    model = build_model(torch.bfloat16)
    engine = build_engine(model, micro_batch_tokens=40)
    rounded = gradients(engine, batch, SFTLoss())
    flat = [torch.cat([g.flatten().float() for g in found.values()]) for found in (exact, rounded)]
    assert torch.cosine_similarity(flat[0], flat[1], dim=0) > 0.995
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())

    addresses = {name: weight.data_ptr() for name, weight in model.module.named_parameters()}
    losses = [engine.update(batch, SFTLoss())["sft/loss"].value for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert {name: weight.data_ptr() for name, weight in model.module.named_parameters()} == addresses
    masters = engine.state_tensors()
    assert all(masters[f"model/{n}"].dtype == torch.float32 for n, _ in model.module.named_parameters())
    assert all(torch.equal(w, masters[f"model/{n}"].bfloat16()) for n, w in model.module.named_parameters())


def test_faulty_rows_are_named() -> None:
    engine, batch = build_engine(build_model()), build_rows([4, 3])
    with pytest.raises(ValueError, match="row 1: 'odd' has 2 values for 3 tokens"):
        engine.update(batch.with_column("odd", [[0.0] * 4, [0.0] * 2]), ProbeLoss(columns=("odd",)))
    with pytest.raises(KeyError, match="trainer_logprobs"):
        engine.update(batch, PolicyLoss(old_logprobs="trainer_logprobs"))


def test_exact_gradients_are_bit_equal_for_the_same_rows() -> None:
    engines = [build_engine(build_model(numerics="exact"), micro_batch_tokens=40) for _ in range(2)]
    first, second = (gradients(engine, build_rows(LENGTHS), SFTLoss()) for engine in engines)
    assert equal(first, second)


def state(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_tensors().items()}


def poison(batch: Batch, value: float) -> Batch:
    """The same rows, one advantage at a token that counts replaced."""
    advantages = [np.array(row) for row in batch.arrays("advantages")]
    advantages[2][-1] = value
    return batch.with_column("advantages", advantages)


def test_the_schedule_moves_once_a_step_and_not_on_skipped_ones() -> None:
    schedule = ScheduleSettings(kind="linear", warmup_steps=1, total_steps=5)
    engine = build_engine(build_model(), lr=0.8, schedule=schedule, micro_batch_tokens=10)
    good = build_rows(LENGTHS)
    batches = [good, good, poison(good, float("nan")), good, good.slice(0, 0), good, good, good]
    rates = [engine.update(batch, PolicyLoss())["train/lr"].value for batch in batches]
    assert rates == pytest.approx([0.4, 0.8, 0.6, 0.6, 0.4, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(value: float) -> None:
    model = build_model()
    engine = build_engine(model, max_grad_norm=1.0)
    good = build_rows(LENGTHS)
    engine.update(good, PolicyLoss())
    before = state(engine)
    metrics = engine.update(poison(good, value), PolicyLoss(entropy_coefficient=0.0))
    assert (metrics["train/skipped_steps"].value, metrics["train/nonfinite_steps"].value) == (1, 1)
    assert not {"policy/loss", "train/grad_norm"} & set(metrics)
    assert equal(state(engine), before)
    assert engine.update(good, PolicyLoss())["train/skipped_steps"].value == 0


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run() -> None:
    engine = build_engine(build_model(), max_skipped_steps=2)
    good = build_rows(LENGTHS)
    bad = poison(good, float("nan"))
    for batch in (bad, bad, good, bad, good.slice(0, 0), bad):
        engine.update(batch, PolicyLoss())
    with pytest.raises(
        NonFiniteError,
        match=r"3 steps in a row .*\(train.max_skipped_steps is 2.* after 1 steps taken\); lower train.optimizer.lr",
    ):
        engine.update(bad, PolicyLoss())


def test_nothing_to_count_skips_the_step() -> None:
    model = build_model()
    engine = build_engine(model, max_skipped_steps=0)
    before = state(engine)
    nothing = build_rows(LENGTHS).with_column("loss_mask", [[0] * length for length in LENGTHS])
    rejected = build_rows(LENGTHS, states=[RowState.REJECTED] * len(LENGTHS))
    for batch in (nothing, rejected, rejected.slice(0, 0)):
        metrics = engine.update(batch, SFTLoss(normalization="sequence_mean"))
        assert (metrics["train/skipped_steps"].value, metrics["train/nonfinite_steps"].value) == (1, 0)
        assert (metrics["train/rows"].value, metrics["train/micro_batches"].value) == (0, 0)
        assert len(engine.log_prob(batch, 1.0)) == batch.num_rows
    assert equal(state(engine), before)


@pytest.mark.parametrize(
    ("numerics", "dtype"), [("exact", torch.float32), ("fast", torch.float32), ("fast", torch.bfloat16)]
)
def test_steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit(
    numerics: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    schedule = ScheduleSettings(kind="cosine", warmup_steps=2, total_steps=6)
    batches = [build_rows(LENGTHS, seed=step) for step in range(6)]
    batches[1] = poison(batches[1], float("nan"))

    def start() -> TrainEngine:
        model = build_model(dtype, numerics=numerics)
        return build_engine(model, weight_decay=0.1, schedule=schedule, micro_batch_tokens=40, max_skipped_steps=1)

    whole = start()
    for batch in batches:
        whole.update(batch, PolicyLoss())
    first = start()
    for batch in batches[:2]:
        first.update(batch, PolicyLoss())
    drawn = torch.rand(3)
    first_state = first.state_json()
    torch.set_rng_state(first.state_tensors()["rng/cpu"])
    save_file(first.state_tensors(), tmp_path / "state.safetensors")
    expected_draw = torch.rand(3)
    assert not torch.equal(drawn, expected_draw)

    second = start()
    for seed in (97, 98, 99):
        second.update(build_rows(LENGTHS, seed=seed), PolicyLoss())
    addresses = {name: weight.data_ptr() for name, weight in second.model.module.named_parameters()}
    torch.manual_seed(12345)
    second.load_state(load_file(tmp_path / "state.safetensors"), first_state)
    assert torch.equal(torch.rand(3), expected_draw)
    assert {name: weight.data_ptr() for name, weight in second.model.module.named_parameters()} == addresses
    assert second.state_json() == {"steps_taken": 1, "skipped_in_a_row": 1}
    for batch in batches[2:]:
        second.update(batch, PolicyLoss())
    ours, theirs = state(second), state(whole)
    assert equal({n: t for n, t in ours.items() if n != "rng/cpu"}, {n: t for n, t in theirs.items() if n != "rng/cpu"})
    assert second.state_json() == whole.state_json()
    assert not equal(weights(second.model), weights(first.model))


def test_state_before_the_first_step_is_whole() -> None:
    first, second = build_engine(build_model()), build_engine(build_model())
    second.update(build_rows(LENGTHS), SFTLoss())
    second.load_state(state(first), first.state_json())
    for engine in (first, second):
        engine.update(build_rows(LENGTHS, seed=1), SFTLoss())
    assert equal(state(first), state(second))


def test_a_state_of_another_form_is_refused_before_anything_changes() -> None:
    engine = build_engine(build_model())
    before = state(engine)
    name = "optimizer/exp_avg/model.norm.weight"
    for change, message in (
        ({name: None}, f"'{name}' is missing"),
        ({"odd": torch.zeros(1)}, "'odd' is in the saved state"),
        ({name: torch.zeros(3)}, f"'{name}' is torch.float32 \\[3\\] in the saved state"),
    ):
        tensors = {k: v for k, v in {**{n: t + 1 for n, t in before.items()}, **change}.items() if v is not None}
        with pytest.raises(ValueError, match=message):
            engine.load_state(tensors, {"steps_taken": 3, "skipped_in_a_row": 0})
    assert equal(state(engine), before)
    assert engine.state_json()["steps_taken"] == 0


def test_an_adapters_state_is_of_one_scale() -> None:
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")

    def start(**how: Any) -> TrainEngine:
        return TrainEngine(build_model(), TrainSettings(lora=LoraSettings(rank=4, **how)))

    first, doubled, same = start(alpha=8.0), start(alpha=16.0), start(alpha=4.0, rslora=True)
    before = state(doubled)
    with pytest.raises(
        ValueError, match="trained at a scale of 2, and train.lora makes it 4 .*; resume with the train.lora.alpha"
    ):
        doubled.load_state(state(first), first.state_json())
    with pytest.raises(
        ValueError, match="checkpoint is of an older version of hybridflow, .*; go on with that version"
    ):
        doubled.load_state(state(first), {"steps_taken": 0, "skipped_in_a_row": 0})
    assert equal(state(doubled), before)
    same.load_state(state(first), first.state_json())


def test_a_model_with_an_adapter_is_not_split_over_matrices() -> None:
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")
    model = build_model()
    apply_lora(model, LoraSettings(rank=4), seed=0)
    mesh = Mesh(Layout(tensor=2), {axis: Ranks() for axis in get_args(Axis)})
    with pytest.raises(ConfigError, match="train.parallel_config.tp: a model with an adapter cannot be split"):
        apply_tensor_parallel(model, mesh)


def test_an_adapter_goes_on_beside_its_own_base() -> None:
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")

    def start(model: LanguageModel) -> TrainEngine:
        return TrainEngine(model, TrainSettings(lora=LoraSettings(rank=4)))

    first, moved = start(build_model()), build_model()
    with torch.no_grad():
        next(moved.module.parameters())[0, 0] += 1e-3
    moved.module.name_or_path = "models/moved"
    second = start(moved)
    with pytest.raises(
        ValueError, match="trained on other base weights than 'models/moved' holds; resume with the model.path"
    ):
        second.load_state(state(first), first.state_json())
    start(build_model()).load_state(state(first), first.state_json())

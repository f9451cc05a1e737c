"""Sequence parallel in real processes over gloo: loss, log-probabilities and every gradient of one process, in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hybridflow.algorithms.losses import PolicyLoss, SFTLoss, TokenLoss, compute_denominator
from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, Packed, compute_logprobs, fresh_model
from hybridflow.models.attention import AttentionForm, AttentionPlan
from hybridflow.models.attention_padded import PaddedPlan
from hybridflow.train_engine import join_ranks, packing, sequence_parallel
from hybridflow.train_engine.mesh import Layout, Mesh, build_mesh
from hybridflow.train_engine.packing import PackedRows, Rows, build_shaped, compute_packed_weights, pack_rows, read_rows
from hybridflow.train_engine.segments import RowGroup
from hybridflow.train_engine.sequence_parallel import UlyssesPlan
from hybridflow.types import RowState, Shaping

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "4 kv heads": SHAPE | {"num_key_value_heads": 4},
    "2 kv heads": SHAPE | {"num_key_value_heads": 2},
    "1 kv head": SHAPE | {"num_key_value_heads": 1},
    "6 of 3 heads": SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 3},
    "windows": SHAPE
    | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}
LAYOUTS = {
    "alone": Layout(),
    "sp 2": Layout(sequence=2),
    "sp 4": Layout(sequence=4),
    "sp 2 x dp 2": Layout(data=2, sequence=2),
}
LOSSES: dict[str, TokenLoss] = {
    "sft": SFTLoss(),
    "sft, sequences": SFTLoss(normalization="sequence_mean"),
    "policy": PolicyLoss(clip_low=0.1, clip_high=0.1, entropy_coefficient=0.1, temperature=0.7),
    "policy, penalised": PolicyLoss(entropy_coefficient=0.1, shaping=Shaping(repetition_penalty=1.3)),
    "policy, cut": PolicyLoss(temperature=0.7, shaping=Shaping(top_p=0.7)),
    "policy, sequences": PolicyLoss(entropy_coefficient=0.1, normalization="sequence_mean"),
}
ROWS: dict[str, tuple[int, ...]] = {
    "many": (3, 17, 1, 2, 9, 1, 12),
    "one row in all parts": (23,),
    "rows of one token": (1, 1, 1),
    "last token beyond the border": (4, 5),
    "divisible": (8, 16),
}
"""Lengths; of the fourth set the second row's first token is the last of the first half."""
CASES = [("many", loss) for loss in LOSSES] + [(rows, "policy, sequences") for rows in ROWS if rows != "many"]


class Result(NamedTuple):
    """Of a whole mini-batch: summed over all ranks."""

    loss: float
    weight: float
    denominator: float
    logprobs: np.ndarray
    gradients: dict[str, np.ndarray]


def build_rows(lengths: Sequence[int], seed: int = 0, *, change: int | None = None) -> Batch:
    """Rows with a random mask and a policy loss's columns; `change`: a row whose tokens are all others."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 40, length).astype(np.int32) for length in lengths]
    masks = [(rng.random(length) < 0.6).astype(np.uint8) for length in lengths]
    for mask in masks:
        mask[-1], mask[0] = 1, 0
    floats = {
        name: [rng.normal(shift, 0.3, length).astype(np.float32) for length in lengths]
        for name, shift in (("rollout_logprobs", -3.7), ("advantages", 0.2))
    }
    if change is not None:
        tokens[change] = (tokens[change] + 7) % 40
    state = np.full(len(lengths), RowState.OK, np.int8)
    kept = [(mask * (1 + row % 9)).astype(np.int32) for row, mask in zip(tokens, masks, strict=True)]
    return Batch.from_columns(tokens=tokens, loss_mask=masks, kept_counts=kept, state=state, **floats)


def build_model(name: str, dtype: torch.dtype) -> LanguageModel:
    return fresh_model(MODELS[name], seed=0, dtype=dtype)


def pick_rows(count: int, mesh: Mesh) -> list[int]:
    """Of this data index: every second row or so, uneven where it must be; none in the last where there are few."""
    return list(range(mesh.at.data, count, mesh.layout.data))


def accumulate(
    model: LanguageModel,
    mesh: Mesh,
    batch: Batch,
    loss: TokenLoss,
    *,
    pack: Callable[..., PackedRows] = pack_rows,
    scale: float = 1.0,
) -> Result:
    """Two micro-batches and one without rows; everything summed over the ranks that see different tokens."""
    model.module.zero_grad(set_to_none=True)
    rows, mine = read_rows(batch, loss.columns), pick_rows(batch.num_rows, mesh)
    denominator = compute_denominator(rows.count_masked(), loss.normalization)
    sums, logprobs = torch.zeros(2, dtype=torch.float64), torch.zeros(rows.tokens.size, dtype=torch.float64)
    for chosen in (mine[:2], mine[2:], []):
        packed = pack(rows, [RowGroup((row,)) for row in chosen], rows.loss_mask, CPU, mesh.sequence)
        total, weight, values = compute_loss(model, rows, packed, loss)
        (total * scale / denominator).backward()
        sums += torch.stack([total.detach(), weight]).double()
        logprobs[packed.places_M] += values.detach().double()
    for tensor in (sums, logprobs):
        mesh.tokens.sum_(tensor)
    gradients = {name: sum_up(weight.grad, mesh) for name, weight in model.module.named_parameters()}
    return Result(float(sums[0]), float(sums[1]), denominator, logprobs.numpy(), gradients)


def sum_up(gradient: Tensor | None, mesh: Mesh) -> np.ndarray:
    assert gradient is not None
    gradient = gradient.double()
    mesh.tokens.sum_(gradient)
    return gradient.numpy()


def compute_loss(
    model: LanguageModel, rows: Rows, packed: PackedRows, loss: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TD = model.hidden_states(packed.tokens_T, packed.positions_T, packed.attention)
    logprobs_M, entropy_M = compute_logprobs(
        hidden_TD,
        packed.targets_M,
        model.head,
        temperature=loss.temperature,
        with_entropy=loss.needs_entropy,
        rows=packed.hidden_index_M,
        shaped=build_shaped(rows, packed, loss.shaping, CPU),
    )
    mask_T, weights_T = compute_packed_weights(rows, packed, loss.normalization)
    columns = {name: torch.from_numpy(values[packed.places_T]) for name, values in rows.columns.items()}
    spread = functools.partial(spread_tokens, packed=packed)
    entropy_T = None if entropy_M is None else spread(entropy_M)
    found = loss(spread(logprobs_M), entropy_T, mask_T, weights_T, columns)
    return found.total, found.weight, logprobs_M


def spread_tokens(values_M: Tensor, packed: PackedRows) -> Tensor:
    return values_M.new_zeros(packed.places_T.size).index_copy_(0, packed.token_index_M, values_M)


def work(place: Place, layout: str, model: str, dtype: torch.dtype) -> dict[tuple[str, str], Result]:
    """Each loss over each set of rows."""
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=CPU, timeout_s=30.0)
    mesh, language_model = build_mesh(ranks, LAYOUTS[layout], CPU), build_model(model, dtype)
    results = {
        (rows, loss): accumulate(language_model, mesh, build_rows(ROWS[rows]), LOSSES[loss]) for rows, loss in CASES
    }
    ranks.leave()
    return results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`run(layout, model, dtype)`: the results by rank, computed once."""

    @functools.cache
    def computed(layout: str, model: str, dtype: torch.dtype) -> list[dict[tuple[str, str], Result]]:
        directory = tmp_path_factory.mktemp("ranks")
        return run_ranks(LAYOUTS[layout].size, work, layout, model, dtype, directory=directory)

    return computed


def relative_gap(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Largest difference of any entry, relative to the largest entry of any tensor of one process."""
    assert set(ours) == set(theirs)
    largest = max(float(np.abs(value).max()) for value in theirs.values())
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours) / max(largest, 1e-300)


def check_equal(ours: Result, alone: Result, tolerance: float) -> None:
    assert ours.loss == pytest.approx(alone.loss, rel=tolerance, abs=0)
    assert ours.weight == pytest.approx(alone.denominator, rel=1e-12)
    assert ours.denominator == alone.denominator
    assert np.abs(ours.logprobs - alone.logprobs).max() <= tolerance * np.abs(alone.logprobs).max()
    assert relative_gap(ours.gradients, alone.gradients) < tolerance


@pytest.mark.parametrize(
    ("layout", "model", "dtype", "tolerance"),
    [
        ("sp 2", "4 kv heads", torch.float64, 1e-10),
        ("sp 2", "6 of 3 heads", torch.float64, 1e-10),
        ("sp 2", "windows", torch.float64, 1e-10),
        ("sp 2", "1 kv head", torch.float32, 1e-5),
        ("sp 2", "2 kv heads", torch.bfloat16, 0.05),
        ("sp 4", "2 kv heads", torch.float64, 1e-10),
        ("sp 2 x dp 2", "1 kv head", torch.float64, 1e-10),
    ],
    ids=str,
)
def test_loss_and_every_gradient_are_those_of_one_process(
    run: Any, layout: str, model: str, dtype: torch.dtype, tolerance: float
) -> None:
    (alone,) = run("alone", model, dtype)
    for results in run(layout, model, dtype):
        for case, expected in alone.items():
            check_equal(results[case], expected, tolerance)


def test_the_rows_compared_have_something_to_learn_from(run: Any) -> None:
    (alone,) = run("alone", "1 kv head", torch.float64)
    for (rows, _), result in alone.items():
        largest = max(float(np.abs(gradient).max()) for gradient in result.gradients.values())
        if rows == "rows of one token":
            # Nothing predicts these tokens, and they count as certain.
            assert largest == 0.0
        else:
            assert largest > 1e-3 and result.loss != 0.0


def shift_labels_after_split(*args: Any) -> PackedRows:
    """Labels rolled within a part: the last hidden state of a part predicts the part's own first token."""
    packed = pack_rows(*args)
    border = packed.hidden_index_M == packed.tokens_T.numel() - 1
    return dataclasses.replace(packed, targets_M=torch.where(border, packed.tokens_T[0], packed.targets_M))


def restart_positions(*args: Any) -> PackedRows:
    """A row that goes on in a part begins there anew."""
    packed = pack_rows(*args)
    begins = torch.nonzero(packed.positions_T == 0)
    end = int(begins[0]) if begins.numel() else packed.positions_T.numel()
    positions_T = packed.positions_T.clone()
    positions_T[:end] -= packed.positions_T[0]
    return dataclasses.replace(packed, positions_T=positions_T)


def forget_borders(*args: Any) -> PackedRows:
    """Attention over all rows as if they were one."""
    packed = pack_rows(*args)
    num_tokens = int(packed.attention.cu_seqlens[-1])
    attention = Packed(torch.tensor([0, num_tokens], dtype=torch.int32), num_tokens, wrap=packed.attention.wrap)
    return dataclasses.replace(packed, attention=attention)


def weigh_parts(rows: Rows, packed: PackedRows, normalization: Any) -> tuple[Tensor, Tensor]:
    """Weights of sequences by the tokens of the own part alone."""
    part = dataclasses.replace(rows, loss_mask=rows.loss_mask.copy())
    part.loss_mask[packed.places_T[~packed.is_here_T]] = False
    return packing.compute_packed_weights(part, packed, normalization)


def share_heads_in_turn(rows_TNK: Tensor, copies: int) -> Tensor:
    """Kv heads repeated as a whole, not each beside itself."""
    return rows_TNK.repeat(1, copies, 1)


def plant(place: Place, name: str) -> dict[str, Result]:
    """The same mini-batch rightly and with each fault, and with another row, rightly and without borders."""
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=CPU, timeout_s=30.0)
    mesh = build_mesh(ranks, Layout(sequence=place.size), CPU)
    model, batch, other = build_model(name, torch.float64), build_rows(ROWS["many"]), build_rows(ROWS["many"], change=4)
    accumulate_ = functools.partial(accumulate, model, mesh, batch, LOSSES["sft, sequences"])
    results = {
        "none": accumulate_(),
        "labels": accumulate_(pack=shift_labels_after_split),
        "positions": accumulate_(pack=restart_positions),
        "borders": accumulate_(pack=forget_borders),
        "scale": accumulate_(scale=1.0 / place.size),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_parallel, "_repeat_heads", share_heads_in_turn)
        results["heads"] = accumulate_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "compute_packed_weights", weigh_parts)
        results["weights"] = accumulate_()
    results["other row"] = accumulate(model, mesh, other, LOSSES["sft"])
    results["other row, borders"] = accumulate(model, mesh, other, LOSSES["sft"], pack=forget_borders)
    ranks.leave()
    return results


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What `plant` gave on the first of four ranks."""
    results: dict[str, Result] = run_ranks(4, plant, "2 kv heads", directory=tmp_path_factory.mktemp("ranks"))[0]
    return results


def test_the_faults_of_published_bugs_are_seen(planted: dict[str, Result], run: Any) -> None:
    (alone,) = run("alone", "2 kv heads", torch.float64)
    expected = alone["many", "sft, sequences"]
    check_equal(planted["none"], expected, 1e-10)
    for fault in ("labels", "positions", "borders", "scale", "heads", "weights"):
        assert relative_gap(planted[fault].gradients, expected.gradients) > 1e-3, fault


def test_a_row_does_not_move_with_its_neighbour(planted: dict[str, Result]) -> None:
    offsets = np.cumsum((0, *ROWS["many"]))
    changed = np.zeros(offsets[-1], bool)
    changed[offsets[4] : offsets[5]] = True
    moved = planted["other row"].logprobs != planted["none"].logprobs
    assert moved[changed].any()
    assert not moved[~changed].any()
    moved_without_borders = planted["other row, borders"].logprobs != planted["borders"].logprobs
    assert moved_without_borders[~changed].any()


class Layer(nn.Module):
    """Attention with the projections around it, as a decoder layer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(32, 64, dtype=torch.float64), nn.Linear(32, 32, dtype=torch.float64)

    def forward(self, hidden_TD: Tensor, plan: AttentionPlan) -> Tensor:
        query, key, value = self.inward(hidden_TD).split([32, 16, 16], dim=1)
        heads = [rows.unflatten(1, (-1, 8)) for rows in (query, key, value)]
        return hidden_TD + self.outward(plan.attend(self, *heads, AttentionForm(0.3)).flatten(1))


def run_layer(layer: Layer, hidden_TD: Tensor, plan: AttentionPlan) -> Tensor:
    result: Tensor = checkpoint(layer.forward, hidden_TD, plan, use_reentrant=False, preserve_rng_state=False)
    return result


def train_layers(layers: list[Layer], run_one: Callable[..., Tensor], hidden_TD: Tensor, plan: Any) -> list[Tensor]:
    """The output of all layers, and every gradient."""
    first_TD = hidden_TD.clone().requires_grad_()
    out_TD = functools.reduce(lambda rows, layer: run_one(layer, rows, plan), layers, first_TD)
    weights = [weight for layer in layers for weight in layer.parameters()]
    return [out_TD.detach(), *torch.autograd.grad(out_TD.square().sum(), [first_TD, *weights])]


def compile_layers(place: Place) -> tuple[bool, int]:
    """Whether compiled layers give the same bits, over several numbers of tokens, and how many compilations that took."""
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=CPU, timeout_s=60.0)
    torch.manual_seed(0)
    layers, counter = [Layer(), Layer()], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run_layer, backend=counter, fullgraph=True, dynamic=True)
    equal = []
    for num_tokens in (12, 20):
        plan = UlyssesPlan(PaddedPlan(np.array([num_tokens]), CPU), ranks)
        hidden_TD = torch.randn(num_tokens // place.size, 32, dtype=torch.float64)
        eager, ours = (train_layers(layers, run_one, hidden_TD, plan) for run_one in (run_layer, compiled))
        equal += [torch.equal(*pair) for pair in zip(eager, ours, strict=True)]
    ranks.leave()
    return all(equal), counter.frame_count


@pytest.mark.slow
def test_layers_compile_around_it_once_and_are_checkpointed(tmp_path: Any) -> None:
    assert run_ranks(2, compile_layers, directory=tmp_path, timeout_s=100.0) == [(True, 1)] * 2

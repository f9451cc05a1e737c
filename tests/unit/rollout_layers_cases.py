"""Tests of the rewritten layers in Triton's interpreter; test_rollout_layers.py runs this file in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import FOR_KERNELS
from triton.runtime import interpreter

from hybridflow.models import Packed, Paged, fresh_model
from hybridflow.rollout.native import kernels
from hybridflow.rollout.native.graphs import _State
from hybridflow.rollout.native.kernels import advance
from hybridflow.rollout.native.layers import FusedLayers, serves
from hybridflow.rollout.native.plans import StepPlan

CONFIG = FOR_KERNELS
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "mistral": {"sliding_window": None},
}
LENGTHS = (25, 15)
patch_tensor = interpreter._patch_lang_tensor


@pytest.fixture(autouse=True)
def bounds_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 turns no array of one element into a number any more, as Triton 3.6 has it do for the bounds of a loop."""

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def without_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_next_tokens_get_the_hidden_states_of_the_module(family: str) -> None:
    model = fresh_model({"model_type": family, **CONFIG, **FAMILIES[family]}, seed=1)
    assert serves(model)
    layers = FusedLayers(model)
    tokens, following = torch.randint(0, 97, (40,)), torch.tensor([5, 9])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    cache, tables = model.new_cache(6), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    ends = torch.tensor([0, 25, 40], dtype=torch.int32)
    plan = model.plan_attention(Paged(cache, tables, torch.tensor(LENGTHS), ends))
    found = layers.hidden_states(
        tokens, positions, torch.full((40,), -1), cache,
        lambda layer, module, q, k, v, form: plan.attend(module, q, k, v, form), with_kv=True,
    )  # fmt: skip
    torch.testing.assert_close(found, model.hidden_states(tokens, positions, Packed(ends, 25)), atol=3e-5, rtol=1e-4)

    at = torch.tensor(LENGTHS)
    slots = tables[torch.arange(2), at // 32].long() * 32 + at % 32
    held = (at + 1).int()
    found = layers.hidden_states(
        following, at, slots, cache,
        lambda layer, module, q, k, v, form: kernels.decode_attention(
            q, cache.keys[layer], cache.values[layer], tables, held, scale=form.scale
        ),
    )  # fmt: skip
    whole = torch.cat([tokens[:25], following[:1], tokens[25:], following[1:]])
    positions = torch.cat([torch.arange(26), torch.arange(16)])
    ends = torch.tensor([0, 26, 42], dtype=torch.int32)
    expected = model.hidden_states(whole, positions, Packed(ends, 26))[[25, 41]]
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def product(columns: int, splits: int = 1) -> kernels.ProductPlan:
    return kernels.ProductPlan(16, columns, 32, splits, num_warps=4, num_stages=3)


PLANS = {
    "apart": StepPlan(gate_up=product(16)),
    "split": StepPlan(joint=True, attention=kernels.AttentionPlan(2, 32, 4, 3, least_keys=32)),
    "products": StepPlan(True, product(64, 2), product(32, 2), product(64), product(64, 3)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_every_plan_of_a_decode_step_gives_the_states_of_the_module(family: str, plan: StepPlan) -> None:
    """Two rows whose newest token meets what is in the cache, and a row that idles."""
    model = fresh_model({"model_type": family, **CONFIG, **FAMILIES[family]}, seed=1)
    layers, cache = FusedLayers(model), model.new_cache(6)
    lengths, tables = torch.tensor([25, 40]), torch.tensor([[3, 0], [1, 2], [0, 0]], dtype=torch.int32)
    whole = torch.randint(0, 97, (65,))
    positions = torch.cat([torch.arange(25), torch.arange(40)])
    slots = torch.cat(
        [
            tables[row, positions_R // 32].long() * 32 + positions_R % 32
            for row, positions_R in enumerate(positions.split([25, 40]))
        ]
    )
    before = torch.ones(65, dtype=torch.bool)
    before[[24, 64]] = False
    ends = torch.tensor([0, 24, 63], dtype=torch.int32)
    model.hidden_states(whole[before], positions[before], Paged(cache, tables[:2], lengths - 1, ends))
    found = layers.decode_states(
        torch.tensor([int(whole[24]), int(whole[64]), 3]), torch.tensor([24, 39, 0]),
        torch.tensor([int(slots[24]), int(slots[64]), 5 * 32]), tables, torch.tensor([25, 40, 0], dtype=torch.int32), cache, plan,
    )  # fmt: skip
    expected = model.hidden_states(whole, positions, Packed(torch.tensor([0, 25, 65], dtype=torch.int32), 40))
    torch.testing.assert_close(found[:2], expected[[24, 64]], atol=3e-5, rtol=1e-4)
    assert found[2].isfinite().all() and not layers._arrivals[0].any()


def test_longer_rows_get_longer_tables_with_the_same_beginning() -> None:
    model = fresh_model({"model_type": "qwen2", **CONFIG}, seed=1)
    layers = FusedLayers(model)
    before = layers._cos_PK.clone()
    assert not layers.reach(1024) and layers.reach(1025) and layers.num_positions == 2048
    assert torch.equal(layers._cos_PK[:1024], before)
    assert layers.reach(2500) and layers.num_positions == 2500


def test_a_step_moves_live_rows_and_ends_those_that_have_ended() -> None:
    state = _State.build(8, 4, torch.device("cpu"))
    for held, values in (
        (state.lengths, [5, 33, 64, 40, 7]),
        (state.limits, [6, 40, 100, 50, 100]),
        (state.live, [1, 1, 0, 1, 1]),
    ):
        held[:5] = torch.tensor(values, dtype=torch.int32)
    state.tables[:4] = torch.tensor([[7, 8, 9, 1], [4, 5, 6, 1], [1, 2, 3, 1], [9, 3, 1, 1]], dtype=torch.int32)
    advance.prepare_step(state, 6, 999)
    assert state.positions[:6].tolist() == [4, 32, 0, 39, 6, 0]
    assert state.slots[:6].tolist() == [7 * 32 + 4, 5 * 32, 999, 3 * 32 + 7, 6, 999]
    assert state.contexts[:6].tolist() == [5, 33, 0, 40, 7, 0]
    is_stop = torch.zeros(97, dtype=torch.int32)
    is_stop[15] = 1
    logprobs = torch.tensor([-0.5, float("nan"), -1.0, -2.0, -3.0, -1.0])
    advance.finish_step(state, 6, torch.tensor([11, 12, 13, 15, 16, 17]), logprobs, is_stop)
    # At its limit, not finite, idle, a stop id, going on, no row.
    assert state.out_tokens[0, :6].tolist() == [11, 12, -1, 15, 16, -1]
    assert state.live[:6].tolist() == [0, 0, 0, 0, 1, 0]
    assert state.lengths[:5].tolist() == [6, 34, 64, 41, 8]
    assert state.tokens[:5].tolist() == [11, 12, 0, 15, 16] and state.step.tolist() == [1]
    assert state.out_logprobs[0, [0, 2, 3, 4]].tolist() == [-0.5, 0.0, -2.0, -3.0]

"""The rewritten layers on parts of a model, in Triton's interpreter; test_tensor_rollout.py runs this file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Place, run_ranks
from tiny_models import FOR_KERNELS
from torch import Tensor
from triton.runtime import interpreter

from hybridflow.models import Packed, fresh_model
from hybridflow.rollout.native import kernels, parallel
from hybridflow.rollout.native.layers import FusedLayers, StepPlan, serves
from hybridflow.rollout.native.parallel import build_shard
from hybridflow.train_engine import join_ranks

CONFIG = FOR_KERNELS | {"head_dim": 32}
LENGTHS = (25, 16)
CPU = torch.device("cpu")
PRODUCT = kernels.ProductPlan(16, 32, 32, 2, num_warps=4, num_stages=3)
_patch_tensor = interpreter._patch_lang_tensor


def patch(tensor: Any, scope: Any) -> None:
    """NumPy 2.4 turns no array of one element into a number any more, as Triton 3.6 has it do for the bounds of a loop."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@torch.no_grad()
def compute(place: Place, family: str, long_pass: int) -> tuple[float, float]:
    """How far the states of prompts, and of the tokens that follow them, are from the whole module's."""
    interpreter._patch_lang_tensor, parallel.LONG_PASS = patch, long_pass
    whole = fresh_model({"model_type": family, **CONFIG}, seed=1)
    ranks = join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=CPU, timeout_s=60.0)
    model, group = build_shard(whole, ranks, device=CPU, dtype=torch.float32, timeout_s=60.0)
    parallel.copy_shards(model.module, group, whole.module.named_parameters())
    assert serves(model)
    layers, cache = FusedLayers(model, group.tokens), model.new_cache(4)
    tokens = torch.randint(0, 97, (43,), generator=torch.Generator().manual_seed(0))
    prompts, positions = torch.cat([tokens[:25], tokens[26:42]]), torch.cat([torch.arange(n) for n in LENGTHS])
    ends = torch.tensor([0, 25, 41], dtype=torch.int32)
    plan = model.plan_attention(Packed(ends, 25))

    def attend(_: int, module: Any, query: Tensor, key: Any, value: Any, form: Any) -> Tensor:
        return plan.attend(module, query, key, value, form)

    # Row 0 lies in block 1, row 1 in block 2.
    slots = torch.cat([32 + torch.arange(25), 64 + torch.arange(16)])
    with group.tokens.splitting(len(prompts)):
        found = layers.hidden_states(prompts, positions, slots, cache, attend, with_kv=True)
    first = float((found - whole.hidden_states(prompts, positions, Packed(ends, 25))).abs().max())
    tables, held = torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([26, 17], dtype=torch.int32)
    step = StepPlan(joint=True, qkv=PRODUCT, out=PRODUCT, down=PRODUCT)
    found = layers.decode_states(
        tokens[[25, 42]], torch.tensor([25, 16]), torch.tensor([57, 80]), tables, held, cache, step
    )
    positions, ends = torch.cat([torch.arange(26), torch.arange(17)]), torch.tensor([0, 26, 43], dtype=torch.int32)
    expected = whole.hidden_states(tokens, positions, Packed(ends, 26))[[25, 42]]
    ranks.leave()
    return first, float((found - expected).abs().max())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_parts_compute_the_states_of_the_module(family: str, tmp_path: Path) -> None:
    for gaps in run_ranks(2, compute, family, 7, directory=tmp_path, timeout_s=100.0):
        assert max(gaps) < 1e-4


def test_short_passes_are_not_shared_out(tmp_path: Path) -> None:
    for gaps in run_ranks(2, compute, "qwen3", 1000, directory=tmp_path, timeout_s=100.0):
        assert max(gaps) < 1e-4

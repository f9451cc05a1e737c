"""Bucket planning, the call count, and what the attention function refuses."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SMALL_LLAMA
from transformers import AutoModelForCausalLM

from hybridflow.models import Packed, PagedKVCache, fresh_model
from hybridflow.models.attention_padded import RowPadding, plan_buckets

CONFIG = SMALL_LLAMA
ROW = (torch.arange(5), torch.arange(5), Packed(torch.tensor([0, 5], dtype=torch.int32), 5))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_buckets_hold_every_row_once_and_waste_little(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    buckets = plan_buckets(lengths)
    held = np.sort(np.concatenate(buckets)) if buckets else np.array([], dtype=np.int64)
    assert held.tolist() == np.flatnonzero(lengths).tolist()
    for bucket in buckets:
        assert (np.diff(bucket) > 0).all()
        longest, shortest = lengths[bucket].max(), lengths[bucket].min()
        assert longest <= max(32, 2 * shortest)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(any))
def test_padding_and_back_is_the_identity_with_gradient(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    padding = RowPadding(lengths, plan_buckets(lengths), torch.device("cpu"))
    rows = torch.randn(int(lengths.sum()), 3, requires_grad=True)
    back = padding.unpad(list(padding.pad(rows)))
    assert torch.equal(back, rows)
    upstream = torch.randn_like(rows)
    back.backward(upstream)
    assert torch.equal(rows.grad, upstream)


def test_a_shared_config_that_switches_attention_back_is_caught():
    model = fresh_model(CONFIG, seed=0)
    AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    with pytest.raises(RuntimeError, match="0 of 2 layers attended .* 'eager'"):
        model.hidden_states(*ROW)


def test_building_another_model_from_the_callers_config_does_no_harm():
    model = fresh_model(CONFIG, seed=0)
    first = model.hidden_states(*ROW)
    config = copy.deepcopy(model.config)
    other = fresh_model(config, seed=0)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert torch.equal(other.hidden_states(*ROW), first)


def test_the_module_alone_does_not_run_without_boundaries():
    model = fresh_model(CONFIG, seed=0)
    with pytest.raises(RuntimeError, match="only through LanguageModel.hidden_states"):
        model.module(input_ids=torch.tensor([[1, 2, 3]]))


def test_dropout_is_refused():
    model = fresh_model(dict(CONFIG, attention_dropout=0.1), seed=0)
    model.hidden_states(*ROW)
    model.module.train()
    with pytest.raises(RuntimeError, match="dropout is 0.1"):
        model.hidden_states(*ROW)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_recomputes_in_fast_mode_and_is_refused_in_exact_mode():
    model = fresh_model(CONFIG, seed=0)
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.module.gradient_checkpointing_enable({"use_reentrant": False})
            model.module.train()
        model.module.zero_grad()
        model.hidden_states(*ROW).square().sum().backward()
        grads.append(model.module.get_input_embeddings().weight.grad.clone())
    assert torch.equal(grads[0], grads[1])
    model.numerics = "exact"
    hidden = model.hidden_states(*ROW)
    with pytest.raises(RuntimeError, match="turn gradient checkpointing off"):
        hidden.sum().backward()


def test_empty_rows_take_no_part():
    model = fresh_model(CONFIG, seed=0)
    tokens, positions = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 0])
    with_empty = Packed(torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32), 2)
    without = Packed(torch.tensor([0, 2, 3], dtype=torch.int32), 2)
    for numerics in ("fast", "exact"):
        model.numerics = numerics
        assert torch.equal(
            model.hidden_states(tokens, positions, with_empty), model.hidden_states(tokens, positions, without)
        )


def test_slots_are_copied_in_all_layers():
    cache = PagedKVCache(num_layers=2, num_blocks=4, num_kv_heads=1, head_dim=3)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy_slots(torch.tensor([33, 34, 33]), torch.tensor([1, 2, 97]))
    source = torch.arange(4 * 32)
    source[[1, 2, 97]] = torch.tensor([33, 34, 33])
    assert torch.equal(cache.keys, keys[:, source]) and torch.equal(cache.values, values[:, source])
    assert cache.num_bytes == 2 * 2 * 4 * 32 * 3 * 4

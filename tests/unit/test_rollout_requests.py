"""Requests, their answers and weights on the way, for engines that have a model of their own."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.rollout import sglang
from hybridflow.rollout.base import WatchedWeights, WeightsError
from hybridflow.rollout.buckets import iter_buckets, pack, unpack, write_weight_files
from hybridflow.rollout.requests import FiniteGuard, Sample, ServedModel, build_batch, plan_requests
from hybridflow.rollout.vllm_service import build_body
from hybridflow.types import RowState, SamplingParams


@pytest.fixture(scope="module")
def model() -> ServedModel:
    pieces = ["<pad>", "<unk>", "</s>"] + [chr(ord("a") + i) for i in range(13)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    return ServedModel(tokenizer, frozenset({2}), context=10, vocab_size=16, shapes={})


def prompts_of(*tokens: list[int]) -> Batch:
    return Batch.from_columns(group_id=[50 + i for i in range(len(tokens))], prompt_tokens=list(tokens))


def test_a_request_does_not_depend_on_its_company(model):
    sampling = SamplingParams(samples_per_prompt=3, max_new_tokens=6, seed=9)
    both = plan_requests(prompts_of([3, 4], [5, 6, 7, 8, 9, 3]), sampling, 4, model).requests
    alone = plan_requests(prompts_of([3, 4], [5, 6, 7, 8, 9, 3]).slice(1, 2), sampling, 4, model).requests
    assert [r.seed for r in both[3:]] == [r.seed for r in alone] and len({r.seed for r in both}) == 6
    assert [r.max_tokens for r in both] == [6, 6, 6, 4, 4, 4]
    assert all(0 <= r.seed < 2**63 for r in both)
    assert not {r.seed for r in both} & {r.seed for r in plan_requests(prompts_of([3, 4]), sampling, 5, model).requests}


def test_stops_are_all_there_for_an_engine_that_knows_none(model):
    sampling = SamplingParams(stop_token_ids=(7,), stop_strings=("</s>", "ab"), ignore_eos=True)
    stops = plan_requests(prompts_of([3]), sampling, 0, model).stops
    assert (stops.ids, stops.strings) == ([2, 7], ("ab",))
    assert plan_requests(prompts_of([3]), SamplingParams(stop_token_ids=(7,)), 0, model).stops.ids == [2, 7]


def test_every_way_of_sampling_reaches_an_engine_or_is_refused(model):
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop_strings=("ab",))
    asked = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "stop": ["ab"], "stop_token_ids": [2]}
    plan = plan_requests(prompts_of([3]), sampling, 0, model)
    body = build_body(plan, plan.requests[0])
    assert {name: body[name] for name in asked} == asked and body["repetition_penalty"] == 1.0 and body["ignore_eos"]
    with pytest.raises(ConfigError, match=r"sampling.min_p: 0.1 is what SGLang cannot draw by .* set it to 0, or"):
        sglang.build_params(plan, plan.requests[0])
    plan = plan_requests(prompts_of([3]), replace(sampling, min_p=0.0), 0, model)
    params = sglang.build_params(plan, plan.requests[0])
    assert {name: params[name] for name in asked if name != "min_p"} == {k: v for k, v in asked.items() if k != "min_p"}
    plan = plan_requests(prompts_of([3]), SamplingParams(repetition_penalty=1.2), 0, model)
    assert build_body(plan, plan.requests[0])["repetition_penalty"] == 1.2
    with pytest.raises(
        ConfigError,
        match=r"repetition_penalty: 1.2 counts the prompt, and SGLang .* set it to 1, or rollout.engine=native",
    ):
        sglang.build_params(plan, plan.requests[0])


@pytest.mark.parametrize(
    ("ignore_eos", "expected"), [(True, Sample([5, 7], [-1.0, -2.0], "stop")), (False, Sample([5, 7], [-1.0, -2.0], "stop"))]
)  # fmt: skip
def test_sglangs_rows_end_at_our_ids_and_strings_though_it_may_not_look(model, ignore_eos, expected):
    sampling = SamplingParams(stop_token_ids=(7,), ignore_eos=ignore_eos)
    plan = plan_requests(prompts_of([3]), sampling, 0, model)
    assert sglang.build_params(plan, plan.requests[0])["ignore_eos"] == ignore_eos
    drawn = [(-1.0, 5, None), (-2.0, 7, None), (-3.0, 9, None)][: 3 if ignore_eos else 2]
    told = {"output_token_logprobs": drawn, "finish_reason": {"type": "length"}}
    assert sglang.read_sample(plan, {"text": "", "meta_info": told}) == expected
    strings = plan_requests(prompts_of([3]), SamplingParams(stop_strings=("ab",)), 0, model)
    assert sglang.read_sample(strings, {"text": "cab", "meta_info": told}).finish_reason == "stop"
    assert sglang.read_sample(strings, {"text": "ca", "meta_info": told}).finish_reason == "length"


def test_a_run_with_sglang_still_ends_at_sigterm():
    loop = asyncio.new_event_loop()

    class Engine:
        def __init__(self) -> None:
            self.loop = loop

        def flush_cache(self) -> None:
            self.loop.add_signal_handler(signal.SIGTERM, lambda: None)

    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        sglang._give_termination_back(Engine())
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        loop.close()


def test_answers_become_rows_and_each_failure_says_why(model):
    prompts = prompts_of([3, 4], [], [5])
    plan = plan_requests(prompts, SamplingParams(samples_per_prompt=2, stop_strings=("de",)), 0, model)
    assert [request.row for request in plan.requests] == [0, 1, 4, 5]
    answers = {
        0: Sample([5, 6, 7, 8], [-0.5, -1.0, -0.25, -2.0], "stop"),
        1: Sample([5], [float("nan")], "length"),
        4: Sample([5, 2], [-1.0], "stop"),
    }
    batch = build_batch(plan, answers, version=3)
    failed, empty = RowState.FAILED, RowState.EMPTY
    assert batch.pylist("state") == [RowState.OK, failed, failed, failed, failed, empty]
    assert batch.pylist("tokens") == [[3, 4, 5, 6, 7, 8], [], [], [], [], [5]]
    assert batch.pylist("rollout_logprobs")[0] == [0.0, 0.0, -0.5, -1.0, -0.25, -2.0]
    assert batch.pylist("response")[0] == "c" and batch.pylist("finish_reason") == ["stop"] + 5 * ["abort"]
    errors = batch.pylist("rollout_error")
    assert errors[0] is None and errors[5] is None and "not finite" in errors[1] and "no tokens" in errors[2]
    assert "2 tokens and 1 log-probabilities" in errors[4]
    odd = build_batch(plan, {0: Sample([5], [-1.0], "repetition")}, version=3)
    assert "'repetition'" in odd.pylist("rollout_error")[0]


def test_buckets_are_bounded_and_hold_everything_once():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 60, (40,), generator=generator).tolist()
    weights = [(f"w{i}", torch.randn(size, generator=generator)) for i, size in enumerate(sizes)] + [
        ("big", torch.ones(500))
    ]
    buckets = list(iter_buckets(weights, 1000))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in weights]
    assert all(sum(-(-w.nbytes // 16) * 16 for _, w in bucket) <= 1000 for bucket in buckets[:-1])
    assert [name for name, _ in buckets[-1]] == ["big"]
    assert all(
        sum(w.nbytes for _, w in (*one, other[0])) > 900 for one, other in zip(buckets, buckets[1:], strict=False)
    )


def test_what_is_packed_comes_out_bit_for_bit_in_each_type():
    bucket = [
        ("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.randn(2, 2, 2).double()), ("d", torch.zeros(0, 4)),
        ("e", torch.randn(6, 3).T),
    ]  # fmt: skip
    buffer = torch.full((10_000,), 77, dtype=torch.uint8)
    entries, filled = pack(bucket, buffer)
    assert filled.data_ptr() == buffer.data_ptr()
    for (name, weight), (named, back) in zip(bucket, unpack(entries, filled), strict=True):
        assert name == named and back.dtype == weight.dtype and torch.equal(back, weight)
    _, larger = pack(bucket, torch.empty(8, dtype=torch.uint8))
    assert larger.numel() >= sum(weight.nbytes for _, weight in bucket)


def test_files_hold_every_weight_in_bounded_pieces(tmp_path):
    weights = {f"w{i}": torch.randn(100) for i in range(10)} | {"view": torch.randn(20, 20)[:, :10]}
    written = write_weight_files(weights.items(), tmp_path, 1000)
    files = sorted(tmp_path.glob("*.safetensors"))
    read = {name: weight for file in files for name, weight in load_file(file).items()}
    assert len(files) == 6 and written == sum(weight.nbytes for weight in weights.values())
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)


def test_only_what_fits_passes_and_all_else_is_named():
    shapes = {"a": torch.Size([2]), "b": torch.Size([3, 1])}
    whole = WatchedWeights([("b", torch.ones(3, 1)), ("a", torch.ones(2))], shapes)
    assert [name for name, _ in whole] == ["b", "a"]
    whole.check()
    for given, passed, told in (
        ([("a", torch.ones(2))], ["a"], r"'b' is not on both sides \(1"),
        ([("a", torch.ones(2)), ("b", torch.ones(3, 1)), ("c", torch.ones(1))], ["a", "b"], "'c' is not on both"),
        ([("a", torch.ones(2)), ("b", torch.ones(1, 3))], ["a"], r"'b' has the shape \(1, 3\).*\(3, 1\)"),
    ):
        watched = WatchedWeights(given, shapes)
        assert [name for name, _ in watched] == passed
        with pytest.raises(WeightsError, match=told):
            watched.check()


def test_no_answer_at_all_is_an_aborted_row(model):
    plan = plan_requests(prompts_of([3]), SamplingParams(), 0, model)
    batch = build_batch(plan, {}, version=0)
    assert batch.pylist("state") == [RowState.EMPTY] and batch.pylist("finish_reason") == ["abort"]
    assert batch.pylist("tokens") == [[3]] and np.all(batch.arrays("loss_mask")[0] == 0)


def test_weights_that_are_not_finite_are_kept_from_sampling(model):
    shapes = {"a": torch.Size([2]), "b": torch.Size([3])}
    good, bad = ("a", torch.ones(2)), ("b", torch.tensor([1.0, torch.inf, 2.0]))
    for given, is_finite in (([good, ("b", torch.ones(3))], True), ([good, bad], False), ([bad, good], False)):
        watched = WatchedWeights(given, shapes, checks_finite=True)
        assert len(list(watched)) == 2 and watched.is_finite == is_finite
    guard, plan = FiniteGuard(), plan_requests(prompts_of([3], [4]), SamplingParams(samples_per_prompt=2), 0, model)
    assert guard.fail(plan) == {} and guard.fail_scores([[3, 4]], torch.float32) is None
    guard.note("adapter", is_finite=False)
    guard.note("weights", is_finite=True)
    batch = build_batch(plan, guard.fail(plan), version=1)
    assert batch.pylist("state") == [RowState.FAILED] * 4 and "are not finite" in batch.pylist("rollout_error")[0]
    scores = guard.fail_scores([[3, 4]], torch.float32)
    assert scores is not None and np.isnan(scores.logprobs[0]).all() and len(scores.logprobs[0]) == 2
    guard.note("adapter", is_finite=True)
    assert guard.fail(plan) == {}

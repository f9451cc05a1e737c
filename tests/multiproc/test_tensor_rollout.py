"""Generation by ranks that share a model gives what one process gives, and stops all of them where one of them stops."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from tiny_models import SAMPLED, build_letters, draw_prompts

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.models.loading import build_config
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.base import WeightsError
from hybridflow.rollout.native import parallel
from hybridflow.rollout.native.parallel import (
    DrawsDifferError,
    RowLinear,
    build_shard,
    check_tensor_rollout,
    plan_shards,
)
from hybridflow.train_engine import Layout, Ranks, join_ranks
from hybridflow.train_engine.logprobs import compute_batch_logprobs
from hybridflow.types import PeerLostError, SamplingParams

HERE = Path(__file__).parent
VOCAB = SAMPLED["vocab_size"]
CONFIG = SAMPLED
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3, one kv head": {"num_key_value_heads": 1},
    "qwen2, biases, head of its own": {"model_type": "qwen2", "head_dim": None, "tie_word_embeddings": False},
    "llama, all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "gemma2": {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 24, "query_pre_attn_scalar": 8},
}
LENGTHS = [5, 70, 33, 58, 1, 32]
SAMPLING = SamplingParams(max_new_tokens=12, samples_per_prompt=3, temperature=0.9, seed=5)


class Work(NamedTuple):
    """What all ranks are to do. replicas: groups of ranks, each with the whole model between them."""

    config: dict[str, Any] = CONFIG
    sampling: SamplingParams = SAMPLING
    limits: dict[str, int] = {}
    replicas: int = 1
    dtype: torch.dtype = torch.float64


def build_whole(work: Work, seed: int = 1) -> LanguageModel:
    values = {name: value for name, value in work.config.items() if value is not None}
    whole = fresh_model(values, seed=seed, dtype=work.dtype)
    with torch.no_grad():
        for name, weight in whole.module.named_parameters():
            if name.endswith("bias"):
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    return whole


def join(place: Place, timeout_s: float = 30.0) -> Ranks:
    device = torch.device("cpu")
    return join_ranks(rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=device, timeout_s=timeout_s)


def build_engine(place: Place, work: Work, timeout_s: float = 30.0) -> tuple[NativeEngine, Ranks]:
    """This rank's part, with the weights of the whole model."""
    world = join(place, timeout_s)
    degree = place.size // work.replicas
    ranks = world.split(Layout(data=work.replicas, tensor=degree).partition("tensor"))
    whole = build_whole(work)
    model, group = build_shard(whole, ranks, device=torch.device("cpu"), dtype=work.dtype, timeout_s=timeout_s)
    engine = NativeEngine(model, build_letters(), NativeSettings(**work.limits), group)  # type: ignore[arg-type]
    engine.load_weights(1, whole.module.named_parameters())
    return engine, world


class Found(NamedTuple):
    """What one rank returned: columns of the samples, and of the cache and the scheduler what it was about."""

    columns: dict[str, list[Any]]
    scored: list[np.ndarray]
    blocks: int
    preemptions: int
    cache_heads: int


def generate_worker(place: Place, works: list[Work]) -> list[Found]:
    """Each of them in the same processes; and what the part makes of its own samples as a trainer would score them."""
    found = []
    for at, work in enumerate(works):
        engine, world = build_engine(Place(place.rank, place.size, f"{place.rendezvous}{at}"), work)
        samples = engine.generate(draw_prompts(LENGTHS), work.sampling, step=3)
        scored = compute_batch_logprobs(engine.model, samples, temperature=1.0, micro_batch_tokens=300)
        cache = engine._cache
        assert cache is not None
        found.append(
            Found(read_columns(samples), scored, cache.num_blocks, engine.report.preemptions, cache.keys.shape[2])
        )
        world.leave()
    return found


def read_columns(samples: Batch) -> dict[str, list[Any]]:
    names = ("tokens", "rollout_logprobs", "finish_reason", "response", "state", "policy_version_min", "kept_counts")
    return {name: samples.pylist(name) for name in names if name in samples}


def generate_alone(work: Work) -> Batch:
    engine = NativeEngine(build_whole(work), build_letters())
    engine.load_weights(1)
    return engine.generate(draw_prompts(LENGTHS), work.sampling, step=3)


def check(work: Work, found: Found) -> None:
    expected = generate_alone(work)
    columns = read_columns(expected)
    assert found.columns.keys() == columns.keys() and ("kept_counts" in columns) == work.sampling.cuts
    for name in columns.keys() - {"rollout_logprobs"}:
        assert found.columns[name] == columns[name], name
    for ours, theirs in zip(found.columns["rollout_logprobs"], columns["rollout_logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 if work.dtype == torch.float64 else 1e-4)
    scored = compute_batch_logprobs(build_whole(work), expected, temperature=1.0, micro_batch_tokens=300)
    for ours, theirs in zip(found.scored, scored, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 if work.dtype == torch.float64 else 1e-4)


def check_all(works: list[Work], size: int, directory: Path) -> list[list[Found]]:
    by_rank = run_ranks(size, generate_worker, works, directory=directory, timeout_s=90.0)
    for found in by_rank:
        for work, one in zip(works, found, strict=True):
            check(work, one)
    return by_rank


def test_every_family_samples_the_rows_of_one_process(tmp_path: Path) -> None:
    works = [Work(CONFIG | changes) for changes in FAMILIES.values()]
    (first, *_), _ = check_all(works, 2, tmp_path)
    assert first.cache_heads == 1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_more_ranks_than_kv_heads_share_them(kv_heads: int, tmp_path: Path) -> None:
    for (found,) in check_all([Work(CONFIG | {"num_key_value_heads": kv_heads})], 4, tmp_path):
        assert found.cache_heads == 1


def test_every_way_of_sampling(tmp_path: Path) -> None:
    ways = [
        SamplingParams(max_new_tokens=20, temperature=0.0, samples_per_prompt=1),
        SamplingParams(max_new_tokens=20, temperature=1.3, samples_per_prompt=3, top_k=7),
        SamplingParams(max_new_tokens=20, samples_per_prompt=3, top_p=0.8, stop_strings=("ab", "k")),
        SamplingParams(max_new_tokens=20, samples_per_prompt=3, min_p=0.3),
        SamplingParams(max_new_tokens=20, samples_per_prompt=3, stop_token_ids=(4, 9), ignore_eos=True),
    ]
    works = [Work(sampling=way) for way in ways]
    check_all([*works, Work(sampling=ways[0], dtype=torch.float32), Work(dtype=torch.float32)], 2, tmp_path)


def test_little_room_preempts_on_all_ranks_alike(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=40, samples_per_prompt=2, ignore_eos=True)
    limits = {"kv_cache_tokens": 6 * 32, "prefill_tokens_per_step": 20}
    for (found,) in check_all([Work(sampling=sampling, limits=limits)], 2, tmp_path):
        assert found.preemptions > 0


def split_worker(place: Place, works: list[Work]) -> tuple[list[Found], list[int], list[int]]:
    """As `generate_worker` where every pass of 7 tokens and more is shared out; tokens of all passes through the first norm and MLP."""
    parallel.LONG_PASS = 7
    normed, seen = [], []
    build = parallel.build_shard

    def build_watched(*args: Any, **kwargs: Any) -> Any:
        model, group = build(*args, **kwargs)
        layer = model.module.base_model.layers[0]
        layer.input_layernorm.register_forward_hook(lambda _, args, out: normed.append(args[0].shape[1]))
        layer.mlp.gate_proj.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
        return model, group

    global build_shard
    build_shard = build_watched
    return generate_worker(place, works), normed, seen


def test_long_passes_are_shared_out_by_tokens(tmp_path: Path) -> None:
    sampling = dataclasses.replace(SAMPLING, ignore_eos=True)
    works = [Work(CONFIG | changes, sampling, limits={"prefill_tokens_per_step": 41}) for changes in FAMILIES.values()]
    for found, normed, seen in run_ranks(2, split_worker, works, directory=tmp_path, timeout_s=90.0):
        for work, one in zip(works, found, strict=True):
            check(work, one)
        # The 199 tokens of prompts, and beside them 3, 6, 9, 9 and 15 rows that decode. An odd pass is filled up; scoring and decoding of
        # few rows is not shared out.
        shared = [(part, whole) for part, whole in zip(normed, seen, strict=True) if part != whole]
        assert shared == len(works) * [*5 * [(21, 41)], (18, 36)]


def test_two_replicas_of_two_ranks_sample_alike(tmp_path: Path) -> None:
    check_all([Work(replicas=2)], 4, tmp_path)


# --- what ranks agree on --------------------------------------------------------------------------------------------


def cache_worker(place: Place) -> tuple[list[int], bool]:
    """Blocks of the cache where ranks have unequal room, and after one of them alone has slept."""
    engine, world = build_engine(place, Work())
    own = 40 - 7 * place.rank
    engine._compute_own_max_blocks = lambda: own  # type: ignore[method-assign]
    sampling = SamplingParams(max_new_tokens=80, samples_per_prompt=4, ignore_eos=True)
    blocks = []
    for _ in range(2):
        engine.generate(draw_prompts(LENGTHS), sampling, step=0)
        assert engine._cache is not None
        blocks.append(engine._cache.num_blocks)
        kept = engine._cache
        if place.rank == 1:
            engine.sleep()
            engine.wake()
    engine.generate(draw_prompts(LENGTHS), sampling, step=0)
    is_new = engine._cache is not kept
    world.leave()
    return blocks, is_new


def limit_worker(place: Place) -> tuple[int, int]:
    """Bytes of this rank's part, and what rows may hold and still decode beside prompts."""
    engine, world = build_engine(place, Work(CONFIG | {"vocab_size": 51, "tie_word_embeddings": False}))
    # Only with graphs is there a limit; nothing is decoded here.
    engine._graphs = object()  # type: ignore[assignment]
    limit, num_bytes = engine._compute_max_held_beside(), sum(w.nbytes for w in engine.model.module.parameters())
    world.leave()
    return num_bytes, limit


def test_ranks_with_unequal_parts_agree_on_which_rows_decode_beside_prompts(tmp_path: Path) -> None:
    (first_bytes, first), (last_bytes, last) = run_ranks(2, limit_worker, directory=tmp_path)
    assert first_bytes > last_bytes and first == last > 0


def test_the_cache_is_as_large_as_the_least_room_and_renewed_by_all(tmp_path: Path) -> None:
    for blocks, is_new in run_ranks(2, cache_worker, directory=tmp_path):
        assert blocks == [33, 33] and is_new


def abort_worker(place: Place) -> tuple[list[int], set[str]]:
    """Rank 1 is told to end the call some time after it began; lengths of the rows, and how they ended."""
    engine, world = build_engine(place, Work())
    appended = 0

    def count(*args: Any) -> bool:
        nonlocal appended
        appended += 1
        if place.rank == 1 and appended == 9:
            threading.Thread(target=engine.abort).start()
        return ended(*args)

    ended = engine._is_ended
    engine._is_ended = count  # type: ignore[method-assign]
    sampling = SamplingParams(max_new_tokens=80, samples_per_prompt=2, ignore_eos=True)
    samples = engine.generate(draw_prompts(LENGTHS), sampling, step=0)
    again = engine.generate(draw_prompts(LENGTHS), SAMPLING, step=0)
    assert "abort" not in again.pylist("finish_reason")
    world.leave()
    return samples.lengths("tokens").tolist(), set(samples.pylist("finish_reason"))


def test_an_abort_of_one_rank_ends_all_at_the_same_step(tmp_path: Path) -> None:
    (lengths, reasons), other = run_ranks(2, abort_worker, directory=tmp_path)
    assert (lengths, reasons) == other
    assert reasons == {"abort"}
    assert all(0 < sampled < 60 for sampled in np.subtract(lengths, np.repeat(LENGTHS, 2)))


def fail_worker(place: Place, fault: str) -> str:
    """What each rank says where one of them fails in the midst of a call."""
    engine, world = build_engine(place, Work(), timeout_s=5.0)
    if place.rank == 1:
        plant(engine, fault)
    with pytest.raises(RuntimeError) as caught, world.leaving_on_error():
        engine.generate(draw_prompts(LENGTHS), SAMPLING, step=0)
    return f"{caught.type.__name__}: {caught.value}"


def plant(engine: NativeEngine, fault: str) -> None:
    if fault == "other draws":
        finish = engine._start

        def start(*args: Any) -> Any:
            job = finish(*args)
            job.keys[:] += 1
            return job

        engine._start = start  # type: ignore[method-assign]
    if fault == "error":
        engine.model.module.base_model.layers[1].register_forward_pre_hook(_raise)


def _raise(*_: Any) -> None:
    raise RuntimeError("this rank fails")


def test_ranks_that_draw_otherwise_are_told(tmp_path: Path) -> None:
    for message in run_ranks(2, fail_worker, "other draws", directory=tmp_path):
        assert message.startswith(f"{DrawsDifferError.__name__}: ranks 0 and 1 of 2 share a model and have drawn")


def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_worker, "error", directory=tmp_path, timeout_s=20.0)
    assert first.startswith(PeerLostError.__name__) and second == "RuntimeError: this rank fails"


# --- weights --------------------------------------------------------------------------------------------------------


def faulty_worker(place: Place) -> tuple[float, float, str]:
    """How far log-probabilities are from the whole model's as they should be, and where one product is not summed; and what is said
    of a weight that is missing."""
    engine, world = build_engine(place, Work())
    expected = generate_alone(Work())
    right = compare(engine.generate(draw_prompts(LENGTHS), SAMPLING, step=3), expected)
    down = engine.model.module.base_model.layers[1].mlp.down_proj
    assert isinstance(down, RowLinear)
    down._tokens = parallel.TokenSplit()
    sampling = SamplingParams(max_new_tokens=1, samples_per_prompt=1, temperature=0.0)
    # The ranks' tokens part, so that each is alone with its own first token.
    engine.group = None
    wrong = compare(
        engine.generate(draw_prompts(LENGTHS), sampling, step=3),
        NativeEngine(build_whole(Work()), build_letters()).generate(draw_prompts(LENGTHS), sampling, step=3),
    )
    weights = list(build_whole(Work()).module.named_parameters())
    with pytest.raises(WeightsError) as caught:
        parallel.copy_shards(engine.model.module, build_group(engine, world), weights[1:])
    world.leave()
    return right, wrong, str(caught.value)


def build_group(engine: NativeEngine, ranks: Ranks) -> parallel.TensorGroup:
    config = build_config(CONFIG)
    return parallel.TensorGroup(
        ranks, parallel.TokenSplit(ranks), plan_shards(config, size=2, tensor=2, dtype=torch.float64), 1.0
    )


def compare(samples: Batch, expected: Batch) -> float:
    """The largest difference of the first sampled token's log-probability."""
    gaps = []
    for row, other, mask in zip(
        samples.arrays("rollout_logprobs"),
        expected.arrays("rollout_logprobs"),
        samples.arrays("loss_mask"),
        strict=True,
    ):
        at = int(np.argmax(mask))
        gaps.append(abs(row[at] - other[at]))
    return float(max(gaps))


def test_a_product_that_is_not_summed_and_a_weight_that_is_missing_are_seen(tmp_path: Path) -> None:
    for right, wrong, message in run_ranks(2, faulty_worker, directory=tmp_path):
        assert right < 1e-6 and wrong > 0.05
        assert message.startswith("weight 'model.embed_tokens.weight' is not on both sides (1 such)")


def test_the_layout_of_the_ranks_is_that_of_the_model() -> None:
    config = build_config(CONFIG | {"tie_word_embeddings": False, "num_key_value_heads": 1})
    layout = plan_shards(config, size=4, tensor=2, dtype=torch.bfloat16)
    boxes = {
        name: [
            (held.placement.offsets[rank].tolist(), held.placement.shape[rank].tolist()) for rank in range(layout.size)
        ]
        for name, held in layout.tensors.items()
    }
    attention = "model.layers.0.self_attn"
    assert boxes[f"{attention}.q_proj.weight"][:2] == [([0, 0], [16, 32]), ([16, 0], [16, 32])]
    assert boxes[f"{attention}.k_proj.weight"][:2] == [([0, 0], [8, 32])] * 2
    assert boxes[f"{attention}.o_proj.weight"][:2] == [([0, 0], [32, 16]), ([0, 16], [32, 16])]
    assert boxes["model.layers.0.mlp.down_proj.weight"][1] == ([0, 24], [32, 24])
    assert boxes["lm_head.weight"][:2] == [([0, 0], [15, 32]), ([15, 0], [14, 32])]
    assert boxes["model.embed_tokens.weight"] == [([0, 0], [VOCAB, 32])] * 4
    assert all(of_rank[:2] == of_rank[2:] for of_rank in boxes.values())


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "degree", "message"),
    [
        ({}, 3, "rollout.native.tp: 3 does not divide the model's 4 attention heads; set a divisor"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "neither divides the model's 6 key-value heads"),
        ({"intermediate_size": 49}, 2, "does not divide the model's intermediate size of 49"),
        ({"vocab_size": 5}, 4, "a vocabulary of 5 leaves one of 4 ranks without a part"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(changes: dict[str, Any], degree: int, message: str) -> None:
    config = build_config(CONFIG | changes)
    with pytest.raises(ConfigError) as caught:
        check_tensor_rollout(config, degree)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_family_without_a_plan_is_refused() -> None:
    config = build_config(CONFIG)
    config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match="the plan of 'qwen3' says 'nothing', which is not known"):
        check_tensor_rollout(config, 2)


# --- fused layers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch's CPU build comes without")
def test_fused_layers_in_the_interpreter() -> None:
    """In a process of its own: Triton decides at its import whether it compiles."""
    paths = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"
    }  # fmt: skip
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "tensor_layers_cases.py")]
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

"""Checkpoints: what is saved comes back, from any number of shards into any layout, and no crash or damage is believed."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    ShardEntry,
    export_checkpoint,
    load_shards,
    newest_checkpoint,
    open_checkpoint,
    prune,
    write_shard,
)
from hybridflow.checkpoint import writer as writer_module
from hybridflow.models import (
    LoraSettings,
    adapter_weights,
    apply_lora,
    compute_base_checksum,
    fresh_model,
    load_model,
    save_adapter_config,
    save_description,
    save_model,
)
from hybridflow.types import Box


def tensors_of(step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(step)
    weight = torch.randn(6, 4, generator=draws)
    return {
        "model/weight": weight,
        "model/bias": torch.randn(3, generator=draws).bfloat16(),
        "optimizer/steps": torch.tensor(float(step)),
        "optimizer/none": torch.zeros(0, 4),
        "optimizer/transposed": weight.t(),
        "optimizer/part": weight[2:4],
        "rng/cpu": draws.get_state(),
    }


def save(root: Path, step: int) -> Path:
    with CheckpointWriter(root, step) as writer:
        entry = write_shard(writer.shard_path("actor", 0), tensors_of(step), {"steps_taken": step, "loss": 0.1 + step})
        return writer.commit([entry], {"step": step, "data": {"epoch": 1, "row": 7}, "kl": 1e-300})


def assert_holds(directory: Path, step: int) -> None:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.step == step and checkpoint.state == {"step": step, "data": {"epoch": 1, "row": 7}, "kl": 1e-300}
    tensors, state = load_shards(directory, "actor")
    assert state == {"steps_taken": step, "loss": 0.1 + step}
    expected = tensors_of(step)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    path = save(tmp_path, 10)
    assert path == tmp_path / "step_00000010" and names_in(tmp_path) == ["step_00000010"]
    assert_holds(path, 10)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.path == path and newest.damaged == ()
    assert names_in(path) == ["actor", "manifest.json", "state.json"]
    assert set(newest.load_tensors("actor", "model/")) == {"model/weight", "model/bias"}
    with pytest.raises(CheckpointError, match="no role 'critic'; it has \\['actor'\\]"):
        load_shards(path, "critic")
    tensors, _ = load_shards(path, "actor")
    shutil.rmtree(path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(10).items())


def test_the_last_one_written_is_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        save(tmp_path, step)
    # A run that went back to step 10 and came to step 15 goes on from there, not from the branch that it left.
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 15
    prune(tmp_path, keep=2)
    assert names_in(tmp_path) == ["step_00000015", "step_00000020"]


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / "actor" / "rank_00000.safetensors").write_bytes(b"")
    save(tmp_path, 10)
    assert_holds(path, 10)
    assert names_in(tmp_path) == ["step_00000010"]


def test_an_error_while_saving_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="'z' is"), CheckpointWriter(tmp_path, 20) as writer:  # noqa: PT012
        write_shard(writer.shard_path("actor", 0), tensors_of(20))
        write_shard(writer.shard_path("actor", 1), {"z": torch.zeros(1, dtype=torch.complex64)})
    assert names_in(tmp_path) == ["step_00000010"]


# Layouts.


def pieces_of(
    global_shape: tuple[int, ...], cuts: tuple[list[int], ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the boxes of a grid cut at `cuts` along each dimension."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, edges in zip(global_shape, cuts, strict=True):
        edges = sorted({0, size, *edges})
        spans = list(zip(edges[:-1], edges[1:], strict=True))
        boxes = [((*o, a), (*n, b - a)) for o, n in boxes for a, b in spans]
    return boxes


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout_is_read_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("layouts")
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cut = st.tuples(*(st.lists(st.integers(0, size), max_size=2) for size in shape))
    whole = torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)
    with CheckpointWriter(root, 1) as writer:
        entries = []
        for rank, (offsets, box) in enumerate(pieces_of(shape, data.draw(cut))):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))]
            path = writer.shard_path("actor", rank)
            tensors = {"x": part} | ({"replicated": torch.tensor(3)} if rank == 0 else {})
            entries.append(write_shard(path, tensors, {"rank": rank}, {"x": Box(shape, offsets, box)}))
        writer.commit(data.draw(st.permutations(entries)), {})
    checkpoint = newest_checkpoint(root)
    assert checkpoint is not None and checkpoint.role_state("actor") == {"rank": 0}
    tensors = checkpoint.load_tensors("actor")
    assert torch.equal(tensors["x"], whole) and tensors["replicated"] == 3
    for offsets, box in pieces_of(shape, data.draw(cut)):
        expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, box, strict=True))]
        loaded = checkpoint.load_boxes("actor", {"x": Box(shape, offsets, box), "replicated": Box((), (), ())})
        assert torch.equal(loaded["x"], expected) and loaded["replicated"] == 3


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process and returns how it ended: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_rank_reads_its_boxes_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    with CheckpointWriter(tmp_path, 1) as writer:
        halves = [(writer.shard_path("actor", rank), whole[2 * rank : 2 * rank + 2]) for rank in range(2)]
        entries = [
            write_shard(path, {"w": half}, {"rank": rank}, boxes={"w": Box((4, 3), (2 * rank, 0), (2, 3))})
            for rank, (path, half) in enumerate(halves)
        ]
        path = writer.commit(entries, {})
    tensors, state = load_shards(path, "actor", {"w": Box((4, 3), offsets=(1, 1), shape=(2, 2))})
    assert torch.equal(tensors["w"], whole[1:3, 1:3]) and state == {"rank": 0}
    empty, _ = load_shards(path, "actor", {"w": Box((4, 3), offsets=(4, 0), shape=(0, 3))})
    assert empty["w"].shape == (0, 3)
    box = Box((4, 3), (0, 0), (4, 3))
    for boxes, message in (
        ({}, "tensor 'w' of actor is in .*, but this run has none; resume with the same model and train.lora"),
        ({"w": box, "x": box}, "tensor 'x' of actor is not in .*; resume"),
        ({"w": Box((4, 3), (3, 0), (2, 3))}, r"tensor 'w' of actor has no such box: .*offsets=\(3, 0\)"),
        ({"w": Box((4, 2), (0, 0), (4, 2))}, r"tensor 'w' of actor is \[4, 3\] in .* and \[4, 2\] here"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_shards(path, "actor", boxes)


def boxes_of(**shapes: tuple[int, ...]) -> dict[str, Box]:
    return {f"model/q_proj.{name}.weight": Box(shape, (0, 0), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (boxes_of(base=(6, 4)), "this run trained an adapter (train.lora); set it again, as in the run's config.yaml"),
        (boxes_of(lora_A=(2, 4), lora_B=(6, 2)), "the saved adapter has rank 3: set train.lora.rank=3"),
        (boxes_of(lora_A=(3, 5), lora_B=(6, 3)), "is [3, 4] in "),
        (
            boxes_of(lora_A=(3, 4), lora_B=(6, 3)) | {"model/v_proj.lora_A.weight": Box((3, 4), (0, 0), (3, 4))},
            "the saved adapter is on other layers; set train.lora.target_modules as in the run's config.yaml",
        ),
    ],
    ids=["off", "rank", "model", "layers"],
)
def test_an_adapter_that_changes_over_a_resume_says_which_key_to_set(
    wanted: dict[str, Box], message: str, tmp_path: Path
) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        tensors = {"model/q_proj.lora_A.weight": torch.ones(3, 4), "model/q_proj.lora_B.weight": torch.ones(6, 3)}
        path = writer.commit([write_shard(writer.shard_path("actor", 0), tensors)], {})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_shards(path, "actor", wanted)


def test_an_adapter_that_a_resume_turns_on_is_to_be_taken_out(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.commit(
            [write_shard(writer.shard_path("actor", 0), {"model/q_proj.weight": torch.ones(6, 4)})], {}
        )
    with pytest.raises(CheckpointError, match="this run trained all weights, without an adapter; take train.lora out"):
        load_shards(path, "actor", boxes_of(lora_A=(3, 4), lora_B=(6, 3)))


def test_a_checkpoint_of_the_format_before_says_so(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = json.loads((path / "manifest.json").read_text())
    content["manifest"]["format"] = 1
    body = json.dumps(content["manifest"], sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="format 1, and this version of hybridflow reads format 2; go on with"):
        open_checkpoint(path)


def test_an_adapter_is_exported_as_one(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    adapter = {f"layers.0.q_proj.lora_{part}.weight": torch.randn(2, 2, generator=draws) for part in "AB"}
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.shard_path("actor", 0)
        entry = write_shard(path, {f"model/{name}": weight for name, weight in adapter.items()})
        (path.parent / "huggingface").mkdir()
        (path.parent / "huggingface" / "config.json").write_text('{"dtype": "bfloat16"}')
        (path.parent / "huggingface" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
        for file in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
            (path.parent / "huggingface" / file).write_text("{}")
        checkpoint = open_checkpoint(writer.commit([entry], {}))
    export_checkpoint(checkpoint, tmp_path / "out")
    adapter_files = ["adapter_config.json", "adapter_model.safetensors"]
    assert names_in(tmp_path / "out") == [*adapter_files, "chat_template.jinja", "tokenizer.json"]
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == {"peft_type": "LORA", "r": 2}
    written = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == {f"base_model.model.{name}" for name in adapter}
    for name, weight in adapter.items():
        assert torch.equal(written[f"base_model.model.{name}"], weight.bfloat16())


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_exported_merged_into_its_own_base(trained: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")
    shape = dict(
        model_type="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    for name, seed in (("base", 0), ("other", 1)):
        save_model(fresh_model(shape, seed=seed, dtype=trained), None, tmp_path / name)
    model = load_model(tmp_path / "base", dtype=trained)
    checksum = compute_base_checksum(model)
    apply_lora(model, LoraSettings(rank=2, alpha=6.0), seed=0)
    draws = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(weight.shape, generator=draws) for name, weight in adapter_weights(model).items()}

    def commit(step: int, state: dict[str, Any]) -> Checkpoint:
        with CheckpointWriter(tmp_path, step) as writer:
            path = writer.shard_path("actor", 0)
            entry = write_shard(path, {f"model/{name}": weight for name, weight in masters.items()}, state)
            save_description(model, None, path.parent / "huggingface")
            save_adapter_config(model, path.parent / "huggingface")
            return open_checkpoint(writer.commit([entry], {}))

    checkpoint = commit(1, {"adapter": [3.0, checksum]})
    base = dict(load_model(tmp_path / "base", dtype=trained).module.named_parameters())
    for dtype, numbers in (("auto", trained), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        export_checkpoint(checkpoint, tmp_path / dtype, dtype, merge=True)
        assert names_in(tmp_path / dtype) == ["config.json", "generation_config.json", "model.safetensors"]
        written = safetensors.torch.load_file(tmp_path / dtype / "model.safetensors")
        assert written.keys() == base.keys()
        for name, weight in base.items():
            lora_A, lora_B = (masters.get(name.replace(".weight", f".lora_{side}.weight")) for side in "AB")
            expected = (
                weight.double()
                if lora_A is None or lora_B is None
                else weight.double() + 3 * (lora_B.double() @ lora_A.double())
            )
            assert written[name].dtype == numbers
            tolerance = 1e-6 if numbers == torch.float32 else 2**-8
            torch.testing.assert_close(written[name].double(), expected.detach(), rtol=tolerance, atol=1e-6)
        assert load_model(tmp_path / dtype, dtype=numbers).config.dtype == numbers
    export_checkpoint(checkpoint, tmp_path / "named", merge=True, base=str(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="trained on other weights than .*other' holds; give the base model's"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True, base=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="older version of hybridflow.*export it without merge=true"):
        export_checkpoint(commit(2, {}), tmp_path / "out", merge=True)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match="base', which the checkpoint names as the adapter's base, holds no model"
    ):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_workers_write_their_own_shards(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    reader, sender = os.pipe()
    with CheckpointWriter(tmp_path, 3) as writer:
        paths = [writer.shard_path("actor", rank) for rank in range(2)]

        def write(rank: int) -> None:
            part = whole[2 * rank : 2 * rank + 2]
            entry = write_shard(paths[rank], {"w": part}, boxes={"w": Box((4, 3), (2 * rank, 0), (2, 3))})
            os.write(sender, entry.record.sha256.encode())

        assert [in_child(lambda r=rank: write(r)) for rank in range(2)] == [0, 0]
        entries = [
            write_shard(p, {"w": whole[2 * r : 2 * r + 2]}, boxes={"w": Box((4, 3), (2 * r, 0), (2, 3))})
            for r, p in enumerate(paths)
        ]
        assert os.read(reader, 1024).decode() == "".join(entry.record.sha256 for entry in entries)
        writer.commit(entries, {})
    assert torch.equal(load_shards(tmp_path / "step_00000003", "actor")[0]["w"], whole)


def shard(writer: CheckpointWriter, rank: int, offset: int, rows: int, **tensors: Tensor) -> ShardEntry:
    values = {"w": torch.zeros(rows, 3), **tensors}
    return write_shard(writer.shard_path("actor", rank), values, boxes={"w": Box((4, 3), (offset, 0), (rows, 3))})


BAD_LAYOUTS: dict[str, tuple[Callable[[CheckpointWriter], list[ShardEntry]], str]] = {
    "a gap": (lambda w: [shard(w, 0, 0, 2), shard(w, 1, 3, 1)], "'w' of actor has 9 of 12 values"),
    "an overlap": (
        lambda w: [shard(w, 0, 0, 3), shard(w, 1, 2, 2)],
        "'w' of actor is written twice .*rank_00000.*rank_00001",
    ),
    "outside": (lambda w: [shard(w, 0, 2, 3)], "'w' of actor has a shard outside"),
    "a replica": (
        lambda w: [shard(w, 0, 0, 2, b=torch.ones(1)), shard(w, 1, 2, 2, b=torch.ones(1))],
        "'b' of actor is written twice",
    ),
    "two shapes": (
        lambda w: [shard(w, 0, 0, 4, b=torch.ones(1)), write_shard(w.shard_path("actor", 1), {"b": torch.ones(2)})],
        "'b' of actor has two types or shapes",
    ),
    "a missing entry": (
        lambda w: [shard(w, 0, 0, 4), shard(w, 1, 0, 4)][:1],
        "actor/rank_00001.safetensors was written, but",
    ),
}


@pytest.mark.parametrize(("write", "message"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_shards_that_do_not_fit_are_not_committed(
    write: Callable[[CheckpointWriter], list[ShardEntry]], message: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    with CheckpointWriter(tmp_path, 2) as writer, pytest.raises(CheckpointError, match=message):
        writer.commit(write(writer), {})
    assert names_in(tmp_path) == ["step_00000001"]


def test_a_shard_lost_before_the_commit_is_named(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        entry = shard(writer, 0, 0, 4)
        writer.shard_path("actor", 0).unlink()
        with pytest.raises(CheckpointError, match="rank_00000.safetensors is missing"):
            writer.commit([entry], {})


def test_state_that_json_would_change_is_named(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        for state, message in (
            ({"data": {7: 1}}, "state.data has the key 7"),
            ({"data": [1, {"x": torch.zeros(1)}]}, r"state.data\[1\].x is a Tensor"),
        ):
            with pytest.raises(CheckpointError, match=message):
                writer.commit([], state)
            with pytest.raises(CheckpointError, match=message):
                write_shard(writer.shard_path("actor", 0), {}, state)
        with pytest.raises(CheckpointError, match="'Actor' cannot name"):
            writer.shard_path("Actor", 0)
        with pytest.raises(CheckpointError, match="'z' is complex64"):
            write_shard(writer.shard_path("actor", 0), {"z": torch.zeros(1, dtype=torch.complex64)})


# Damage.


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


SHARD = "actor/rank_00000.safetensors"
DAMAGES = {
    "missing": Path.unlink,
    "cut short": cut_short,
    "a bit flipped": flip_a_bit,
    "emptied": lambda p: p.write_bytes(b""),
}


@pytest.mark.parametrize("file", [SHARD, "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_one_is_named_and_passed_over(
    file: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    damage(bad / file)
    with pytest.raises(CheckpointError, match=f"step_00000020/{file}"):
        open_checkpoint(bad)
    with caplog.at_level(logging.WARNING):
        newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.path == good
    assert len(newest.damaged) == 1 and f"step_00000020/{file}" in newest.damaged[0]
    assert newest.damaged[0] in caplog.text
    assert_holds(good, 10)


def test_where_all_are_damaged_nothing_starts_anew(tmp_path: Path) -> None:
    for step in (10, 20):
        cut_short(save(tmp_path, step) / SHARD)
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole: .*step_00000020.*step_00000010"):
        newest_checkpoint(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    data = (path / "manifest.json").read_bytes()
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 7)
        (path / "manifest.json").write_bytes(changed)
        if json_equal(changed, data):
            continue
        with pytest.raises(CheckpointError, match="manifest.json"):
            open_checkpoint(path)


def json_equal(left: bytes | bytearray, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "actor/../../x", ".hidden"])
def test_a_manifest_cannot_point_outside(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    content = json.loads((path / "manifest.json").read_text())
    content["manifest"]["files"][name] = content["manifest"]["files"].pop(SHARD)
    content["manifest"]["shards"][0]["file"] = name
    rewrite(path, content)
    with pytest.raises(CheckpointError, match="not a manifest of this format"):
        open_checkpoint(path)


def test_a_manifest_that_lies_about_a_tensor_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    content = json.loads((path / "manifest.json").read_text())
    box = content["manifest"]["shards"][0]["tensors"]["model/weight"]
    box["shape"] = box["global_shape"] = [4, 6]
    rewrite(path, content)
    with pytest.raises(CheckpointError, match="rank_00000.safetensors, tensor 'model/weight': not float32"):
        open_checkpoint(path).load_tensors("actor")


def rewrite(path: Path, content: dict[str, Any]) -> None:
    """Writes a manifest with a right checksum, as an attacker would."""
    from hybridflow.checkpoint.manifest import _hash_json

    content["sha256"] = _hash_json(content["manifest"])
    (path / "manifest.json").write_text(json.dumps(content))


# Old ones.


def test_old_ones_go_only_for_whole_new_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    cut_short(tmp_path / "step_00000004" / SHARD)
    (tmp_path / "step_00000003" / "manifest.json").unlink()
    prune(tmp_path, keep=3)
    assert len(names_in(tmp_path)) == 4
    prune(tmp_path, keep=1)
    assert names_in(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]
    save(tmp_path, 5)
    prune(tmp_path, keep=1)
    assert names_in(tmp_path) == ["step_00000005"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_by_step.txt").write_text("mine")
    save(tmp_path, 6)
    prune(tmp_path, keep=1)
    assert names_in(tmp_path) == ["notes", "step_00000006", "step_by_step.txt"]


# Crashes.


def save_and_prune(root: Path, step: int) -> None:
    save(root, step)
    prune(root, keep=1)


CALLS = ("fsync", "rename", "rmdir", "unlink", "mkdir")


def die_at(count: int, work: Callable[[], None]) -> None:
    """Runs `work` and kills this process just before its `count`-th call that changes the disk."""
    left = [count]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return stand_in

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
    work()


@pytest.mark.parametrize("new_step", [10, 20], ids=["the same step again", "a new step"])
def test_killed_before_any_call_that_touches_the_disk(new_step: int, tmp_path: Path) -> None:
    kills = 0
    for count in range(1, 500):
        root = tmp_path / str(count)
        save(root, 10)
        ended = in_child(lambda n=count, r=root: die_at(n, lambda: save_and_prune(r, new_step)))
        newest = newest_checkpoint(root)
        assert newest is not None and newest.step in (10, new_step) and newest.damaged == ()
        assert_holds(newest.path, newest.step)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        save_and_prune(root, 30)
        assert names_in(root) == ["step_00000030"]
        assert_holds(root / "step_00000030", 30)
    assert ended == 0 and newest.step == new_step and names_in(root) == [f"step_{new_step:08d}"]
    assert kills > 15


def test_killed_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def half_save(tensors: dict[str, Tensor], path: Path) -> None:
        data = safetensors.torch.save(tensors)
        Path(path).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        writer_module.save_file = half_save  # type: ignore[assignment]
        save(tmp_path, 20)

    assert in_child(work) == -signal.SIGKILL
    assert names_in(tmp_path) == [".writing-step_00000020", "step_00000010"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 10 and newest.damaged == ()
    assert_holds(newest.path, 10)
    save(tmp_path, 20)
    assert names_in(tmp_path) == ["step_00000010", "step_00000020"]


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from hybridflow.checkpoint import CheckpointWriter, prune, write_shard
root = Path(sys.argv[1])
for step in range(1, 10_000):
    tensors = {f"t{i}": torch.full((250_000,), float(step)) for i in range(8)}
    with CheckpointWriter(root, step) as writer:
        entry = write_shard(writer.shard_path("actor", 0), tensors, {"step": step})
        writer.commit([entry], {"step": step})
    prune(root, keep=2)
    print(step, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A process that does nothing but save is killed after some steps, each time a little later."""
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for _ in range(4):
            announced = int(process.stdout.readline())
        time.sleep(0.013)
    finally:
        process.kill()
        process.wait()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step >= announced and newest.damaged == ()
    tensors, state = load_shards(newest.path, "actor")
    assert state == {"step": newest.step} == newest.state
    assert all(torch.equal(tensor, torch.full((250_000,), float(newest.step))) for tensor in tensors.values())


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        done.append(f"{path} -> {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    final = save(tmp_path, 10)
    writing = str(tmp_path / ".writing-step_00000010")
    named = done.index(f"{writing} -> {final}")
    written = {writing, *(writing + str(path).removeprefix(str(final)) for path in final.rglob("*"))}
    assert set(done[:named]) == written and len(written) == 5
    assert str(tmp_path) in done[named + 1 :]


# Export.


def test_an_export_is_read_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    masters = {name: weight.detach() for name, weight in model.named_parameters()}
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.shard_path("actor", 0)
        entry = write_shard(path, {f"model/{name}": weight for name, weight in masters.items()})
        config.dtype = torch.bfloat16
        config.save_pretrained(path.parent / "huggingface")
        (path.parent / "huggingface" / "tokenizer.json").write_text("{}")
        writer.commit([entry], {})
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None and "actor/huggingface/config.json" in checkpoint.manifest.files
    ids = torch.arange(8)[None]
    for dtype, expected in (("float32", model), ("auto", copy.deepcopy(model).bfloat16())):
        export_checkpoint(checkpoint, tmp_path / dtype, dtype)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype).eval()
        assert loaded.dtype == expected.dtype and names_in(tmp_path / dtype)[-1] == "tokenizer.json"
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    flip_a_bit(checkpoint.path / "actor" / "huggingface" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="huggingface/tokenizer.json"):
        open_checkpoint(checkpoint.path)
    with pytest.raises(CheckpointError, match="config.json is missing"):
        export_checkpoint(open_checkpoint(save(tmp_path / "other", 1)), tmp_path / "out")

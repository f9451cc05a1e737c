"""`hybridflow doctor` and `get_available_backends`: yes or no with the reason, as this machine has it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import pytest
import torch
import torch.distributed as dist

import hybridflow
from hybridflow.cli.main import main
from hybridflow.train_engine import backends, get_available_backends

NAMES = ("fsdp2", "ddp", "tensor_parallel", "compile", "flash_attn", "cudnn_attention", "liger", "lora", "ray")


def test_every_backend_is_told_with_a_reason() -> None:
    found = hybridflow.get_available_backends()
    assert tuple(found) == NAMES
    assert all(backend.reason and bool(backend) == backend.available for backend in found.values())
    assert found["fsdp2"].available == found["ddp"].available == dist.is_available()
    assert found["ray"].available == (importlib.util.find_spec("ray") is not None)
    if found["ray"]:
        assert found["ray"].reason == f"ray {importlib.metadata.version('ray')}"
    if not torch.cuda.is_available():
        assert not found["flash_attn"] and not found["cudnn_attention"] and not found["liger"]
        assert found["flash_attn"].reason.startswith("needs a GPU; ")


def test_an_old_gpu_and_a_missing_package_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert get_available_backends()["flash_attn"] == backends.Backend(
        False, "needs compute capability 8.0, and Tesla V100 has less"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert get_available_backends()["flash_attn"].available
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert get_available_backends()["compile"].reason.startswith("triton is not installed")
    assert get_available_backends()["liger"] == backends.Backend(
        False, "liger-kernel is not installed: pip install liger-kernel"
    )


def test_the_command_prints_a_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0]: line.split() for line in lines if line}
    assert words["torch"][1] == torch.__version__
    for name, backend in get_available_backends().items():
        assert words[name][1] == ("yes" if backend else "no")
        assert " ".join(words[name][2:]) == backend.reason


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert len(record["devices"]) == max(1, torch.cuda.device_count())
    assert {name: entry["available"] for name, entry in record["backends"].items()} == {
        name: backend.available for name, backend in get_available_backends().items()
    }


def test_the_command_has_nothing_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "++depth=3"]) == 2
    assert "unknown key 'depth'" in capsys.readouterr().err

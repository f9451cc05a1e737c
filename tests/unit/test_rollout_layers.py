import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import SMALL

from hybridflow.models import fresh_model
from hybridflow.models.lora import LoraSettings, apply_lora
from hybridflow.rollout.native.graphs import round_seats
from hybridflow.rollout.native.layers import join_parameters, serves

HERE = Path(__file__).parent
CONFIG = SMALL | {"max_position_embeddings": 64}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch's CPU build comes without")
def test_layers_in_the_interpreter():
    """In a process of its own: Triton decides at its import whether it compiles."""
    paths = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"
    }  # fmt: skip
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "rollout_layers_cases.py")]
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_joined_parameters_are_views_of_one_storage_and_the_same_objects():
    model = fresh_model({"model_type": "qwen2", **CONFIG}, seed=1)
    attention = model.module.base_model.layers[0].self_attn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    parameters = [projection.weight for projection in projections]
    before = [parameter.detach().clone() for parameter in parameters]
    joint = join_parameters(parameters)
    assert torch.equal(joint, torch.cat(before)) and not joint.is_inference()
    assert all(projection.weight is parameter for projection, parameter in zip(projections, parameters, strict=True))
    again = join_parameters(parameters)
    assert again.data_ptr() == joint.data_ptr() and again.shape == joint.shape
    with torch.no_grad():
        parameters[1].add_(1.0)
    assert torch.equal(joint[32:48], before[1] + 1.0) and torch.equal(joint[:32], before[0])
    # Training goes on with them.
    attention.k_proj(torch.randn(3, 32)).sum().backward()
    assert parameters[1].grad is not None and parameters[1].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "qwen3", "head_dim": 8}, True),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "hidden_act": "gelu"}, False),
        ({"model_type": "llama", "mlp_bias": True}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "mistral", "sliding_window": 16}, False),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, False),
        ({"model_type": "gemma2", "head_dim": 8}, False),
    ],
    ids=str,
)
def test_layers_serve_what_they_compute_alike(values, expected):
    assert serves(fresh_model({**CONFIG, **values}, seed=1)) is expected


def test_an_adapter_goes_through_the_module():
    model = fresh_model({"model_type": "qwen2", **CONFIG}, seed=1)
    apply_lora(model, LoraSettings(rank=2, alpha=4.0), seed=0)
    assert not serves(model)


def test_seats_are_at_most_half_again_as_many_as_rows():
    sizes = [round_seats(count) for count in range(1, 2000)]
    assert all(size >= count for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size <= 1.5 * count + 8 for count, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:8] == [8, 12, 16, 24, 32, 48, 64, 96]

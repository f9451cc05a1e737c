"""AdamW against the formula written out in float64, and the storage it promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hybridflow.config import ConfigError
from hybridflow.train_engine.optimizer import AdamW, OptimizerSettings


def adamw_float64(weight: Tensor, grads: list[Tensor], lr: float, decay: float, settings: OptimizerSettings) -> Tensor:
    """The update of arXiv:1711.05101, algorithm 2, in float64."""
    (beta1, beta2), weight = settings.betas, weight.double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        mean = beta1 * mean + (1 - beta1) * grad.double()
        square = beta2 * square + (1 - beta2) * grad.double() ** 2
        step = (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + settings.eps)
        weight = weight - lr * decay * weight - lr * step
    return weight


def build(dtype: torch.dtype) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "norm": (3,), "bias": (5,)}
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def give_gradient(parameters: dict[str, Parameter], seed: int) -> dict[str, Tensor]:
    """Runs a backward pass that leaves random gradients, which it returns."""
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(live.shape, generator=generator).to(live.dtype) for name, live in parameters.items()}
    torch.stack([(live * grads[name]).sum() for name, live in parameters.items()]).sum().backward()
    return grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_follow_the_formula_and_decay_matrices_only(dtype: torch.dtype) -> None:
    settings = OptimizerSettings(weight_decay=0.1, max_grad_norm=0.0, betas=(0.8, 0.95))
    parameters = build(dtype)
    start = {name: live.detach().clone() for name, live in parameters.items()}
    optimizer = AdamW(parameters, settings)
    history = []
    for step in range(4):
        history.append(give_gradient(parameters, seed=step))
        optimizer.step(0.05, optimizer.compute_grad_norm())
    for name, live in parameters.items():
        decay = settings.weight_decay if name == "matrix" else 0.0
        expected = adamw_float64(start[name], [grads[name] for grads in history], 0.05, decay, settings)
        master = optimizer.weights[name].master
        torch.testing.assert_close(master.double(), expected, rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=1e-7)
        assert torch.equal(live, master.to(dtype))


def test_live_weights_never_move() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parameters = build(dtype)
        addresses = {name: live.data_ptr() for name, live in parameters.items()}
        optimizer = AdamW(parameters, OptimizerSettings())
        give_gradient(parameters, seed=0)
        optimizer.step(1.0, optimizer.compute_grad_norm())
        assert {name: live.data_ptr() for name, live in parameters.items()} == addresses


def test_masters_keep_steps_that_bfloat16_would_lose() -> None:
    live = Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = AdamW({"w": live}, OptimizerSettings(max_grad_norm=0.0))
    for _ in range(10):
        live.sum().backward()
        optimizer.step(1e-3, optimizer.compute_grad_norm())
    assert torch.allclose(optimizer.weights["w"].master, torch.tensor(0.99), atol=1e-5)
    assert torch.equal(live, torch.full((2, 2), 0.99, dtype=torch.bfloat16))


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    live = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW({"w": live}, OptimizerSettings())
    for _ in range(300):
        live.sum().backward()
    # bfloat16 stops counting ones at 256.
    assert torch.equal(optimizer.gradients()["w"], torch.full((3,), 300.0))
    assert live.grad is None


def test_a_bfloat16_weight_has_one_optimizer_at_a_time() -> None:
    live = Parameter(torch.ones(3, dtype=torch.bfloat16))
    first = AdamW({"w": live}, OptimizerSettings())
    second = AdamW({"w": live}, OptimizerSettings())
    with pytest.raises(RuntimeError, match="two optimizers"):
        live.sum().backward()
    del first
    live.sum().backward()
    assert torch.equal(second.gradients()["w"], torch.ones(3))


def test_clipping_scales_to_the_norm_and_leaves_small_gradients_alone() -> None:
    parameters = {
        "a": Parameter(torch.zeros(2, 2, dtype=torch.float64)),
        "b": Parameter(torch.zeros(1, dtype=torch.float64)),
    }
    optimizer = AdamW(parameters, OptimizerSettings(max_grad_norm=1.0, betas=(0.0, 0.0), eps=1.0))
    (2.0 * parameters["a"].sum() + 3.0 * parameters["b"].sum()).backward()
    norm = optimizer.compute_grad_norm()
    assert float(norm) == pytest.approx(5.0)
    optimizer.step(1.0, norm)
    # With both betas 0 and eps 1 the first step is -lr * g / (|g| + 1).
    assert float(parameters["b"].detach()) == pytest.approx(-0.6 / 1.6, rel=1e-5)
    assert float(parameters["a"].detach()[0, 0]) == pytest.approx(-0.4 / 1.4, rel=1e-5)

    (0.1 * parameters["b"].sum()).backward()
    optimizer.step(1.0, optimizer.compute_grad_norm())
    # A gradient of 0.1 as it is, on top of the first step.
    assert float(parameters["b"].detach()) == pytest.approx(-0.6 / 1.6 - 0.1 / 1.1, rel=1e-5)


def test_frozen_weights_are_left_out() -> None:
    parameters = build(torch.float32)
    parameters["matrix"].requires_grad_(False)
    optimizer = AdamW(parameters, OptimizerSettings())
    assert "exp_avg/matrix" not in optimizer.state_tensors()


def test_bad_settings_and_types_are_named() -> None:
    with pytest.raises(ConfigError, match="betas"):
        OptimizerSettings(betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="lr"):
        OptimizerSettings(lr=-1.0)
    with pytest.raises(ConfigError):
        OptimizerSettings(lr=math.nan)
    with pytest.raises(ValueError, match="'w' is torch.float16"):
        AdamW({"w": Parameter(torch.zeros(1, dtype=torch.float16))}, OptimizerSettings())
    with pytest.raises(ValueError, match="no weight to train"):
        AdamW({"w": Parameter(torch.zeros(1), requires_grad=False)}, OptimizerSettings())

"""TrainLayers: the same gradients in every mode, computed again where it says so, one compilation, and nothing left behind."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.config import ConfigError, settings
from hybridflow.models import LanguageModel, Packed, fresh_model
from hybridflow.train_engine import layers as layers_file
from hybridflow.train_engine.backends import (
    FusedKernels,
    apply_kernels,
    apply_liger,
    check_precision,
)
from hybridflow.train_engine.host_inputs import HostInputs
from hybridflow.train_engine.layers import CheckpointingSetting, TrainLayers, plan_compile, resolve_layers
from hybridflow.train_engine.memory import LayerMode, ModelShape, OutOfMemoryError, Workload, compute_memory, read_shape

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LENGTHS = [7, 12, 5]
MODES = ("none", "selective", "full")


def build_model(dtype: torch.dtype = torch.float64, **changes: Any) -> LanguageModel:
    numerics = changes.pop("numerics", "fast")
    return fresh_model({**CONFIG, **changes}, seed=0, dtype=dtype, numerics=numerics)


def build_workload(model: LanguageModel, tokens: int = 64) -> Workload:
    return Workload(read_shape(model.config), model.dtype, tokens, on_gpu=model.device.type == "cuda")


def resolve(model: LanguageModel, workload: Workload, budget_bytes: int, **asked: Any) -> LayerMode:
    """By these settings, all others left to us."""
    return resolve_layers(
        model, workload, budget_bytes, **{"checkpointing": "auto", "compiled": "auto", "offload": False, **asked}
    )


def build_layers(model: LanguageModel, **mode: Any) -> TrainLayers:
    return TrainLayers(model, build_workload(model), LayerMode(**mode))


def compute_loss(model: LanguageModel, lengths: list[int]) -> Tensor:
    """A loss to which every token's hidden state matters in another way."""
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = torch.randint(0, 40, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    hidden_TD = model.hidden_states(tokens, positions, Packed(ends, max(lengths)))
    weights = torch.randn(hidden_TD.shape, generator=generator, dtype=torch.float64)
    return (hidden_TD.double() * weights).sum()


def gradients(model: LanguageModel, layers: TrainLayers | None, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    model.module.zero_grad(set_to_none=True)
    if layers is None:
        compute_loss(model, lengths).backward()
    else:
        with layers:
            compute_loss(model, lengths).backward()
    found = {name: weight.grad for name, weight in model.module.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def largest_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry of its tensor."""
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


class Counter(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self, *wanted: Any) -> None:
        super().__init__()
        self.wanted = wanted
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.wanted
        return func(*args, **(kwargs or {}))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its code generation, which takes most of a minute: what is traced, and how often, stays the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    layers_file._compile_layer.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    layers_file._compile_layer.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradients_are_the_same_in_every_mode(family: str) -> None:
    model = build_model(model_type=family)
    plain = gradients(model, None)
    for mode in MODES:
        assert largest_gap(gradients(model, build_layers(model, checkpointing=mode)), plain) < 1e-10


def test_layers_are_computed_again_and_selective_multiplies_no_matrix_twice() -> None:
    model = build_model()
    calls: list[int] = []
    hook = model.module.base_model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    aten = torch.ops.aten
    norms, products = {}, {}
    for mode in MODES:
        for counted, ops in ((products, (aten.mm.default, aten.addmm.default)), (norms, (aten.rsqrt.default,))):
            calls.clear()
            with Counter(*ops) as counter:
                gradients(model, build_layers(model, checkpointing=mode))
            counted[mode] = counter.count
        assert len(calls) == (1 if mode == "none" else 2)
    hook.remove()
    assert products["selective"] == products["none"]
    # All products of three layers but the last of each, whose output backward does not need.
    assert products["full"] == products["none"] + 3 * 6
    # Four norms a layer: of hidden states, queries and keys.
    assert norms["full"] == norms["selective"] == norms["none"] + 3 * 4


def test_the_head_keeps_no_logits_where_layers_keep_their_inputs_alone() -> None:
    kept = {mode: build_layers(build_model(), checkpointing=mode).keep_logits_bytes for mode in MODES}
    assert kept == {"none": None, "selective": None, "full": 0}


def test_nothing_stays_behind_not_even_after_an_error() -> None:
    model = build_model()
    layers = build_layers(model, checkpointing="full", compiled=True)
    before = [dict(vars(module)) for module in model.module.modules()]
    seen: list[bool] = []

    def fail() -> None:
        with layers:
            seen.append(all("forward" in vars(layer) for layer in model.module.base_model.layers))
            seen.append(model.layers_compiled)
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        fail()
    assert seen == [True, True]
    assert not model.layers_compiled
    assert [dict(vars(module)) for module in model.module.modules()] == before


def test_layers_are_not_entered_twice() -> None:
    model = build_model()
    with (
        build_layers(model, checkpointing="full"),
        pytest.raises(RuntimeError, match="replaced already"),
        build_layers(model, checkpointing="selective"),
    ):
        pass
    assert not any("forward" in vars(layer) for layer in model.module.base_model.layers)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_never_wakes(mode: str) -> None:
    model, quiet = build_model(attention_dropout=0.5), build_model()
    with build_layers(model, checkpointing=mode):
        assert not any(module.training for module in model.module.modules())
        compute_loss(model, LENGTHS).backward()
        assert not any(module.training for module in model.module.modules())
    plain = gradients(quiet, None)
    assert all(torch.equal(weight.grad, plain[name]) for name, weight in model.module.named_parameters())  # type: ignore[arg-type]


def test_without_gradient_nothing_is_checkpointed_and_the_numbers_are_those_of_training() -> None:
    model = build_model()
    for mode in ("selective", "full"):
        with build_layers(model, checkpointing=mode):
            trained = compute_loss(model, LENGTHS)
            with torch.no_grad():
                alone = compute_loss(model, LENGTHS)
        assert not alone.requires_grad
        assert alone.item() == trained.item()


def test_a_base_whose_embedding_is_frozen_still_trains_under_checkpointing() -> None:
    model = build_model()
    model.module.requires_grad_(False)
    trained = [layer.self_attn.q_proj.weight for layer in model.module.base_model.layers]
    found: dict[str, list[Tensor]] = {}
    for mode in MODES:
        for weight in trained:
            weight.requires_grad_(True).grad = None
        with build_layers(model, checkpointing=mode):
            compute_loss(model, LENGTHS).backward()
        found[mode] = [weight.grad.clone() for weight in trained]
    for mode in ("selective", "full"):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[mode], found["none"], strict=True))
    assert all(gradient.abs().max() > 0 for gradient in found["none"])


@pytest.mark.parametrize(
    "checkpointing",
    ["selective", pytest.param("none", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.slow)],
)
def test_all_layers_and_lengths_share_one_compilation(traced: None, checkpointing: str) -> None:
    # Rows of one length: on the CPU attention pads by buckets, whose number is compiled in. No length equals another size of the model,
    # which the compiler would take for the same one.
    model = build_model()
    compiled = build_layers(model, checkpointing=checkpointing, compiled=True)
    for lengths in ([17, 17], [25, 25]):
        assert largest_gap(gradients(model, compiled, lengths), gradients(model, None, lengths)) < 1e-10
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_compiled_model_whose_attention_was_switched_back_is_refused() -> None:
    model = build_model()
    model.module.config._attn_implementation = "sdpa"
    with (
        pytest.raises(RuntimeError, match="names the attention 'sdpa', not 'hybridflow'"),
        build_layers(model, compiled=True),
    ):
        pass
    assert not any("forward" in vars(layer) for layer in model.module.base_model.layers)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_offload_holds_the_inputs_of_layers_and_nothing_else_on_the_host(traced: None, compiled: bool) -> None:
    model = build_model()
    lengths = [17, 17]
    layers = build_layers(model, checkpointing="full", offload=True, compiled=compiled)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    plain = gradients(model, None, lengths)
    model.module.zero_grad(set_to_none=True)
    with layers:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = compute_loss(model, lengths)
        assert layers._inputs.num_waiting == 3
        hidden_bytes = 34 * 32 * 8
        # The final norm's own, outside of the layers, are float32.
        assert not [tensor for tensor in kept if tensor.nbytes == hidden_bytes and tensor.shape == (1, 34, 32)][1:]
        loss.backward()
        assert layers._inputs.num_waiting == 0
    found = {name: weight.grad for name, weight in model.module.named_parameters()}
    assert largest_gap(found, plain) < 1e-10  # type: ignore[arg-type]


def test_a_fetched_input_brings_the_one_below_it_along() -> None:
    inputs = HostInputs(torch.device("cpu"))
    sent = [inputs._send(torch.full((4,), float(index))) for index in range(3)]
    assert inputs._fetch(sent[2]).tolist() == [2.0] * 4
    assert [kept.fetched is not None for kept in sent] == [False, True, True]
    assert inputs._fetch(sent[1]).tolist() == [1.0] * 4
    assert inputs._fetch(sent[0]).tolist() == [0.0] * 4
    assert inputs.num_waiting == 0


EXACT = {"dtype": torch.float32, "numerics": "exact"}
REFUSED = {
    "checkpointing in exact mode": (
        EXACT,
        {"checkpointing": "full"},
        "train.gradient_checkpointing is full, but numerics",
    ),
    "compile in exact mode": (EXACT, {"compiled": True}, "train.compile is true, but numerics 'exact' fixes"),
    "offload on a CPU": ({}, {"offload": True}, "train.activation_offload is true, but the model is not on a GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_are_refused(name: str) -> None:
    of_model, asked, message = REFUSED[name]
    model = build_model(**of_model)
    with pytest.raises(ConfigError, match=message):
        resolve(model, build_workload(model), 2**30, **asked)


def test_offload_without_full_checkpointing_is_refused() -> None:
    model = build_model()
    model.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="train.gradient_checkpointing is selective; write full there"):
        resolve(model, build_workload(model), 2**30, checkpointing="selective", offload=True)
    mode = resolve(model, build_workload(model), 2**40, checkpointing="auto", offload=True, compiled=False)
    assert mode == LayerMode("full", compiled=False, offload=True, auto=True)


def test_a_bool_of_an_old_configuration_is_refused_with_what_to_write() -> None:
    @settings
    class Old:
        """Settings."""

        gradient_checkpointing: CheckpointingSetting = "none"
        """How."""

    with pytest.raises(ConfigError, match=r"gradient_checkpointing is true, but .* write full"):
        Old(gradient_checkpointing=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"gradient_checkpointing is 'fulll'.*nearest is full"):
        Old(gradient_checkpointing="fulll")  # type: ignore[arg-type]
    assert Old(gradient_checkpointing="auto").gradient_checkpointing == "auto"


def test_auto_takes_the_fastest_mode_that_fits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model()
    workload = build_workload(model, tokens=4096)
    totals = {mode: compute_memory(workload, LayerMode(mode)).total for mode in MODES}
    assert totals["none"] > totals["selective"] > totals["full"]
    for mode, there in totals.items():
        assert resolve(model, workload, there) == LayerMode(mode, auto=True)
        assert len(caplog.records) == (0 if mode == "none" else 1)
        assert all(f"auto takes {mode}: a micro-batch of 4096 tokens" in line.getMessage() for line in caplog.records)
        caplog.clear()
    assert resolve(model, workload, 1).checkpointing == "full"
    exact = build_model(**EXACT)
    assert resolve(exact, workload, 1) == LayerMode("none")


SHAPE = ModelShape(2, 64, 128, 4, 2, 64, 100)
AUTO_COMPILES = {
    "a GPU": (Workload(SHAPE, torch.bfloat16, 64), True),
    "a CPU": (Workload(SHAPE, torch.bfloat16, 64, on_gpu=False), False),
    "no kernel for the numbers": (Workload(SHAPE, torch.float32, 64), False),
    "no kernel for the heads": (Workload(replace(SHAPE, head_dim=20), torch.bfloat16, 64), False),
    "no kernel with a softcap": (Workload(replace(SHAPE, attention_softcap=50.0), torch.bfloat16, 64), False),
}


@pytest.mark.parametrize("name", AUTO_COMPILES)
def test_auto_compiles_where_a_kernel_serves_packed_rows(name: str) -> None:
    workload, expected = AUTO_COMPILES[name]
    assert plan_compile("auto", workload) is expected
    assert plan_compile(True, workload) and not plan_compile(False, workload)


def run_out(layers: TrainLayers, model: LanguageModel, *modes: str) -> Callable[[], float]:
    """A step that runs out of memory in its backward pass in the given modes."""

    def step() -> float:
        with layers:
            loss = compute_loss(model, LENGTHS)
            with layers.phase("backward", 24):
                if layers.mode.checkpointing in modes:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
                loss.backward()
        return loss.item()

    return step


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_what_a_failed_step_has_computed_is_gone_before_the_next(mode: str) -> None:
    """Also where it holds itself, as a graph may."""
    model = build_model()
    layers = build_layers(model, checkpointing=mode, auto=True)
    kept: list[weakref.ref[Tensor]] = []

    def step() -> None:
        assert not [tensor for ref in kept if (tensor := ref()) is not None]
        with layers:
            hook = model.module.base_model.layers[1].mlp.register_forward_hook(
                lambda module, args, output: kept.extend([weakref.ref(args[0]), weakref.ref(output)])
            )
            loss = compute_loss(model, LENGTHS)
            circle: list[Any] = [loss]
            circle.append(circle)
            hook.remove()
            with layers.phase("backward", 24):
                if layers.mode.checkpointing != "full":
                    loss.backward(retain_graph=True)
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    layers.attempt(step, lambda: None, alone=True)
    assert len(kept) >= 4 and layers.mode.checkpointing == "full"


def test_auto_switches_on_after_running_out_and_does_the_step_again(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model()
    plain = gradients(model, None)
    layers = build_layers(model, auto=True)
    discarded: list[bool] = []

    def discard() -> None:
        # A step that failed half-way has left gradients.
        discarded.append(True)
        model.module.zero_grad(set_to_none=True)

    discard()
    loss = layers.attempt(run_out(layers, model, "none"), discard, alone=True)
    assert loss == compute_loss(model, LENGTHS).item()
    assert layers.mode == LayerMode("selective", auto=True)
    assert len(discarded) == 2
    assert largest_gap({name: weight.grad for name, weight in model.module.named_parameters()}, plain) < 1e-10  # type: ignore[misc]
    assert [line.levelno for line in caplog.records] == [logging.WARNING]
    assert "auto takes selective and does the step again after: out of memory in backward" in caplog.text
    layers.attempt(run_out(layers, model, "none"), discard, alone=True)
    assert len(discarded) == 2 and len(caplog.records) == 1
    layers.attempt(run_out(layers, model, "none", "selective"), discard, alone=True)
    assert layers.mode.checkpointing == "full"
    with pytest.raises(OutOfMemoryError):
        layers.attempt(run_out(layers, model, *MODES), discard, alone=True)


def test_a_step_is_done_again_only_alone_and_only_by_auto() -> None:
    model = build_model()
    for layers, alone in ((build_layers(model, auto=True), False), (build_layers(model), True)):
        with pytest.raises(OutOfMemoryError, match="train.gradient_checkpointing=full"):
            layers.attempt(run_out(layers, model, "none"), lambda: None, alone=alone)
        assert layers.mode.checkpointing == "none"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


REFERENCE = FusedKernels(rms_norm, silu_mul)


def count_kernels(calls: list[str]) -> FusedKernels:
    def counted(name: str, kernel: Callable[..., Tensor], *inputs: Any) -> Tensor:
        calls.append(name)
        return kernel(*inputs)

    return FusedKernels(partial(counted, "norm", rms_norm), partial(counted, "mlp", silu_mul))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_kernels_serve_one_model_and_no_other(family: str) -> None:
    model, other = (build_model(torch.float32, model_type=family) for _ in range(2))
    plain = gradients(other, None)
    names = [name for name, _ in model.module.named_parameters()]
    calls: list[str] = []
    apply_kernels(model.module, count_kernels(calls))
    # The final norm, and in each of three layers two, with Qwen 3 those of queries and keys too; once more under checkpointing.
    norms = 3 * (4 if family == "qwen3" else 2)
    assert largest_gap(gradients(model, None), plain) < 1e-4
    assert (calls.count("norm"), calls.count("mlp")) == (norms + 1, 3)
    assert largest_gap(gradients(model, build_layers(model, checkpointing="full")), plain) < 1e-4
    calls.clear()
    gradients(other, None)
    gradients(build_model(torch.float32, model_type=family), None)
    assert not calls
    assert [name for name, _ in model.module.named_parameters()] == names


@pytest.mark.slow
def test_fused_kernels_leave_one_compilation(traced: None) -> None:
    model = build_model(torch.float32)
    apply_kernels(model.module, REFERENCE)
    layers = build_layers(model, compiled=True)
    plain = gradients(build_model(torch.float32), None, [17, 17])
    assert largest_gap(gradients(model, layers, [17, 17]), plain) < 1e-4
    assert counters["stats"]["unique_graphs"] == 1


def test_liger_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="of family 'gemma2' its kernels are not known"):
        apply_liger(build_model(model_type="gemma2"))
    with pytest.raises(
        ConfigError, match=r"train.liger is true, but (cannot be had: .*|its kernels need a GPU.*); write false"
    ):
        apply_liger(build_model())
    with pytest.raises(ConfigError, match="kernel is for silu, and this model's MLP has GELUTanh"):
        apply_kernels(build_model(hidden_act="gelu_pytorch_tanh").module, REFERENCE)


PRECISIONS = {
    "float16": (torch.float16, "cpu", {}, "float16, whose gradients overflow without a loss scaler"),
    "liger in float64": (
        torch.float64,
        "cpu",
        {"liger": True},
        "its kernels compute in float32 and model.dtype is float64",
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_that_would_not_hold_are_refused(name: str) -> None:
    dtype, device, asked, message = PRECISIONS[name]
    with pytest.raises(ConfigError, match=message):
        check_precision(dtype, torch.device(device), **asked)
    for fine in (torch.bfloat16, torch.float32):
        check_precision(fine, torch.device(device), liger=True)
    check_precision(torch.float64, torch.device(device))


def test_autocast_tf32_and_emulated_bfloat16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="float32 passes in bfloat16"):
        check_precision(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_precision(torch.float32, torch.device("cuda"))
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigError, match="TF32 is on.*set_float32_matmul_precision"):
            check_precision(torch.float32, torch.device("cuda"))
        check_precision(torch.bfloat16, torch.device("cuda"))
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    with pytest.raises(ConfigError, match="bfloat16, which V100 only emulates"):
        check_precision(torch.bfloat16, torch.device("cuda"))

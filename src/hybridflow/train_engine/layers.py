"""The decoder layers as training runs them: checkpointed, compiled, their inputs waiting on the host. The module stays as it is.

Dimensions: T packed tokens, D model.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel
from hybridflow.models.attention import ATTENTION_NAME
from hybridflow.models.attention_varlen import serves_varlen
from hybridflow.train_engine.host_inputs import HostInputs
from hybridflow.train_engine.memory import (
    GIB,
    MODES,
    Checkpointing,
    LayerMode,
    OutOfMemoryError,
    Phase,
    Workload,
    compute_memory,
    naming_out_of_memory,
    plan_checkpointing,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

# More than a model needs: with and without gradient, each kind of attention window; times the models of one process.
_MAX_COMPILATIONS = 64
_FSDP_FLAG = "_is_fsdp_managed_module"


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        instead = "full" if value else "none"
        raise ValueError(f"is {str(value).lower()}, but it is one of none, selective, full, auto; write {instead}")
    return value


CheckpointingSetting = Annotated[Literal["none", "selective", "full", "auto"], BeforeValidator(_refuse_bool)]
CompileSetting = bool | Literal["auto"]


def check_layers(
    checkpointing: CheckpointingSetting, compiled: CompileSetting, offload: bool, *, on_gpu: bool, exact: bool
) -> None:
    """Raises ConfigError for what cannot be on such a device in such numerics; before launch, without the model."""
    if exact and checkpointing in ("selective", "full"):
        raise ConfigError(
            f"train.gradient_checkpointing is {checkpointing}, but numerics 'exact' cannot compute layers again in backward; "
            "write none, or numerics=fast"
        )
    if exact and compiled is True:
        raise ConfigError(
            "train.compile is true, but numerics 'exact' fixes every operation, and a compiler would not; write false, or numerics=fast"
        )
    if offload:
        _check_offload(checkpointing, on_gpu=on_gpu)


def resolve_layers(
    model: LanguageModel,
    workload: Workload,
    budget_bytes: int,
    *,
    checkpointing: CheckpointingSetting,
    compiled: CompileSetting,
    offload: bool,
) -> LayerMode:
    """The mode that the settings ask for on this device; ConfigError for what cannot be.

    auto: of checkpointing, the fastest mode whose estimate is within the budget, `full` with offload, none in exact mode; said in a line
          of the log where it is not none. Of `compiled`: see `plan_compile`.
    """
    on_gpu, exact = model.device.type == "cuda", model.numerics == "exact"
    check_layers(checkpointing, compiled, offload, on_gpu=on_gpu, exact=exact)
    compiles = not exact and plan_compile(compiled, workload)
    if checkpointing != "auto":
        return LayerMode(checkpointing, compiles, offload)
    if exact:
        return LayerMode("none", False)
    chosen = "full" if offload else plan_checkpointing(workload, budget_bytes, compiled=compiles)
    _tell_choice(chosen, workload, budget_bytes, compiles)
    return LayerMode(chosen, compiles, offload, auto=True)


def plan_compile(compiled: CompileSetting, workload: Workload) -> bool:
    """Whether layers run compiled; `auto`: on GPUs, where a kernel serves packed rows."""
    if compiled != "auto":
        return compiled
    shape, device = workload.shape, torch.device("cuda" if workload.on_gpu else "cpu")
    # Attention over padded blocks has Python inside, other for each batch.
    return serves_varlen(device, workload.dtype, shape.head_dim, shape.attention_softcap)


def _check_offload(checkpointing: CheckpointingSetting, *, on_gpu: bool) -> None:
    if not on_gpu:
        raise ConfigError(
            "train.activation_offload is true, but the model is not on a GPU: its activations are on the host already; write false"
        )
    if checkpointing not in ("full", "auto"):
        raise ConfigError(
            f"train.activation_offload is true, but what it moves are the inputs that full checkpointing keeps, and "
            f"train.gradient_checkpointing is {checkpointing}; write full there, or false here"
        )


def _tell_choice(chosen: Checkpointing, workload: Workload, budget_bytes: int, compiled: bool) -> None:
    if chosen == "none":
        return
    plain = compute_memory(workload, LayerMode("none", compiled))
    _log.warning(
        "gradient_checkpointing auto takes %s: a micro-batch of %d tokens without it is estimated at %.1f GiB of activations "
        "beside %.1f GiB of weights, gradients and optimizer, and there are %.1f GiB",
        *(chosen, workload.micro_batch_tokens, plain.activations / GIB, plain.fixed / GIB, budget_bytes / GIB),
    )


class TrainLayers(AbstractContextManager["TrainLayers"]):
    """Within it, every decoder layer's `forward` is the training one; the rollout runs the same modules, so it ends with the passes.

    Only the attribute `forward` of the instances is set: hooks (FSDP2's) are on the call and stay outside of checkpoint and compiler. A
    backward pass belongs inside too. No module's training flag changes, so no dropout wakes.

    All layers of all models share one compiled function, whose argument the layer is: one compilation for each kind of layer, with
    gradient and without, whatever the number of tokens. Checkpointing is inside of what is compiled.
    """

    def __init__(self, model: LanguageModel, workload: Workload, mode: LayerMode) -> None:
        self.mode = mode
        self._model = model
        self._workload = workload
        self._layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
        if len(self._layers) != model.num_layers:
            raise RuntimeError(
                f"{len(self._layers)} layers that can be checkpointed were found in a model of {model.num_layers}"
            )
        self._inputs = HostInputs(model.device)
        self._stack = ExitStack()

    def __enter__(self) -> TrainLayers:
        if self.mode.is_plain:
            return self
        if any("forward" in vars(layer) for layer in self._layers):
            raise RuntimeError("a layer's forward is replaced already: leave the context that did it first")
        with ExitStack() as stack:
            if self.mode.compiled:
                stack.enter_context(_compiling(self._model, self._layers))
            stack.callback(self._restore)
            for layer in self._layers:
                vars(layer)["forward"] = partial(self._run, layer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._inputs.clear()

    def _restore(self) -> None:
        for layer in self._layers:
            del vars(layer)["forward"]

    def _run(self, layer: nn.Module, hidden: Tensor, **kwargs: Any) -> Tensor:
        mode = self.mode
        run = _compile_layer() if mode.compiled else run_layer
        if not mode.offload or not torch.is_grad_enabled():
            return run(mode.checkpointing, layer, hidden, kwargs)
        with self._inputs.keeping(hidden):
            return run(mode.checkpointing, layer, hidden, kwargs)

    @property
    def keep_logits_bytes(self) -> int | None:
        """Logits that the head may keep for backward: none under full checkpointing, which is for little memory; None: a share of
        what is free."""
        return 0 if self.mode.checkpointing == "full" else None

    def estimate_pass_bytes(self) -> int:
        """What a micro-batch is estimated to need beside weights, gradients and optimizer."""
        estimate = compute_memory(self._workload, self.mode)
        return estimate.activations + estimate.backward

    def phase(self, phase: Phase, num_tokens: int | None = None) -> AbstractContextManager[None]:
        """Around a part of a step: an out-of-memory error in it names the phase, the tokens of the micro-batch and the remedies."""
        return naming_out_of_memory(phase, num_tokens, self._model.device, self._workload, self.mode)

    def attempt(self, step: Callable[[], T], discard: Callable[[], None], *, alone: bool) -> T:
        """What `step` returns. Where memory does not suffice, `auto` makes checkpointing stricter, says so, and does the step again.

        step:    passes alone, no optimizer step: it may run again from the start.
        discard: forgets what a step that failed has left.
        alone:   no other rank is in the step; several ranks could not repeat it together.
        """
        while True:
            try:
                return step()
            except OutOfMemoryError as error:
                stricter = self._find_stricter() if alone else None
                if stricter is None:
                    raise
                reason = str(error)
            # Outside of the handler: the error's traceback holds the tensors of the step that failed, and graphs may hold themselves.
            discard()
            gc.collect()
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()
            _log.warning("gradient_checkpointing auto takes %s and does the step again after: %s", stricter, reason)
            self.mode = replace(self.mode, checkpointing=stricter)

    def _find_stricter(self) -> Checkpointing | None:
        """The next stricter mode, where there is one and `auto` may take it."""
        if not self.mode.auto or self.mode.checkpointing == "full":
            return None
        return MODES[MODES.index(self.mode.checkpointing) + 1]


@contextmanager
def _compiling(model: LanguageModel, layers: Sequence[nn.Module]) -> Iterator[None]:
    # What the model itself sees to by counting calls, which a compiled layer cannot.
    if model.config._attn_implementation != ATTENTION_NAME:
        raise RuntimeError(
            f"the model's config names the attention '{model.config._attn_implementation}', not '{ATTENTION_NAME}': build every other "
            "model from a copy of the config"
        )
    sharded = [module for layer in layers for module in layer.modules() if _FSDP_FLAG in vars(module)]
    with torch._dynamo.config.patch(recompile_limit=_MAX_COMPILATIONS):
        model.layers_compiled = True
        # By this flag, which nothing else reads, the compiler takes shapes of weights and sizes of heads for ones that change. Here
        # weights are gathered before a layer's forward, whose hooks stay outside, so it is a module like any other.
        for module in sharded:
            vars(module)[_FSDP_FLAG] = False
        try:
            yield
        finally:
            model.layers_compiled = False
            for module in sharded:
                vars(module)[_FSDP_FLAG] = True


@cache
def _compile_layer() -> Callable[..., Tensor]:
    return torch.compile(run_layer, dynamic=True)


def run_layer(checkpointing: Checkpointing, layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """A layer's output, its backward pass prepared as `checkpointing` says. Nothing of it is random."""
    forward = type(layer).forward
    if checkpointing == "none" or not torch.is_grad_enabled():
        return forward(layer, hidden, **kwargs)
    # The input alone is an argument: what the layers share (rotary tables, attention plan) is held, not saved once a layer.
    run = partial(_call_layer, forward, layer, kwargs)
    if checkpointing == "full":
        return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)


def _call_layer(forward: Callable[..., Tensor], layer: nn.Module, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    return forward(layer, hidden, **kwargs)


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_choose_policy)


def _choose_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what matrix units have computed and attention's outputs; the rest is cheap."""
    kept = op in _kept_ops() or op.namespace == "hybridflow"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _kept_ops() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {
            aten.mm.default,
            aten.addmm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            torch.ops.torch_attn._varlen_attn.default,
        }
    )

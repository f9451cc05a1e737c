"""How much memory a step takes: an estimate from a model's shape and the layout, and what is said when it does not suffice.

Dimensions: T tokens of a micro-batch, D model, H query heads, N kv heads, K head size, I inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from hybridflow.config import HybridflowError
from hybridflow.models.families import find_family
from hybridflow.models.head_chunks import compute_head_bytes
from hybridflow.types import UNSHAPED, Shaping

Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the fastest to the one that takes the least memory."""
Phase = Literal["forward", "backward", "optimizer"]

GIB = 2**30
# Of what a device has, some goes to the context, the kernels and the gaps between blocks.
_USABLE = {"cuda": 0.9, "cpu": 0.5}
_TOLD = 4
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class OutOfMemoryError(HybridflowError, RuntimeError):
    """A device's memory did not suffice; the message names the phase, the numbers and the settings that would help."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its memory, e.g. 28 layers of `hidden_size=1024`.

    num_norms: norms over the hidden states in a layer.
    qk_norm:   queries and keys are normed too.
    tied:      the head is the embedding.
    attention_softcap: None for families without one.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_norms: int = 2
    qk_norm: bool = False
    tied: bool = True
    attention_softcap: float | None = None

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def num_weights(self) -> int:
        """All weights, norms and biases left out."""
        ends = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * self.layer_weights + ends


@dataclass(frozen=True)
class LayerMode:
    """How layers run: `LayerMode(checkpointing="full", compiled=True)`.

    offload: layer inputs wait on the host, with `full`.
    auto:    `checkpointing` was chosen here, and may become stricter.
    """

    checkpointing: Checkpointing = "none"
    compiled: bool = False
    offload: bool = False
    auto: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether layers run as they are."""
        return self.checkpointing == "none" and not (self.compiled or self.offload)


@dataclass(frozen=True)
class RowMemory:
    """What rows take memory for beside their tokens, e.g. `RowMemory(Shaping(1.1), keys_per_token=1.5)`.

    shaping:        of their distributions, which the head computes.
    keys_per_token: keys, each with its value, that attention holds for a token that is computed: above 1 where prompts are shared.
    """

    shaping: Shaping = UNSHAPED
    keys_per_token: float = 1.0


PLAIN_ROW_MEMORY = RowMemory()


@dataclass(frozen=True)
class Workload:
    """What one rank has to hold and to run, in numbers.

    dtype:              of the passes: bfloat16, float32 or float64.
    micro_batch_tokens: T of the whole micro-batch; `sequence` ranks share it.
    tensor, sequence, shard: the degrees.
    replicas:           ranks of `data` x `sequence`, over which weights could be sharded.
    trained_weights:    how many train; None: all. The others (the base under LoRA) have neither gradient nor optimizer.
    on_host:            what waits in the host's memory: `optimizer` moments and masters, `parameters` shards and gradients too.
    on_gpu:             where the passes run.
    exact:              numerics.
    expected:           what the rows take beside their tokens.
    """

    shape: ModelShape
    dtype: torch.dtype
    micro_batch_tokens: int
    tensor: int = 1
    sequence: int = 1
    shard: int = 1
    replicas: int = 1
    trained_weights: int | None = None
    on_host: Literal["none", "optimizer", "parameters"] = "none"
    on_gpu: bool = True
    exact: bool = False
    expected: RowMemory = PLAIN_ROW_MEMORY


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak.

    weights:     live weights, with float32 masters where they have some.
    gradients:   in the masters' type.
    optimizer:   both moments.
    activations: kept from forward to backward.
    backward:    what the head's backward or one layer's holds beside them, whichever is more.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    backward: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.fixed + self.activations + self.backward

    @property
    def fixed(self) -> int:
        """What is there whatever goes through the model."""
        return self.weights + self.gradients + self.optimizer


def read_shape(config: PretrainedConfig) -> ModelShape:
    """The shape that a model's config describes; no weights are needed."""
    values, family = config.to_dict(), find_family(config.model_type)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=values.get("head_dim") or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        num_norms=family.num_norms,
        qk_norm=family.normed_heads,
        tied=bool(config.tie_word_embeddings),
        attention_softcap=values.get("attn_logit_softcapping"),
    )


def compute_memory(workload: Workload, mode: LayerMode) -> MemoryEstimate:
    """An estimate of the peak of one rank, in bytes.

    Activations are held against what autograd saves, in tests; the rest is counted. The peak is in the head's backward or in the last
    layer's, which follows it, with all activations still there. Logits that the head keeps are not counted: it takes for them a share
    of what is free, so a device may be seen to hold more than is needed.
    """
    shape = workload.shape
    tokens = -(-workload.micro_batch_tokens // workload.sequence)
    ends = 4 * shape.hidden_size * workload.dtype.itemsize
    layers_kept = min(2, shape.num_layers) if mode.offload else shape.num_layers
    # The gradients of a layer's widest tensors, and all of a layer that is computed again.
    layer = tokens * compute_layer_bytes(workload, replace(mode, checkpointing="none"))
    head = compute_head_bytes(
        tokens, shape.vocab_size // workload.tensor, shape.hidden_size, workload.dtype,
        on_gpu=workload.on_gpu, trains=workload.trained_weights is None, exact=workload.exact, shaping=workload.expected.shaping,
    )  # fmt: skip
    return MemoryEstimate(
        **_compute_fixed(workload),
        activations=tokens * (layers_kept * compute_layer_bytes(workload, mode) + ends),
        backward=max(layer, head),
    )


def compute_layer_bytes(workload: Workload, mode: LayerMode) -> int:
    """Bytes a token that one layer keeps for its backward pass.

    full:      its input.
    selective: its input, and the outputs of its matrix products and of attention.
    none:      not compiled, all that the operations of Transformers' layers save (norms in float32); compiled, what is not cheap to
               compute again. Both keep the copies of keys and values that rows with a shared prompt attend to.

    Where attention is neither fused nor without a softcap (Gemma 2), it keeps its scores too, quadratic in the rows, which are not counted.
    """
    shape, size = workload.shape, workload.dtype.itemsize
    hidden = shape.hidden_size
    if mode.checkpointing == "full":
        return size * hidden
    queries = shape.num_heads * shape.head_dim // workload.tensor
    keys = max(1, shape.num_kv_heads // workload.tensor) * shape.head_dim
    inner = shape.intermediate_size // workload.tensor
    log_sums = 4 * shape.num_heads // workload.tensor
    if mode.checkpointing == "selective":
        return size * (3 * hidden + 2 * queries + 2 * keys + 2 * inner) + log_sums
    copies = int(size * 2 * keys * (workload.expected.keys_per_token - 1))
    if mode.compiled:
        return size * (4 * hidden + 3 * queries + 3 * keys + 3 * inner) + log_sums + copies
    normed = shape.num_norms * hidden
    heads_normed = queries + keys if shape.qk_norm else 0
    # A norm saves its input in float32, its output before the weight and after it; of a float32 input, the input itself.
    norms = normed * (2 * size + 4) + heads_normed * (size + 4)
    return norms + size * (2 * queries + 2 * keys + 4 * inner) + log_sums + copies


def _compute_fixed(workload: Workload) -> dict[str, int]:
    shape, size = workload.shape, workload.dtype.itemsize
    weights = shape.num_weights // workload.tensor
    trained = weights if workload.trained_weights is None else workload.trained_weights // workload.tensor
    frozen, master = max(0, weights - trained), max(size, 4)
    if workload.shard == 1:
        live, masters = size * weights, 0 if master == size else master * trained
    else:
        # Two layers at a time are gathered, the next beside the one that runs, and what is outside of layers.
        live = size * (2 * shape.layer_weights + shape.vocab_size * shape.hidden_size) // workload.tensor
        masters = (master * trained + size * frozen) // workload.shard
    masters_here = workload.on_host == "none" or (workload.on_host == "optimizer" and workload.shard > 1)
    return {
        "weights": live + (masters if masters_here else 0),
        "gradients": 0 if workload.on_host == "parameters" else master * trained // workload.shard,
        "optimizer": 0 if workload.on_host != "none" else 2 * master * trained // workload.shard,
    }


def plan_checkpointing(workload: Workload, budget_bytes: int, *, compiled: bool) -> Checkpointing:
    """The fastest mode whose estimate is within the budget; `full` where none is."""
    for mode in MODES:
        if compute_memory(workload, LayerMode(mode, compiled)).total <= budget_bytes:
            return mode
    return "full"


def read_budget(device: torch.device) -> int:
    """Bytes of a device that training may count on: nine tenths of a GPU, half of a host's memory (that of its container).

    The same on devices of one kind, whatever is allocated on them.
    """
    return int(_USABLE[device.type] * read_usage(device)[1])


def read_usage(device: torch.device) -> tuple[int, int]:
    """(bytes in use, bytes there); on the CPU, of this process and of the host or container."""
    if device.type == "cuda":
        free, there = torch.cuda.mem_get_info(device)
        return there - free, there
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    return resident, min(page * os.sysconf("SC_PHYS_PAGES"), _read_container_limit())


def read_free(device: torch.device) -> int:
    """Bytes of a GPU that this process can still take: what nobody has, and what its allocator holds unused."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def _read_container_limit() -> int:
    text = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return 2**62 if text == "max" else int(text)


@contextmanager
def naming_out_of_memory(
    phase: Phase, num_tokens: int | None, device: torch.device, workload: Workload, mode: LayerMode
) -> Iterator[None]:
    """Turns torch's out-of-memory error into one that says what to do.

    num_tokens: of the micro-batch that runs; None where none does.
    mode:       as layers run now.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = describe_out_of_memory(phase, num_tokens, device, workload, mode)
        raise OutOfMemoryError(f"{text} ({str(error).splitlines()[0].rstrip('.')})") from error


def describe_out_of_memory(
    phase: Phase, num_tokens: int | None, device: torch.device, workload: Workload, mode: LayerMode
) -> str:
    """`out of memory in backward of a micro-batch of 16384 tokens: 78.9 of 79.2 GiB of cuda:0 are in use; ...`."""
    used, there = read_usage(device)
    where = f"{phase} of a micro-batch of {num_tokens} tokens" if num_tokens else f"the {phase} step"
    remedies = [f"{knob} (about {_gib(saved)} GiB less)" for knob, saved in plan_remedies(workload, mode)]
    advice = ", ".join(remedies) or "a smaller model or more devices"
    return (
        f"out of memory in {where}: {_gib(used)} of {_gib(there)} GiB of {device} are in use; what would help: {advice}"
    )


def plan_remedies(workload: Workload, mode: LayerMode) -> list[tuple[str, int]]:
    """Settings that would take less memory, each with the bytes it is estimated to save; the most first, at most four."""
    now = compute_memory(workload, mode)

    def saved(other: Workload, other_mode: LayerMode = mode) -> int:
        return now.total - compute_memory(other, other_mode).total

    half = workload.micro_batch_tokens // 2
    remedies = {
        f"train.gradient_checkpointing={stricter}": saved(workload, replace(mode, checkpointing=stricter))
        for stricter in MODES[MODES.index(mode.checkpointing) + 1 :]
    }
    if half:
        halved = saved(replace(workload, micro_batch_tokens=half))
        remedies[f"train.micro_batch_tokens={half}, if no row is longer"] = halved
    if mode.checkpointing == "full" and not mode.offload:
        remedies["train.activation_offload=true"] = saved(workload, replace(mode, offload=True))
    if workload.on_host == "none":
        remedies["train.offload=optimizer"] = saved(replace(workload, on_host="optimizer"))
    if workload.replicas > workload.shard:
        remedies["train.parallel_config.shard=0"] = saved(replace(workload, shard=workload.replicas))
    if workload.trained_weights is None:
        adapter = workload.shape.num_weights // 100
        remedies["train.lora"] = saved(replace(workload, trained_weights=adapter))
    told = sorted(remedies.items(), key=lambda remedy: -remedy[1])[:_TOLD]
    return [(knob, num_bytes) for knob, num_bytes in told if num_bytes > 0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"

"""Tensor-parallel generation: each rank of a group has a part of every matrix, and all of them draw the same tokens.

A part is a Hugging Face module of its own, with fewer heads and a narrower MLP, so that the cache, the scheduler, the fused layers and the
graphs work on it as on a whole model. Two sums over ranks a layer, behind the attention's output and the MLP's, make it the whole one's;
the embedding is whole on each rank, the head is split over the vocabulary. Logits of the rows that draw are gathered, and every rank draws
for itself, with the same keys: no rank leads.

Dimensions: T packed tokens, B rows that draw, D model, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hybridflow.config import ConfigError, HybridflowError
from hybridflow.models import Head, LanguageModel
from hybridflow.models.attention import ATTENTION_NAME
from hybridflow.models.head import VocabularyShard, compute_product
from hybridflow.rollout.base import WatchedWeights
from hybridflow.rollout.requests import read_shapes
from hybridflow.types import PeerLostError
from hybridflow.weights.layout import WeightLayout, plan_rollout, read_tensor_dims

_KEY = "rollout.native.tp"
_POLL_S = 5e-5
LONG_PASS = 2048
"""Tokens from which on a pass is worth two collectives in place of one: a link is busy with these longer than with starting."""
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise", "colwise_gather_output"}


class DrawsDifferError(HybridflowError, RuntimeError):
    """Ranks that share a model have drawn different tokens."""


class TensorRanks(Protocol):
    """This process among those that share a model; what it asks of all of them, all of them ask at once."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over ranks, in place."""
        ...

    def max_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its elementwise maximum over ranks, in place."""
        ...

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of ranks, through the host."""
        ...

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Every rank's rows, one rank's below the other's; of one shape on all."""
        ...

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """This rank's part of the rows of the sum over ranks."""
        ...


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """What an engine has to know of the ranks that generate with it: all call its verbs alike, with the same prompts.

    tokens:    how long passes over prompts are shared out.
    layout:    which box of each weight every rank of the group holds.
    timeout_s: bound of a wait for the device, which may itself wait for another rank.

    All that is decided follows from prompts, settings and drawn tokens, which are the same on all ranks. What may differ, free memory and
    the wish to end a call, is agreed on through the host, and with it that the tokens are indeed the same.
    """

    ranks: TensorRanks
    tokens: TokenSplit
    layout: WeightLayout
    timeout_s: float

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(min(numbers[0] for numbers in self.ranks.gather([number])))

    def is_ended(self, is_aborting: bool, checksum: int) -> bool:
        """Whether any rank ends the call. Raises DrawsDifferError where the tokens drawn so far, of this `checksum`, are not the same."""
        told = self.ranks.gather([float(is_aborting), float(checksum)])
        odd = [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        if odd:
            raise DrawsDifferError(
                f"ranks 0 and {odd[0]} of {self.ranks.size} share a model and have drawn different tokens; place them on devices of one "
                f"kind, or set {_KEY}=1"
            )
        return any(aborting for aborting, _ in told)

    def wait(self, done: torch.cuda.Event) -> None:
        """Returns when the device is there; PeerLostError where that takes longer than `timeout_s`."""
        end_s = time.monotonic() + self.timeout_s
        while not done.query():
            if time.monotonic() > end_s:
                raise PeerLostError(
                    f"rank {self.ranks.rank} of {self.ranks.size} that share a model waited {self.timeout_s:g} s for a step of all; "
                    "look for the error of the rank that failed first"
                )
            time.sleep(_POLL_S)


class TokenSplit:
    """Sequence parallel for passes over long prompts (Megatron's, arXiv:2205.05198).

    Where layers act on single tokens, norms and residuals, each rank has a part of the pass's tokens; attention and MLP see all of them,
    with a part of the heads and features. So each sum over ranks becomes a reduce-scatter and the gather before the next product: the
    same bytes travel. Off, as in passes of fewer than `LONG_PASS` tokens and without ranks, all methods leave tokens whole.
    """

    def __init__(self, ranks: TensorRanks | None = None) -> None:
        self._ranks = ranks
        self._num_tokens = 0

    @contextmanager
    def splitting(self, num_tokens: int) -> Iterator[None]:
        """On for a pass of so many tokens, where that is long."""
        self._num_tokens = num_tokens if num_tokens >= LONG_PASS else 0
        try:
            yield
        finally:
            self._num_tokens = 0

    def share(self, whole_TD: Tensor) -> Tensor:
        """This rank's tokens; parts are of one size, the last one filled up."""
        if self._ranks is None or not self._num_tokens:
            return whole_TD
        return self._fill(whole_TD).chunk(self._ranks.size)[self._ranks.rank].clone()

    def gather(self, part_TD: Tensor) -> Tensor:
        """All tokens, from every rank's."""
        if self._ranks is None or not self._num_tokens:
            return part_TD
        return self._ranks.gather_rows(part_TD)[: self._num_tokens]

    def sum(self, partial_TD: Tensor) -> Tensor:
        """The sum over ranks, of this rank's tokens; `partial_TD` may be written over."""
        if self._ranks is None:
            return partial_TD
        if not self._num_tokens:
            self._ranks.sum_(partial_TD)
            return partial_TD
        return self._ranks.sum_rows(self._fill(partial_TD))

    def _fill(self, whole_TD: Tensor) -> Tensor:
        assert self._ranks is not None
        lacking = -len(whole_TD) % self._ranks.size
        return F.pad(whole_TD, (0, 0, 0, lacking)) if lacking else whole_TD


@dataclass(frozen=True, kw_only=True)
class SharedVocabulary(VocabularyShard):
    """A head's rows of a rank, whose logits can be gathered.

    ranks: the same as `axis`. size: V.
    """

    ranks: TensorRanks
    size: int

    def gather(self, part_BV: Tensor) -> Tensor:
        """[B, V] from every rank's columns; the same bits on all ranks."""
        width, (rows, own) = -(-self.size // self.ranks.size), part_BV.shape
        every = self.ranks.gather_rows(F.pad(part_BV, (0, width - own)) if own < width else part_BV)
        every_BRV = every.view(self.ranks.size, rows, width).transpose(0, 1)
        return every_BRV.reshape(rows, self.ranks.size * width)[:, : self.size]


def can_draw(model: LanguageModel) -> bool:
    """Whether logits of the whole vocabulary can be had: of a model that is split for training they cannot."""
    return model.vocabulary is None or isinstance(model.vocabulary, SharedVocabulary)


def compute_raw_logits(hidden_BD: Tensor, head: Head) -> Tensor:
    """The head's raw products [B, V], before scale and softcap; of a split head from all ranks, which call together."""
    vocabulary = head.vocabulary
    raw_BV = compute_product(hidden_BD, head.weight.t(), head)
    if vocabulary is None:
        return raw_BV
    if not isinstance(vocabulary, SharedVocabulary):
        raise ValueError("the model is split for training, and its logits are not gathered; generate with a copy")
    return vocabulary.gather(raw_BV)


def check_tensor_rollout(config: PretrainedConfig, degree: int) -> None:
    """Raises ConfigError where the model cannot generate in so many parts; before launch, from the config alone."""
    heads, kv_heads, rows = config.num_attention_heads, config.num_key_value_heads, config.vocab_size
    if heads % degree:
        raise ConfigError(f"{_KEY}: {degree} does not divide the model's {heads} attention heads; set a divisor")
    if kv_heads % degree and degree % kv_heads:
        raise ConfigError(
            f"{_KEY}: {degree} neither divides the model's {kv_heads} key-value heads nor is a multiple of them; set one that does or is"
        )
    if config.intermediate_size % degree:
        raise ConfigError(
            f"{_KEY}: {degree} does not divide the model's intermediate size of {config.intermediate_size}; set a divisor"
        )
    # Parts are of one size but for the last, as torch.chunk cuts: few rows over many ranks leave the last ranks none.
    if -(-rows // -(-rows // degree)) != degree:
        raise ConfigError(
            f"{_KEY}: a vocabulary of {rows} leaves one of {degree} ranks without a part; set a lower degree"
        )
    odd = sorted(set((config.base_model_tp_plan or {"": "nothing"}).values()) - _STYLES)
    if odd:
        raise ConfigError(f"{_KEY}: the plan of '{config.model_type}' says '{odd[0]}', which is not known; set it to 1")


def plan_shards(config: PretrainedConfig, *, size: int, tensor: int, dtype: torch.dtype) -> WeightLayout:
    """Which box of each weight every one of `size` ranks generates with, in groups of `tensor` neighbours.

    By the model's own plan: rows of q, k, v, gate and up, columns of o and down, by whole heads; where kv heads are fewer than ranks,
    several have the same one. A head of its own is split by rows; the embedding is whole, and a head tied to it a part of that.
    """
    shapes = read_shapes(config)
    split = () if config.tie_word_embeddings else ("lm_head",)
    dims = read_tensor_dims(shapes, config.base_model_tp_plan, split)
    return plan_rollout(
        *(shapes, dims),
        ranks=range(size),
        size=size,
        tensor=tensor,
        dtype=dtype,
        num_kv_heads=config.num_key_value_heads,
    )


def build_shard(
    whole: LanguageModel, ranks: TensorRanks, *, device: torch.device, dtype: torch.dtype, timeout_s: float
) -> tuple[LanguageModel, TensorGroup]:
    """This rank's part of a model, with weights that are yet to come, and its group.

    whole: gives the configuration and the buffers; its weights are not read, so it may itself be split or sharded.
    """
    check_tensor_rollout(whole.config, ranks.size)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            _cut_config(whole, ranks.size), dtype=dtype, attn_implementation=ATTENTION_NAME
        )
        tokens = TokenSplit(ranks)
        _sum_rows(module.base_model, whole.config.base_model_tp_plan, tokens)
        _split_tokens(module, tokens)
        rows = _cut_head(module, whole.config, ranks)
    module.to_empty(device=device)
    module.tie_weights()
    _copy_buffers(whole.module, module)
    model = LanguageModel(module.eval().requires_grad_(False))
    offset, vocab_size = ranks.rank * -(-whole.vocab_size // ranks.size), whole.vocab_size
    local = _rows_from(offset, rows) if whole.config.tie_word_embeddings else _all_rows
    model.vocabulary = SharedVocabulary(offset, ranks, local, ranks=ranks, size=vocab_size)
    layout = plan_shards(whole.config, size=ranks.size, tensor=ranks.size, dtype=dtype)
    return model, TensorGroup(ranks, tokens, layout, timeout_s)


@torch.no_grad()
def copy_shards(module: nn.Module, group: TensorGroup, weights: Iterable[tuple[str, Tensor]]) -> None:
    """As `copy_weights`, from whole weights to this rank's parts."""
    own, held = dict(module.named_parameters()), group.layout.tensors
    shapes = {name: torch.Size(held[name].placement.global_shape) for name in own}
    watched = WatchedWeights(weights, shapes)
    for name, weight in watched:
        box = held[name].placement.box(group.ranks.rank)
        own[name].copy_(
            weight[tuple(slice(start, start + length) for start, length in zip(box.offsets, box.shape, strict=True))]
        )
    watched.check()


class RowLinear(nn.Linear):
    """A linear layer over this rank's input features, summed over ranks; the bias is whole on each, and added once."""

    def __init__(self, linear: nn.Linear, tokens: TokenSplit) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._tokens = tokens

    def forward(self, input: Tensor) -> Tensor:
        """This rank's part of [..., T, D] to [..., T, E], the same on all ranks, or of its own tokens."""
        partial = F.linear(input, self.weight)
        out = self._tokens.sum(partial.flatten(0, -2)).view(*partial.shape[:-2], -1, partial.shape[-1])
        return out if self.bias is None else out + self.bias


def _cut_config(whole: LanguageModel, degree: int) -> PretrainedConfig:
    config = copy.deepcopy(whole.config)
    # What it was before follows from the number of heads, in families that do not name it.
    config.head_dim = whole.head_dim
    config.num_attention_heads = whole.num_heads // degree
    config.num_key_value_heads = max(whole.num_kv_heads // degree, 1)
    config.intermediate_size = config.intermediate_size // degree
    return config


def _split_tokens(module: PreTrainedModel, tokens: TokenSplit) -> None:
    """Has the module's own forward share its tokens out; the fused layers do so themselves. One packed row goes through: [1, T, D]."""

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (tokens.gather(args[0][0])[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": tokens.gather(kwargs["hidden_states"][0])[None]}

    base: Any = module.base_model
    module.get_input_embeddings().register_forward_hook(lambda _, __, out: tokens.share(out[0])[None])
    base.norm.register_forward_hook(lambda _, __, out: tokens.gather(out[0])[None])
    for layer in base.layers:
        layer.self_attn.register_forward_pre_hook(gather, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(gather, with_kwargs=True)


def _sum_rows(base: nn.Module, plan: Mapping[str, str], tokens: TokenSplit) -> None:
    """Puts layers that sum in the place of those whose inputs are split."""
    ends = tuple(pattern.rpartition(".")[2] for pattern, style in plan.items() if style == "rowwise")
    for name, linear in list(base.named_modules()):
        above, _, last = name.rpartition(".")
        if last in ends and isinstance(linear, nn.Linear):
            setattr(base.get_submodule(above), last, RowLinear(linear, tokens))


def _cut_head(module: PreTrainedModel, config: PretrainedConfig, ranks: TensorRanks) -> int:
    """Leaves a head of its own only this rank's rows of it; how many these are."""
    width = -(-config.vocab_size // ranks.size)
    rows = min(width, config.vocab_size - ranks.rank * width)
    if not config.tie_word_embeddings:
        head = module.get_output_embeddings()
        module.set_output_embeddings(nn.Linear(config.hidden_size, rows, bias=False, dtype=head.weight.dtype))
    return rows


def _copy_buffers(whole: nn.Module, part: nn.Module) -> None:
    """Frequencies and factors, bit for bit: computed anew on another device they would be rounded otherwise."""
    own = dict(part.named_buffers())
    for name, buffer in whole.named_buffers():
        if name in own:
            own[name].copy_(buffer)


def _all_rows(weight: Tensor) -> Tensor:
    return weight


def _rows_from(offset: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[offset : offset + count]

"""Tensor parallel: each matrix split over the `tensor` ranks by the model's own plan, embedding and head over the vocabulary.

Weights become DTensors, so that storage (FSDP2, checkpoints) knows what is split how; the arithmetic runs on their local parts. Per block
(attention, MLP) that is one sum over ranks in forward, behind the row-split matrix, and one in backward, before the column-split ones.
DTensor's own arithmetic would sum once for each column-split matrix, and under torch.compile bind the number of tokens.
Dimensions: T packed tokens, D and E input and output features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from transformers import PretrainedConfig

from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel, has_adapter
from hybridflow.models.head import VocabularyShard
from hybridflow.train_engine.mesh import Layout, Mesh, check_heads

_KEY = "train.parallel_config.tp"
# Embedding and head are split here, whatever the plan says of them: Transformers 5.17 splits the embedding, 5.24 does not.
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise", "colwise_gather_output"}


def check_tensor_parallel(config: PretrainedConfig, degree: int) -> None:
    """Raises ConfigError where the model cannot be split over so many ranks; before launch, from the config alone."""
    check_heads(Layout(tensor=degree), config.num_attention_heads, config.num_key_value_heads)
    # Parts are of one size but for the last, as torch.chunk cuts: few rows over many ranks leave the last ranks none.
    rows = config.vocab_size
    if -(-rows // -(-rows // degree)) != degree:
        raise ConfigError(
            f"{_KEY}: a vocabulary of {rows} leaves one of {degree} ranks without a part; set a lower degree"
        )
    if config.intermediate_size % degree:
        raise ConfigError(
            f"{_KEY}: an intermediate size of {config.intermediate_size} does not split into {degree} equal parts; set a degree that "
            "divides it"
        )


def apply_tensor_parallel(model: LanguageModel, mesh: Mesh) -> frozenset[str]:
    """Splits the model in place over `mesh.tensor`; the weights must be equal on its ranks, and no collective is called.

    returns: the names of whole weights whose gradient has to be summed over `tensor`: each rank has only the part of its own heads.

    Split weights are DTensors of the axis's device mesh; the others stay as they are, and get the same gradient on all ranks.
    Biases behind a row-split matrix are added after the sum, and stay whole. Must run before FSDP2, and before the layers are compiled.
    """
    check_tensor_parallel(model.config, mesh.layout.tensor)
    if has_adapter(model):
        # Its layers have other names than the plan's, and would stay whole beside split ones.
        raise ConfigError(f"{_KEY}: a model with an adapter cannot be split over matrices; set it to 1")
    device_mesh = mesh.device_mesh("tensor")
    plan = _read_plan(model.config)
    blocks = _split_matrices(model.module.base_model, plan, device_mesh)
    partial = {id(weight) for block in blocks for weight in _iter_whole_weights(block)}
    model.vocabulary = _split_vocabulary(model, mesh, device_mesh)
    return frozenset(name for name, weight in model.module.named_parameters() if id(weight) in partial)


def _read_plan(config: PretrainedConfig) -> Mapping[str, str]:
    """The model's own plan, but for entries that say of a weight that it stays whole: `{"layers.*.mlp.up_proj": "colwise"}`."""
    plan: Mapping[str, str] = config.base_model_tp_plan
    odd = sorted(set(plan.values()) - _STYLES)
    if odd:
        raise ConfigError(
            f"{_KEY}: the plan of '{config.model_type}' has a style '{odd[0]}' that is not known here; set it to 1"
        )
    return {name: style for name, style in plan.items() if style in ("colwise", "rowwise")}


def _split_matrices(base: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> list[nn.Module]:
    """Puts split linear layers in the place of whole ones; the blocks that begin with them."""
    blocks: dict[str, nn.Module] = {}
    for name, linear in list(base.named_modules()):
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        if not styles or not isinstance(linear, nn.Linear):
            continue
        above, _, last = name.rpartition(".")
        block = base.get_submodule(above)
        if styles[0] == "rowwise":
            setattr(block, last, RowLinear(linear, mesh))
            continue
        setattr(block, last, ColumnLinear(linear, mesh))
        if above not in blocks:
            blocks[above] = block
            # By the class of the instance, as FSDP2 does it: a hook would make the layers differ for the compiler.
            block_type: Any = type(block)
            block.__class__ = _entering(block_type, _group_name(mesh))
    return list(blocks.values())


def _split_vocabulary(model: LanguageModel, mesh: Mesh, device_mesh: DeviceMesh) -> VocabularyShard:
    embedding = model.module.get_input_embeddings()
    head = model.module.get_output_embeddings()
    split = VocabularyEmbedding(embedding, device_mesh)
    model.module.set_input_embeddings(split)
    # The very same parameter where the two were tied, else it would be trained twice.
    head.weight = split.weight if head.weight is embedding.weight else _split(head.weight, device_mesh, 0)
    return VocabularyShard(split.offset, mesh.tensor, _to_local)


def _iter_whole_weights(block: nn.Module) -> list[Parameter]:
    """Weights between the column-split matrices and the row-split one, such as norms of each head."""
    split = {
        id(weight)
        for module in block.modules()
        if isinstance(module, ColumnLinear | RowLinear)
        for weight in module.parameters()
    }
    return [weight for weight in block.parameters() if id(weight) not in split]


class ColumnLinear(nn.Linear):
    """A linear layer that computes this rank's output features, from inputs that are the same on all ranks."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.train(linear.training)
        self.weight = _split(linear.weight, mesh, 0)
        self.bias = None if linear.bias is None else _split(linear.bias, mesh, 0)

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] to this rank's part of [..., E]."""
        return F.linear(input, _to_local(self.weight), None if self.bias is None else _to_local(self.bias))


class RowLinear(nn.Linear):
    """A linear layer over this rank's input features, summed over ranks; the bias is whole on each, and added once."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.train(linear.training)
        self.group_name = _group_name(mesh)
        self.weight = _split(linear.weight, mesh, 1)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """This rank's part of [..., D] to [..., E]."""
        out: Tensor = _SumForward.apply(F.linear(input, _to_local(self.weight)), self.group_name)
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which this rank holds some rows: it looks those up, and the ranks add up."""

    embed_scale: Tensor | None

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.train(embedding.training)
        self.group_name = _group_name(mesh)
        self.weight = _split(embedding.weight, mesh, 0)
        self.offset = mesh.get_local_rank() * -(-embedding.num_embeddings // mesh.size())
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - self.offset
        self.local_padding = padding if 0 <= padding < _to_local(self.weight).shape[0] else None
        # Gemma's embeddings multiply by a buffer.
        scale = dict(embedding.named_buffers()).get("embed_scale")
        if scale is None and type(embedding) is not nn.Embedding:
            raise ConfigError(f"{_KEY}: a {type(embedding).__name__} cannot be split over the vocabulary; set it to 1")
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[...] ids to [..., D], the same on all ranks."""
        weight = _to_local(self.weight)
        rows = input - self.offset
        is_elsewhere = (rows < 0) | (rows >= weight.shape[0])
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), weight, padding_idx=self.local_padding)
        out: Tensor = _SumForward.apply(found.masked_fill(is_elsewhere[..., None], 0.0), self.group_name)
        return out if self.embed_scale is None else out * self.embed_scale.to(weight.dtype)


@cache
def _entering(block_type: Any, group_name: str) -> type[nn.Module]:
    """The block whose gradient at the input is the sum of what each rank's heads or features give."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args:
            return block_type.forward(self, _SumBackward.apply(args[0], group_name), *args[1:], **kwargs)
        hidden = _SumBackward.apply(kwargs.pop("hidden_states"), group_name)
        return block_type.forward(self, hidden_states=hidden, **kwargs)

    return type(block_type.__name__, (block_type,), {"forward": forward})


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group_name: str) -> Tensor:
        return _sum(part, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group_name), None


def _sum(part: Tensor, group_name: str) -> Tensor:
    """Sum over ranks; a functional collective, which torch.compile keeps in its graph."""
    started = torch.ops._c10d_functional.all_reduce(part.contiguous(), "sum", group_name)
    done: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return done


def _split(weight: Tensor, mesh: DeviceMesh, dim: int) -> Parameter:
    """This rank's part along a dimension, cut as by torch.chunk, as a DTensor; a copy, so that the whole is freed."""
    part = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride())
    return Parameter(whole, requires_grad=weight.requires_grad)


def _to_local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _group_name(mesh: DeviceMesh) -> str:
    return mesh.get_group().group_name

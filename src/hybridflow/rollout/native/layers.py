"""The layers of Llama-like models rewritten for generation: joint matrix products and fused kernels on the module's own weights.

Dimensions: T tokens of a pass, D model, H query heads, N kv heads, K head size, P positions of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.models import LanguageModel, PagedKVCache
from hybridflow.models.attention import AttentionForm

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""By the `model_type` of their config."""
_ACTS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MIN_POSITIONS = 1024


Attend = Callable[[int, nn.Module, Tensor, Tensor | None, Tensor | None, AttentionForm], Tensor]
"""(layer, its attention module, queries [T, H, K], keys and values [T, N, K] or None, form) -> output [T, H, K]."""


@dataclass(frozen=True)
class _Layer:
    """One layer's weights; qkv [(H + 2N) K, D] and gate_up [2F, D] are one storage each, which the module's parameters are views of."""

    attention: Any
    qkv: Tensor
    qkv_bias: Tensor | None
    out: nn.Linear
    gate_up: Tensor
    down: nn.Linear
    input_norm: Any
    post_norm: Any
    query_norm: Tensor | None
    key_norm: Tensor | None


class FusedLayers:
    """From tokens to hidden states after the final norm, as `LanguageModel.hidden_states`, in a third of the kernels.

    Weights are read where the module has them, so that a trained or loaded weight counts at once. Rounding is that of Transformers' layers,
    step for step, but for the order of sums in products.
    """

    def __init__(self, model: LanguageModel) -> None:
        base: Any = model.module.base_model
        self._model = model
        self._embed, self._norm, self._rotary = base.embed_tokens, base.norm, base.rotary_emb
        self._layers = [_read_layer(layer) for layer in base.layers]
        self._eps: float = self._norm.variance_epsilon
        self._act = _ACTS[model.config.hidden_act]
        self._form = AttentionForm(float(self._layers[0].attention.scaling))
        self._cos_PK, self._sin_PK = self._build_tables(_MIN_POSITIONS)

    @property
    def num_positions(self) -> int:
        """Rows of the rotary tables."""
        return self._cos_PK.shape[0]

    def reach(self, num_positions: int) -> bool:
        """Makes the rotary tables long enough; True where they have moved, so that what was captured reads the old ones."""
        if num_positions <= self.num_positions:
            return False
        longer = min(max(num_positions, 2 * self.num_positions), self._model.config.max_position_embeddings)
        self._cos_PK, self._sin_PK = self._build_tables(max(longer, num_positions))
        return True

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: PagedKVCache,
        attend: Attend,
        *,
        with_kv: bool = False,
    ) -> Tensor:
        """[T, D].

        tokens_T, positions_T: [T] int64 on the device.
        slots_T:               [T] int64, where each token's keys and values go; below 0 nowhere.
        attend:                gets the new tokens' keys and values where `with_kv`, else reads them from the cache.
        """
        from hybridflow.rollout.native import kernels

        residual_TD = F.embedding(tokens_T, self._embed.weight)
        normed_TD = kernels.rms_norm(residual_TD, self._layers[0].input_norm.weight, self._eps)
        for index, layer in enumerate(self._layers):
            rows = kernels.rotate_and_store(
                F.linear(normed_TD, layer.qkv, layer.qkv_bias),
                *(self._cos_PK, self._sin_PK, positions_T, slots_T, cache.keys[index], cache.values[index]),
                num_heads=self._model.num_heads,
                num_kv_heads=self._model.num_kv_heads,
                head_dim=self._model.head_dim,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=self._eps,
                return_kv=with_kv,
            )
            query_THK, key_TNK, value_TNK = rows if with_kv else (rows, None, None)
            out_THK = attend(index, layer.attention, query_THK, key_TNK, value_TNK, self._form)
            out_TD = F.linear(out_THK.flatten(1), layer.out.weight, layer.out.bias)
            normed_TD = kernels.add_rms_norm(out_TD, residual_TD, layer.post_norm.weight, self._eps)
            inner_TF = kernels.gated_act(F.linear(normed_TD, layer.gate_up), self._act)
            out_TD = F.linear(inner_TF, layer.down.weight)
            following = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
            normed_TD = kernels.add_rms_norm(out_TD, residual_TD, following.weight, self._eps)
        return normed_TD

    def _build_tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        cos_1PK, sin_1PK = self._rotary(like, torch.arange(num_positions, device=self._model.device)[None])
        return cos_1PK[0].contiguous(), sin_1PK[0].contiguous()


def serves(model: LanguageModel) -> bool:
    """Whether these layers compute what the model's own do: of a family that is known, whole, without windows or adapters."""
    config, values = model.config, model.config.to_dict()
    if config.model_type not in FAMILIES or model.vocabulary is not None:
        return False
    windowed = "sliding_attention" in (values.get("layer_types") or ())
    windowed |= config.model_type == "mistral" and values.get("sliding_window") is not None
    plain = all(type(part) is nn.Linear for layer in model.module.base_model.layers for part in _list_products(layer))
    return plain and not windowed and config.hidden_act in _ACTS and not values.get("mlp_bias")


def _list_products(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    children = dict(attention.named_children())
    norms = [children[name].weight if name in children else None for name in ("q_norm", "k_norm")]
    return _Layer(
        attention=attention,
        qkv=join_parameters([projection.weight for projection in projections]),
        qkv_bias=join_parameters(biases) if biases else None,
        out=attention.o_proj,
        gate_up=join_parameters([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj,
        input_norm=layer.input_layernorm,
        post_norm=layer.post_attention_layernorm,
        query_norm=norms[0],
        key_norm=norms[1],
    )


@torch.inference_mode(False)
@torch.no_grad()
def join_parameters(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters one below the other, as one tensor [sum of rows, ...] of which they are views from here on.

    The parameters stay the same objects with the same values; their addresses change, unless they lie so already.
    """
    first = parameters[0].data
    rows = [parameter.shape[0] for parameter in parameters]
    ends = [start.data_ptr() + start.nbytes for start in parameters]
    adjacent = all(
        end == after.data_ptr() and after.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for end, after in zip(ends, parameters[1:], strict=False)
    )
    if adjacent:
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split(rows), strict=True):
        parameter.data = part
    return joint

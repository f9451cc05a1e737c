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
from hybridflow.rollout.native.parallel import RowLinear, TokenSplit, can_draw
from hybridflow.rollout.native.plans import LayerSizes, ProductPlan, StepPlan, plan_step

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""By the `model_type` of their config."""
_ACTS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MIN_POSITIONS, _MIN_ARRIVALS = 1024, 4096
# Of the GPUs that steps were measured on (Hopper).
_FIRST_CAPABILITY = (9, 0)


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


@dataclass(frozen=True)
class _Rows:
    """Rows that are decoded: positions and slots of the tokens that are fed [B], block tables [B, W], tokens held [B], arrivals [B N]."""

    positions: Tensor
    slots: Tensor
    tables: Tensor
    contexts: Tensor
    arrivals: Tensor


class FusedLayers:
    """From tokens to hidden states after the final norm, as `LanguageModel.hidden_states`, in a third of the kernels.

    Weights are read where the module has them, so that a trained or loaded weight counts at once. Rounding is that of Transformers' layers,
    step for step, but for the order of sums in products.

    tokens: how ranks that share the model share the tokens of long passes.
    """

    def __init__(self, model: LanguageModel, tokens: TokenSplit | None = None) -> None:
        base: Any = model.module.base_model
        self._model, self._tokens = model, tokens or TokenSplit()
        self._embed, self._norm, self._rotary = base.embed_tokens, base.norm, base.rotary_emb
        self._layers = [_read_layer(layer) for layer in base.layers]
        self._eps: float = self._norm.variance_epsilon
        self._act = _ACTS[model.config.hidden_act]
        self._form = AttentionForm(float(self._layers[0].attention.scaling))
        self._cos_PK, self._sin_PK = self._build_tables(_MIN_POSITIONS)
        self._arrivals: list[Tensor] = []

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

        gather = self._tokens.gather
        stream_TD, normed_TD = self._begin(tokens_T)
        for index, layer in enumerate(self._layers):
            rows = kernels.rotate_and_store(
                F.linear(gather(normed_TD), layer.qkv, layer.qkv_bias),
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
            normed_TD = self._finish(index, out_THK, stream_TD, StepPlan())
        return gather(normed_TD)

    def decode_states(
        self,
        tokens_B: Tensor,
        positions_B: Tensor,
        slots_B: Tensor,
        tables_BW: Tensor,
        contexts_B: Tensor,
        cache: PagedKVCache,
        plan: StepPlan | None = None,
    ) -> Tensor:
        """[B, D] of one new token a row, whose keys and values are stored.

        positions_B, slots_B: [B] int64 of the tokens that are fed. tables_BW: [B, W] int32 blocks. contexts_B: [B] int32 tokens held, the
        one that is fed among them; 0 is an idle row. plan: None takes the one that is fastest where it was measured.
        """
        plan = self.plan(*tables_BW.shape) if plan is None else plan
        rows = _Rows(positions_B, slots_B, tables_BW, contexts_B, self._find_arrivals(len(tokens_B)))
        stream_TD, normed_TD = self._begin(tokens_B)
        for index in range(len(self._layers)):
            qkv, out_THK = self._project(index, normed_TD, rows, cache, plan)
            self._attend(index, qkv, out_THK, rows, cache, plan)
            normed_TD = self._finish(index, out_THK, stream_TD, plan)
        return normed_TD

    def plan(self, num_rows: int, num_blocks: int) -> StepPlan:
        """How so many rows with tables of so many blocks are decoded here."""
        device, model = self._model.device, self._model
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
            return StepPlan()
        inner = self._layers[0].gate_up.shape[0] // 2
        width, itemsize = self._embed.weight.shape[1], model.dtype.itemsize
        sizes = LayerSizes(model.num_heads, model.num_kv_heads, model.head_dim, width, inner, itemsize)
        return plan_step(sizes, num_rows, num_blocks, torch.cuda.get_device_properties(device).multi_processor_count)

    def _begin(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream, its norm before the first layer), each [T, D]."""
        from hybridflow.rollout.native import kernels

        stream_TD = self._tokens.share(F.embedding(tokens_T, self._embed.weight))
        return stream_TD, kernels.rms_norm(stream_TD, self._layers[0].input_norm.weight, self._eps)

    def _project(
        self, index: int, normed_TD: Tensor, rows: _Rows, cache: PagedKVCache, plan: StepPlan
    ) -> tuple[Tensor, Tensor]:
        """(the joint projection, or the rotated queries where attention is not joint; room for the layer's attention)."""
        layer, model = self._layers[index], self._model
        qkv = _multiply(normed_TD, layer.qkv, layer.qkv_bias, plan.qkv)
        if not plan.joint:
            from hybridflow.rollout.native import kernels

            whole = qkv if qkv.dim() == 2 else kernels.add_shares(qkv, layer.qkv_bias, normed_TD.dtype)
            qkv = kernels.rotate_and_store(
                whole,
                *(self._cos_PK, self._sin_PK, rows.positions, rows.slots, cache.keys[index], cache.values[index]),
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=self._eps,
            )
        return qkv, normed_TD.new_empty((len(normed_TD), model.num_heads, model.head_dim))

    def _attend(
        self, index: int, qkv: Tensor, out_THK: Tensor, rows: _Rows, cache: PagedKVCache, plan: StepPlan
    ) -> None:
        from hybridflow.rollout.native import kernels

        layer, keys, values = self._layers[index], cache.keys[index], cache.values[index]
        if not plan.joint:
            kernels.decode_attention(
                qkv, keys, values, rows.tables, rows.contexts, scale=self._form.scale, out=out_THK, plan=plan.attention
            )
            return
        kernels.attend_and_store(
            *(qkv, layer.qkv_bias, self._cos_PK, self._sin_PK, keys, values, rows.tables, rows.contexts, rows.arrivals),
            num_heads=self._model.num_heads,
            scale=self._form.scale,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._eps,
            out=out_THK,
            plan=plan.attention,
        )

    def _finish(self, index: int, out_THK: Tensor, stream_TD: Tensor, plan: StepPlan) -> Tensor:
        """The rest of the layer, and the norm before the next one."""
        from hybridflow.rollout.native import kernels

        layer = self._layers[index]
        out_TD = _apply(layer.out, out_THK.flatten(1), plan.out)
        normed_TD = kernels.add_rms_norm(out_TD, stream_TD, layer.post_norm.weight, self._eps)
        whole_TD = self._tokens.gather(normed_TD)
        if plan.gate_up is None:
            inner_TF = kernels.gated_act(F.linear(whole_TD, layer.gate_up), self._act)
        else:
            inner_TF = kernels.multiply_gated(whole_TD, layer.gate_up, self._act, plan.gate_up)
        out_TD = _apply(layer.down, inner_TF, plan.down)
        following = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
        return kernels.add_rms_norm(out_TD, stream_TD, following.weight, self._eps)

    def _find_arrivals(self, num_rows: int) -> Tensor:
        """Room for the splits of attention to sign in, 0 between steps. Captured steps go on using theirs, so none is given up."""
        count = num_rows * self._model.num_kv_heads
        if not self._arrivals or self._arrivals[-1].numel() < count:
            room = max(_MIN_ARRIVALS, 1 << (count - 1).bit_length())
            self._arrivals.append(torch.zeros(room, dtype=torch.int32, device=self._model.device))
        return self._arrivals[-1]

    def _build_tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        cos_1PK, sin_1PK = self._rotary(like, torch.arange(num_positions, device=self._model.device)[None])
        return cos_1PK[0].contiguous(), sin_1PK[0].contiguous()


def _multiply(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, plan: ProductPlan | None) -> Tensor:
    if plan is None:
        return F.linear(x_TI, weight_OI, bias_O)
    from hybridflow.rollout.native import kernels

    return kernels.multiply(x_TI, weight_OI, bias_O, plan)


def _apply(product: nn.Linear, x_TI: Tensor, plan: ProductPlan | None) -> Tensor:
    # By the module itself where no plan is, or where it sums over ranks.
    if plan is None or type(product) is RowLinear:
        out: Tensor = product(x_TI)
        return out
    # The norm that adds up shares adds no bias.
    return _multiply(x_TI, product.weight, product.bias, plan if product.bias is None else plan._replace(splits=1))


def serves(model: LanguageModel) -> bool:
    """Whether these layers compute what the model's own do: of a family that is known, whole, without windows or adapters."""
    config, values = model.config, model.config.to_dict()
    if config.model_type not in FAMILIES or not can_draw(model):
        return False
    windowed = "sliding_attention" in (values.get("layer_types") or ())
    windowed |= config.model_type == "mistral" and values.get("sliding_window") is not None
    products = [part for layer in model.module.base_model.layers for part in _list_products(layer)]
    plain = all(type(part) in (nn.Linear, RowLinear) for part in products)
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

"""Tensor parallel in real processes over gloo: loss and every gradient equal to those of one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from processes import Place, run_ranks
from torch import Tensor
from transformers import LlamaConfig

from hybridflow.config import ConfigError
from hybridflow.models import (
    LanguageModel,
    Packed,
    compute_logprobs,
    fresh_model,
    predicted_positions,
)
from hybridflow.train_engine import join_ranks
from hybridflow.train_engine.mesh import Layout, Mesh, build_mesh
from hybridflow.train_engine.sharding import apply_sharding, gather_whole, local_part, read_splits
from hybridflow.train_engine.tensor_parallel import apply_tensor_parallel, check_tensor_parallel

Arrays = dict[str, NDArray[np.float64]]
BASE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=64, initializer_range=0.15, pad_token_id=90, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GEMMA = dict(BASE, head_dim=12, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=20, sliding_window=5)
SLIDING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(BASE, model_type="llama", attention_bias=True, mlp_bias=True),
    "qwen2": dict(BASE, model_type="qwen2", num_key_value_heads=2, num_attention_heads=2),
    "qwen3": dict(BASE, model_type="qwen3", head_dim=12),
    "mistral": dict(BASE, model_type="mistral", sliding_window=7),
    "gemma": dict(BASE, model_type="gemma", head_dim=12, hidden_act="gelu_pytorch_tanh"),
    "gemma2": dict(
        GEMMA, model_type="gemma2", layer_types=SLIDING, attn_logit_softcapping=4.0, final_logit_softcapping=3.0
    ),
    "gemma3": dict(GEMMA, model_type="gemma3_text", layer_types=SLIDING),
}
LENGTHS = [1, 13, 7, 2, 20]
TEMPERATURE = 0.7


def build(name: str, tied: bool, dtype: torch.dtype = torch.float64) -> LanguageModel:
    model = fresh_model(dict(FAMILIES[name], tie_word_embeddings=tied), seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for weight in model.module.parameters():
        # Biases begin at 0 and norms alike: a bias that is added once a rank, or a norm that is not summed, would not show.
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(dtype)
    return model


@cache
def draw_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (sum(LENGTHS),), generator=generator)
    # Both ends of every shard, and the padding entry, are looked up and predicted.
    tokens[:12] = torch.tensor([0, 24, 25, 48, 49, 50, 74, 75, 96, 90, 90, 0])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return tokens, positions, torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def compute_loss(model: LanguageModel) -> Tensor:
    tokens, positions, cu_seqlens = draw_rows()
    hidden_index, token_index = predicted_positions(cu_seqlens)

    def forward() -> tuple[Tensor, Tensor | None]:
        hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, max(LENGTHS)))
        return compute_logprobs(
            hidden, tokens[token_index], model.head, temperature=TEMPERATURE, with_entropy=True, rows=hidden_index, chunk_tokens=16
        )  # fmt: skip

    logprobs, entropy = model.run(forward)
    assert entropy is not None
    upstream = torch.linspace(-1.0, 1.0, logprobs.shape[0], dtype=logprobs.dtype)
    return (logprobs * upstream + 0.3 * entropy).sum()


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Norms work in float32 whatever they are given, and would round."""
    own = Tensor.float, Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lower = tensor.dtype == torch.float64 and args and args[0] is torch.float32
        return tensor if lower else own[1](tensor, *args, **kwargs)

    Tensor.float = lambda tensor: to(tensor, torch.float32)  # type: ignore[method-assign]
    Tensor.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float, Tensor.to = own  # type: ignore[method-assign]


def join(place: Place, layout: Layout) -> Mesh:
    ranks = join_ranks(
        rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=torch.device("cpu"), timeout_s=30.0
    )
    return build_mesh(ranks, layout, torch.device("cpu"))


def compute_gradients(
    model: LanguageModel, mesh: Mesh | None = None, partial: frozenset[str] = frozenset(), share: float = 1.0
) -> Arrays:
    """The loss, and whole gradients by name. share: what this rank's loss counts for."""
    loss = compute_loss(model)
    (loss * share).backward()
    found = {"loss": loss.detach()}
    for name, weight in model.module.named_parameters():
        assert weight.grad is not None, name
        found[name] = weight.grad.detach()
        if mesh is not None:
            found[name] = gather_whole(local_part(weight.grad), weight.shape, read_splits(weight), mesh)
        if mesh is not None and name in partial:
            mesh.tensor.sum_(found[name])
    return {name: value.numpy() for name, value in found.items()}


def train_families(place: Place, cases: list[tuple[str, bool]]) -> list[Arrays]:
    mesh = join(place, Layout(tensor=place.size))
    found = []
    for name, tied in cases:
        model = build(name, tied)
        partial = apply_tensor_parallel(model, mesh)
        with norms_in_float64():
            found.append(compute_gradients(model, mesh, partial))
    return found


def check_equal(found: Arrays, expected: Arrays, what: object, within: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= within * max(np.abs(value).max(), 1.0), (what, name)


CASES = {
    2: [(name, index % 2 == 0) for index, name in enumerate(FAMILIES)] + [("qwen2", True), ("qwen3", False)],
    4: [("llama", True), ("llama", False), ("gemma3", True)],
}
"""Families, and whether embedding and head are tied."""


@pytest.mark.parametrize("size", CASES)
def test_loss_and_every_gradient_equal_those_of_one_process(size: int, tmp_path: Path) -> None:
    results = run_ranks(size, train_families, CASES[size], directory=tmp_path, timeout_s=60)
    for index, case in enumerate(CASES[size]):
        with norms_in_float64():
            expected = compute_gradients(build(*case))
        for result in results:
            check_equal(result[index], expected, case)


SHARDED_CASES = [("qwen3", True), ("llama", False)]


def train_sharded(place: Place) -> list[Arrays]:
    mesh = join(place, Layout(data=2, tensor=2, shard=2))
    found = []
    for name, tied in SHARDED_CASES:
        model = build(name, tied)
        partial = apply_tensor_parallel(model, mesh)
        apply_sharding(model, mesh, reshard_after_forward=True)
        with norms_in_float64():
            found.append(compute_gradients(model, mesh, partial, share=(0.25, 0.75)[mesh.at.data]))
    return found


def test_sharded_on_top_the_gradients_are_summed_over_both_axes(tmp_path: Path) -> None:
    results = run_ranks(4, train_sharded, directory=tmp_path, timeout_s=60)
    for index, case in enumerate(SHARDED_CASES):
        with norms_in_float64():
            expected = compute_gradients(build(*case))
        for result in results:
            check_equal(result[index], expected, case)


def train_float32(place: Place) -> list[Any]:
    mesh = join(place, Layout(tensor=place.size))
    model = build("qwen2", True, torch.float32)
    whole = {name: weight.numel() for name, weight in model.module.named_parameters()}
    partial = apply_tensor_parallel(model, mesh)
    local = {name: local_part(weight).numel() for name, weight in model.module.named_parameters()}
    is_one = model.head_weight is model.module.get_input_embeddings().weight
    return [compute_gradients(model, mesh, partial), whole, local, is_one]


def test_float32_and_what_a_rank_holds(tmp_path: Path) -> None:
    results = run_ranks(2, train_float32, directory=tmp_path)
    expected = compute_gradients(build("qwen2", True, torch.float32))
    for rank, (found, whole, local, is_one) in enumerate(results):
        check_equal(found, expected, rank, within=1e-5)
        # A tied embedding that became two weights would have a name more here, and two moments in the optimizer.
        assert list(local) == list(whole) and is_one
        for name, count in local.items():
            rows = {
                "model.embed_tokens.weight": (49, 48),
                "down_proj": (26, 26),
                "gate_proj": (26, 26),
                "up_proj": (26, 26),
            }
            width = next((counts for part, counts in rows.items() if part in name), None)
            if width is not None:
                assert count == width[rank] * BASE["hidden_size"], name
            else:
                assert count * (1 if "norm" in name else 2) == whole[name], name


def read_partial(place: Place) -> list[frozenset[str]]:
    mesh = join(place, Layout(tensor=place.size))
    return [apply_tensor_parallel(build(name, True), mesh) for name in ("llama", "gemma3")]


def test_only_the_norms_of_heads_are_partial(tmp_path: Path) -> None:
    names = {f"model.layers.{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")}
    assert run_ranks(2, read_partial, directory=tmp_path) == [[frozenset(), names]] * 2


REFUSED: list[tuple[dict[str, int], int, str]] = [
    (dict(num_attention_heads=8, num_key_value_heads=8), 3, "3 does not divide the model's 8 attention heads"),
    (dict(num_attention_heads=4, num_key_value_heads=1), 2, "2 does not divide the model's 1 key-value heads"),
    (dict(vocab_size=5), 4, "a vocabulary of 5 leaves one of 4 ranks without a part; set a lower degree"),
    (
        dict(intermediate_size=3),
        4,
        "an intermediate size of 3 does not split into 4 equal parts; set a degree that divides it",
    ),
]


@pytest.mark.parametrize(("changes", "degree", "message"), REFUSED)
def test_what_cannot_be_split_is_refused_before_launch(changes: dict[str, int], degree: int, message: str) -> None:
    config = LlamaConfig(**(BASE | changes))
    with pytest.raises(ConfigError, match=f"^train.parallel_config.tp: {message}"):
        check_tensor_parallel(config, degree)
    check_tensor_parallel(config, 1)

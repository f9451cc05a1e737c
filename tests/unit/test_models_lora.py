"""LoRA on every family: what is adapted and how it starts, gradients, merged copies, off and on, directories, generation."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_models_families import FAMILIES, build, build_reference, draw_rows, pack
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import (
    AdapterForm,
    LoraSettings,
    adapter_disabled,
    adapter_weights,
    apply_lora,
    check_lora,
    compute_logits,
    compute_logprobs,
    compute_merged,
    has_adapter,
    iter_merged_weights,
    load_adapter,
    load_model,
    merge_adapter,
    plain_name,
    predicted_positions,
    resolve_lora,
    save_adapter,
    save_adapter_config,
    save_model,
)
from hybridflow.models.families import UnsupportedModelError
from hybridflow.rollout import NativeEngine
from hybridflow.types import SamplingParams

peft = pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")

# Unlike a rank of alpha, so that a scale that is left out or turned round shows.
SETTINGS = LoraSettings(rank=4, alpha=12.0)
ROWS = draw_rows([13, 1, 40, 7])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
each_family = pytest.mark.parametrize("name", FAMILIES)
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def adapt(name, settings=SETTINGS, *, trained=True, **how):
    """A model with an adapter; `trained`: away from its start, where it changes nothing."""
    model = build(name, **how)
    apply_lora(model, settings, seed=5)
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in adapter_weights(model).values():
                weight.copy_(0.15 * torch.randn(weight.shape, generator=generator))
    return model


def compute(model, rows=ROWS):
    """Logits, [T, V], without gradient."""
    with torch.no_grad():
        return compute_logits(model.hidden_states(*pack(rows)), model.head)


def sum_logprobs(model):
    tokens, positions, packed = pack(ROWS)
    hidden_index, token_index = predicted_positions(packed.cu_seqlens)
    hidden = model.hidden_states(tokens, positions, packed)
    return compute_logprobs(hidden, tokens[token_index], model.head, rows=hidden_index)[0].sum()


def merge(model, like):
    """A model that had no number in common with anything, filled with the merged weights of `model`."""
    with torch.no_grad():
        own = dict(like.module.named_parameters())
        for weight in own.values():
            weight.fill_(float("nan"))
        for name, weight in iter_merged_weights(model):
            own.pop(name).copy_(weight)
    assert not own
    return like


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in FAMILIES] + [("llama", torch.float32), ("gemma2", torch.float64)],
)
def test_a_new_adapter_changes_no_bit_and_alone_requires_a_gradient(name, dtype):
    model = build(name, dtype=dtype)
    before, base = compute(model), dict(model.module.named_parameters())
    assert not has_adapter(model) and adapter_weights(model) == {}
    apply_lora(model, SETTINGS, seed=0)
    assert has_adapter(model) and torch.equal(compute(model), before)
    sum_logprobs(model).backward()
    parameters = dict(model.module.named_parameters())
    adapter = adapter_weights(model)
    assert {plain_name(n) for n, p in parameters.items() if p.requires_grad} == set(adapter)
    assert {plain_name(n) for n, p in parameters.items() if p.grad is not None} == set(adapter)
    assert {p.dtype for p in adapter.values()} == {dtype} and not any("default" in n for n in adapter)
    assert len(adapter) == 2 * len(LINEAR) * model.num_layers
    kept = {plain_name(n): p for n, p in parameters.items() if plain_name(n) not in adapter}
    assert list(kept) == list(base) and all(kept[n] is p for n, p in base.items())


def test_the_branch_is_computed_in_the_models_own_numbers():
    model = adapt("llama", dtype=torch.bfloat16)
    seen = set()
    for layer in model.module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
            layer.register_forward_hook(lambda _, inputs, output: seen.update({inputs[0].dtype, output.dtype}))
    compute(model)
    assert seen == {torch.bfloat16}


def test_the_seed_alone_decides_how_an_adapter_starts():
    def draw(seed, dtype=torch.float32):
        model = build("qwen3", dtype=dtype)
        apply_lora(model, SETTINGS, seed)
        return adapter_weights(model)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    again, other, low, wide = draw(3), draw(4), draw(3, torch.bfloat16), draw(3, torch.float64)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight.bfloat16(), low[name]) and torch.equal(weight.double(), wide[name])
        if "lora_B" in name:
            assert weight.count_nonzero() == 0
        else:
            # Kaiming's uniform with a = sqrt(5).
            bound = 1 / math.sqrt(weight.shape[1])
            assert 0.5 * bound < weight.abs().max() <= bound and not torch.equal(weight, other[name])
    halves = [weight for name, weight in first.items() if name.endswith("q_proj.lora_A.weight")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(halves, 2))


@tied_or_not
@each_family
def test_gradients_are_those_of_the_merged_matrix(name, tied):
    """dA = scale B^T dW and dB = scale dW A^T, where W = base + scale B A, in float64."""
    model = adapt(name, tied=tied, dtype=torch.float64)
    merged = merge(model, build(name, tied=tied, dtype=torch.float64))
    ours, theirs = sum_logprobs(model), sum_logprobs(merged)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)
    ours.backward()
    theirs.backward()
    adapter = adapter_weights(model)
    scale = 12.0 / 4
    for layer, weight in merged.module.named_parameters():
        prefix = layer.removesuffix(".weight")
        if f"{prefix}.lora_A.weight" not in adapter:
            continue
        lora_a, lora_b = adapter[f"{prefix}.lora_A.weight"], adapter[f"{prefix}.lora_B.weight"]
        torch.testing.assert_close(lora_a.grad, scale * lora_b.T @ weight.grad, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(lora_b.grad, scale * weight.grad @ lora_a.T, rtol=1e-9, atol=1e-10)


@tied_or_not
@each_family
def test_a_merged_copy_is_the_adapted_model(name, tied):
    model, base = adapt(name, tied=tied), build(name, tied=tied)
    merged = merge(model, build(name, tied=tied))
    expected = compute(model)
    torch.testing.assert_close(compute(merged), expected, rtol=1e-4, atol=1e-4)
    # What a copy would say that never got the adapter.
    assert (compute(base) - expected).abs().mean() > 0.1
    assert [n for n, _ in iter_merged_weights(model)] == [n for n, _ in base.module.named_parameters()]
    assert (merged.head_weight is merged.module.get_input_embeddings().weight) == tied


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        (LoraSettings(rank=4, alpha=4.0), 1.0),
        (LoraSettings(rank=8, alpha=4.0), 0.5),
        (LoraSettings(rank=3, alpha=1.5), 0.5),
        (LoraSettings(rank=16, alpha=12.0, rslora=True), 3.0),
    ],
)
def test_the_scale_is_alpha_over_rank_or_over_its_root(settings, scale):
    model = adapt("qwen2", settings, dtype=torch.float64)
    assert resolve_lora(settings).scale == scale
    base, adapter = dict(build("qwen2", dtype=torch.float64).module.named_parameters()), adapter_weights(model)
    prefix = "model.layers.1.mlp.up_proj"
    expected = (
        base[f"{prefix}.weight"] + scale * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
    )
    torch.testing.assert_close(dict(iter_merged_weights(model))[f"{prefix}.weight"], expected, rtol=1e-13, atol=1e-13)
    merged = merge(model, build("qwen2", dtype=torch.float64))
    torch.testing.assert_close(compute(merged), compute(model), rtol=1e-10, atol=1e-10)


def test_only_the_layers_that_are_named_are_adapted():
    model = adapt("llama", LoraSettings(rank=2, target_modules=("v_proj", "layers.1.mlp.up_proj")))
    layers = {name.partition(".lora_")[0] for name in adapter_weights(model)}
    attention = {f"model.layers.{i}.self_attn.v_proj" for i in range(3)}
    assert layers == attention | {"model.layers.1.mlp.up_proj"}
    base = dict(build("llama").module.named_parameters())
    changed = {name for name, weight in iter_merged_weights(model) if not torch.equal(weight, base[name])}
    assert changed == {f"{layer}.weight" for layer in layers}


def test_bfloat16_is_merged_in_float32_and_rounded_once():
    generator = torch.Generator().manual_seed(0)
    base, lora_a, lora_b = (torch.randn(s, generator=generator).bfloat16() for s in ((96, 64), (4, 64), (96, 4)))
    merged = compute_merged(base, lora_a, lora_b, 0.01)
    once = (base.double() + 0.01 * (lora_b.double() @ lora_a.double())).bfloat16()
    twice = base + (0.01 * (lora_b.double() @ lora_a.double())).bfloat16()
    assert merged.dtype == torch.bfloat16
    # Float32 sums fall on the other side of a rounding border once in tens of thousands.
    assert (merged != once).float().mean() < 1e-3 < (twice != once).float().mean()
    wide = compute_merged(base.double(), lora_a.double(), lora_b.double(), 0.01)
    exact = base.double() + 0.01 * (lora_b.double() @ lora_a.double())
    torch.testing.assert_close(wide, exact, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fifty_exports_leave_base_and_export_bit_equal(dtype, tmp_path):
    model = adapt("qwen3", dtype=dtype)
    parameters = dict(model.module.named_parameters())
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    first = {name: weight.clone() for name, weight in iter_merged_weights(model)}
    for _ in range(50):
        last = dict(iter_merged_weights(model))
    save_model(model, None, tmp_path)
    assert all(torch.equal(parameters[name], weight) for name, weight in before.items())
    assert all(torch.equal(last[name], weight) for name, weight in first.items())
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(first) and all(torch.equal(saved[name], weight) for name, weight in first.items())
    # Adding to a merged weight instead of beside it.
    adapted = "model.layers.0.self_attn.q_proj.weight"
    last[adapted].fill_(0)
    assert torch.equal(dict(iter_merged_weights(model))[adapted], first[adapted])


def test_merging_reads_each_weight_once_through_the_callers_eyes():
    model = adapt("qwen2", dtype=torch.bfloat16)
    masters = {id(weight): weight.detach().double() + 1e-4 for weight in model.module.parameters()}
    asked = []

    def read(parameter):
        asked.append(id(parameter))
        return masters[id(parameter)]

    merged = dict(iter_merged_weights(model, read))
    assert sorted(asked) == sorted(masters)
    named = {plain_name(name): masters[id(weight)] for name, weight in model.module.named_parameters()}
    prefix = "model.layers.2.mlp.down_proj"
    product = named[f"{prefix}.lora_B.weight"] @ named[f"{prefix}.lora_A.weight"]
    torch.testing.assert_close(merged[f"{prefix}.weight"], named[f"{prefix}.weight"] + 3.0 * product)
    assert torch.equal(merged["model.norm.weight"], named["model.norm.weight"])


def test_a_transposed_matrix_is_merged_transposed():
    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(24, 16)).double()
    base = plain[0].weight.detach().clone()
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"], fan_in_fan_out=True)
    layer = peft.inject_adapter_in_model(config, plain)[0]
    lora_a, lora_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(lora_b)
    rows = torch.randn(5, 16, dtype=torch.float64)
    merged = compute_merged(base, lora_a, lora_b, layer.scaling["default"], fan_in_fan_out=True)
    torch.testing.assert_close(layer(rows), rows @ merged + layer.base_layer.bias, rtol=1e-12, atol=1e-12)


def test_a_model_without_an_adapter_gives_its_own_weights():
    model = build("gemma2")
    given, own = list(iter_merged_weights(model)), list(model.module.named_parameters())
    assert [name for name, _ in given] == [name for name, _ in own]
    assert all(a.data_ptr() == b.data_ptr() for (_, a), (_, b) in zip(given, own, strict=True))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@each_family
def test_switched_off_it_is_the_base_bit_for_bit(name, numerics):
    base, model = build(name, numerics=numerics), adapt(name, numerics=numerics)
    adapted = compute(model)
    with adapter_disabled(model):
        assert torch.equal(compute(model), compute(base))
    assert torch.equal(compute(model), adapted) and not torch.equal(adapted, compute(base))


def test_it_comes_back_after_errors_and_nested_contexts_and_still_trains():
    base, model = build("llama"), adapt("llama")
    adapted = compute(model)
    flags = [weight.requires_grad for weight in model.module.parameters()]
    with pytest.raises(KeyError), adapter_disabled(model):
        raise KeyError("a reward")
    assert torch.equal(compute(model), adapted)
    with adapter_disabled(model):
        assert [weight.requires_grad for weight in model.module.parameters()] == flags
        with adapter_disabled(model):
            pass
        assert torch.equal(compute(model), compute(base))
    assert torch.equal(compute(model), adapted)
    sum_logprobs(model).backward()
    assert all(weight.grad.abs().sum() > 0 for weight in adapter_weights(model).values())
    with pytest.raises(ValueError, match="no adapter that could be switched off"), adapter_disabled(base):
        pass


@tied_or_not
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "norm", "input_layernorm", "qproj", "model", "0.q_proj"])
def test_targets_that_match_nothing_we_adapt_are_refused_with_the_names_there_are(target, tied):
    model = build("llama", tied=tied)
    with pytest.raises(ConfigError, match=f"target_modules: '{target}' is no linear layer.*{', '.join(LINEAR)}$"):
        apply_lora(model, LoraSettings(target_modules=("q_proj", target)), seed=0)
    assert not has_adapter(model) and all(weight.requires_grad for weight in model.module.parameters())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(dropout=0.05), "dropout is 0.05, but post-training runs without dropout"),
        (dict(target_modules=()), "target_modules is empty"),
        (dict(rank=0), "rank is 0"),
        (dict(alpha=0.0), "alpha is 0.0"),
        (dict(target_modules="q_proj"), "target_modules is 'q_proj'"),
        (dict(path="/nowhere"), "no adapter_config.json in '/nowhere'"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        check_lora(LoraSettings(**wrong))


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"PEFT is not installed; pip install 'hybridflow\[lora\]'"):
        apply_lora(build("llama"), SETTINGS, seed=0)


def test_a_second_adapter_is_refused():
    model = adapt("llama")
    with pytest.raises(ValueError, match="an adapter already"):
        apply_lora(model, SETTINGS, seed=0)


@tied_or_not
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "llama_bias_yarn"])
def test_a_saved_model_is_the_merged_one(name, tied, tmp_path):
    model = adapt(name, tied=tied)
    save_model(model, None, tmp_path)
    loaded = load_model(tmp_path)
    assert not has_adapter(loaded)
    torch.testing.assert_close(compute(loaded), compute(model), rtol=1e-4, atol=1e-4)
    names = set(dict(build(name, tied=tied).module.named_parameters()))
    assert set(load_file(tmp_path / "model.safetensors")) == names
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    logits = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ROWS])
    torch.testing.assert_close(logits, compute(model), rtol=1e-4, atol=1e-4)
    given = {weight: torch.zeros_like(tensor) for weight, tensor in loaded.module.named_parameters()}
    save_model(model, None, tmp_path, given)
    assert all(not tensor.any() for tensor in load_file(tmp_path / "model.safetensors").values())


@tied_or_not
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", SETTINGS),
        ("gemma2", LoraSettings(rank=16, alpha=6.0, rslora=True)),
        ("llama", LoraSettings(rank=2, alpha=1.5, target_modules=("o_proj", "up_proj"))),
    ],
)
def test_peft_reads_a_saved_adapter_and_computes_the_same(name, settings, tied, tmp_path):
    model = adapt(name, settings, tied=tied, dtype=torch.float64)
    save_adapter(model, tmp_path)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert names == {f"base_model.model.{weight}" for weight in adapter_weights(model)}
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = build_reference(build(name, tied=tied, dtype=torch.float64))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        logits = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ROWS])
        plain = torch.cat([theirs.base_model.model(input_ids=row[None]).logits[0] for row in ROWS])
    # Their eager attention takes its softmax in float32.
    torch.testing.assert_close(logits, compute(model), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, plain) and (logits - compute(build(name, tied=tied))).abs().mean() > 0.02


def test_a_file_of_an_adapter_says_the_same_each_time(tmp_path):
    model = adapt("llama", dtype=torch.bfloat16)
    save_adapter(model, tmp_path / "a")
    save_adapter(
        model, tmp_path / "b", {name: weight.detach().clone() for name, weight in adapter_weights(model).items()}
    )
    save_adapter_config(model, tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["adapter_config.json"]
    assert (tmp_path / "c" / "adapter_config.json").read_bytes() == (
        tmp_path / "a" / "adapter_config.json"
    ).read_bytes()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(LINEAR) and (config["r"], config["lora_alpha"]) == (4, 12)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.lora_A.weight' is not on both sides"):
        save_adapter(model, tmp_path / "c", {})
    with pytest.raises(ValueError, match="no adapter to save"):
        save_adapter(build("llama"), tmp_path / "c")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_from_a_saved_adapter(dtype, tmp_path):
    first = adapt("qwen3", dtype=dtype)
    save_adapter(first, tmp_path)
    second = build("qwen3", dtype=dtype)
    apply_lora(second, LoraSettings(rank=4, alpha=12.0, path=str(tmp_path)), seed=99)
    assert torch.equal(compute(second), compute(first))
    third = adapt("qwen3", trained=False, dtype=dtype)
    load_adapter(third, tmp_path)
    assert torch.equal(compute(third), compute(first))
    assert all(weight.requires_grad for weight in adapter_weights(third).values())


def rewrite(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, dict(rank=8), r"rank is 8, but the adapter in .* has 4; leave train.lora.rank out"),
        ({}, dict(alpha=4.0), "alpha is 4.0, but the adapter in .* has 12"),
        ({}, dict(rslora=True), "rslora is true, but the adapter in .* has false"),
        ({}, dict(target_modules=("q_proj",)), r"down_proj.lora_A.weight' is in the adapter alone"),
        (dict(use_dora=True), {}, "sets use_dora"),
        (dict(alpha_pattern={"q_proj": 3}), {}, "sets alpha_pattern"),
        (dict(bias="all"), {}, "sets bias"),
        (dict(init_lora_weights="pissa"), {}, "sets init_lora_weights"),
        (dict(peft_type="LOHA"), {}, "is of kind LOHA"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(changes, settings, message, tmp_path):
    save_adapter(adapt("llama"), tmp_path)
    rewrite(tmp_path, **changes)
    chosen = LoraSettings(**(dict(rank=4, alpha=12.0, path=str(tmp_path)) | settings))
    with pytest.raises(ConfigError, match=message):
        apply_lora(build("llama"), chosen, seed=0)


def test_an_adapter_of_another_model_or_file_is_refused(tmp_path):
    save_adapter(adapt("llama"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"another model or rank: weight .*q_proj.lora_B.weight' is \[64, 4\], not \[96"
    ):
        apply_lora(build("qwen3"), LoraSettings(rank=4, alpha=12.0, path=str(tmp_path)), seed=0)
    save_adapter(adapt("llama", LoraSettings(rank=4, alpha=12.0, target_modules=("q_proj",))), tmp_path)
    with pytest.raises(ConfigError, match="down_proj.lora_A.weight' is not in it"):
        apply_lora(build("llama"), LoraSettings(target_modules="all-linear", path=str(tmp_path)), seed=0)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors in .* saved as safetensors"):
        check_lora(LoraSettings(rank=4, alpha=12.0, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "adapter_config.json",
            b'{"peft_type": "LORA"',
            "adapter_config.json in .* is damaged: .*; give a PEFT adapter",
        ),
        ("adapter_config.json", b"\xff\xfe", "adapter_config.json in .* is damaged: .*; give a PEFT adapter"),
        ("adapter_config.json", b"[]", "adapter_config.json in .* holds no keys; give a PEFT adapter"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "has r null and lora_alpha null, which have to be numbers"),
        ("adapter_model.safetensors", b"", "adapter_model.safetensors in .* is damaged: .*; give a PEFT adapter"),
    ],
)
def test_a_damaged_adapter_is_told_in_one_sentence(file, content, message, tmp_path):
    save_adapter(adapt("llama"), tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        apply_lora(build("llama"), LoraSettings(rank=4, alpha=12.0, path=str(tmp_path)), seed=0)


def test_an_adapter_directory_is_not_taken_for_a_model(tmp_path):
    model = adapt("llama")
    save_model(model, None, tmp_path)
    save_adapter(model, tmp_path)
    with pytest.raises(
        UnsupportedModelError,
        match="is a LoRA adapter, not a model; set model.path to its base and model.adapter=.*train.lora.path=",
    ):
        load_model(tmp_path)


def test_what_is_not_set_comes_from_the_adapter(tmp_path):
    save_adapter(adapt("llama", LoraSettings(rank=3, alpha=1.5, rslora=True, target_modules=("v_proj",))), tmp_path)
    form = resolve_lora(LoraSettings(path=str(tmp_path)))
    assert form == AdapterForm(rank=3, alpha=1.5, rslora=True, target_modules=("v_proj",))
    assert resolve_lora(LoraSettings(alpha=1.5, path=str(tmp_path))) == form
    new = AdapterForm(rank=16, alpha=32.0, rslora=False, target_modules="all-linear")
    assert resolve_lora(LoraSettings()) == new and resolve_lora(LoraSettings(rank=4)).rank == 4
    with pytest.raises(
        ConfigError, match="train.lora.rslora is false, but the adapter in .* has true; leave train.lora.rslora out"
    ):
        resolve_lora(LoraSettings(rslora=False, path=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [dict(target_modules="model.*_proj"), dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1])],
    ids=str,
)
def test_an_adapter_made_by_a_pattern_is_gone_on_with_at_its_own_layers(changes, tmp_path):
    layers = ("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj")
    first = adapt("llama", LoraSettings(rank=2, target_modules=layers))
    save_adapter(first, tmp_path)
    rewrite(tmp_path, **changes)
    second = build("llama")
    apply_lora(second, LoraSettings(path=str(tmp_path)), seed=0)
    assert len(adapter_weights(second)) == 4 and torch.equal(compute(second), compute(first))


@tied_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_merged_into_a_model_as_an_export_has_it(dtype, tied, tmp_path):
    adapted = adapt("qwen3", LoraSettings(rank=4, alpha=12.0, rslora=True), tied=tied, dtype=dtype)
    save_adapter(adapted, tmp_path)
    model = build("qwen3", tied=tied, dtype=dtype)
    model.module.name_or_path = "base"
    merge_adapter(model, tmp_path, "model.adapter")
    assert not has_adapter(model) and model.module.name_or_path == ""
    expected = dict(iter_merged_weights(adapted))
    own = dict(model.module.named_parameters())
    assert own.keys() == expected.keys() and all(torch.equal(own[name], weight) for name, weight in expected.items())
    assert all(weight.requires_grad for weight in own.values())


def test_an_adapter_of_another_model_is_not_merged(tmp_path):
    save_adapter(adapt("llama"), tmp_path)
    model = build("qwen3")
    before = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
    with pytest.raises(
        ConfigError,
        match="^model.adapter: the adapter in .* does not fit the model at layer 'model.layers.0.*trained on",
    ):
        merge_adapter(model, tmp_path, "model.adapter")
    assert all(torch.equal(before[name], weight) for name, weight in model.module.named_parameters())


@pytest.fixture(scope="module")
def tokenizer():
    words = {chr(0x4E00 + i): i for i in range(95)} | {"<unk>": 95, "</s>": 96}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<unk>")


def generate(model, tokenizer):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 95, length).astype(np.int32) for length in (5, 70, 33, 1)]
    prompts = Batch.from_columns(group_id=[40 + i for i in range(4)], prompt_tokens=tokens)
    sampling = SamplingParams(max_new_tokens=8, samples_per_prompt=3, temperature=0.9, seed=5, ignore_eos=True)
    return NativeEngine(model, tokenizer).generate(prompts, sampling, step=3)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama"])
def test_the_native_engine_samples_from_the_adapted_policy(name, tokenizer):
    model, base = adapt(name), build(name)
    merged = merge(model, build(name))
    ours, theirs, first = (generate(each, tokenizer) for each in (model, merged, base))
    assert torch.equal(ours.ragged("tokens").values, theirs.ragged("tokens").values)
    logprobs = [each.ragged("rollout_logprobs").values for each in (ours, theirs)]
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=1e-4, atol=1e-4)
    # A rollout to which the adapter was never sent stays with the first policy.
    assert (ours.ragged("tokens").values != first.ragged("tokens").values).float().mean() > 0.2
    with adapter_disabled(model):
        assert generate(model, tokenizer).equals(first)


@pytest.mark.parametrize(("name", "rank"), [("qwen3", 4), ("gemma2", 5), ("llama", 16)])
def test_exact_numerics_hold_with_an_adapter(name, rank, tokenizer):
    model = adapt(name, LoraSettings(rank=rank, alpha=12.0), numerics="exact")
    batch = generate(model, tokenizer)
    tokens, offsets = batch.ragged("tokens").values.long(), batch.ragged("tokens").offsets.int()
    rows = list(tokens.split(offsets.diff().tolist()))

    def score(some):
        packed_tokens, positions, packed = pack(some)
        hidden_index, token_index = predicted_positions(packed.cu_seqlens)
        hidden = model.hidden_states(packed_tokens, positions, packed)
        return compute_logprobs(hidden[hidden_index], packed_tokens[token_index], model.head, temperature=0.9)[0]

    together = score(rows)
    assert torch.equal(together, torch.cat([score([row]) for row in rows]))
    counts = batch.ragged("loss_mask").values.bool()
    expected = torch.zeros(len(tokens)).index_put((predicted_positions(offsets)[1],), together.detach())
    assert torch.equal(batch.ragged("rollout_logprobs").values[counts], expected[counts])

"""Directories in and out, fresh models, and what is refused by name."""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import SMALL_LLAMA
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from hybridflow.models import Packed, compute_logits, fresh_model, load_model, load_tokenizer, save_model
from hybridflow.models.families import UnsupportedModelError

CONFIG = SMALL_LLAMA
DATA = Path(os.environ.get("HYBRIDFLOW_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROW = (torch.arange(5), torch.arange(5), Packed(torch.tensor([0, 5], dtype=torch.int32), 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_are_inverse(tmp_path, tied, dtype):
    model = fresh_model(dict(CONFIG, tie_word_embeddings=tied), seed=0, dtype=dtype)
    save_model(model, None, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    ours = dict(model.module.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, ours[name])
    assert model.dtype == dtype and len(ours) == len(list(loaded.module.parameters()))
    assert (loaded.head_weight is loaded.module.get_input_embeddings().weight) == tied
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors"}
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    logits = theirs(input_ids=ROW[0][None]).logits[0]
    if dtype == torch.float32:
        torch.testing.assert_close(compute_logits(model.hidden_states(*ROW), model.head), logits, rtol=1e-5, atol=1e-5)


def test_a_fresh_model_depends_on_its_seed_alone(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [fresh_model(CONFIG, seed=7), fresh_model(CONFIG, seed=7), fresh_model(CONFIG, seed=8)]
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.head_weight for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    low = fresh_model(CONFIG, seed=7, dtype=torch.bfloat16)
    assert torch.equal(low.head_weight, weights[0].bfloat16())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for source in (LlamaConfig(**CONFIG), tmp_path, tmp_path / "config.json"):
        assert torch.equal(fresh_model(source, seed=7).head_weight, weights[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "cohere", "granite", "phi3", "gpt2", "gemma3"])
def test_other_families_are_refused_by_name(tmp_path, family):
    with pytest.raises(ValueError, match=f"'{family}' is not supported; hybridflow serves Llama"):
        fresh_model({"model_type": family}, seed=0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=f"'{family}' is not supported"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rope_type 'dynamic'"),
        (dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantized"),
        (dict(model_type="gemma3_text", use_bidirectional_attention=True), "both directions"),
    ],
)
def test_models_we_would_compute_wrongly_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fresh_model({**CONFIG, **change}, seed=0)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    model = fresh_model(CONFIG, seed=0)
    save_model(model, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(dict(config, num_hidden_layers=3)))
    with pytest.raises(ValueError, match="missing keys model.layers.2"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(config, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="unexpected keys model.layers.1"):
        load_model(tmp_path)


def test_only_safetensors_are_read(tmp_path):
    model = fresh_model(CONFIG, seed=0)
    model.config.save_pretrained(tmp_path)
    torch.save(model.module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="no .safetensors file"):
        load_model(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"no config.json in 'meta-llama/Llama-3'"):
        load_model("meta-llama/Llama-3")


def test_a_directorys_own_code_does_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(ValueError, match="trust_remote_code|evil"):
        load_model(tmp_path)


def test_tokenizer_round_trip(tmp_path):
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    save_model(fresh_model(CONFIG, seed=0), tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.eos_token_id == 2
    with pytest.raises(UnsupportedModelError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.skipif(
    not (DATA / "stories260K").is_dir(), reason="shared data absent: set HYBRIDFLOW_DATA to its directory"
)
def test_a_real_model_tells_its_story():
    model = load_model(DATA / "stories260K")
    tokenizer = load_tokenizer(DATA / "stories260K")
    reference = AutoModelForCausalLM.from_pretrained(DATA / "stories260K", attn_implementation="eager")
    tokens = tokenizer("Once upon a time, there was a little girl named Lily.", return_tensors="pt").input_ids[0]
    packed = Packed(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
    logits = compute_logits(model.hidden_states(tokens, torch.arange(len(tokens)), packed), model.head)
    torch.testing.assert_close(logits, reference(input_ids=tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
    assert torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None]).mean() > -2.0

"""Wrong command lines: each is told in one sentence with the key, before a worker starts."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.batch import Batch
from hybridflow.checkpoint import Checkpoint, export
from hybridflow.checkpoint.manifest import CheckpointError
from hybridflow.cli.main import main
from hybridflow.config import ConfigError
from hybridflow.data import build_character_tokenizer
from hybridflow.flow import commands

NEW = ["model.path=null", "model.tokenizer=tiny"]
RL = ["rl", "model.path=tiny", "data.files=[few.jsonl]", "reward.function=rewards.py:good", "run.progress=false"]
SFT = ["sft", "model.path=tiny", "data.files=[few.jsonl]", "data.response_column=answer", "run.progress=false"]
EVAL = ["eval", "model.path=tiny", "reward.function=rewards.py:good"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, rows and rewards, and broken copies of them."""
    root = tmp_path_factory.mktemp("place")
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=64, **shape)).save_pretrained(root / "tiny")
    build_character_tokenizer("0123456789+=").save_pretrained(root / "tiny")
    for name, file, content in (
        ("cut", "model.safetensors", (root / "tiny/model.safetensors").read_bytes()[:-100]),
        ("pointer", "model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("torn", "config.json", b'{"model_type": "llama", "hid'),
        ("foreign", "config.json", b'{"model_type": "gpt2"}'),
        ("speechless", "tokenizer.json", None),
    ):
        shutil.copytree(root / "tiny", root / name)
        (root / name / file).unlink() if content is None else (root / name / file).write_bytes(content)
    shutil.copytree(root / "tiny", root / "another")
    build_character_tokenizer("+=0123456789").save_pretrained(root / "another")
    (root / "hollow").mkdir()
    (root / "file").write_text("x")
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").write_text("")
    (root / "few.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "1"}) + "\n" for i in range(8)))
    (root / "empty.jsonl").write_text("")
    (root / "taken.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (root / "advantages.py").write_text("def raw(rewards, group_ids, ok): return rewards\n")
    (root / "rewards.py").write_text("X = 3\ndef good(response): return 1.0\ndef asks(response, gold): return 1.0\n")
    (root / "torn.py").write_text("def good(:\n")
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl"], "data.files is required and not set; set data.files=VALUE"),
        ([*RL, "model.path=nowhere"], "model.path: 'nowhere' does not exist; give a Hugging Face model directory"),
        ([*RL, "model.path=hollow"], "model.path: 'hollow' holds no config.json and no finished run; give"),
        ([*RL, "model.path=file"], "model.path: 'file' holds no config.json and no finished run; give"),
        ([*RL, "model.path=cut"], "model.path: 'cut/model.safetensors' is no whole safetensors file ("),
        ([*SFT, "model.path=pointer"], "model.path: 'pointer/model.safetensors' is no whole safetensors file ("),
        ([*RL, "model.path=torn"], "model.path: config.json in 'torn' cannot be read ("),
        ([*SFT, "model.path=foreign"], "model.path: model family 'gpt2' is not supported; hybridflow serves Llama"),
        (
            [*RL, "algorithm.kl_coefficient=0.1", "+reference.path=cut"],
            "reference.path: 'cut/model.safetensors' is no whole safetensors file (",
        ),
        (
            [*RL, "+reference.path=tiny"],
            "reference.path: 'tiny' would not be read, since no KL to it is asked for; set algorithm.kl_coefficient above 0",
        ),
        (
            [*RL, *NEW, "+model.config={model_type: llama, hiden_size: 8}"],
            "model.config: the model config's 'hiden_size' is none of a llama's values; the nearest is 'hidden_size'",
        ),
        (
            [*RL, *NEW, "+model.config={model_type: llama, hidden_size: x}"],
            "model.config: the model config cannot be used (Validation error for field 'hidden_size'",
        ),
        (
            [*RL, *NEW, "+model.config={model_type: llama, hidden_size: 30, num_attention_heads: 4}"],
            "model.config: the model config cannot be used (Class validation error",
        ),
        (
            [*RL, *NEW, "+model.config={model_type: llama, hidden_size: 32, num_attention_heads: 4, vocab_size: 3}"],
            "model.config: vocab_size is 3, and the tokenizer has 16 tokens; leave it out",
        ),
        (
            [*RL, *NEW, "+model.config={model_type: llama, hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 3}"],
            "model.config: num_key_value_heads is 3 and does not divide num_attention_heads=4; set it to a number that does",
        ),
        ([*RL, *NEW, "+model.config={hidden_size: 8}"], "model.config: the model config has no model_type"),
        ([*RL, "model.device=cuda:77"], "model.device: 'cuda:77' is not here, there are "),
        ([*RL, "model.device=gpu"], "model.device is 'gpu' and must match pattern "),
        ([*RL, "data.files=[]"], "data.files is [] and must have at least 1 item; set data.files ("),
        ([*RL, "data.files=[nowhere.jsonl]"], "data.files: 'nowhere.jsonl' names no file (seen from "),
        ([*RL, "data.files=[empty.jsonl]"], "data.files: empty.jsonl hold no rows; give files with rows"),
        ([*RL, "data.files=[hollow]"], "data.files: 'hollow' names no file (seen from "),
        (
            [*RL, "data.prompt_column=question"],
            "data.prompt_column: there is no column 'question'; set it to one of prompt, answer",
        ),
        ([*SFT, "data.response_column=gold"], "data.response_column: there is no column 'gold'; set it to one of prompt, answer"),
        ([*RL, "data.format=chat"], "data.format: chats need a chat template and the tokenizer has none; use"),
        ([*RL, "reward.function=rewards.py"], "reward.function: 'rewards.py' names no function; write pkg.mod:fn"),
        ([*RL, "reward.function=rewards.py:god"], "reward.function: '{place}/rewards.py' has no 'god'; the nearest is 'good'"),
        ([*RL, "reward.function=rewards.py:X2"], "reward.function: '{place}/rewards.py' has no 'X2'; functions there: asks, good"),
        ([*RL, "reward.function=rewards.py:X"], "reward.function: it is int, not a function; correct '"),
        ([*RL, "reward.function=torn.py:good"], "reward.function: it cannot be loaded: SyntaxError: "),
        ([*RL, "reward.function=rewards.py:asks"], "reward.function: its parameter 'gold' is no column; the columns are "),
        (
            [*RL[:3], "reward={route_by: answer, components: {a: {function: exact_match, values: [x, 2]}}}"],
            "reward.route_by: no component is for rows with answer='1', only for x, 2; name the value in the `values` of one",
        ),
        (
            [*RL, "evaluation.stop_at=0.9"],
            "evaluation.stop_at: 0.9 is never reached, since evaluation.data is not given; give evaluation.data.files=[...]",
        ),
        ([*RL, "evaluation.data.files=[nowhere.jsonl]"], "evaluation.data.files: 'nowhere.jsonl' names no file"),
        (
            [*EVAL, "evaluation.data.files=[taken.jsonl]"],
            "evaluation.data.rename: the rows have a column 'response', which is what a rollout calls a column of its own; "
            "set evaluation.data.rename.response to another name, e.g. data_response",
        ),
        (
            [*EVAL, "evaluation.data.files=[few.jsonl]", "evaluation.data.min_tokens=9", "evaluation.data.max_tokens=8"],
            "evaluation.data.min_tokens: 9 is more than evaluation.data.max_tokens=8, and no row is both; lower it",
        ),
        (
            [*EVAL, "evaluation.data.files=[few.jsonl]", "evaluation.data.max_tokens=2"],
            "evaluation.data: none of the 8 rows of few.jsonl can be used (8 dropped); raise evaluation.data.max_tokens",
        ),
        ([*SFT, "evaluation.data.files=[few.jsonl]"], "reward.function: evaluation.data is given, and nothing says what"),
        (
            [*EVAL, "evaluation.data.files=[few.jsonl]", "evaluation.data.epochs=3"],
            "evaluation.data.epochs: 3 would not be read, since prompts are taken once here; leave it out (null)",
        ),
        (
            [*RL, "algorithm.kl_coefficient=0.1", "reference.path=another"],
            "reference: 12 of the policy's 16 tokens, such as '0', are others or none in the reference's tokenizer, and a KL",
        ),
        (
            [*RL, "algorithm.kl_coefficient=0.1", "reference={path: tiny, tokenizer: another}"],
            "reference: 12 of the policy's 16 tokens, such as '0', are others or none in the reference's tokenizer, and a KL",
        ),
        (
            [*RL, "sampling.samples_per_prompt=1", "algorithm.advantage_function=advantages.py:raw"],
            "algorithm.drop_constant_groups: true leaves out groups of equal rewards, as all are with sampling.samples_per_prompt=1, and",
        ),
        (
            [*RL, "sampling.top_p=0.9", "rollout.engine=vllm"],
            "rollout.engine: 'vllm' does not tell among how many tokens each was drawn, which training on samples cut by min_p, top_k",
        ),
        (
            [*RL, "sampling.min_p=0.05", "sampling.top_k=5", "rollout.vllm.url=http://127.0.0.1:1"],
            "rollout.engine: 'vllm' does not tell among how many tokens each was drawn, which training on samples cut by min_p, top_k",
        ),
        (
            [
                *[*RL, "sampling.top_k=5", "train.parallel_config.tp=2"],
                *["runtime.kind=ray", 'runtime.placement.device_map={actor: "cpu:0-1"}'],
            ],
            "sampling.top_k=5: the trainer needs each distribution whole, and train.parallel_config.tp=2 splits the vocabulary",
        ),
        ([*RL, "sampling.min_p=1.5"], "sampling.min_p is 1.5 and must be less than or equal to 1; "),
        ([*RL, "sampling.repetition_penalty=0"], "sampling.repetition_penalty is 0 and must be greater than or equal to 0.01; "),
        ([*RL, "sampling.repetition_penalty=1e9"], "sampling.repetition_penalty is 1000000000.0 and must be less than or equal to 100; "),
        ([*RL, "updates_per_step=64"], "updates_per_step: 64 is more than prompts_per_step=32; "),
        (
            [*RL, "steps=99999999999999999999"],
            "steps is 99999999999999999999 and must be less than 2**63; correct it or leave it at its default, 100",
        ),
        ([*RL, "numerics=exact", "model.dtype=float64"], "numerics: 'exact' needs float32"),
        ([*RL, "rollout.native.tp=2"], "rollout.native.tp: 2 takes 2 workers or a multiple, and 1 generates; "),
        (
            [*RL, "rollout.engine=native", "rollout.vllm.url=http://h:1"],
            "rollout.vllm.url: 'http://h:1' is a vLLM server, and rollout.engine is native; ",
        ),
        ([*RL, "rollout.vllm.url=h:1"], "rollout.vllm.url is 'h:1' and must match pattern "),
        (
            [*RL, "train.parallel_config.tp=2"],
            "train.parallel_config: tp=2 takes 2 trainers or a multiple, but there is 1 trainer; ",
        ),
        ([*RL, "train.lora=true"], "train.lora is true and must be a section of keys; write its keys, such as train.lora.rank"),
        (
            [*RL, "train.lora.target_modules=[nosuch]"],
            "train.lora.target_modules: 'nosuch' is no linear layer below the head; there are ",
        ),
        ([*RL, "train.lr=1"], "unknown key 'train.lr' (value 1): the nearest key is 'train.optimizer.lr'; "),
        (
            [*RL, '+runtime.placement.device_map={actr: "cpu:0"}'],
            "runtime.placement.device_map.actr: 'actr' is not a role of this run",
        ),
        (
            [*RL, '+runtime.placement.device_map={actor: "tpu:0"}'],
            "runtime.placement: device_map.actor names 'tpu:0', which is not a range",
        ),
        ([*RL, "checkpoint.resume_path=hollow"], "checkpoint.resume_path is 'hollow' while checkpoint.resume_mode is 'auto'; "),
        (
            [*RL, "checkpoint.resume_mode=path", "checkpoint.resume_path=hollow"],
            "checkpoint.resume_path: 'hollow' holds no manifest.json; give ",
        ),
        ([*RL, "run.name=a/b"], "run.name is 'a/b' and must match pattern "),
        (["generate", "model.path=tiny"], 'prompts: nothing to continue; give prompts=["..."] or data.files=[...]'),
        (["generate", "model.path=tiny", "prompts=a"], "prompts is 'a' and must be a list; write it as one, 'prompts=[a]'"),
        (
            ["generate", "model.path=tiny", "prompts=[a]", "output=hollow"],
            "output: 'hollow' is a directory; name a file, such as hollow/samples.parquet",
        ),
        (["generate", "model.path=tiny", "prompts=[a]", "output=no/x"], "output: the directory of 'no/x' does not exist; "),
        *(
            ([*words, f"output={name}"], f"output: '{name}' has no name that ends in .parquet, and samples are written as Parquet alone; ")
            for words in (["generate", "model.path=tiny", "prompts=[a]"], [*EVAL, "evaluation.data.files=[few.jsonl]"])
            for name in ("o.jsonl", "hollow/o.csv", "o.parquet.gz", "o", ".parquet")
        ),
        (["eval", "model.path=tiny", "evaluation.data.files=[few.jsonl]"], "reward.function: nothing is rewarded; give "),
        (["export", "checkpoint=nowhere", "output=o"], "checkpoint: 'nowhere' is no directory; give "),
        (["export", "checkpoint=tiny", "output=o"], "checkpoint: 'tiny' holds no whole checkpoint; give "),
        (["export", "checkpoint=hollow", "output=tiny"], "output: 'tiny' holds a model already (config.json); name "),
        (["export", "checkpoint=hollow", "output=file"], "output: 'file' is a file; name a directory"),
        (["export", "checkpoint=hollow", "output=''"], "output: '' is no directory; name one"),
        (["export", "checkpoint=hollow", "output=run"], "output: 'run' is a run's directory (it holds metrics.jsonl); name "),
        (
            ["export", "checkpoint=hollow", "output=file/x/y"],
            "output: 'file/x/y' cannot be written (Not a directory); name a directory in a directory that can be",
        ),
        (
            ["generate", "model.path=tiny", "prompts=[a]", f"output={'x' * 242}.parquet"],
            f"output: '{'x' * 242}.parquet' cannot be written (File name too long); name a file in a directory that can be",
        ),
        (["plan", "eval"], "'eval' is no command that can be planned; write one of rl, sft"),
        (["plan", *RL, "--svg", "no/x.svg"], "--svg: 'no/x.svg' cannot be written (No such file or directory); "),
        (["quickstart", "directory=file"], "directory: 'file/quickstart/"),
        (
            ["quickstart", "stop_at=95"],
            "stop_at is 95 and must be less than or equal to 1; correct it or leave it at its default, 0.95",
        ),
        (["doctor", "depth=3"], "unknown key 'depth' (value 3): the configuration has no keys to set; take it out"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else " ".join(value)[-40:],
)  # fmt: skip
def test_a_wrong_command_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(commands, "open_runtime", refuse)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message.replace('{place}', str(place))}")
    assert ("; " in line or ": rename " in line or ": name " in line) and "Traceback" not in shown.err


def test_a_held_out_row_that_cannot_be_used(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    limits = ["evaluation.data.max_tokens=2", "evaluation.data.on_long_row=error"]
    assert main([*EVAL, "evaluation.data.files=[few.jsonl]", *limits]) == 1
    assert capsys.readouterr().err == (
        "error: few.jsonl, line 1: it has 5 tokens, more than evaluation.data.max_tokens=2; raise that, or set "
        "evaluation.data.on_long_row to drop or truncate\n"
    )


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Batch, "to_parquet", fill)
    with pytest.raises(
        ConfigError, match=r"^output: 'o' cannot be written \(No space left on device\); name a file in "
    ):
        commands._write(Batch.from_columns(reward=[1.0]), "o")
    source = tmp_path / "actor" / "huggingface"
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"dtype": "float32"}')
    monkeypatch.setattr(export, "save_file", fill)
    checkpoint = SimpleNamespace(path=tmp_path, load_tensors=lambda *_: {})
    with pytest.raises(
        CheckpointError, match=r"^output: '.*out' cannot be written \(.*No space left on device\); make room"
    ):
        export.export_checkpoint(cast(Checkpoint, checkpoint), tmp_path / "out")


def test_a_model_without_a_tokenizer(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main([*RL, "algorithm.kl_coefficient=0.1", "reference.path=speechless"]) == 1
    assert "error: reference.tokenizer: no tokenizer can be read from 'speechless'" in capsys.readouterr().err
    assert main([*RL, "model.path=speechless"]) == 1
    assert capsys.readouterr().err == (
        "error: model.tokenizer: no tokenizer can be read from 'speechless' (it holds no tokenizer.json); give a directory with a "
        "tokenizer.json\n"
    )

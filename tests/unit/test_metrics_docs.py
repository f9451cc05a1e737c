"""Documents held to what is so: the metrics that a run writes, the engine that it says and records, the Pythons that are tested."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from hybridflow.config import load_config
from hybridflow.flow.commands import run_rl, run_sft
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.observability.report.names import NAMES

ROOT = Path(__file__).parents[2]
TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}"
)
GROUPS = (
    "advantages", "checkpoint", "controller", "data", "eval", "groups", "hybrid", "memory", "policy", "probe", "recovery", "response",
    "reward", "rollout", "rows", "sft", "speed", "time", "train",
)  # fmt: skip
WRITTEN = re.compile(rf'"((?:{"|".join(GROUPS)})/[a-z_0-9]+)"')
"""Names that the source writes out."""
MADE = {
    *(f"rows/{state}" for state in ("ok", "empty", "failed", "rejected")),
    *(
        f"data/rows_{kind}"
        for kind in ("dropped", "truncated", "short", "skipped", "unmatched", "filtered", "duplicate")
    ),
    *(f"policy/clip_fraction_{side}" for side in ("low", "high", "dual")),
}
"""Names that the source puts together."""


@pytest.fixture(scope="module")
def units() -> dict[str, str]:
    """By name of the tables' first column, such as `train/lr` and `time/<phase>_s`, the unit; '' for a pure number."""
    rows = [
        line.split("|") for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert all(len(row) == 5 and row[3].strip() for row in rows)
    found: dict[str, str] = {}
    for _, cell, unit, *_ in rows:
        names, of_each = re.findall(r"`([^`]+)`", cell), unit.strip().split(", ")
        assert len(of_each) in (1, len(names)) and not found.keys() & set(names)
        found |= dict(zip(names, of_each if len(of_each) > 1 else of_each * len(names), strict=True))
    return found


@pytest.fixture(scope="module")
def told(units: dict[str, str]) -> list[str]:
    return list(units)


def is_told(name: str, told: list[str]) -> bool:
    if name in told:
        return True
    return any(re.fullmatch(re.sub(r"<\w+>", r"[\\w-]+", pattern), name) for pattern in told if "<" in pattern)


def test_every_name_in_the_source_is_told_and_every_name_told_is_in_the_source(told: list[str]) -> None:
    files = [path for path in (ROOT / "src").rglob("*.py") if "report" not in path.parts]
    # Beside metrics there are sources of rewards, called by their component.
    written = {name for path in files for name in WRITTEN.findall(path.read_text())} - {"reward/accuracy"}
    assert sorted(name for name in written | MADE if not is_told(name, told)) == []
    assert sorted(name for name in told if "<" not in name and name not in written | MADE) == []
    assert len(told) > 50


def test_the_report_calls_a_metric_what_the_tables_do(units: dict[str, str]) -> None:
    shown = {name: known.unit.replace("/", " a ") for name, known in NAMES.items()}
    assert shown == {name: unit.replace("/", " a ") for name, unit in units.items() if "<" not in name}


def words(tmp_path: Path, *more: str) -> list[str]:
    files = write_sums(tmp_path, seed=0)
    return [
        f"+model.config={TINY}", f"+model.tokenizer={tmp_path / 'tokenizer'}", f"data.files=[{files['valid']}]", "steps=2",
        f"evaluation.data.files=[{files['test']}]", "evaluation.max_prompts=4", "evaluation.stop_at=null",
        "evaluation.every_steps=1", "checkpoint.every_steps=1",
        f"run={{directory: {tmp_path}, name: first, tensorboard: false}}", *more,
    ]  # fmt: skip


def read_run(run: Path) -> tuple[set[str], str | None]:
    """Names of metrics, and the engine that the run has recorded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    return set().union(*lines) - {"step"}, json.loads((run / "environment.json").read_text())["rollout_engine"]


def test_a_run_writes_no_name_that_is_not_told(
    tmp_path: Path, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = words(
        tmp_path, "prompts_per_step=4", "sampling.samples_per_prompt=4", "model.path=null", "algorithm.kl_coefficient=0.01",
        "reward.inline=true", "+train.share_prompts=true",
    )  # fmt: skip
    run_rl(load_config(RLConfig, config_name="quickstart_rl", overrides=more))
    names, engine = read_run(tmp_path / "quickstart" / "first")
    assert {name.split("/")[0] for name in names} >= {
        "reward",
        "eval",
        "policy",
        "response",
        "rows",
        "groups",
        "data",
        "train",
        "time",
        "speed",
    }
    assert sorted(name for name in names if not is_told(name, told)) == []
    assert engine == "native: on a CPU it uses the trainer's own weights, and nothing else is faster"
    assert f"rollout engine {engine}\n" in capsys.readouterr().err


def test_a_run_that_generates_nothing_names_no_engine(
    tmp_path: Path, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = words(tmp_path, "rows_per_step=4", "model.path=null", "evaluation.data=null", "data.response_column=answer")
    more = [word for word in more if not word.startswith("evaluation.data.files")]
    run_sft(load_config(SFTConfig, config_name="quickstart_sft", overrides=more))
    names, engine = read_run(tmp_path / "quickstart" / "first")
    assert "sft/loss" in names and sorted(name for name in names if not is_told(name, told)) == []
    assert engine is None and "rollout engine" not in capsys.readouterr().err


def test_the_same_pythons_are_named_everywhere() -> None:
    told = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")}
    assert tomllib.loads(told.pop("pyproject.toml"))["project"]["requires-python"] == ">=3.11,<3.13"
    assert [name for name, text in told.items() if "3.11 or 3.12" not in text] == []
    assert "(3, 11) <= v < (3, 13)" in told["Makefile"]

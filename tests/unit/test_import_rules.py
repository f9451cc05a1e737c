"""The import rules hold, and each of them notices when it is broken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLANTED = {
    "config/load.py": ("import hybridflow.types", "config stands alone"),
    "types.py": ("import hybridflow.observability.run", "the nouns know config alone"),
    "observability/run.py": ("import hybridflow.runtime.api", "observability knows the nouns"),
    "algorithms/kl.py": ("import hybridflow.models.head", "algorithms are pure functions on the nouns"),
    "data/__init__.py": (
        "import hybridflow.rollout.base",
        "models, data, rewards and checkpoint stand below the engines",
    ),
    "rollout/native/engine.py": ("import hybridflow.data", "engines use models"),
    "runtime/dispatch.py": ("import hybridflow.roles.actor", "the runtime knows the nouns"),
    "roles/actor.py": ("import hybridflow.data", "roles use the runtime's interface and the engines"),
    "roles/reference.py": ("import hybridflow.runtime.inprocess", "only the runtime's interface is seen above it"),
    "flow/job.py": ("import hybridflow.rollout.native.engine", "flow is what happens, not where or how"),
    "flow/rl.py": ("import hybridflow.algorithms.losses", "the page has verbs only"),
    "cli/rl.py": ("def late():\n    import hybridflow.data", "the command line knows flow"),
    "flow/sft.py": ("def late():\n    import ray", "ray stays in runtime/ray_*.py"),
}


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=directory, env=os.environ | {"PYTHONPATH": str(directory / "src"), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_rules_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reward_worker_works_without_the_engines() -> None:
    """Whose imports would take most of its start, and a gigabyte for nothing."""
    code = """
import sys
from hybridflow.batch import Batch
from hybridflow.rewards import RewardSettings
from hybridflow.roles.reward_model import RewardWorker
from hybridflow.runtime.api import Seat
worker = RewardWorker(Seat("reward"), RewardSettings(function="exact_match", workers=1), None)
batch = Batch.from_columns(tokens=[[5, 6]], loss_mask=[[0, 1]], response=["4"], answer=["4"], state=[0], rollout_error=[None])
(scores,) = worker.score(batch, (1,)).objects
scored = batch.merge(scores)
told = worker.summarize(scored)
samples, spread = worker.cut(worker.take(scored, [0]).objects[0], [0], None)
worker.close()
print(told.mean, told.num_tokens, samples.num_rows, spread.pylist("length"), {"torch", "transformers"} & set(sys.modules))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "1.0 1 1 [1] set()\n", done.stderr


def test_every_import_rule_notices_a_violation(copy: Path) -> None:
    for file, (line, _) in PLANTED.items():
        path = copy / "src" / "hybridflow" / file
        path.write_text(path.read_text() + f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = {line.partition(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line}
    assert broken == {name for _, name in PLANTED.values()}


def test_process_groups_stay_out_of_flow_and_algorithms(copy: Path) -> None:
    for file in ("flow/rl.py", "algorithms/kl.py"):
        path = copy / "src" / "hybridflow" / file
        path.write_text(
            path.read_text() + "\n\ndef late() -> None:\n    import torch.distributed as dist\n\n    dist.barrier()\n"
        )
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--output-format", "concise", "src"],
        cwd=copy, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 1
    assert {
        line.split(":")[0].removeprefix("src/hybridflow/") for line in found.stdout.splitlines() if "TID251" in line
    } == {
        "flow/rl.py",
        "algorithms/kl.py",
    }

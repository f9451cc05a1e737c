"""What whole runs start from."""

from __future__ import annotations

import pytest
from tiny_runs import train_start, write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a small task: `tokenizer`, `few` (40 rows to train on) and `valid`."""
    return write_task(tmp_path_factory.mktemp("sums"))


@pytest.fixture(scope="session")
def start(task: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that SFT left, as a run's directory."""
    return train_start(task, tmp_path_factory.mktemp("start"))

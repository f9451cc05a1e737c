"""The kept samples as the page's browser reads them, of bounded size."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from hybridflow.batch import Batch
from hybridflow.observability.report.reading import RunRecord
from hybridflow.observability.report.spreads import thin
from hybridflow.observability.samples import list_steps, samples_path
from hybridflow.types import RowState

MAX_TOKENS = 150_000
"""Tokens in the page, some 20 bytes each; where more were kept, steps are left out evenly."""


def build_rollouts(record: RunRecord) -> tuple[list[dict[str, Any]], int]:
    """The steps of the browser, and how many were kept: each `{"step": 20, "groups": [{"prompt": [...], "rows": [...]}]}`."""
    directory = record.path / "samples"
    kept = [step for step in list_steps(directory) if record.first_step <= step <= record.last_step]
    steps, sizes = thin(kept, 64), 0
    batches: dict[int, Batch] = {}
    built: list[dict[str, Any]] = []
    for step in steps:
        try:
            batch = Batch.from_parquet(samples_path(directory, step))
            _check(batch)
        except (OSError, ValueError):
            record.notes.append(f"samples/{samples_path(directory, step).name} cannot be read.")
            continue
        batches[step] = batch
        sizes += len(batch.ragged("tokens").values)
    if sizes > MAX_TOKENS:
        chosen = thin(sorted(batches), max(1, len(batches) * MAX_TOKENS // sizes))
        batches = {step: batches[step] for step in chosen}
    for step, batch in batches.items():
        try:
            built.append(_build_step(step, batch))
        except (ValueError, TypeError, KeyError):
            record.notes.append(f"samples/{samples_path(directory, step).name} cannot be read.")
    return built, len(kept)


def _check(batch: Batch) -> None:
    needed = {"group_id", "state", "reward", "tokens", "loss_mask", "rollout_logprobs", "positions", "pieces"}
    if missing := sorted(needed - set(batch.column_names)):
        raise ValueError(f"the columns {missing} are missing")
    if (batch.lengths("pieces") != batch.lengths("tokens")).any():
        raise ValueError("'pieces' must have the length of 'tokens'")


def _build_step(step: int, batch: Batch) -> dict[str, Any]:
    rows = [_build_row(batch, index) for index in range(batch.num_rows)]
    by_group = groupby(zip(batch.pylist("group_id"), rows, strict=True), key=lambda pair: pair[0])
    groups = []
    for _, members in by_group:
        together = [row for _, row in members]
        # The prompt is that of the first sample: a group has one.
        groups.append({"prompt": together[0]["prompt"], "cut": together[0]["cut"], "rows": together})
        for row in together:
            del row["prompt"], row["cut"]
    return {"step": step, "groups": groups}


def _build_row(batch: Batch, index: int) -> dict[str, Any]:
    """`p` pieces, `m` mask, `l` and `t` log-probabilities of rollout and trainer in thousandths, `g` tokens left out before a place."""
    row = batch.slice(index, index + 1)
    mask = row.arrays("loss_mask")[0]
    first = int(mask.argmax()) if mask.any() else len(mask)
    pieces, positions = row.pylist("pieces")[0], np.asarray(row.pylist("positions")[0])
    gaps = np.flatnonzero(np.diff(positions[first:]) > 1) + 1
    reward = row.pylist("reward")[0]
    return {
        "prompt": "".join(pieces[:first]),
        "cut": int(positions[0]) if len(positions) else 0,
        "p": pieces[first:],
        "m": "" if mask[first:].all() else "".join(map(str, mask[first:].tolist())),
        "l": _thousandths(row.arrays("rollout_logprobs")[0][first:]),
        "t": _thousandths(row.arrays("trainer_logprobs")[0][first:]) if "trainer_logprobs" in row else None,
        "g": {int(at): int(positions[first + at] - positions[first + at - 1] - 1) for at in gaps},
        "n": int(positions[-1]) + 1 - int(positions[first]) if first < len(positions) else 0,
        "r": reward if reward is not None and np.isfinite(reward) else None,
        "s": RowState(row.pylist("state")[0]).name.lower(),
        "f": row.pylist("finish_reason")[0] if "finish_reason" in row else "",
        "e": next((row.pylist(name)[0] for name in ("rollout_error", "reward_error") if name in row and row.pylist(name)[0]), ""),
    }  # fmt: skip


def _thousandths(logprobs: np.ndarray) -> list[int | None]:
    return [round(float(value) * 1000) if np.isfinite(value) else None for value in logprobs]

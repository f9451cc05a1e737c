"""The page itself: what a run's record says, laid out by the template. All that comes from data is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from hybridflow.observability.report.charts import NUM_COLORS, Chart, build_chart, build_phases
from hybridflow.observability.report.names import EXPECTED, GROUPS, HEADLINES, group_of
from hybridflow.observability.report.reading import RunRecord, Series, read_run
from hybridflow.observability.report.rollouts import build_rollouts
from hybridflow.observability.report.series import format_duration, format_value
from hybridflow.observability.report.spreads import build_spreads

NAME = "report.html"
MAX_CURVES = 120
"""Metrics that are drawn; a run that has more keeps the others in metrics.jsonl."""
MAX_CONFIG = 200_000
"""Characters of config.yaml that are shown."""

STILL = 1e-3
"""A curve whose values differ by less than this, of the largest, is told as one number: noise would fill its axis."""
MAX_HISTORY = 200
"""Starts and ends that are listed."""

STATES = {
    "finished": ("Finished", "good"),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "warn"),
    "running": ("Running", "info"),
    "vanished": ("Ended without a word", "bad"),
    "unknown": ("Unfinished", "warn"),
}
_KEY = re.compile(r"""(\s*(?:- )*)(?!- )([^\s:"'{\[#][^:]*|"[^"]*"|'[^']*')(:(?:\s.*)?)""")
KINDS = {"rl": "Reinforcement learning", "sft": "Supervised fine-tuning", "run": "Run"}


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes the run's report, whole or not at all, and returns its path.

    output: the file; None is `report.html` in the run's directory.
    """
    path = output or run / NAME
    beside = path.with_name(f".writing-{path.name}")
    page = build_report(read_run(run))
    beside.unlink(missing_ok=True)
    try:
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def build_report(record: RunRecord) -> str:
    """The page of a run. Its size is bounded whatever the run's length: see the limits in this package and `samples.MAX_KEPT_STEPS`."""
    charts = _build_charts(record)
    rollouts, num_kept = build_rollouts(record)
    spreads = build_spreads(record)
    script, style = _read("page.js"), _read("page.css")
    return _template().render(
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_to_json({"charts": {chart.metric: _chart_data(chart) for chart in charts}, "rollouts": rollouts}),
        title=record.path.resolve().name,
        project=record.path.resolve().parent.name,
        kind=KINDS[record.kind],
        state=STATES[record.outcome.state],
        ending=_describe_ending(record),
        tiles=_build_tiles(record),
        headlines=[chart for chart in charts if chart.metric in HEADLINES[record.kind]],
        groups=_group([chart for chart in charts if chart.metric not in HEADLINES[record.kind]]),
        has_smooth=any(chart.smooth for chart in charts),
        num_metrics=len(record.metrics),
        max_curves=MAX_CURVES,
        phases=build_phases(record),
        num_colors=NUM_COLORS,
        spreads=spreads,
        rollouts=rollouts,
        num_kept=num_kept,
        record=record,
        starts=_build_starts(record),
        notes=_build_notes(record),
        config_lines=[_split_key(line) for line in record.config_text[:MAX_CONFIG].splitlines()],
        config_cut=len(record.config_text) > MAX_CONFIG,
        versions=_list_versions(record),
        command=" ".join(map(str, record.environment.get("command") or [])),
        now=_format_time(datetime.now(UTC).timestamp()),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_read("page.html"))


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _to_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end that element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(chart: Chart) -> dict[str, Any]:
    return {"u": chart.name.unit, "w": chart.width, **chart.points}


def _build_charts(record: RunRecord) -> list[Chart]:
    """Of the first `MAX_CURVES` metrics, in the order of headlines and groups."""
    order = {title: index for index, (title, _) in enumerate(GROUPS)}
    headlines = HEADLINES[record.kind]
    names = sorted(
        record.metrics, key=lambda name: (name not in headlines, order.get(group_of(name), len(order)), name)
    )
    return [build_chart(name, record.metrics[name], record) for name in names[:MAX_CURVES]]


def _group(charts: list[Chart]) -> list[tuple[str, list[Chart], list[Chart]]]:
    """By heading, the curves that move and those that do not."""
    titles = [*(title for title, _ in GROUPS), "Other"]
    groups = []
    for title in titles:
        inside = [chart for chart in charts if group_of(chart.metric) == title]
        moving = [chart for chart in inside if not _is_constant(chart)]
        if inside:
            groups.append((title, moving, [chart for chart in inside if _is_constant(chart)]))
    return groups


def _is_constant(chart: Chart) -> bool:
    if chart.bad or chart.count < 2:
        return False
    lows = chart.points["l"]
    low, high = min(lows), max(chart.points.get("h", lows))
    return low == high or high - low < STILL * max(abs(low), abs(high))


def _split_key(line: str) -> tuple[str, str, str]:
    """What stands before a line's key, the key, and the rest: `("  - ", "kind", ": constant")`; `("", "", "- 0.9")` where it has no key."""
    found = _KEY.fullmatch(line)
    return (found[1], found[2], found[3]) if found else ("", "", line)


def _describe_ending(record: RunRecord) -> str:
    planned, done = record.planned_steps, record.last_step
    of = f"{done:,} of {planned:,} steps" if planned is not None else f"{done:,} steps"
    outcome = record.outcome
    if outcome.state == "finished":
        early = planned is not None and done < planned
        return f"{of}; it ended early, at its goal or with its data" if early else of
    if outcome.state == "vanished":
        return f"{of}; the process left no word of its end: it was killed, or its machine was"
    if outcome.state == "running":
        return f"{of} so far"
    return of


def _build_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """Label, value, and a line under it."""
    results = {"eval/reward_mean": "Held-out reward", "reward/mean": "Mean reward", "sft/loss": "Training loss"}
    tiles = []
    for metric, label in results.items():
        if values := _finite(record.metrics.get(metric)):
            tiles.append((label, format_value(values[-1]), f"from {format_value(values[0])}"))
    planned = record.planned_steps
    tiles.append(("Steps", f"{record.last_step:,}", "plan not known" if planned is None else f"of {planned:,}"))
    return tiles + _build_cost_tiles(record)


def _build_cost_tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    times, speeds, peaks = (
        _finite(record.metrics.get(metric))
        for metric in ("time/step_s", "speed/trained_tokens_per_s", "memory/peak_rss_bytes")
    )
    tiles = []
    if times:
        tiles.append(("Time in steps", format_duration(math.fsum(times)), f"median {format_value(median(times), 's')}"))
    if speeds:
        tiles.append(("Training speed", format_value(median(speeds)), "tokens/s, median of steps"))
    if peaks:
        tiles.append(("Host memory", format_value(max(peaks), "bytes"), "largest worker"))
    return tiles


def _finite(series: Series | None) -> list[float]:
    return [] if series is None else [value for value in series.values.tolist() if math.isfinite(value)]


def _build_starts(record: RunRecord) -> list[tuple[str, str]]:
    told, is_under_way = [], False
    for line in record.history[-MAX_HISTORY:]:
        step, at = line.get("step", 0), line.get("at_s")
        when = _format_time(at) if isinstance(at, (int, float)) else "at an unknown time"
        if line.get("event") == "start":
            told += [("", "Ended without a word")] if is_under_way else []
            told.append((when, "Started" if not step else f"Went on after step {step}"))
        else:
            error = line.get("error")
            told.append((when, f"Ended after step {step}" + (f": {error}" if error else "")))
        is_under_way = line.get("event") == "start"
    return told


def _build_notes(record: RunRecord) -> list[str]:
    notes = list(record.notes)
    if not record.metrics:
        return [*notes, "No step was finished, so there is nothing to draw."]
    for metric, why in EXPECTED[record.kind].items():
        if metric not in record.metrics:
            notes.append(f"There is no {metric}: {why}.")
    if len(record.metrics) > MAX_CURVES:
        notes.append(f"{len(record.metrics) - MAX_CURVES} further metrics are in metrics.jsonl alone.")
    return notes


def _list_versions(record: RunRecord) -> list[tuple[str, str]]:
    environment = record.environment
    versions = environment.get("versions")
    listed = [(str(name), str(version)) for name, version in versions.items()] if isinstance(versions, dict) else []
    gpus = environment.get("gpus")
    facts = {
        "Python": environment.get("python"),
        "git commit": environment.get("git_commit"),
        "CPU cores": environment.get("cpu_count"),
        "rollout engine": environment.get("rollout_engine"),
        "GPUs": (", ".join(map(str, gpus)) or "none") if isinstance(gpus, list) else None,
    }
    return [*listed, *((name, str(value)) for name, value in facts.items() if value is not None)]


def _format_time(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"

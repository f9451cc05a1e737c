"""The report of a run: what is read, what is drawn, what is bounded, and that nothing in a run's data becomes markup."""

from __future__ import annotations

import fcntl
import html
import json
import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.cli.main import main
from hybridflow.observability.report import build_report, read_run, write_report
from hybridflow.observability.report.charts import NUM_COLORS, build_chart, build_phases, label_ticks
from hybridflow.observability.report.reading import RunRecord, Series
from hybridflow.observability.report.rollouts import MAX_TOKENS, build_rollouts
from hybridflow.observability.report.series import downsample, format_value, nice_ticks, running_mean
from hybridflow.observability.report.spreads import build_spreads
from hybridflow.observability.run import RunDirectory, RunSettings
from hybridflow.observability.samples import (
    MAX_KEPT_STEPS,
    SampleFiles,
    compute_spread,
    cut_samples,
    list_steps,
    plan_kept,
    plan_rows,
    split_text,
)

EVIL = '</script><img src=x onerror="window.harmed=1"><script>window.harmed=1</script>\'"&<!--'


def write_run(path: Path, lines: list[dict[str, Any]], **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text("steps: 100\nprompts_per_step: 4\n")
    (path / "environment.json").write_text('{"versions": {"torch": "2.13.0"}, "python": "3.11.7", "gpus": []}')
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def make_samples(num_tokens: int = 8, text: str = "x", groups: int = 2) -> Batch:
    rows = 2 * groups
    return Batch.from_columns(
        group_id=[row // 2 for row in range(rows)],
        sample_id=[row % 2 for row in range(rows)],
        state=[0] * rows,
        reward=[float(row % 2) for row in range(rows)],
        finish_reason=["stop"] * rows,
        reward_error=[text if row == 0 else None for row in range(rows)],
        tokens=[list(range(num_tokens))] * rows,
        loss_mask=[[0, 0] + [1] * (num_tokens - 2)] * rows,
        rollout_logprobs=[[0.0, 0.0] + [-0.5] * (num_tokens - 2)] * rows,
        trainer_logprobs=[[0.0, 0.0] + [-0.25] * (num_tokens - 2)] * rows,
        positions=[list(range(num_tokens))] * rows,
        pieces=[[text] * num_tokens] * rows,
    )


# Curves


@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(-1e6, 1e6) | st.just(float("nan"))), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_downsampling_keeps_every_extreme_within_its_place(
    steps_and_values: list[tuple[int, float]], count: int
) -> None:
    steps = np.cumsum([gap for gap, _ in steps_and_values])
    values = np.array([value for _, value in steps_and_values])
    first, last = int(steps[0]), int(steps[-1])
    buckets = downsample(Series(steps, values), first, last, count)
    finite = np.isfinite(values)
    place = (steps - first) * count // (last - first + 1)
    assert len(buckets.steps) == len(np.unique(place[finite])) <= count
    for index, at in enumerate(np.unique(place[finite])):
        inside = values[finite & (place == at)]
        assert (buckets.low[index], buckets.high[index]) == (inside.min(), inside.max())
        assert buckets.mean[index] == pytest.approx(inside.mean(), rel=1e-9, abs=1e-6)
        assert buckets.steps[index] == steps[finite & (place == at)][0]


def test_a_line_breaks_where_a_value_was_not_finite() -> None:
    series = Series(np.arange(1, 6), np.array([1.0, 2.0, np.nan, 4.0, 5.0]))
    assert downsample(series, 1, 5, 100).breaks.tolist() == [False, False, True, False]
    chart = build_chart("train/grad_norm", series, RunRecord(Path("r"), first_step=1, last_step=5))
    assert chart.raw.count("M") == 2 and chart.bad == 1 and chart.count == 4


def test_the_running_mean_is_that_of_its_window() -> None:
    values = np.random.default_rng(0).normal(size=50)
    found = running_mean(values, 7)
    for at in range(50):
        half = min(3, at, 49 - at)
        assert found[at] == pytest.approx(values[at - half : at + half + 1].mean(), abs=1e-12)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_few_and_lie_on_the_axis(low: float, span: float) -> None:
    high = low + span
    ticks = nice_ticks(low, high, 4)
    assert 1 <= len(ticks) <= 9
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0.0, 3.0, "", ["0", "1", "2", "3"]), (0.99996, 1.00004, "", ["0.99996", "0.99998", "1.00000", "1.00002", "1.00004"]),
        (6.1402 * 2**30, 6.1404 * 2**30, "bytes", None), (0.8120, 0.8121, "share", None), (2**20, 4 * 2**20, "bytes", None),
        (123.0, 124.0, "", ["123.00", "123.25", "123.50", "123.75", "124.00"]), (1000.0, 1010.0, "", None),
        (0.97, 0.98, "share", ["97.00 %", "97.25 %", "97.50 %", "97.75 %", "98.00 %"]), (-3e-7, -2e-7, "", None), (0.0, 1e7, "", None),
    ],
)  # fmt: skip
def test_labels_tell_the_ticks_of_an_axis_apart(low: float, high: float, unit: str, expected: list[str] | None) -> None:
    ticks = nice_ticks(low, high, 4)
    labels = label_ticks(ticks, unit)
    assert len(set(labels)) == len(ticks) >= 2
    if expected is not None:
        assert labels == expected
    scale = {"GiB": 2**30, "MiB": 2**20, "%": 0.01, "": 1.0}
    parts = [label.replace(",", "").partition(" ") for label in labels]
    slack = (0.51 if unit == "bytes" else 1e-6) * min(np.diff(ticks))
    assert [float(number) * scale[sign] for number, _, sign in parts] == pytest.approx(ticks, rel=0, abs=slack)


@pytest.mark.parametrize(
    "values", [[1.0, 1.0 + 2**-52, 1.0], [0.3, 0.1 + 0.2, 0.3], [0.7, 0.1 * 7, 0.7], [5.0, np.nextafter(5.0, 6.0), 5.0]], ids=str
)  # fmt: skip
def test_values_that_differ_by_rounding_are_drawn_as_equal_ones(values: list[float]) -> None:
    assert len(set(values)) == 2
    record = RunRecord(Path("r"), first_step=1, last_step=3)
    chart, equal = (
        build_chart("other/value", Series(np.arange(1, 4), np.array(series)), record) for series in (values, values[:1] * 3)
    )  # fmt: skip
    assert chart.y_ticks == equal.y_ticks and chart.raw == equal.raw
    assert len({tick.label for tick in chart.y_ticks}) == len(chart.y_ticks) >= 3


def test_ticks_are_distinct_where_floats_are_too_far_apart_for_the_step() -> None:
    ticks = nice_ticks(1.0, 1.0 + 2**-51, 4)
    assert 1 <= len(ticks) == len(set(ticks)) <= 3


def test_the_style_has_each_colour_of_phases() -> None:
    style = (resources.files("hybridflow.observability.report") / "page.css").read_text()
    assert sorted(map(int, re.findall(r"\.p(\d+)\{fill:var\(--p\1\)\}", style))) == list(range(NUM_COLORS))
    # Light, dark by the system's wish, and dark by the reader's.
    assert sorted(map(int, re.findall(r"--p(\d+):#", style))) == sorted([*range(NUM_COLORS)] * 3)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0, "", "0"), (0.03125, "nats", "0.0312 nats"), (12345.6, "tokens/s", "12,346 tokens/s"), (3 * 2**20, "bytes", "3 MiB"),
        (0.8125, "share", "81.2 %"), (0.00028, "s", "0.28 ms"), (42.06, "s", "42.1 s"), (725.0, "s", "12 min 5 s"),
        (1000.4 * 2**20, "bytes", "1000 MiB"), (633.7 * 2**20, "bytes", "634 MiB"),
        (12000.0, "s", "3 h 20 min"), (1.5e-7, "", "1.5e-7"), (float("nan"), "s", "not finite"),
    ],
)  # fmt: skip
def test_numbers_are_told_with_their_units(value: float, unit: str, expected: str) -> None:
    assert format_value(value, unit) == expected


def test_phases_and_the_rest_add_up_to_the_steps(tmp_path: Path) -> None:
    lines = [{"step": s, "time/rollout_s": 0.2, "time/update_s": 0.5, "time/step_s": 1.0} for s in range(1, 101)]
    phases = '{"step": 100, "phase": "save", "seconds": 5.0, "spans": [{"role": "a"}]}\n'
    chart = build_phases(read_run(write_run(tmp_path, lines, phases__jsonl=phases)))
    assert chart is not None and not chart.overlapping
    assert [(phase.name, phase.seconds) for phase in chart.phases] == [
        ("rollout", "20 s"), ("update", "50 s"), ("other", "30 s"), ("save", "5 s")
    ]  # fmt: skip
    assert sum(phase.share for phase in chart.phases) == pytest.approx(1.0)
    first = [bar for bar in chart.bars if bar.x == chart.bars[0].x]
    assert sum(bar.height for bar in first) == pytest.approx(100 / 1.05, abs=0.1)
    lines = [{**line, "time/step_s": 0.6} for line in lines]
    overlapping = build_phases(read_run(write_run(tmp_path / "beside", lines)))
    assert overlapping is not None and overlapping.overlapping
    assert [phase.name for phase in overlapping.phases] == ["rollout", "update"]


# What is kept of samples


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=16), st.integers(64, 600))
def test_rows_are_cut_to_the_budget_and_short_ones_are_whole(sizes: list[tuple[int, int]], budget: int) -> None:
    masks = [np.array([0] * max(prompt, 1) + [1] * response, np.uint8) for prompt, response in sizes]
    kept = plan_kept(masks, budget)
    assert sum(map(len, kept)) <= budget
    room = max(map(len, kept))
    for mask, positions in zip(masks, kept, strict=True):
        assert (np.diff(positions) > 0).all() and positions[-1] == len(mask) - 1
        assert len(positions) == len(mask) or len(positions) == room < len(mask)
        assert mask[positions[0]] == 0


def test_a_long_row_loses_the_start_of_its_prompt_and_the_middle_of_its_response() -> None:
    (kept,) = plan_kept([np.array([0] * 100 + [1] * 200, np.uint8)], 60)
    assert kept.tolist() == [*range(80, 100), *range(100, 127), *range(287, 300)]


@pytest.mark.parametrize("num_steps", [1, 2, 47, 48, 49, 1000, 10_000])
def test_steps_kept_are_few_and_the_same_after_a_stop(num_steps: int, tmp_path: Path) -> None:
    def keep(directory: Path, steps: range) -> list[int]:
        directory.mkdir(exist_ok=True)
        files = SampleFiles(directory, num_steps)
        for step in steps:
            if step in (1, num_steps) or step % files.stride == 0:
                assert files.is_due(step)
                (directory / f"step_{step:08d}.samples.parquet").touch()
            elif step % 97 == 0:
                assert not files.is_due(step)
        return list_steps(directory)

    whole = keep(tmp_path / "whole", range(1, num_steps + 1))
    assert len(whole) <= MAX_KEPT_STEPS + 2 and whole[0] == 1 and whole[-1] == num_steps
    keep(tmp_path / "stopped", range(1, num_steps // 2 + 1))
    assert keep(tmp_path / "stopped", range(num_steps // 2 + 1, num_steps + 1)) == whole


def test_samples_of_steps_that_come_again_are_taken_out(tmp_path: Path) -> None:
    run = RunDirectory(RunSettings(directory=str(tmp_path), name="r", tensorboard=False), "rl")
    run.hold()
    for step in (1, 3, 5):
        SampleFiles(run.samples, 10).write(step, make_samples(), compute_spread(make_samples()))
    run.open("steps: 10\n", resume_step=3, sources={}, engine=None)
    assert list_steps(run.samples) == [1, 3] and len(list(run.samples.iterdir())) == 4
    run.log_end(3, "boom")
    run.close()
    assert [(line["event"], line["step"]) for line in read_run(run.path).history] == [("start", 3), ("end", 3)]


def test_rows_of_first_prompts_are_chosen() -> None:
    assert plan_rows(512, 8) == [p * 8 + s for p in range(4) for s in range(4)]
    assert plan_rows(6, 3) == [0, 1, 2, 3, 4, 5] and plan_rows(256, 1) == [0, 1, 2, 3] and plan_rows(0, 8) == []


def test_spread_counts_sampled_tokens_and_is_bounded() -> None:
    batch = make_samples(num_tokens=5)
    spread = compute_spread(batch)
    assert spread.pylist("length") == [3] * 4 and spread.pylist("reward") == [0.0, 1.0, 0.0, 1.0]
    many = Batch.concat([batch] * 300)
    assert compute_spread(many).num_rows == 1024


def test_cut_samples_keep_token_and_numbers_together() -> None:
    long = make_samples(num_tokens=6000).drop(["pieces", "positions"])
    cut = cut_samples(long)
    assert int(cut.lengths("tokens").sum()) <= 8192
    # Token ids are positions in this batch, so what was kept can be told from both.
    assert cut.pylist("tokens") == cut.pylist("positions")
    assert all(values[-1] == -0.5 and values[0] == 0.0 for values in cut.pylist("rollout_logprobs"))


def test_text_of_tokens_joins_bytes_of_one_character() -> None:
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = tokenizer("a é\u20ac b")["input_ids"]
    assert split_text(tokenizer, ids) == ["a", " ", "", "é", "", "", "\u20ac", " ", "b"]
    assert "".join(split_text(tokenizer, ids[:-3])) == "a é\ufffd"


# Runs in any state


def test_an_empty_directory_gives_a_report_that_says_so(tmp_path: Path) -> None:
    page = build_report(read_run(tmp_path))
    for told in ("metrics.jsonl is not there.", "config.yaml is not there.", "No step was finished", "Unfinished"):
        assert told in page, told
    assert "This run kept no samples" in page


def test_states_are_told_apart(tmp_path: Path) -> None:
    start, lines = '{"event": "start", "at_s": 1.0, "step": 0}\n', [{"step": 1, "reward/mean": 0.5}]
    end = '{"event": "end", "at_s": 2.0, "step": 1, "error": %s}\n'
    for name, history, state in (
        ("vanished", start, "vanished"),
        ("finished", start + end % "null", "finished"),
        ("failed", start + end % '"boom"', "failed"),
        ("stopped", start + end % '"interrupted"', "interrupted"),
        ("again", start + end % '"boom"' + start, "vanished"),
    ):
        assert read_run(write_run(tmp_path / name, lines, history__jsonl=history)).outcome.state == state
    run = write_run(tmp_path / "held", lines, history__jsonl=start)
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).outcome.state == "running"
    assert read_run(run).outcome.state == "vanished"
    assert "boom" in build_report(read_run(tmp_path / "failed"))
    killed = write_run(tmp_path / "killed", lines, history__jsonl=start + start.replace("0}", "1}") + end % "null")
    told = re.findall(r"<li><time>.*?</time><span>(.*?)</span>", build_report(read_run(killed)))
    assert told == ["Started", "Ended without a word", "Went on after step 1", "Ended after step 1"]


def test_damaged_lines_are_counted_and_the_rest_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    good = [json.dumps({"step": step, "reward/mean": step / 10, "odd": "text", "train/lr": None}) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text(
        "\n".join([good[0], "{nonsense", good[1], "[1]", good[2]]) + '\n{"step": 4, "rew'
    )
    record = read_run(run)
    assert record.metrics["reward/mean"].values.tolist() == [0.1, 0.2, 0.3] and record.last_step == 3
    assert "metrics.jsonl: 2 lines cannot be read and are left out." in record.notes
    assert "odd" not in record.metrics and np.isnan(record.metrics["train/lr"].values).all()
    assert "3 values not finite" in build_report(record)


def test_a_metric_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    page = build_report(read_run(write_run(tmp_path, [{"step": 1, "reward/mean": 0.5}])))
    assert "There is no eval/reward_mean: evaluation.data names no held-out rows" in page
    assert "There is no policy/kl_to_reference" in page


def test_damaged_samples_are_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"step": 5, "reward/mean": 0.5}])
    SampleFiles(run / "samples", 10).write(5, make_samples(), compute_spread(make_samples()))
    (run / "samples" / "step_00000004.samples.parquet").write_bytes(b"no parquet")
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(1, 6)))
    record = read_run(run)
    steps, kept = build_rollouts(record)
    assert [step["step"] for step in steps] == [5] and kept == 2
    assert "samples/step_00000004.samples.parquet cannot be read." in record.notes


def test_samples_carry_their_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.5}])
    for step in (1, 2):
        SampleFiles(run / "samples", 2).write(step, make_samples(text="t"), compute_spread(make_samples()))
    (first, _), kept = build_rollouts(read_run(run))
    assert kept == 2 and len(first["groups"]) == 2 and first["groups"][0]["prompt"] == "tt"
    row = first["groups"][0]["rows"][1]
    assert (row["r"], row["n"], row["l"], row["t"], row["p"]) == (1.0, 6, [-500] * 6, [-250] * 6, ["t"] * 6)
    reward, length = build_spreads(read_run(run))
    assert [(b.label, b.early, b.late) for b in reward.bins] == [("0", 100.0, 100.0), ("1", 100.0, 100.0)]
    assert [b.label for b in length.bins] == ["6"]
    assert reward.fan is not None and [layer.label for layer in reward.fan.layers] == ["1", "0"]


# Bounds and safety


@pytest.mark.parametrize(
    ("values", "still"),
    [
        ([5.0, 5.0, 5.0], True), ([0.0, 0.0, 0.0], True), ([1.0, 0.9992, 1.0], True), ([-1.0, -1.0009, -1.0], True), ([1e-3], False),
        ([1.0, 0.9988, 1.0], False), ([0.0, 1e-9, 0.0], False), ([-1e-4, 1e-4, 0.0], False), ([1e-3, 9.5e-4, 9e-4], False),
        ([5.0, float("nan"), 5.0], False),
    ],
)  # fmt: skip
def test_a_curve_that_hardly_changes_is_told_as_a_number(values: list[float], still: bool, tmp_path: Path) -> None:
    page = build_report(read_run(write_run(tmp_path, [{"step": i, "train/x": v} for i, v in enumerate(values, 1)])))
    assert ('<figure class="chart" data-metric="train/x"' not in page) == still
    assert ('<span class="fact" data-find="train/x' in page) == still


def test_only_keys_of_the_configuration_are_coloured(tmp_path: Path) -> None:
    config = """\
steps: 4
optimizer:
  betas:
  - 0.9
  - http://host:80
  'quoted: key': 1
reward:
- kind: exact
  text: 'a: b'
- {kind: near}
- "c: d"
-1: 2
"""
    page = build_report(read_run(write_run(tmp_path, [], config__yaml=config)))
    code = re.findall(r'<pre class="code">(.*?)</pre>', page, re.DOTALL)[0]
    keys = re.findall(r'<span class="key">(.*?)</span>', code)
    assert keys == ["steps", "optimizer", "betas", "&#39;quoted: key&#39;", "reward", "kind", "text", "-1"]
    assert html.unescape(re.sub(r"<.*?>", "", code)) == config


@pytest.mark.slow
def test_ten_thousand_steps_give_a_small_file_in_little_time(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).normal(size=(10_000, 60))
    names = ["reward/mean", "sft/loss", "time/step_s", *(f"other/metric_{index}" for index in range(57))]
    lines = [{"step": step, **dict(zip(names, row.tolist(), strict=True))} for step, row in enumerate(draws, start=1)]
    run = write_run(tmp_path, lines)
    files = SampleFiles(run / "samples", 10_000)
    for step in range(1, 10_001, files.stride):
        files.write(step, make_samples(num_tokens=2000, text="word "), compute_spread(make_samples()))
    started_s = time.perf_counter()
    size = write_report(run).stat().st_size
    assert time.perf_counter() - started_s < 60
    assert size < 8_000_000
    record = read_run(run)
    steps, _ = build_rollouts(record)
    assert sum(len(row["p"]) for step in steps for group in step["groups"] for row in group["rows"]) <= MAX_TOKENS
    chart = build_chart("reward/mean", record.metrics["reward/mean"], record)
    assert min(chart.points["l"]) == pytest.approx(draws[:, 0].min(), rel=1e-4)
    assert max(chart.points["h"]) == pytest.approx(draws[:, 0].max(), rel=1e-4)


def test_nothing_in_the_data_becomes_markup(tmp_path: Path) -> None:
    history = json.dumps({"event": "start", "at_s": 1.0, "step": 0}) + "\n"
    history += json.dumps({"event": "end", "at_s": 2.0, "step": 1, "error": EVIL}) + "\n"
    run = write_run(
        tmp_path / "a<b>&c",
        [{"step": 1, EVIL: 1.0, "reward/mean": 0.5}, {"step": 2, EVIL: 2.0, "reward/mean": 0.6}],
        config__yaml=f"steps: 3\nname: {json.dumps(EVIL)}\n",
        environment__json=json.dumps({"versions": {EVIL: EVIL}, "command": [EVIL], "gpus": [EVIL]}),
        history__jsonl=history,
        recovery__jsonl=json.dumps({"worker": EVIL, "call": EVIL, "step": 1, "cause": EVIL}) + "\n",
        phases__jsonl=json.dumps({"step": 1, "phase": EVIL, "seconds": 1.0, "spans": []}) + "\n",
    )
    SampleFiles(run / "samples", 2).write(2, make_samples(text=EVIL), compute_spread(make_samples()))
    page = write_report(run).read_text()
    assert "<img" not in page and "<!--" not in page
    assert page.count("<script") == page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1])["rollouts"][0]["groups"][0]["prompt"] == EVIL * 2
    assert not re.search(r'(src|href)="(?!#)', page), "it asks for nothing outside itself"


# The command


def test_the_command_writes_the_report_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "project" / 'odd, "name"', [{"step": 1, "reward/mean": 0.5}])
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    other = tmp_path / "other.html"
    assert main(["report", str(run), f"output={other}"]) == 0 and "Mean reward" in other.read_text()
    for words, told in (
        ([], "error: no run is named; write hybridflow report RUN"),
        ([str(tmp_path / "none")], "is no directory; give a run's directory"),
        ([str(tmp_path / "project")], "give one of the runs in it, as "),
        ([str(run), f"output={tmp_path}"], "name an HTML file in a directory that is there"),
    ):
        capsys.readouterr()
        assert main(["report", *words]) == 2
        assert told in capsys.readouterr().err

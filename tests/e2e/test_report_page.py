"""The report as whole runs leave it, and as a browser shows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, find_chromium
from tiny_runs import rl_config, sft_config

from hybridflow.batch import Batch
from hybridflow.config import HybridflowError
from hybridflow.flow.commands import run_rl, run_sft
from hybridflow.observability.report import build_report, read_run, write_report
from hybridflow.observability.report.rollouts import build_rollouts
from hybridflow.observability.samples import samples_path

EVIL = '</script><img src=x onerror="window.harmed=1"><script>window.harmed=1</script>\'"&<!--'
LAPTOP, PHONE = (1440, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: `make chromium` fetches Debian's where apt can, else install one")
    with Browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def rl_run(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps that went on to 8."""
    root = tmp_path_factory.mktemp("report")
    run_rl(rl_config(task, root, start, "steps=4"))
    return Path(run_rl(rl_config(task, root, start, "steps=8"))["run"])


def test_a_resumed_run_shows_samples_as_the_trainer_and_the_rollout_see_them(rl_run: Path) -> None:
    record = read_run(rl_run)
    assert record.outcome.state == "finished" and (rl_run / "report.html").exists()
    assert [(line["event"], line["step"]) for line in record.history] == [
        ("start", 0),
        ("end", 4),
        ("start", 4),
        ("end", 8),
    ]
    steps, kept = build_rollouts(record)
    assert [step["step"] for step in steps] == list(range(1, 9)) and kept == 8
    for step in steps:
        whole = Batch.from_parquet(rl_run / "rollouts" / f"step_{step['step']:08d}.parquet")
        rows = [row for group in step["groups"] for row in group["rows"]]
        assert len(rows) == 16
        # The first four prompts of four samples each are the first rows of the step.
        assert [row["r"] for row in rows] == whole.pylist("reward")[:16]
        for row, logprobs, mask in zip(rows, whole.arrays("rollout_logprobs"), whole.arrays("loss_mask"), strict=False):
            assert row["l"] == [round(float(value) * 1000) for value in logprobs[mask == 1]]
            # In exact mode the trainer's are the same bits, as long as it is asked before it changes.
            assert row["t"] == row["l"]
    assert len(build_report(record)) < 1_500_000


def test_keeping_samples_changes_no_number(task: dict[str, str], start: str, tmp_path: Path, rl_run: Path) -> None:
    without = Path(run_rl(rl_config(task, tmp_path, start, "steps=8", "run.report=false"))["run"])
    assert not (without / "samples").exists() and not (without / "report.html").exists()
    ours, theirs = ((run / "model" / "model.safetensors").read_bytes() for run in (rl_run, without))
    assert ours == theirs


def test_trainer_scores_are_of_before_the_update(task: dict[str, str], start: str, tmp_path: Path) -> None:
    config = rl_config(task, tmp_path, start, "steps=2", "train.optimizer.lr=0.05", "train.schedule={kind: constant}")
    run = Path(run_rl(config)["run"])
    for step in (1, 2):
        batch = Batch.from_parquet(samples_path(run / "samples", step))
        for name in ("rollout_logprobs", "trainer_logprobs"):
            assert any(value < -0.01 for row in batch.pylist(name) for value in row)
        assert batch.pylist("rollout_logprobs") == batch.pylist("trainer_logprobs")


def test_supervised_runs_show_their_evaluations(task: dict[str, str], tmp_path: Path) -> None:
    run = Path(run_sft(sft_config(task, tmp_path, "steps=10"))["run"])
    steps, _ = build_rollouts(read_run(run))
    assert [step["step"] for step in steps] == [5, 10]
    assert all(row["t"] is None for step in steps for group in step["groups"] for row in group["rows"])


def test_a_run_that_breaks_leaves_a_report_that_says_by_what(task: dict[str, str], start: str, tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def broken(response):\n    raise ValueError('<b>no</b> reward today')\n")
    config = rl_config(task, tmp_path, start, "steps=20", f"reward.function={reward}:broken", "evaluation.data=null")
    with pytest.raises(HybridflowError, match="every row has failed"):
        run_rl(config)
    run = tmp_path / "quickstart" / "run"
    page = (run / "report.html").read_text()
    assert read_run(run).outcome.state == "failed"
    assert "every row has failed" in page and "&lt;b&gt;no&lt;/b&gt; reward today" in page and "<b>no" not in page


# In the browser

CONTRAST = """
(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return text.startsWith('color(srgb')
    ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => { const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const seen = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.checkVisibility() || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(element.tagName)) continue;
    if (element.closest('.sr, .skip, :disabled, :disabled + span')) continue;
    const back = behind(element);
    const [a, b] = [light(over(parse(getComputedStyle(element).color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const where = `${element.tagName}.${element.className}`;
    if (ratio < (seen.get(where) ?? 99)) seen.set(where, ratio);
  }
  return Object.fromEntries(seen);
})()
"""
SHOW_ALL_COLOURS = (
    "document.querySelectorAll('input[name=mode]').forEach(i => { if (!i.disabled && i.value === '%s') i.click(); })"
)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_it_fits_the_window_is_legible_and_asks_for_nothing(
    browser: Browser, rl_run: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.requests.clear()
    browser.errors.clear()
    browser.show(rl_run / "report.html", *size, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    for mode in ("ratio", "rollout", "trainer"):
        browser.run(SHOW_ALL_COLOURS % mode)
        ratios = browser.run(CONTRAST)
        assert len(ratios) > 30
        assert {where: ratio for where, ratio in ratios.items() if ratio < 4.5} == {}
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(245, 246, 248)")


LABELS = """
[...document.querySelectorAll('.y span')].map((label) => {
  const words = document.createRange();
  words.selectNodeContents(label);
  const measured = [words, label.closest('figure'), label.closest('.plot').querySelector('.area')];
  const [text, card, area] = measured.map((item) => item.getBoundingClientRect());
  const line = area.top + area.height * parseFloat(label.style.top) / 100;
  return [label.textContent, text.left - card.left, area.left - text.right, (text.top + text.bottom) / 2 - line];
})
"""
"""Of each label of a y axis: its text, its distance from its card's edge and from the curves, and how far below its grid line it is."""


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_labels_of_an_axis_stand_within_their_card_at_their_lines(
    browser: Browser, size: tuple[int, int], tmp_path: Path
) -> None:
    lines = [
        {"step": step, "reward/mean": 1e-5 * step, "memory/peak_rss_bytes": 1e9 + 2e5 * step, "time/update_s": step / 10, "time/step_s": 1}
        for step in range(1, 9)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("steps: 8\nprompts_per_step: 1\n")
    browser.show(write_report(tmp_path), *size)
    labels = browser.run(LABELS)
    assert max(len(text) for text, *_ in labels) >= len("954.63 MiB") and len(labels) > 8
    for text, from_edge, from_curves, below in labels:
        assert from_edge >= 13 and from_curves >= 7 and abs(below) <= 2, (text, from_edge, from_curves, below)
    assert browser.run("document.documentElement.scrollWidth") == size[0]


def test_curves_and_tokens_answer_to_the_keyboard(browser: Browser, rl_run: Path) -> None:
    browser.show(rl_run / "report.html", *LAPTOP)
    assert browser.run("document.getElementById('tip').hidden") is True
    browser.run("document.querySelector('[data-metric=\"reward/mean\"] .area').focus()")
    rewards = [json.loads(line)["reward/mean"] for line in (rl_run / "metrics.jsonl").read_text().splitlines()]
    for key, step in (("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 8)):
        browser.press(key)
        told = browser.run("document.getElementById('tip').textContent")
        assert told.splitlines()[0] == f"step {step}"
        assert float(told.splitlines()[1].split()[0]) == pytest.approx(rewards[step - 1], rel=2e-3)
    browser.run("document.querySelector('.k').focus()")
    first = browser.run("document.getElementById('token').textContent")
    browser.press("ArrowRight")
    second = browser.run("document.getElementById('token').textContent")
    assert "Place in the response1 of" in first and "Place in the response2 of" in second
    assert "Trainer / rollout ratio1.000" in second


def test_the_slider_and_the_filter_work(browser: Browser, rl_run: Path) -> None:
    browser.show(rl_run / "report.html", *PHONE)
    assert browser.run("document.getElementById('where').textContent") == "step 8"
    browser.run("document.getElementById('back').click()")
    assert browser.run("document.getElementById('where').textContent") == "step 7"
    assert browser.run("document.querySelectorAll('.sample').length") == 16
    filtered = "(() => { const f = document.getElementById('find'); f.value = '%s'; f.dispatchEvent(new Event('input')); return [...document.querySelectorAll('#curves .chart')].filter(c => c.checkVisibility()).map(c => c.dataset.metric) })()"  # noqa: E501
    assert browser.run(filtered % "grad_norm") == ["train/grad_norm"]
    assert browser.run(filtered % "nothing like this") == []
    assert browser.run("document.getElementById('none').hidden") is False


def test_hostile_text_does_no_harm(browser: Browser, rl_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "<img src=x onerror=window.harmed=1>"
    shutil.copytree(rl_run, run)
    batch = Batch.from_parquet(samples_path(run / "samples", 8))
    pieces = [[EVIL] * len(row) for row in batch.pylist("tokens")]
    evil = batch.with_column("pieces", pieces).with_column("reward_error", [EVIL] * batch.num_rows)
    evil.to_parquet(samples_path(run / "samples", 8))
    lines = [{"step": step, "reward/mean": 0.5, EVIL: float(step)} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text(f"steps: 8\nname: {json.dumps(EVIL)}\n")
    (run / "history.jsonl").write_text(json.dumps({"event": "end", "at_s": 1.0, "step": 8, "error": EVIL}) + "\n")
    browser.errors.clear()
    browser.show(write_report(run), *PHONE)
    browser.run("document.querySelector('.k').focus()")
    browser.run("document.querySelectorAll('.area[tabindex]').forEach((area) => area.focus())")
    browser.press("ArrowLeft")
    assert browser.run("document.getElementById('tip').textContent").startswith("step 7")
    assert browser.run("window.harmed === undefined") is True
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('.prompt').textContent").startswith(EVIL)
    assert browser.run("document.documentElement.scrollWidth") == PHONE[0]
    assert browser.errors == []

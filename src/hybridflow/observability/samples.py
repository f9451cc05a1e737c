"""What a run keeps of its samples for the report: of some steps a few rows token by token, and the spread of the others. S: rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch import Batch

MAX_KEPT_STEPS = 48
"""Steps of a run whose samples are kept, about evenly spaced."""
PROMPTS, SAMPLES_PER_PROMPT = 4, 4
"""Rows of a step that are kept: so many samples of so many prompts."""
MAX_TOKENS = 8192
"""Tokens of a step that are kept, at some 20 bytes each; long rows lose the beginning of their prompt and the middle of their response."""
MAX_SPREAD_ROWS = 1024
"""Rows of a step whose reward and length are kept, 12 bytes each."""
MAX_TEXT = 2000
"""Characters of an error or an answer that are kept."""

_WHOLE = ("group_id", "sample_id", "finish_reason", "state", "reward")
_TEXTS = ("reward_error", "rollout_error")
_PER_TOKEN = ("tokens", "loss_mask", "rollout_logprobs", "trainer_logprobs")


class Tokenizer(Protocol):
    """What is needed of one to show tokens."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Its names of the tokens."""

    def decode(self, ids: list[int]) -> str:
        """Their text."""


class SampleFiles:
    """The directory `samples/` of a run, and which steps it is to hold.

    A step is kept when it is the first, the last, or `stride` after the last one kept: so a run of any length keeps about
    `MAX_KEPT_STEPS`, and one that goes on after a stop keeps those that it would have kept.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        self.directory, self._num_steps = directory, num_steps
        self.stride = -(-num_steps // MAX_KEPT_STEPS)

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether this step's samples are to be kept."""
        before = [kept for kept in list_steps(self.directory) if kept < step]
        return is_last or not before or step == self._num_steps or step // self.stride > before[-1] // self.stride

    def write(self, step: int, samples: Batch, spread: Batch) -> None:
        """Puts a step's files in place, each whole or not at all."""
        self.directory.mkdir(exist_ok=True)
        spread.to_parquet(spread_path(self.directory, step))
        samples.to_parquet(samples_path(self.directory, step))


def samples_path(directory: Path, step: int) -> Path:
    """The file of a step's rows."""
    return directory / f"step_{step:08d}.samples.parquet"


def spread_path(directory: Path, step: int) -> Path:
    """The file of its rewards and lengths."""
    return directory / f"step_{step:08d}.spread.parquet"


def list_steps(directory: Path) -> list[int]:
    """The steps kept, in order."""
    names = (path.name for path in directory.glob("step_*.samples.parquet"))
    return sorted(int(name[5:13]) for name in names if name[5:13].isdigit())


def remove_after(directory: Path, step: int) -> None:
    """Takes out the files of later steps, which come again."""
    for later in (kept for kept in list_steps(directory) if kept > step):
        samples_path(directory, later).unlink()
        spread_path(directory, later).unlink(missing_ok=True)


def plan_rows(num_rows: int, samples_per_prompt: int) -> list[int]:
    """Row numbers of the first samples of the first prompts, where groups lie one behind the other."""
    prompts = range(min(PROMPTS, num_rows // samples_per_prompt))
    samples = range(min(SAMPLES_PER_PROMPT, samples_per_prompt))
    return [prompt * samples_per_prompt + sample for prompt in prompts for sample in samples]


def compute_spread(batch: Batch) -> Batch:
    """Columns `reward` float64, null where there is none, and `length` int32, sampled tokens, of at most `MAX_SPREAD_ROWS` rows."""
    lengths = np.array([mask.sum() for mask in batch.arrays("loss_mask")], np.int32)
    rows = np.unique(np.linspace(0, batch.num_rows - 1, min(batch.num_rows, MAX_SPREAD_ROWS)).astype(np.int64))
    rewards = batch.select(["reward"]).take(rows).pylist("reward")
    return Batch.from_columns(reward=rewards, length=lengths[rows])


def cut_samples(batch: Batch) -> Batch:
    """The rows as the report shows them, within `MAX_TOKENS`.

    returns: those columns that are shown, and `positions`, list<int32>: where each kept token stands in its row.
    """
    kept_S = plan_kept(batch.arrays("loss_mask"), MAX_TOKENS)
    columns = {name: batch.pylist(name) for name in _WHOLE if name in batch}
    for name in (name for name in _TEXTS if name in batch):
        columns[name] = [text and text[:MAX_TEXT] for text in batch.pylist(name)]
    for name in (name for name in _PER_TOKEN if name in batch):
        columns[name] = [row[kept] for row, kept in zip(batch.arrays(name), kept_S, strict=True)]
    return Batch.from_columns(**columns, positions=[kept.astype(np.int32) for kept in kept_S])


def plan_kept(masks: Sequence[NDArray[np.uint8]], max_tokens: int) -> list[NDArray[np.int64]]:
    """Positions of each row to keep, rising, not more than `max_tokens` in all rows together (but one a row at least).

    Short rows are kept whole. Of a long one, the prompt (what stands before the first counted token) gives way first, up to a third of
    the row's room and from its beginning; then the response in its middle, and a third of what is left of it is its end.
    """
    room = _share([len(mask) for mask in masks], max_tokens)
    return [_cut_row(mask, room) for mask in masks]


def _share(lengths: list[int], total: int) -> int:
    """The greatest length such that rows cut to it have at most `total` tokens, and at least 4."""
    left, rows = total, sorted(lengths)
    for index, length in enumerate(rows):
        share = left // (len(rows) - index)
        if length > share:
            return max(share, 4)
        left -= length
    return max(rows, default=4)


def _cut_row(mask: NDArray[np.uint8], room: int) -> NDArray[np.int64]:
    positions = np.arange(len(mask))
    if len(mask) <= room:
        return positions
    first = int(mask.argmax()) if mask.any() else len(mask)
    prompt, response = positions[:first], positions[first:]
    prompt = prompt[max(0, len(prompt) - max(room // 3, room - len(response))) :]
    left = room - len(prompt)
    if len(response) > left:
        response = np.concatenate([response[: left - left // 3], response[len(response) - left // 3 :]])
    return np.concatenate([prompt, response])


def add_pieces(samples: Batch, tokenizer: Tokenizer) -> Batch:
    """A further column `pieces`, list<string>: the text of each token."""
    return samples.with_column("pieces", [split_text(tokenizer, ids) for ids in samples.pylist("tokens")])


def split_text(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token. Where several make one character (bytes of UTF-8), the last of them has it and the others have ''."""
    pieces: list[str] = []
    held: list[int] = []
    for token_id, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        held.append(token_id)
        text = tokenizer.decode(held)
        if "\ufffd" in text and len(held) < 4:
            pieces.append("")
            continue
        # A first token loses its blank where the tokenizer marks blanks so.
        blank = " " if len(held) == 1 and str(name).startswith("\u2581") and not text.startswith(" ") else ""
        pieces.append(blank + text)
        held = []
    if held:
        pieces[-1] = tokenizer.decode(held)
    return pieces

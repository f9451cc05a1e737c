"""Rows in epoch order as tokens: left out where they must be, counted, and taken up again at any row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from hybridflow.config import ConfigError
from hybridflow.config.explain import shown
from hybridflow.data.encode import Example, Prompt, Row
from hybridflow.data.messages import BadRow, DataError
from hybridflow.data.order import EpochOrder
from hybridflow.data.settings import DataSettings
from hybridflow.data.sources import Rows, bad_row

_CACHED_TOKENS = 1 << 24
_RECOUNTED_ROWS = 1024
_REMEDIES = {
    "dropped": "raise data.max_tokens",
    "short": "lower data.min_tokens",
    "skipped": "mend those that were skipped",
}

_log = logging.getLogger(__name__)

Item = TypeVar("Item", Example, Prompt)


class Encoder(Protocol[Item]):
    """Makes tokens of rows."""

    def encode(self, rows: Sequence[Row]) -> list[Item | BadRow]: ...


class RowStream(Generic[Item]):
    """The rows that can be used, epoch after epoch.

    A row is tokenised when its turn comes, a take's rows in one call, and kept for the next epochs until `_CACHED_TOKENS` are held.
    Everything it is at is in `state()`.
    """

    def __init__(self, rows: Rows, encoder: Encoder[Item], settings: DataSettings, seed: int) -> None:
        self.rows = rows
        self._encoder: Encoder[Item] = encoder
        self._settings = settings
        self.order = EpochOrder(rows.num_rows, seed=seed, shuffle=settings.shuffle, epochs=settings.epochs)
        self.num_taken = 0
        self.counts = {"dropped": 0, "truncated": 0, "short": 0, "skipped": 0}
        self._cache: dict[int, Item] = {}
        self._cached_tokens = 0

    def take(self, count: int) -> tuple[list[int], list[Item]]:
        """Row numbers and tokens of the next `count` rows that can be used; fewer only at the end of the last epoch."""
        found: list[tuple[int, Item]] = []
        num_left_out = 0
        while len(found) < count:
            candidates = self.order.take(count - len(found)).tolist()
            usable = self._encode(candidates)
            num_left_out = 0 if usable else num_left_out + len(candidates)
            found += usable
            # Any two epochs' worth of rows on end hold each row once.
            if num_left_out >= 2 * self.rows.num_rows or not (candidates or found or self.num_taken):
                self._recount()
                remedies = " and ".join(_REMEDIES[kind] for kind, count in self.counts.items() if count)
                raise ConfigError(
                    f"data: none of the {self.rows.num_rows} rows of {', '.join(self.rows.files)} can be used ({self.tell_counts()}); "
                    f"{remedies}"
                )
            if not candidates:
                break
        self.num_taken += len(found)
        return [number for number, _ in found], [item for _, item in found]

    def _recount(self) -> None:
        """Counts each row once, whose turn may have come in several epochs."""
        before = dict(self.counts)
        for start in range(0, self.rows.num_rows, _RECOUNTED_ROWS):
            self._encode(list(range(start, min(start + _RECOUNTED_ROWS, self.rows.num_rows))))
        self.counts = {kind: count - before[kind] for kind, count in self.counts.items()}

    def tell_counts(self) -> str:
        """What has become of rows so far, e.g. `2 dropped, 1 short`; empty where all were used as they are."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if count)

    def state(self) -> dict[str, Any]:
        """The place in the data, as JSON values."""
        return {
            "epoch": self.order.epoch,
            "position": self.order.position,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "fingerprint": self.rows.fingerprint,
            "num_rows": self.rows.num_rows,
            "num_taken": self.num_taken,
            "counts": dict(self.counts),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a place. Raises ConfigError if rows or seed are not those that the place was in."""
        now = self.state()
        if (state["fingerprint"], state["num_rows"]) != (now["fingerprint"], now["num_rows"]):
            raise ConfigError(
                f"data.files: {', '.join(self.rows.files)} do not hold the rows that this run was started on ({state['num_rows']} rows, "
                f"sha256 {state['fingerprint'][:12]}; now {now['num_rows']} rows, sha256 {now['fingerprint'][:12]}); "
                "bring those back, with the data.keep_where, data.keep_function and data.deduplicate_by of then, or start a new run"
            )
        for key, name in (("seed", "seed"), ("shuffle", "data.shuffle")):
            if state[key] != now[key]:
                raise ConfigError(
                    f"{name}: {shown(now[key])} is not the {shown(state[key])} that this run's order of rows comes from; set it back, or "
                    "start a new run"
                )
        self.order.move_to(state["epoch"], state["position"])
        self.num_taken, self.counts = state["num_taken"], self.counts | state["counts"]

    def _encode(self, numbers: list[int]) -> list[tuple[int, Item]]:
        """Those of the rows that can be used."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._cache]
        rows = self.rows.take(new, self.rows.needed).to_pylist() if new else []
        fresh = dict(zip(new, self._encoder.encode(rows), strict=True))
        admitted = [
            (number, self._admit(number, fresh[number] if number in fresh else self._cache[number]))
            for number in numbers
        ]
        return [(number, item) for number, item in admitted if item is not None]

    def _admit(self, number: int, item: Item | BadRow) -> Item | None:
        """The row as it is used, or None, by what the settings say about bad and long rows."""
        if isinstance(item, BadRow):
            if self._settings.on_bad_row == "error":
                raise bad_row(self.rows.where(number), item)
            self._leave_out("skipped", number, item)
            return None
        self._remember(number, item)
        least, most, length = self._settings.min_tokens, self._settings.max_tokens, len(item.tokens)
        if least is not None and length < least:
            self._leave_out("short", number, f"{length} tokens, less than data.min_tokens={least}")
            return None
        return item if most is None or length <= most else self._shorten(number, item, most)

    def _shorten(self, number: int, item: Item, max_tokens: int) -> Item | None:
        length = len(item.tokens)
        if self._settings.on_long_row == "error":
            raise DataError(
                f"{self.rows.where(number)}: it has {length} tokens, more than data.max_tokens={max_tokens}; "
                "raise that, or set data.on_long_row to drop or truncate"
            )
        truncates = self._settings.on_long_row == "truncate"
        cut = item.cut(max_tokens, self._settings.truncation_side) if truncates else BadRow("")
        if isinstance(cut, BadRow):
            self._leave_out("dropped", number, f"{length} tokens, more than data.max_tokens={max_tokens}")
            return None
        self.counts["truncated"] += 1
        return cut

    def _leave_out(self, kind: str, number: int, reason: object) -> None:
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            _log.warning(
                "data: %s is left out (%s); further rows like it are only counted", self.rows.where(number), reason
            )

    def _remember(self, number: int, item: Item) -> None:
        if number not in self._cache and self._cached_tokens < _CACHED_TOKENS:
            self._cache[number] = item
            self._cached_tokens += len(item.tokens)

"""Rows from files as one Arrow table that knows where each row stood."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hybridflow.columns import is_plain
from hybridflow.config import ConfigError
from hybridflow.data.files import Numbered, compute_fingerprint, find_files, iter_json, iter_parquet
from hybridflow.data.filters import call_filter, find_first, match_columns
from hybridflow.data.messages import BadRow, DataError, Use, pack_messages
from hybridflow.data.settings import DataSettings

Layout = Literal["text", "pair", "messages"]
"""How a row becomes text: as it is, or through the chat template from prompt and response, or through it from messages."""

LEFT_OUT_BY = {
    "skipped": "on_bad_row",
    "unmatched": "keep_where",
    "filtered": "keep_function",
    "duplicate": "deduplicate_by",
}
"""Why rows of the files are left out when they are read, and the setting that says so."""

_SHOWN_CHARS = 40

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """All rows that were read; row numbers count from 0.

    table:       their columns, renamed; the column of messages as JSON text.
    files:       in the order of their rows.
    place:       [rows, 2] int32: index into `files`, and line (or place in a list or a Parquet file) from 1.
    needed:      the columns that make a row's tokens.
    fingerprint: sha256 of the files' content, and of which rows the filters keep.
    left_out:    rows by reason, `{"skipped": 0, "unmatched": 12, "filtered": 0, "duplicate": 3}`.
    """

    table: pa.Table
    layout: Layout
    files: tuple[str, ...]
    place: np.ndarray
    needed: tuple[str, ...]
    fingerprint: str
    left_out: dict[str, int]

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.place)

    def take(self, numbers: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these numbers, in their order, as one chunk.

        Chunk by chunk: Arrow's own take would first put all chunks of a column of text together, which copies the whole table each time.
        """
        table = self.table if columns is None else self.table.select(columns)
        chunks = table.to_batches()
        starts = np.cumsum([0, *(chunk.num_rows for chunk in chunks)])
        wanted = np.asarray(numbers, np.int64)
        sources = np.searchsorted(starts, wanted, side="right") - 1
        pieces = [
            chunks[source].take(pa.array(wanted[sources == source] - starts[source])) for source in np.unique(sources)
        ]
        order = np.argsort(np.argsort(sources, kind="stable"))
        return pa.Table.from_batches(pieces, table.schema).combine_chunks().take(pa.array(order))

    def where(self, row: int) -> str:
        """Where a row stands, e.g. `train.jsonl, line 17`."""
        return _tell_place(self.files, self.place[row])

    def describe(self) -> str:
        """How many there are, e.g. `7418 of 7433 rows (left out: 12 by data.keep_where, 3 by data.deduplicate_by)`."""
        return _describe_rows(self.num_rows, self.left_out)


def read_rows(settings: DataSettings, use: Use) -> Rows:
    """Read all files into memory. Raises ConfigError where settings and files do not fit, DataError for a bad row."""
    files = find_files(settings.files)
    reader = _Reader(settings, use)
    for index, path in enumerate(files):
        reader.read(index, path)
    table = _join(reader.tables)
    if not table.column_names:
        raise ConfigError(f"data.files: {', '.join(files)} hold no rows; give files with rows")
    table = _rename(table, settings.rename)
    layout = choose_layout(settings, table.column_names, use)
    _check_lengths(settings, layout, use)
    needed = tuple(vars(settings)[key] for key in _needed_keys(layout, use))
    table = _drop_unusual(table, needed)
    for key in _needed_keys(layout, use):
        _check_text(table, key, vars(settings)[key])
    left_out = dict.fromkeys(LEFT_OUT_BY, 0) | {"skipped": reader.num_skipped}
    place = np.concatenate(reader.places)
    for kind, keep_rows in _list_sieves(settings, files, needed, layout):
        keep = keep_rows(table, place)
        if not keep.all():
            left_out[kind] += int((~keep).sum())
            table, place = table.filter(pa.array(keep)), place[keep]
    told = f"{_describe_rows(table.num_rows, left_out)} of {', '.join(files)}"
    if table.num_rows == 0:
        raise ConfigError(f"data.files: no row can be used, {told}; give files with rows, or other filters")
    if any(left_out.values()):
        _log.warning("data: %s", told)
    is_filtered = any(count for kind, count in left_out.items() if kind != "skipped")
    fingerprint = compute_fingerprint(files, place if is_filtered else None)
    return Rows(table, layout, files, place, needed, fingerprint, left_out)


def choose_layout(settings: DataSettings, columns: Sequence[str], use: Use) -> Layout:
    """How rows become text, by the settings and the columns there are. Raises ConfigError where the two do not fit."""
    has_messages = settings.messages_column in columns
    if settings.format == "auto" and has_messages and settings.prompt_column in columns:
        raise ConfigError(
            f"data.format: rows have both '{settings.messages_column}' and '{settings.prompt_column}'; "
            "set data.format=chat for the one or data.format=text for the other"
        )
    layout: Layout = "text"
    if settings.format == "chat" or (settings.format == "auto" and has_messages):
        layout = "messages" if has_messages else "pair"
    for key in _needed_keys(layout, use):
        name = vars(settings)[key]
        if name not in columns:
            raise ConfigError(
                f"data.{key}: there is no column '{name}'; set it to one of {', '.join(columns) or 'none'}"
            )
    return layout


def bad_row(where: str, reason: object) -> DataError:
    """The error for a row that must not be skipped."""
    return DataError(f"{where}: {reason}; correct the row, or set data.on_bad_row=skip to leave such rows out")


class _Reader:
    """Collects tables; keeps the type that each column has had so far."""

    def __init__(self, settings: DataSettings, use: Use) -> None:
        self._skips, self._use, self._trained_turns = settings.on_bad_row == "skip", use, settings.trained_turns
        names_before = {new: old for old, new in settings.rename.items()}
        messages = names_before.get(settings.messages_column, settings.messages_column)
        self._messages = None if settings.format == "text" else messages
        self._types: dict[str, pa.DataType] = {}
        self.tables: list[pa.Table] = []
        self.places: list[np.ndarray] = [np.empty((0, 2), np.int32)]
        self.num_skipped = 0

    def read(self, index: int, path: str) -> None:
        """Add the rows of one file."""
        chunks = self._read_parquet(path) if path.endswith(".parquet") else self._read_json(path)
        for lines, table in chunks:
            self.tables.append(table)
            self.places.append(np.stack([np.full(len(lines), index), lines], axis=1).astype(np.int32))

    def _read_json(self, path: str) -> Iterator[tuple[np.ndarray, pa.Table]]:
        for chunk in iter_json(path):
            good = self._drop_bad(path, [(line, self._pack(value)) for line, value in chunk])
            table, checked = self._tabulate(good)
            if table is None:
                good = self._drop_bad(path, checked)
                table, _ = self._tabulate(good)
            yield np.array([line for line, _ in good], np.int32), table

    def _read_parquet(self, path: str) -> Iterator[tuple[np.ndarray, pa.Table]]:
        for lines, table in iter_parquet(path):
            if self._messages in table.column_names:
                packed = [self._pack({self._messages: value}) for value in table.column(self._messages).to_pylist()]
                good = self._drop_bad(path, list(zip(lines.tolist(), packed, strict=True)))
                keep = np.array([not isinstance(row, BadRow) for row in packed])
                texts = pa.array([row[self._messages] for _, row in good], pa.string())
                lines, table = lines[keep], table.filter(pa.array(keep))
                table = table.set_column(table.column_names.index(self._messages), self._messages, texts)
            yield lines, table

    def _pack(self, row: Any) -> Any:
        if isinstance(row, BadRow) or self._messages not in row:
            return row
        try:
            return row | {self._messages: pack_messages(row[self._messages], self._use, self._trained_turns)}
        except BadRow as error:
            return error

    def _drop_bad(self, path: str, rows: list[Numbered]) -> list[Numbered]:
        bad = [(line, row) for line, row in rows if isinstance(row, BadRow)]
        if bad and not self._skips:
            raise bad_row(f"{path}, line {bad[0][0]}", bad[0][1])
        self.num_skipped += len(bad)
        return [(line, row) for line, row in rows if not isinstance(row, BadRow)] if bad else rows

    def _tabulate(self, rows: list[Numbered]) -> tuple[pa.Table | None, list[Numbered]]:
        """The rows as a table; or None, and the rows with BadRow for each that has a value of another type than those before it."""
        columns: dict[str, pa.Array] = {}
        misfits: dict[int, BadRow] = {}
        for name in dict.fromkeys(name for _, row in rows for name in row):
            values = [row.get(name) for _, row in rows]
            try:
                columns[name] = pa.array(values)
                self._types[name] = _unify(self._types.get(name, pa.null()), columns[name].type)
            except _MISFITS:
                misfits |= self._find_misfits(name, values)
        return (None if misfits else pa.table(columns)), [
            (line, misfits.get(i, row)) for i, (line, row) in enumerate(rows)
        ]

    def _find_misfits(self, name: str, values: list[Any]) -> dict[int, BadRow]:
        kind, misfits = self._types.get(name, pa.null()), {}
        for index, value in enumerate(values):
            try:
                kind = _unify(kind, pa.array([value]).type)
            except _MISFITS:
                misfits[index] = BadRow(
                    f"its '{name}' is {_shown(value)}, which does not fit the {kind} of the rows before"
                )
        if not misfits:
            raise ConfigError(
                f"data.files: column '{name}' mixes values that no one type can keep ({kind}); give it one type"
            )
        self._types[name] = kind
        return misfits


_MISFITS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def _unify(before: pa.DataType, now: pa.DataType) -> pa.DataType:
    schemas = [pa.schema([("", kind)]) for kind in (before, now)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _join(tables: list[pa.Table]) -> pa.Table:
    if not tables:
        return pa.table({})
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"data.files: the files differ in the type of a column ({reason}); give it one type in all of them"
        ) from error


def _rename(table: pa.Table, names: dict[str, str]) -> pa.Table:
    for old, new in names.items():
        if old not in table.column_names:
            raise ConfigError(
                f"data.rename: there is no column '{old}'; the columns are {', '.join(table.column_names)}"
            )
        if new in table.column_names or list(names.values()).count(new) > 1:
            raise ConfigError(f"data.rename: '{old}' cannot become '{new}', which is taken; choose another name")
    return table.rename_columns([names.get(name, name) for name in table.column_names])


def _drop_unusual(table: pa.Table, needed: tuple[str, ...]) -> pa.Table:
    """Without what a Batch does not keep (images, times with a zone of their own) and no token is made of, and with dictionaries and long
    strings as plain text."""
    for index, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        kind = pa.string() if pa.types.is_large_string(kind) else kind
        if kind != field.type:
            table = table.set_column(index, field.name, table.column(index).cast(kind))
    unusual = [field.name for field in table.schema if field.name not in needed and not is_plain(field.type)]
    if unusual:
        _log.warning(
            "data: the columns %s are left out: a batch keeps numbers, text, and lists and structs of them",
            ", ".join(unusual),
        )
    return table.drop_columns(unusual)


def _needed_keys(layout: Layout, use: Use) -> tuple[str, ...]:
    if layout == "messages":
        return ("messages_column",)
    return ("prompt_column", "response_column") if use == "sft" else ("prompt_column",)


def _check_text(table: pa.Table, key: str, name: str) -> None:
    column = table.column(name)
    if not (pa.types.is_string(column.type) or column.null_count == len(column)):
        raise ConfigError(f"data.{key}: column '{name}' is {column.type}, not text; name another column or convert it")


Sieve = Callable[[pa.Table, np.ndarray], np.ndarray]
"""[rows] bool: which rows of a table are kept; given the table, and where each row stands."""


def _list_sieves(
    settings: DataSettings, files: tuple[str, ...], needed: tuple[str, ...], layout: Layout
) -> Iterator[tuple[str, Sieve]]:
    """In the order in which they are used, by why they leave rows out."""
    if settings.keep_where:
        yield "unmatched", lambda table, place: match_columns(table, settings.keep_where)
    yield "skipped", lambda table, place: _find_complete(table, place, files, needed, settings.on_bad_row == "skip")
    if (name := settings.keep_function) is not None:
        messages = settings.messages_column if layout == "messages" else None
        yield (
            "filtered",
            lambda table, place: call_filter(table, name, messages, lambda row: _tell_place(files, place[row])),
        )
    if settings.deduplicate_by:
        yield "duplicate", lambda table, place: find_first(table, settings.deduplicate_by)


def _find_complete(
    table: pa.Table, place: np.ndarray, files: tuple[str, ...], needed: tuple[str, ...], skips: bool
) -> np.ndarray:
    """[rows] bool: which rows have a text in each needed column."""
    keep = np.ones(table.num_rows, np.bool_)
    for name in needed:
        missing = pc.is_null(table.column(name)).to_numpy()
        if missing.any() and not skips:
            raise bad_row(_tell_place(files, place[np.flatnonzero(missing)[0]]), f"it has no '{name}'")
        keep &= ~missing
    return keep


def _check_lengths(settings: DataSettings, layout: Layout, use: Use) -> None:
    side, least, most = settings.truncation_side, settings.min_tokens, settings.max_tokens
    if least is not None and most is not None and least > most:
        raise ConfigError(f"data.min_tokens: {least} is more than data.max_tokens={most}, and no row is both; lower it")
    if side != "auto" and settings.on_long_row != "truncate":
        raise ConfigError(
            f"data.truncation_side: '{side}' says where rows are cut, and with data.on_long_row={settings.on_long_row} none is; "
            "set data.on_long_row=truncate, or leave the side at auto"
        )
    if side == "right" and use == "prompt" and layout != "text":
        raise ConfigError(
            "data.truncation_side: 'right' would cut off the words of a chat that ask the assistant to answer; set it to left or auto"
        )


def _tell_place(files: tuple[str, ...], place: np.ndarray) -> str:
    file, line = place
    return f"{files[file]}, line {line}"


def _describe_rows(num_rows: int, left_out: Mapping[str, int]) -> str:
    told = ", ".join(f"{count} by data.{LEFT_OUT_BY[kind]}" for kind, count in left_out.items() if count)
    return f"{num_rows} of {num_rows + sum(left_out.values())} rows (left out: {told})" if told else f"{num_rows} rows"

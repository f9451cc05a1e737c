"""A reward for each row of a batch: by functions of the user, in processes of their own, with a time limit on each row."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np

from hybridflow.batch import Batch
from hybridflow.columns import REWARD_COMPONENT
from hybridflow.config import ConfigError, Field, settings
from hybridflow.rewards.child import Described, Parameters
from hybridflow.rewards.function import (
    BUILTIN,
    SCORED_COLUMNS,
    RewardFunction,
    carry_function,
    check_columns,
    choose_columns,
    describe_transport,
    source_hash,
)
from hybridflow.rewards.process import Outcome
from hybridflow.rewards.workers import InlineFunctions, Item, ProcessGroup, name_key
from hybridflow.types import RowState

_log = logging.getLogger(__name__)

_RESERVED = ("mean", "std", "errors", "kl")


@settings
class RewardComponent:
    """One of several rewards of a row."""

    function: str
    """As `reward.function`."""
    weight: float = 1.0
    """The row's reward is the sum of what its components give, each times its weight; 0 only reports it."""
    values: tuple[str | int, ...] = ()
    """The rows it is for: those whose column `reward.route_by` holds one of these; empty is every row."""
    per: Literal["sample", "batch"] = "sample"
    """As `reward.per`."""
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Given to the function beside the columns, e.g. `{pattern: "<think>.+</think>.+"}`."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """As `reward.timeout_s`; null takes that."""


@settings
class RewardSettings:
    """Which functions say what a response is worth, and within which limits."""

    function: str | None = None
    """`pkg.mod:fn`, `path/to/file.py:fn`, `exact_match`, `gsm8k`, `format_match` or `math_equal`. It is given the columns that its
    parameters name. An `async def` works on several rows at once."""
    per: Literal["sample", "batch"] = "sample"
    """The function is called with one row and gives a number (sample), or with a list a column and gives one number a row (batch): once for
    some whole groups, as many as are scored together."""
    components: dict[str, RewardComponent] = Field(default_factory=dict)
    """Several rewards in place of `function`, by name, e.g. `{accuracy: {function: math_equal}, form: {function: format_match, weight: 0.1,
    arguments: {pattern: ".*answer.*"}}}`. Each is a metric `reward/<name>`. One that fails fails the row."""
    route_by: str | None = None
    """Column of the data by which rows are routed to components with `values`; a row with a value that none of them names is an error."""
    timeout_s: float = Field(default=10.0, gt=0.0)
    """Seconds for one row (or one batch); then its process is killed and the row is an error."""
    workers: int = Field(default=2, ge=1)
    """Processes that score rows side by side."""
    concurrency: int = Field(default=16, ge=1)
    """Rows that an async function works on at once in each process."""
    startup_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds for a process to start and import the functions."""
    max_memory_bytes: int | None = Field(default=None, gt=0)
    """Address space of each process, beyond which its allocations fail; null does not limit it."""
    inline: bool = False
    """Calls the functions in this process, where a debugger reaches them, without any of these limits."""

    def __post_init__(self) -> None:
        if self.function is not None and self.components:
            raise ValueError(
                f"function is '{self.function}' while components has {', '.join(self.components)}; leave one of them out, or name the "
                "function among the components"
            )
        odd = [name for name in self.components if name in _RESERVED or not re.fullmatch("[A-Za-z0-9_]+", name)]
        if odd:
            raise ValueError(
                f"components has the name '{odd[0]}', and names are letters, digits and _, but not {', '.join(_RESERVED)}, which are "
                "metrics of the whole; rename it"
            )
        if self.components and self.per == "batch":
            raise ValueError("per is batch, which `function` alone reads; set it in the component")
        routed = [name for name, component in self.components.items() if component.values]
        if routed and self.route_by is None:
            raise ValueError(
                f"components.{routed[0]}.values is set while route_by is null; name the column in route_by"
            )
        if self.route_by is not None and not routed:
            raise ValueError(f"route_by is '{self.route_by}' while no component has values; say which rows each is for")


class RewardPool:
    """Scores batches by the functions that the settings name, or by a live one in their place.

    A row whose function raises, runs out of time, ends its process or gives anything but a finite number has reward null and says why in
    `reward_error`, with the name of the component where there are several; it touches no other row. The processes start at the first call
    and end with `close()`, with the pool, or with this process, however that ends.
    """

    def __init__(self, settings: RewardSettings, function: RewardFunction | None = None) -> None:
        self._settings = settings
        self._components = _list_components(settings, function)
        live = {} if function is None else {"": function}
        described = {name: _describe(name, one, settings, live) for name, one in self._components.items()}
        self._workers: InlineFunctions | ProcessGroup
        if settings.inline:
            self._workers = InlineFunctions(described, live)
        else:
            self._workers = ProcessGroup(
                described,
                workers=settings.workers,
                concurrency=settings.concurrency,
                startup_timeout_s=settings.startup_timeout_s,
                max_memory_bytes=settings.max_memory_bytes,
            )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> dict[str, Parameters]:
        """Start the processes, if they have not, and tell what each function asks for. Raises ConfigError if one cannot be loaded."""
        return self._workers.start()

    def score(self, batch: Batch) -> Batch:
        """Columns `reward` float64 and `reward_error` string for the same rows; in each row one of the two is null.

        With components a column `reward/<name>` for each too, without its weight: NaN where it failed, or was not for the row.
        A row whose `state` is not OK is not scored: its `reward_error` says so.
        """
        parameters = self.start()
        states = batch.pylist("state") if "state" in batch else [int(RowState.OK)] * batch.num_rows
        scored = [index for index, state in enumerate(states) if state == RowState.OK]
        routes = self._read_routes(batch)
        rows = {name: [row for row in scored if self._is_for(name, routes[row])] for name in self._components}
        found = dict(zip(_list_calls(rows), self._run(batch, parameters, rows), strict=True))
        outcomes = [self._combine(row, routes[row], found) if state == RowState.OK else _skip(state)
                    for row, state in enumerate(states)]  # fmt: skip
        _warn_of_errors(scored, outcomes)
        return Batch.from_columns(
            reward=[reward for reward, _ in outcomes],
            reward_error=[error for _, error in outcomes],
            **{REWARD_COMPONENT + name: _gather(name, batch.num_rows, found) for name in self._settings.components},
        )

    def close(self) -> None:
        """End the processes and what they started. Takes no longer than killing them does; the next call starts new ones."""
        self._workers.close()

    def _run(self, batch: Batch, parameters: Mapping[str, Parameters], rows: Mapping[str, list[int]]) -> list[Outcome]:
        items = []
        for name, component in self._components.items():
            chosen = choose_columns(parameters[name], batch.schema, name_key(name), component.arguments)
            columns = {column: batch.pylist(column) for column in chosen}
            items += [Item(name, {column: columns[column][row] for column in chosen}) for row in rows[name]]
        return self._workers.run(items)

    def _read_routes(self, batch: Batch) -> list[str]:
        route_by = self._settings.route_by
        if route_by is None:
            return [""] * batch.num_rows
        _check_route(route_by, batch.column_names)
        return [str(value) for value in batch.pylist(route_by)]

    def _is_for(self, name: str, route: str) -> bool:
        values = self._components[name].values
        return not values or route in map(str, values)

    def _combine(self, row: int, route: str, found: Mapping[tuple[str, int], Outcome]) -> Outcome:
        if odd := _find_unnamed(self._settings, [route]):
            return None, odd
        reward = 0.0
        for name, component in self._components.items():
            value, error = found.get((name, row), (0.0, None))
            if value is None:
                return None, f"{name}: {error}" if name else error
            reward += component.weight * value
        return reward, None


def check_reward(
    settings: RewardSettings,
    function: RewardFunction | None = None,
    columns: Iterable[str] | None = None,
    routes: Iterable[Any] = (),
) -> frozenset[str]:
    """Raise ConfigError if no reward is named, if one cannot be loaded, or if it asks for a column that rows will not have.

    columns: those of the data, e.g. `("question", "answer")`, to which what a rollout adds is added; None leaves names unchecked.
    routes:  what the data has in the column `route_by`; each value has to be named by a component.
    returns: the columns that the functions name, and the one that routes.
    """
    if odd := _find_unnamed(settings, map(str, routes)):
        raise ConfigError(f"reward.route_by: {odd}")
    with RewardPool(settings, function) as pool:
        found = pool.start()
    routed_by = () if settings.route_by is None else (settings.route_by,)
    if columns is not None:
        there = (*SCORED_COLUMNS, *columns)
        for name, parameters in found.items():
            check_columns(parameters, there, name_key(name))
        for route_by in routed_by:
            _check_route(route_by, there)
    return frozenset({*routed_by, *(name for one in found.values() for name in (*one["required"], *one["optional"]))})


def list_reward_sources(settings: RewardSettings | None, function: RewardFunction | None = None) -> dict[str, str]:
    """Hashes of the sources of all that rewards, to be recorded with a run: `{"reward": ...}`, or `{"reward/accuracy": ...}` of several."""
    if function is not None:
        return {"reward": source_hash(function)}
    if settings is None:
        return {}
    single = {} if settings.function is None else {"reward": source_hash(settings.function)}
    return single | {REWARD_COMPONENT + name: source_hash(one.function) for name, one in settings.components.items()}


def _list_components(settings: RewardSettings, function: RewardFunction | None) -> dict[str, RewardComponent]:
    """By name; a single reward is a component without one."""
    named = settings.function or ", ".join(settings.components)
    if function is not None and named:
        raise ConfigError(f"reward.function: is '{named}' while a function was passed as well; give one of the two")
    if settings.components:
        return settings.components
    if function is None and settings.function is None:
        raise ConfigError(
            f"reward.function: nothing is rewarded; give pkg.mod:fn, path/to/file.py:fn or one of {', '.join(BUILTIN)}"
        )
    return {"": RewardComponent(function=settings.function or "", per=settings.per)}


def _describe(
    name: str, component: RewardComponent, settings: RewardSettings, live: Mapping[str, RewardFunction]
) -> Described:
    return Described(
        transport=carry_function(live[name])
        if name in live
        else describe_transport(component.function, name_key(name)),
        per=component.per,
        arguments=dict[str, Any](component.arguments),
        timeout_s=component.timeout_s or settings.timeout_s,
    )


def _check_route(route_by: str, columns: Iterable[str]) -> None:
    there = sorted(set(columns))
    if route_by not in there:
        raise ConfigError(
            f"reward.route_by: '{route_by}' is no column; the columns are {', '.join(there)}: name one of them"
        )


def _find_unnamed(settings: RewardSettings, routes: Iterable[str]) -> str | None:
    """What is wrong with the first of these values of `route_by` that no component names; None where each is named, or nothing routes."""
    named = dict.fromkeys(str(value) for component in settings.components.values() for value in component.values)
    odd = next((route for route in routes if named and route not in named), None)
    if odd is None:
        return None
    return f"no component is for rows with {settings.route_by}='{odd}', only for {', '.join(named)}; name the value in the `values` of one"


def _list_calls(rows: Mapping[str, list[int]]) -> list[tuple[str, int]]:
    return [(name, row) for name, own in rows.items() for row in own]


def _gather(name: str, num_rows: int, found: Mapping[tuple[str, int], Outcome]) -> np.ndarray:
    """What one component gave, row by row: [rows] float64, NaN for nothing."""
    values = [found.get((name, row), (None, None))[0] for row in range(num_rows)]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _warn_of_errors(scored: list[int], outcomes: list[Outcome]) -> None:
    errors = [(index, outcomes[index][1]) for index in scored if outcomes[index][1] is not None]
    if errors:
        _log.warning("%d of %d rewards are errors; the first, row %d: %s", len(errors), len(scored), *errors[0])


def _skip(state: int) -> Outcome:
    return None, f"not scored: the row is {RowState(state).name}"

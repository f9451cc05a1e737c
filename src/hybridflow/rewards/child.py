"""The process that runs reward functions: it reads rows from one pipe and reports on another, row by row.

Started by its path and not as a module: it imports nothing of hybridflow, so that a process that had to be killed is back in a moment.
The first line in is a `Hello`, the first line out is `{"parameters": {function: ...}}` or `{"error": "one sentence", "function": ...}`.
Then each line in is `[function, [[index, {column: value}], ...]]`, and these rows are answered in order by a line `[index, reward, error]`
each. A plain function answers a row before it is given the next: where the answers stop is where it hangs. An async one works on all rows
of a line at once; one of batches gets them in one call.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar

if TYPE_CHECKING:
    import asyncio

R = TypeVar("R")

_MAX_ERROR_CHARS = 300
_PARENT_CHECK_MS = 1000


class Transport(TypedDict, total=False):
    """Where the function comes from: `module` or `file` with `name`, or `pickle` (cloudpickle in base64, from our own parent alone)."""

    module: str
    file: str
    name: str
    pickle: str


class Parameters(TypedDict):
    """What a function asks for: names it needs, names it has defaults for, and whether it takes any others (`**`)."""

    required: list[str]
    optional: list[str]
    takes_rest: bool
    is_async: bool


class Described(TypedDict):
    """A function, before it is loaded. arguments: of fixed value, beside the columns. timeout_s: of a row or a batch; None for no limit."""

    transport: Transport
    per: Literal["sample", "batch"]
    arguments: dict[str, Any]
    timeout_s: float | None


class Loaded(NamedTuple):
    """A function that can be called. is_async: it gives something to await, and several of it run at once."""

    call: Callable[..., Any]
    is_async: bool
    described: Described


class Hello(TypedDict):
    """What the process is told first. `cpu_limit_s`: CPU seconds of a row (async: a line) after which the kernel ends the process."""

    sys_path: list[str]
    functions: dict[str, Described]
    max_memory_bytes: int | None
    cpu_limit_s: float


Row = tuple[int, dict[str, Any]]
"""A row's index, by which it is answered, and what the function is called with."""
Answer = Callable[[int, float | None, str | None], None]
"""Called with a row's index, its reward and no error, or no reward and an error in one line."""


class FunctionError(ValueError):
    """The function cannot be loaded or called with columns; the message is one sentence."""


def load(described: Described) -> Loaded:
    """The function as it is called. Raises FunctionError."""
    call = load_function(described["transport"])
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    return Loaded(call, is_async, described)


def load_function(transport: Transport) -> Callable[..., Any]:
    """Import, or unpickle, the function. Raises FunctionError."""
    try:
        if "pickle" in transport:
            import cloudpickle

            found = cloudpickle.loads(base64.b64decode(transport["pickle"]))
        else:
            found = (
                _import_file(transport["file"]) if "file" in transport else importlib.import_module(transport["module"])
            )
            for part in transport["name"].split("."):
                found = _find(part, found, _place(transport))
    except FunctionError:
        raise
    except (Exception, SystemExit) as error:
        raise FunctionError(f"it cannot be loaded: {_one_line(error)}; mend {_describe(transport)}") from error
    if not callable(found):
        raise FunctionError(f"it is {type(found).__name__}, not a function; correct {_describe(transport)}")
    loaded: Callable[..., Any] = found
    return loaded


def _find(name: str, owner: Any, place: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        import difflib

        there = [other for other in dir(owner) if not other.startswith("_") and callable(getattr(owner, other))]
        near = difflib.get_close_matches(name, there, n=1)
        remedy = f"the nearest is '{near[0]}'" if near else f"functions there: {', '.join(there[:10]) or 'none'}"
        raise FunctionError(f"'{place}' has no '{name}'; {remedy}") from None


def _describe(transport: Transport) -> str:
    if "pickle" in transport:
        return "the function that was passed"
    return f"'{_place(transport)}:{transport['name']}'"


def _place(transport: Transport) -> str:
    return transport["file"] if "file" in transport else transport["module"]


def read_parameters(function: Loaded) -> Parameters:
    """The names that the function takes from columns. Raises FunctionError, also for an argument that it does not take."""
    try:
        parameters = inspect.signature(function.call).parameters.values()
    except (ValueError, TypeError) as error:
        raise FunctionError(
            f"its parameters cannot be read ({error}); wrap it in a def that names its columns"
        ) from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hidden = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if hidden:
        raise FunctionError(
            f"its parameter '{hidden[0]}' is positional-only, and columns come by keyword; take the '/' out"
        )
    arguments, takes_rest = function.described["arguments"], any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in arguments if name not in {p.name for p in named}]
    if unknown and not takes_rest:
        raise FunctionError(
            f"it takes no argument '{unknown[0]}', only {', '.join(p.name for p in named)}; correct `arguments`"
        )
    return Parameters(
        required=[p.name for p in named if p.default is p.empty and p.name not in arguments],
        optional=[p.name for p in named if p.default is not p.empty and p.name not in arguments],
        takes_rest=takes_rest,
        is_async=function.is_async,
    )


def serve(function: Loaded, rows: list[Row], answer: Answer) -> None:
    """Answer each row, in order. Whatever the function does short of ending the process is caught."""
    if function.described["per"] == "batch":
        _serve_batch(function, rows, answer)
    elif function.is_async:
        _run(_serve_together(function, rows, answer))
    else:
        for index, columns in rows:
            answer(index, *_read(_call(function, columns)))


@functools.cache
def _get_runner() -> asyncio.Runner:
    # Imported where it is used: a process that was killed is back sooner. One loop for all calls, so that connections can be kept.
    import asyncio

    return asyncio.Runner()


def _run(work: Coroutine[Any, Any, R]) -> R:
    return _beside_loop(lambda: _get_runner().run(work))


def _beside_loop(call: Callable[[], R]) -> R:
    """What the call gives; in a thread of its own where this one runs a loop already (a notebook), since a thread runs one at a time."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()


def close_loop() -> None:
    """Ends the loop of async functions, if there is one, and what runs on it."""
    if _get_runner.cache_info().currsize:
        _beside_loop(_get_runner().close)
        _get_runner.cache_clear()


def _serve_batch(function: Loaded, rows: list[Row], answer: Answer) -> None:
    columns = {name: [row[name] for _, row in rows] for name in rows[0][1]}
    called = _run(_await(function, columns)) if function.is_async else _call(function, columns)
    values, error = _read_batch(called, len(rows))
    for position, (index, _) in enumerate(rows):
        answer(index, *((None, error) if error else _read((values[position], None))))


async def _serve_together(function: Loaded, rows: list[Row], answer: Answer) -> None:
    import asyncio

    tasks = [asyncio.create_task(_await(function, columns)) for _, columns in rows]
    for (index, _), task in zip(rows, tasks, strict=True):
        answer(index, *_read(await task))


def _call(function: Loaded, columns: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        return function.call(**columns, **function.described["arguments"]), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 it is the user's code
        return None, _explain(error)


async def _await(function: Loaded, columns: dict[str, Any]) -> tuple[Any, str | None]:
    import asyncio

    timeout_s = function.described["timeout_s"]
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await function.call(**columns, **function.described["arguments"]), None
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 it is the user's code
        return None, f"no result within {timeout_s or 0.0:g} s" if limit.expired() else _explain(error)


def _explain(error: BaseException) -> str:
    # The function's own line, also where a library below it raised.
    frame = error.__traceback__.tb_next if error.__traceback__ else None
    place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
    return _one_line(error) + place


def _read(called: tuple[Any, str | None]) -> tuple[float | None, str | None]:
    value, raised = called
    if raised is not None:
        return None, raised
    try:
        # Unlike float(), isfinite() takes no text for a number.
        finite, reward = math.isfinite(value), float(value)
    except Exception as error:  # noqa: BLE001 so is `__float__`
        return None, f"returned {type(value).__name__}, which is not a number ({_one_line(error)})"
    return (reward, None) if finite else (None, f"returned {reward}, which is not a finite number")


def _read_batch(called: tuple[Any, str | None], num_rows: int) -> tuple[list[Any], str | None]:
    value, raised = called
    if raised is not None:
        return [], raised
    try:
        values = list(value)
    except Exception as error:  # noqa: BLE001 so is `__iter__`
        return [], f"returned {type(value).__name__} for {num_rows} rows; give one number a row ({_one_line(error)})"
    wrong = f"returned {len(values)} values for {num_rows} rows; give one number a row"
    return values, None if len(values) == num_rows else wrong


def main(request_fd: int, result_fd: int, parent_pid: int) -> None:
    """Serve rows until the parent closes its end of the pipe or dies."""
    own_pid = os.getpid()
    for fd in (request_fd, result_fd):
        os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_parent, args=(request_fd, parent_pid), daemon=True).start()
    with open(request_fd, "rb", closefd=False) as requests:
        hello: Hello = json.loads(requests.readline())
        _limit_memory(hello["max_memory_bytes"])
        sys.path[:] = hello["sys_path"]
        functions: dict[str, Loaded] = {}
        parameters: dict[str, Parameters] = {}
        for name, described in hello["functions"].items():
            try:
                functions[name] = load(described)
                parameters[name] = read_parameters(functions[name])
            except FunctionError as error:
                _write(result_fd, {"error": _tell_load(error, hello["max_memory_bytes"]), "function": name})
                return
        _write(result_fd, {"parameters": parameters})

        def answer(index: int, reward: float | None, error: str | None) -> None:
            if os.getpid() != own_pid:
                os._exit(0)  # The function forked, and this is the copy.
            _write(result_fd, [index, reward, error])
            _limit_cpu(hello["cpu_limit_s"])

        for line in requests:
            name, rows = json.loads(line)
            _limit_cpu(hello["cpu_limit_s"])
            serve(functions[name], rows, answer)
            _limit_cpu(0.0)


def _tell_load(error: FunctionError, max_memory_bytes: int | None) -> str:
    if max_memory_bytes is None or not isinstance(error.__cause__, MemoryError):
        return str(error)
    return f"it cannot be loaded within reward.max_memory_bytes={max_memory_bytes}; raise that, or load less in it"


def _limit_cpu(seconds: float) -> None:
    # A C call that holds the interpreter lock (a regular expression that backtracks) stops every thread, also the one that watches the
    # parent. The kernel's timer still ends the process, so none outlives a parent that was killed.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _one_line(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:  # noqa: BLE001 and so is `__str__`
        text = type(error).__name__
    return " ".join(text.split())[:_MAX_ERROR_CHARS]


def _import_file(path: str) -> Any:
    directory, filename = os.path.split(os.path.abspath(path))
    # At the end: a file beside it must not hide a module of the same name that others import.
    if directory not in sys.path:
        sys.path.append(directory)
    name = f"hybridflow_reward_{filename.removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Not by the loader, whose cache takes a file for unchanged that was rewritten to the same length within a second.
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), vars(module))
    return module


def _limit_memory(max_memory_bytes: int | None) -> None:
    if max_memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = max_memory_bytes if hard == resource.RLIM_INFINITY else min(max_memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with_parent(request_fd: int, parent_pid: int) -> None:
    poller = select.poll()
    poller.register(request_fd, 0)  # No events asked for: only the other end's closing is told.
    # The parent's number is looked at too: a process forked from the parent may hold the pipe open.
    while not poller.poll(_PARENT_CHECK_MS) and os.getppid() == parent_pid:
        pass
    os.killpg(0, signal.SIGKILL)  # Our own session: also what the function started.


def _write(result_fd: int, message: Any) -> None:
    try:
        os.write(result_fd, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    # Not by way of the interpreter's exit, where a thread that the function left behind could hold us.
    sys.stdout.flush()
    os._exit(0)

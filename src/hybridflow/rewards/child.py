"""The process that runs a reward function: it reads rows from one pipe and reports on another, row by row.

Started by its path and not as a module: it imports nothing of hybridflow, so that a process that had to be killed is back in a moment.
The first line in is a `Hello`, the first line out is `{"parameters": ...}` or `{"error": "one sentence"}`. Then each line in is
`[[index, {column: value}], ...]`, and each of these rows is answered at once by a line `[index, reward, error]`: where the answers stop is
where the function hangs.
"""

from __future__ import annotations

import base64
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
from collections.abc import Callable
from typing import Any, TypedDict

_MAX_ERROR_CHARS = 300
_PARENT_CHECK_MS = 1000


class Transport(TypedDict, total=False):
    """Where the function comes from: `module` or `file` with `name`, or `pickle` (cloudpickle in base64, from our own parent alone)."""

    module: str
    file: str
    name: str
    pickle: str


class Parameters(TypedDict):
    """What the function asks for: names it needs, names it has defaults for, and whether it takes any others (`**`)."""

    required: list[str]
    optional: list[str]
    takes_rest: bool


class Hello(TypedDict):
    """What the process is told first. `cpu_limit_s`: CPU seconds of one row after which the kernel ends the process."""

    sys_path: list[str]
    function: Transport
    max_memory_bytes: int | None
    cpu_limit_s: float


class FunctionError(ValueError):
    """The function cannot be loaded or called with columns; the message is one sentence."""


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
                found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise FunctionError(f"it cannot be loaded: {_one_line(error)}") from error
    if not callable(found):
        raise FunctionError(f"it is {type(found).__name__}, not a function")
    loaded: Callable[..., Any] = found
    return loaded


def read_parameters(function: Callable[..., Any]) -> Parameters:
    """The names that the function takes by keyword. Raises FunctionError."""
    if inspect.iscoroutinefunction(function):
        raise FunctionError("it is an async function, and a reward is called plainly; wrap it in asyncio.run")
    try:
        parameters = inspect.signature(function).parameters.values()
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
    return Parameters(
        required=[p.name for p in named if p.default is p.empty],
        optional=[p.name for p in named if p.default is not p.empty],
        takes_rest=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def evaluate(function: Callable[..., Any], columns: dict[str, Any]) -> tuple[float | None, str | None]:
    """Reward and no error, or no reward and an error in one line. Whatever the function does short of ending the process is caught."""
    try:
        value = function(**columns)
    except (Exception, SystemExit) as error:  # noqa: BLE001 it is the user's code
        # The function's own line, also where a library below it raised.
        frame = error.__traceback__.tb_next if error.__traceback__ else None
        place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
        return None, _one_line(error) + place
    try:
        # Unlike float(), isfinite() takes no text for a number.
        finite, reward = math.isfinite(value), float(value)
    except Exception as error:  # noqa: BLE001 so is `__float__`
        return None, f"returned {type(value).__name__}, which is not a number ({_one_line(error)})"
    return (reward, None) if finite else (None, f"returned {reward}, which is not a finite number")


def main(request_fd: int, result_fd: int, parent_pid: int) -> None:
    """Serve rows until the parent closes its end of the pipe or dies."""
    own_pid = os.getpid()
    for fd in (request_fd, result_fd):
        os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_parent, args=(request_fd, parent_pid), daemon=True).start()
    with open(request_fd, "rb", closefd=False) as requests:
        hello: Hello = json.loads(requests.readline())
        try:
            _limit_memory(hello["max_memory_bytes"])
            sys.path[:] = hello["sys_path"]
            function = load_function(hello["function"])
            _write(result_fd, {"parameters": read_parameters(function)})
        except FunctionError as error:
            _write(result_fd, {"error": str(error)})
            return
        for line in requests:
            for index, columns in json.loads(line):
                # A C call that holds the interpreter lock (a regular expression that backtracks) stops every thread, also the one that
                # watches the parent. The kernel's timer still ends the process, so none outlives a parent that was killed.
                signal.setitimer(signal.ITIMER_VIRTUAL, hello["cpu_limit_s"])
                answer = [index, *evaluate(function, columns)]
                if os.getpid() != own_pid:
                    os._exit(0)  # The function forked, and this is the copy.
                _write(result_fd, answer)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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
    spec.loader.exec_module(module)
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

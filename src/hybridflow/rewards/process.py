"""One process of the pool, as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards import child
from hybridflow.rewards.child import Hello, Parameters

_READ_BYTES = 1 << 16
_REAP_S = 5.0
_END_S = 0.5
_LONGEST_WAIT_S = 0.5

Outcome = tuple[float | None, str | None]
"""Reward and no error, or no reward and the error."""


class RewardProcess:
    """A spawned interpreter that runs the functions on rows, those of one function at a time.

    Nothing here waits: `wait()` is where the pool sleeps, `pump()` moves what the pipes will take and give. The clock of a row runs from
    the moment the row before it was answered (the first: from when the process had it), and only once the pipes are drained.

    function: of the rows that it has or had last. row_s: by function, how long a row took.
    """

    def __init__(self, hello: Hello, *, startup_timeout_s: float) -> None:
        self.parameters: dict[str, Parameters] | None = None
        self.startup_error: tuple[str, str] | None = None
        self.function = ""
        self.pending: deque[int] = deque()
        self.row_s: dict[str, float] = {}
        self._timeout_s = self._startup_timeout_s = startup_timeout_s
        self._inbox, self._outbox = bytearray(), bytearray()
        self._broken: str | None = None
        self._at_end = False
        self._is_distrusted = False
        request_fd, self._request_fd = os.pipe()
        self._result_fd, result_fd = os.pipe()
        os.set_blocking(self._request_fd, False)
        os.set_blocking(self._result_fd, False)
        try:
            self._process = subprocess.Popen(
                # -P: not with the directory of child.py among the places that modules are looked for in.
                [sys.executable, "-u", "-P", child.__file__, str(request_fd), str(result_fd), str(os.getpid())],
                pass_fds=(request_fd, result_fd),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                # Several processes with a thread pool each would slow one another and the training down.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        finally:
            os.close(request_fd)
            os.close(result_fd)
        self._deadline_s = time.monotonic() + startup_timeout_s
        self._send(hello)

    @property
    def is_idle(self) -> bool:
        """Ready for rows."""
        return self.parameters is not None and not self.pending and self._broken is None

    def give(self, function: str, rows: Sequence[tuple[int, Mapping[str, Any]]], timeout_s: float) -> None:
        """Hand over rows, each with the number it is answered by; the process must be idle. timeout_s: from one answer to the next."""
        self.function, self._timeout_s = function, timeout_s
        self.pending.extend(index for index, _ in rows)
        self._given_s, self._num_given = time.monotonic(), len(rows)
        self._deadline_s = self._given_s + self._timeout_s
        self._send([function, rows])

    def pump(self) -> list[tuple[int, Outcome]]:
        """Send and receive what is possible now; returns the rows answered since. Also finds out whether the process is at its end."""
        self._write()
        answers: list[tuple[int, Outcome]] = []
        for line in self._read_lines():
            self._deadline_s = time.monotonic() + self._timeout_s
            try:
                self._take(json.loads(line), answers)
            except (ValueError, TypeError, LookupError):
                # Nothing that comes after it can be trusted.
                self._is_distrusted = True
                self._broken = f"the process wrote {bytes(line[:40])!r} into the pipe of the rewards"
                break
        return answers

    def fault(self) -> str | None:
        """What is wrong with the process, in a few words, or None while it may go on. Ask after `pump()`."""
        if self._broken is None and (self._at_end or self._process.poll() is not None):
            self._broken = self._find_end()
        if self._broken is None and not self.is_idle and time.monotonic() > self._deadline_s:
            self._broken = self._explain_silence()
        return self._broken

    def kill(self) -> list[tuple[int, Outcome]]:
        """End the process and all that it started, and wait for its end; returns rows it had answered before."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One in the depths of the kernel dies when it comes out; waiting for that would hold up everybody.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        answers = self.pump() if self._result_fd >= 0 else []
        for fd in (self._request_fd, self._result_fd):
            if fd >= 0:
                os.close(fd)
        self._request_fd = self._result_fd = -1
        return answers

    def _send(self, message: Any) -> None:
        self._outbox += json.dumps(message).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        while self._outbox and self._broken is None:
            try:
                del self._outbox[: os.write(self._request_fd, self._outbox)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                # Its end shows in fault(), with a better reason.
                self._outbox.clear()
                return
            if not self._outbox and self.parameters is not None:
                self._deadline_s = time.monotonic() + self._timeout_s

    def _read_lines(self) -> list[bytearray]:
        while not self._is_distrusted:
            try:
                piece = os.read(self._result_fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                self._at_end = True
                break
            self._inbox += piece
        *lines, self._inbox = self._inbox.split(b"\n")
        return lines

    def _explain_silence(self) -> str:
        if self.parameters is None:
            return f"the process did not start within {self._startup_timeout_s:g} s"
        return f"no result within {self._timeout_s:g} s; the process was killed"

    def _find_end(self) -> str:
        try:
            # The pipe's end is seen before the process can be reaped.
            return _describe_end(self._process.wait(_END_S))
        except subprocess.TimeoutExpired:
            return "the process closed the pipe of the rewards"

    def _take(self, message: Any, answers: list[tuple[int, Outcome]]) -> None:
        if self.parameters is None:
            self.parameters = message.get("parameters")
            self.startup_error = None if self.parameters is not None else (message["function"], message["error"])
            return
        index, reward, error = message
        if index != self.pending[0]:
            raise LookupError(index)
        self.pending.popleft()
        answers.append((index, (reward, error)))
        if not self.pending:
            self.row_s[self.function] = (time.monotonic() - self._given_s) / self._num_given


def wait(processes: Sequence[RewardProcess]) -> None:
    """Sleep until a process has something to say, can be sent more, or reaches its deadline; half a second at most."""
    poller = select.poll()
    now_s = time.monotonic()
    timeout_s = _LONGEST_WAIT_S
    for process in processes:
        poller.register(process._result_fd, select.POLLIN)
        if process._outbox:
            poller.register(process._request_fd, select.POLLOUT)
        if not process.is_idle:
            timeout_s = min(timeout_s, max(process._deadline_s - now_s, 0.0))
    poller.poll(int(timeout_s * 1000) + 1)


def _describe_end(returncode: int) -> str:
    if returncode >= 0:
        return f"the process ended by itself (exit code {returncode})"
    known = {int(number): number.name for number in signal.Signals}
    return f"the process died ({known.get(-returncode, f'signal {-returncode}')})"

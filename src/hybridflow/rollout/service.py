"""Requests over HTTP to a service that generates: bounded waits, a few tries, errors that say who did not answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

from hybridflow.config import HybridflowError

_TRIES = 4
_FIRST_PAUSE_S = 0.25
_BUSY = (429, 502, 503, 504)
_QUIET_S = 2.0

_log = logging.getLogger(__name__)


class ServiceError(HybridflowError, RuntimeError):
    """The service did not answer."""


class RefusedError(HybridflowError, RuntimeError):
    """The service answered with an error. status: of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Service:
    """A service at `url`; may be used by many threads. Every request may be made again: it has to mean the same the second time."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._interrupted = False

    def get(self, path: str) -> Any:
        """The answer, from JSON."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any = None, **query: str | int) -> Any:
        """The answer, from JSON; as text where it is not JSON, None where it is empty. Raises RefusedError, and ServiceError where there is
        no answer."""
        return self._ask("POST", f"{path}?{urlencode(query)}" if query else path, body)

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Returns once `path` answers; ServiceError after the timeout. A wait of more than a moment is told once."""
        start_s = time.monotonic()
        error = self._wait_until(start_s + min(_QUIET_S, timeout_s), path)
        if error is not None and timeout_s > _QUIET_S:
            _log.warning("waiting for the server at %s, %g s at most (%s)", self.url, timeout_s, error)
            error = self._wait_until(start_s + timeout_s, path)
        if error is not None:
            raise ServiceError(
                f"{self.url} was not ready within {timeout_s:g} s ({error}); start the server first, or correct the address"
            )

    def _wait_until(self, end_s: float, path: str) -> Exception | None:
        """None as soon as `path` answers; at the end, what kept it from answering."""
        while True:
            try:
                self._ask_once("GET", path, None, max(end_s - time.monotonic(), _FIRST_PAUSE_S))
            except (OSError, http.client.HTTPException, RefusedError) as error:
                if time.monotonic() >= end_s:
                    return error
                time.sleep(_FIRST_PAUSE_S)
            else:
                return None

    def interrupt(self) -> None:
        """Breaks off the requests under way, from any thread, and refuses others until `resume`: those who wait get ServiceError."""
        with self._lock:
            self._interrupted = True
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def resume(self) -> None:
        """Allows requests again."""
        self._interrupted = False

    def _ask(self, method: str, path: str, body: Any) -> Any:
        for attempt in range(_TRIES):
            try:
                return self._ask_once(method, path, body, self.timeout_s)
            except RefusedError as error:
                if error.status not in _BUSY or attempt == _TRIES - 1:
                    raise
            except _BrokenOffError:
                raise ServiceError(f"{self.url}{path} was broken off") from None
            except TimeoutError:
                raise ServiceError(f"{self.url}{path} did not answer within {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                if attempt == _TRIES - 1:
                    told = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise ServiceError(
                        f"{self.url}{path} cannot be reached ({told}); is the server still up?"
                    ) from None
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    def _ask_once(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        with self._connected(timeout_s) as connection:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            # An interruption finds no socket before the line above has made one.
            self._check_interrupted()
            answer = connection.getresponse()
            content = answer.read()
        if answer.status >= 400:
            raise RefusedError(f"{self.url}{path} answered {answer.status}: {_find_message(content)}", answer.status)
        return _parse(content) if content else None

    @contextlib.contextmanager
    def _connected(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=timeout_s)
        with self._lock:
            self._open.add(connection)
        try:
            self._check_interrupted()
            yield connection
        except (OSError, http.client.HTTPException):
            self._check_interrupted()
            raise
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise _BrokenOffError


class _BrokenOffError(Exception):
    """This side has ended the request."""


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _find_message(content: bytes) -> str:
    """What an answer says is wrong: the message of an OpenAI-like error, else its first line."""
    try:
        answer = json.loads(content)
        return str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return (content.decode(errors="replace").strip().splitlines() or ["nothing"])[0][:200]

"""Who may use an engine: one call at a time, nobody's `generate` while it sleeps; and whether the present call is to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """The state that `generate`, `load_weights`, `sleep`, `wake` and `abort` of an engine share.

    aborting: set from any thread to end the present call; the next one begins with it cleared.
    """

    def __init__(self) -> None:
        self.aborting = threading.Event()
        self.asleep = False
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def take(self, verb: str, *, awake: bool = False) -> Iterator[None]:
        """A call's turn; RuntimeError where another call runs, or where it needs an engine that is awake."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{verb}() was called while the rollout engine is generating; wait for it or abort() it first"
            )
        self.aborting.clear()
        try:
            if awake and self.asleep:
                raise RuntimeError(f"the rollout engine is asleep; call wake() before {verb}()")
            yield
        finally:
            self._busy.release()

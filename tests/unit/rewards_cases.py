"""Reward functions for tests. They are loaded in processes of their own, so this file imports nothing that is slow."""

import contextlib
import os
import re
import signal
import sys
import threading
import time


def misbehave(response: str) -> object:
    """What verifiers of other people do."""
    if response == "hang":
        time.sleep(100)
    if response == "hang in C":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if response == "raise":
        raise ValueError("no\nnumber here")
    if response == "exit":
        sys.exit(3)
    if response == "hard exit":
        os._exit(7)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "thread":
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        threading.Thread(target=time.sleep, args=(100,)).start()
    if response == "fork":
        os.fork()
    if response == "print":
        print("[0, 99.0, null]\n" * 10_000)
        sys.stderr.flush()
    if response == "read":
        return input()
    if response == "babble":
        for fd in range(3, 1024):
            with contextlib.suppress(OSError):
                os.write(fd, b"[0, 99.0, null]\n")
    if response == "close":
        os.closerange(3, 1024)
    if response == "recurse":
        return misbehave(response)
    if response == "interrupt":
        raise KeyboardInterrupt
    values = {
        "nan": float("nan"),
        "inf": -float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0],
        "complex": 1j,
        "huge": 10**400,
    }
    return values.get(response, 1.0)


ARRIVED: list[str] = []


async def misbehave_later(response: str) -> object:
    """The same of an async function; "meet" returns when as many rows are under way as its number says."""
    import asyncio

    if response.startswith("meet"):
        ARRIVED.append(response)
        while len(ARRIVED) < int(response.removeprefix("meet ")):
            await asyncio.sleep(0)
        return float(len(ARRIVED))
    if response == "wait":
        await asyncio.sleep(100)
    if response == "cling":
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                continue
    if response == "own timeout":
        raise TimeoutError("the judge did not answer")
    await asyncio.sleep(0.01)
    return misbehave(response)


def misbehave_batch(response: list[str]) -> object:
    """And of a function of batches."""
    if "one too few" in response:
        return [1.0] * (len(response) - 1)
    if "a number" in response:
        return 1.0
    for text in ("hang", "raise", "hard exit"):
        if text in response:
            misbehave(text)
    return [misbehave(text) if text in ("nan", "text") else float(len(response)) for text in response]

"""Headless Chromium for tests of pages, spoken to over its own pipe: no driver, no further package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
SETTLE = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"


def find_chromium() -> Path | None:
    """The machine's Chromium, else the one that `make chromium` has unpacked in `.venv`."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    unpacked = ROOT / ".venv" / "chromium" / "usr" / "lib" / "chromium" / "chromium"
    return Path(found) if found else unpacked if unpacked.exists() else None


class Browser:
    """One page of a Chromium of its own. `requests` are the addresses it asked for, `errors` what scripts and policies complained of."""

    def __init__(self, program: Path) -> None:
        self._home = tempfile.TemporaryDirectory()
        reads_ours, self._write_fd = os.pipe()
        self._read_fd, writes_ours = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{reads_ours} 4>&{writes_ours}; exec "$@"', "bash", str(program), *self._options()],
            pass_fds=(reads_ours, writes_ours),
            env=_environment(program, self._home.name),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads_ours)
        os.close(writes_ours)
        self._buffer, self._next_id, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _options(self) -> list[str]:
        return [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--disable-background-networking", f"--user-data-dir={self._home.name}/profile",
        ]  # fmt: skip

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(timeout=20)
        os.close(self._write_fd)
        os.close(self._read_fd)
        shutil.rmtree(self._home.name, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._next_id += 1
        number = self._next_id
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read_fd, 1 << 20)
            assert read, "Chromium has ended"
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def show(self, path: Path, width: int = 1440, height: int = 900, *, dark: bool = False) -> None:
        """Opens a file in a window of this size; narrow ones are phones."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass
        self.run(SETTLE)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, pressed and let go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """The window as PNG; `whole` takes the page in its full height."""
        self.run(SETTLE)
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def _environment(program: Path, home: str) -> dict[str, str]:
    """For an unpacked Chromium, where its libraries and fonts are."""
    environment = {**os.environ, "HOME": home}
    unpacked = ROOT / ".venv" / "chromium"
    if not program.is_relative_to(unpacked):
        return environment
    directories = [path for place in ("usr/lib", "lib") for path in (unpacked / place).glob("*-linux-gnu*")]
    libraries = [str(path) for path in (*directories, *(path / "pulseaudio" for path in directories))]
    environment["LD_LIBRARY_PATH"] = ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    fonts = Path(home) / "fonts.conf"
    fonts.write_text(
        f"<fontconfig><dir>{unpacked}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{home}/fonts</cachedir></fontconfig>"
    )
    return environment if Path("/etc/fonts/fonts.conf").exists() else {**environment, "FONTCONFIG_FILE": str(fonts)}

"""Chromium without a window, driven over its DevTools pipe: no server, no port, no library. For tests and measurements only.

with Browser() as browser:
    browser.open(path)
    browser.run("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Path of the browser, or None: tests then skip."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Browser:
    """One page in one browser. Everything that its console says, and every address it asks for, is kept."""

    def __init__(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._folder = tempfile.mkdtemp()
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        program = find_chromium()
        assert program is not None, "no Chromium; see find_chromium"
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
            f"--disable-background-networking --remote-debugging-pipe --user-data-dir={self._folder} about:blank"
        )
        self._process = subprocess.Popen(  # the browser reads commands from descriptor 3 and writes to 4
            ["bash", "-c", f"exec {program} {flags} 3<&{to_browser} 4>&{from_browser}"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._session: str | None = None
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.look(width=width, height=height, dark=dark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -------------------------------------------------------------------------------------------- protocol
    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return dict(told["result"])
            self._note(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, told: dict[str, Any]) -> None:
        given = told.get("params", {})
        if told.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str([one.get("value", one.get("description")) for one in given["args"]]))
        elif told.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(given["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded":
            self.console.append(str(given["entry"]["text"]))
        elif told.get("method") == "Network.requestWillBeSent":
            self.requests.append(str(given["request"]["url"]))

    # -------------------------------------------------------------------------------------------- pages
    def look(self, *, width: int, height: int, dark: bool = False, is_print: bool = False) -> None:
        """Size of the window, theme of the system, screen or paper."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="print" if is_print else "screen", features=scheme)

    def open(self, path: Path) -> None:
        """Load a file; returns when everything in it has been read."""
        address = path.absolute().as_uri()
        self.call("Page.navigate", url=address)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")

    def run(self, code: str) -> Any:
        """The value of an expression, awaited."""
        told = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, code: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.run(code):
            assert time.monotonic() < end, f"not within {TIMEOUT_S} s: {code}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key, as a person presses it."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40, "PageDown": 34}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def cpu_s(self) -> float:
        """Seconds that all processes of the browser have had of the processor, by Linux's own count."""
        parents, ticks = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                told = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(stat.parent.name)], ticks[int(stat.parent.name)] = int(told[1]), int(told[11]) + int(told[12])
        mine = {self._process.pid}
        while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
            mine |= more
        return sum(ticks.get(pid, 0) for pid in mine) / os.sysconf("SC_CLK_TCK")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

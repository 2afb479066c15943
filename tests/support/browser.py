"""A headless browser that opens a file and says what it has seen, over Chromium's DevTools pipe."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_SECONDS = 120.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """A page in a browser.

    Attributes:
        problems: Texts of all errors and warnings of the page.
        requests: Addresses that it has asked for.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._numbers = itertools.count(1)
        self._events: list[str] = []
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Open a file in a window of some size, in pixels of CSS."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def ask(self, expression: str) -> Any:
        """Evaluate an expression of JavaScript."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        taken = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def printed(self) -> bytes:
        """Return the page as PDF, as it would be printed on A4."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
        return base64.b64decode(self.send("Page.printToPDF", **paper)["data"])

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._read, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, values: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Log.entryAdded":
            self.problems.append(values["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(values))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {values['message']}")


@contextmanager
def browser_tab(profile: Path) -> Iterator[Tab]:
    """Start a browser; the test is skipped where there is none.

    Args:
        profile: Empty folder for the browser's own files.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(PROGRAMS)}")
    (to_browser, write), (read, from_browser) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
    script = 'exec "$@" 3<&{} 4>&{}'.format(*theirs)
    process = subprocess.Popen(
        ["bash", "-c", script, "browser", program, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (to_browser, from_browser, *theirs):
        os.close(end)
    try:
        yield Tab(write, read)
    finally:
        process.terminate()
        process.wait(30)
        os.close(write)
        os.close(read)

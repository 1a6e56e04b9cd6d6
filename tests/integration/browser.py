"""A headless Chromium, driven over the DevTools protocol's pipe: no port and no client library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# Generous: a loaded machine takes many seconds to start a browser.
DEADLINE_S = 120


@contextlib.contextmanager
def opened(scratch: Path) -> Iterator[Browser]:
    """A browser; the test is skipped where there is none.

    Args:
        scratch: a folder for the browser's own files.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no chromium: bash scripts/system_packages.sh installs it")
    profile = scratch / "profile"
    profile.mkdir()
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()


class Browser:
    """One tab.

    Args:
        program: Chromium's path.
        profile: an empty folder for the browser's own files.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The protocol uses file descriptors 3 and 4, whichever they are in this process.
        script = f"exec {shlex.join([program, *flags])} 3<&{to_browser} 4>&{from_browser}"
        self._log = (profile.parent / "browser.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = [target["targetId"] for target in targets if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends one command, returns its result; requested addresses go to `requests`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def open(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Shows a file on a screen of that size, and waits until it has been drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end_s = time.monotonic() + DEADLINE_S
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end_s, "the page does not load"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        """Takes a screen of that size; a narrow one is a phone's."""
        size = {"width": width, "height": height, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **size)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; plain values only."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> Path:
        """A PNG of the whole page, including the part below the screen's end; or of one part."""
        if clip is None:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """The page as it is printed, on the paper that its style asks for."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))
        return path

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], DEADLINE_S)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended; see browser.log"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer = json.loads(line)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer

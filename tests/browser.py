"""A headless Chromium that tests drive over a pipe, in the DevTools protocol: no driver and no network."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tests.hosts.debian import find_or_install
from tests.patience import AMPLE

# Chromium reads commands from descriptor 3 and writes to 4. They are copied out of the way first.
_WITH_PIPES = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def chromium() -> tuple[str | None, str]:
    """Path of Chromium, or None and the reason why it is not here."""
    return find_or_install("chromium", "chromium")


class Browser:
    """One tab. `complaints` holds what the page wrote to the console and refusals of its security policy."""

    def __init__(self, program: str) -> None:
        # Children of Chromium may write for a moment after it has been killed.
        self._folder = tempfile.TemporaryDirectory(prefix="burst-chromium-", ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", _WITH_PIPES, str(read), str(write), program, "--headless", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
                f"--user-data-dir={self._folder.name}", "about:blank",
            ],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._numbers, self._received = itertools.count(1), b""
        self._events: list[dict[str, Any]] = []
        self._session = ""
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def open(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Show a file at this width, in the light or the dark theme, and wait until it is loaded."""
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=theme)
        self.complaints.clear()
        self._events.clear()
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._take(self._message())

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives on the page; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def document(self) -> str:
        """The page's HTML as it stands now, also where its scripts may not run."""
        root = self._call("DOM.getDocument")["root"]
        html: str = self._call("DOM.getOuterHTML", nodeId=root["nodeId"])["outerHTML"]
        return html

    def press(self, key: str, code: int) -> None:
        """A key of the keyboard, such as Enter, 13."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """The visible part of the page, or all of it, as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            self._take(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            return
        self._events.append(message)
        if message["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + AMPLE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._read, 1 << 20) if ready else b""
            assert got, "Chromium ended or gave no answer"
            self._received += got
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

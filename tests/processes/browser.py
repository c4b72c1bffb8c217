"""A real browser for tests: a headless Chromium, driven over its own pipe (the DevTools protocol), without a library.

    with Browser(folder) as browser:
        browser.open("http://127.0.0.1:8000/")
        browser.click("#theme")
        browser.wait_for("document.title === 'farcall'")

Clicks are mouse events at the place where an element is, so something that covers it is noticed. Whatever the page
throws, logs as an error or asks of another host is kept in ``complaints``.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 120.0


# Chromium wants the pipe at 3 and 4, which may be something else here.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The path of a Chromium, if there is one here; ``FARCALL_CHROMIUM`` may name it."""
    return os.environ.get("FARCALL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page."""

    def __init__(self, folder: Path, width: int = 1440, height: int = 900) -> None:
        program = find_chromium()
        assert program is not None
        self.complaints: list[str] = []
        self._host = ""
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        reading, his_writing = os.pipe()
        his_reading, writing = os.pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
            *(["--no-sandbox"] if os.getuid() == 0 else []),
            "about:blank",
        ]
        with open(folder / "chromium.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(his_reading), str(his_writing), program, *options],
                pass_fds=(his_reading, his_writing),
                stdout=log,
                stderr=log,
            )
        os.close(his_reading)
        os.close(his_writing)
        self._reading, self._writing = reading, writing
        self._session = ""
        self._pressed: dict[str, Any] = {}
        try:
            self._attach(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int) -> None:
        targets = self._until_answered("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.command("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.resize(width, height)

    def _until_answered(self, method: str) -> dict[str, Any]:
        """A browser that has just started has no page for a moment."""
        give_up_at = monotonic() + PATIENCE_S
        while True:
            found = self.command(method)
            if any(target["type"] == "page" for target in found["targetInfos"]):
                return found
            assert monotonic() < give_up_at
            sleep(0.02)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self.command("Browser.close")
        except (OSError, AssertionError):
            self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._reading)
        os.close(self._writing)

    # ------------------------------------------------------------------ the protocol

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found
            self._notice(answer)

    def _next(self) -> dict[str, Any]:
        give_up_at = monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, give_up_at - monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reading, 1 << 16)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _notice(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            if urlsplit(address).netloc.rpartition("@")[2] != self._host:
                self.complaints.append(f"asked for {address}")

    # ------------------------------------------------------------------ a page

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Have the system prefer the "dark" or the "light" theme."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        self._host = urlsplit(address).netloc.rpartition("@")[2]
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; its value."""
        give_up_at = monotonic() + PATIENCE_S
        while not (found := self.evaluate(condition)):
            assert monotonic() < give_up_at, f"{condition} did not come true"
            sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Click what is shown, or will be; ``across`` and ``down``: where on it, from 0 to 1."""
        self.press(selector, across, down)
        self.release()

    def press(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """The first half of a click."""
        chosen = json.dumps(selector)
        self.wait_for(f"document.querySelector({chosen})?.checkVisibility() === true")
        x, y, hit = self.evaluate(
            f"""(() => {{
                const element = document.querySelector({chosen});
                element.scrollIntoView({{block: "center", inline: "center", behavior: "instant"}});
                const box = element.getBoundingClientRect();
                const x = box.left + box.width * {across}, y = box.top + box.height * {down};
                const top = document.elementFromPoint(x, y);
                return [x, y, top !== null && (element === top || element.contains(top) || top.contains(element))];
            }})()"""
        )
        assert hit, f"{selector} cannot be clicked: something covers it"
        self._pressed = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.command("Input.dispatchMouseEvent", type="mousePressed", **self._pressed)

    def release(self) -> None:
        """The second half, at the same place."""
        self.command("Input.dispatchMouseEvent", type="mouseReleased", **self._pressed)

    def write(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.click(selector)
        self.command("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """A picture of what is to be seen."""
        picture = self.command("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(picture))

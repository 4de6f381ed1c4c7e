"""A headless Chromium, driven over its pipe (DevTools protocol): no driver, no port, no network."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 60.0
_END = b"\0"


class Browser:
    """One page. ``problems`` has what its console and its log contain, and each request that is not the page's own."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self._loads = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + _END)
        until = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, until: float) -> dict[str, Any]:
        while _END not in self._waiting:
            if not select.select([self._back], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium did not answer")
            part = os.read(self._back, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self._waiting += part
        text, _, self._waiting = self._waiting.partition(_END)
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled":
                self.problems.append(f"console: {[argument.get('value') for argument in params['args']]}")
            case "Runtime.exceptionThrown":
                self.problems.append(f"exception: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.problems.append(f"log: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "about:")):
                    self.problems.append(f"request: {url}")
            case "Page.loadEventFired":
                self._loads += 1

    def open(self, path: Path, *, fragment: str = "") -> None:
        """Open a file and wait until it is loaded."""
        before = self._loads
        self._call("Page.navigate", url=f"{path.resolve().as_uri()}{fragment}")
        until = time.monotonic() + LIMIT_S
        while self._loads == before:
            self._next(until)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def shape(self, width: int, height: int, *, dark: bool = False, media: str = "screen") -> None:
        """Set the size of the window, the colour scheme and the medium."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def picture(self, selector: str | None = None) -> str:
        """Return a PNG in base64, of an element or of the window."""
        more: dict[str, Any] = {}
        if selector is not None:
            # What is not in the window has no size of its own yet (content-visibility).
            box = self.run(
                f"(async () => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView();"
                "await new Promise((then) => setTimeout(then, 300)); const b = one.getBoundingClientRect();"
                "return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()"
            )
            clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
            more = {"clip": clip, "captureBeyondViewport": True}
        data: str = self._call("Page.captureScreenshot", format="png", **more)["data"]
        return data

    def printed(self) -> str:
        """Return the page as printed: a PDF in base64."""
        data: str = self._call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)["data"]
        return data

    def without_scripts(self) -> None:
        """Switch scripts off for the pages that are opened from now on."""
        self._call("Emulation.setScriptExecutionDisabled", value=True)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in a folder; end it and its children afterwards."""
    if PROGRAM is None:
        raise RuntimeError("chromium is not installed")
    child_in, to = os.pipe()
    back, child_out = os.pipe()
    command = [
        *("bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "chromium", PROGRAM, "--headless", "--no-sandbox"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--disable-extensions"),
        *("--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-pipe"),
    ]
    environment = {**os.environ, "IN": str(child_in), "OUT": str(child_out)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(child_in, child_out),
        env=environment,
        start_new_session=True,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(to, back)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        os.close(to)
        os.close(back)

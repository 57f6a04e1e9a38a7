"""A headless Chromium, driven over WebDriver (https://www.w3.org/TR/webdriver2/) by chromedriver.

Everything that it writes is in a directory of its own, and it reaches no name but the loopback's.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

START_S: Final = 60.0
WAIT_S: Final = 40.0
ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"
"""The key that a reference to an element has in WebDriver's JSON (section 12.1)."""


def missing() -> str | None:
    """What there is not here, or None."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(names)} (packages chromium, chromium-driver)" if names else None


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"/session/{self._session}{path}"
        answer = self._http.request(method, url, json={} if body is None else body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that a script ``return``s; by the browser itself, whatever the page allows."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: object) -> Any:
        """What the script returns once that is true in JavaScript's eyes."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"{script}: {self.text()}"
            time.sleep(0.05)
        return value

    def text(self, css: str = "body") -> str:
        """What a person sees of it."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", css))

    def _find(self, css: str) -> str:
        found = self._ask("POST", "/element", {"using": "css selector", "value": css})
        return str(found[ELEMENT])

    def click(self, css: str) -> None:
        self._ask("POST", f"/element/{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        self._ask("POST", f"/element/{self._find(css)}/value", {"text": text})

    def log(self) -> list[str]:
        """What the console was told since the last time: refusals of the page's policy too."""
        return [one["message"] for one in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A window for as long as the block; nothing of it is left afterwards."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandboxd-browser-"))
        driver = subprocess.Popen(
            ["chromedriver", "--port=0", "--log-level=WARNING"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home},
            start_new_session=True,
        )
        stack.callback(_end, driver)
        http = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{_port(driver)}", timeout=START_S)
        )
        options = {
            "args": [
                "--headless=new",
                "--no-sandbox",  # it runs as root, and looks at a page of ours
                f"--user-data-dir={home}/profile",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--window-size=1280,900",
            ]
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()
        assert "sessionId" in answer["value"], answer
        session = answer["value"]["sessionId"]
        stack.callback(http.delete, f"/session/{session}")
        yield Browser(http, session)


def _port(driver: subprocess.Popen[bytes]) -> int:
    """It says which one it took."""
    assert driver.stdout is not None
    told = b""
    deadline = time.monotonic() + START_S
    while b"successfully on port" not in told or not told.endswith(b"\n"):
        ready, _, _ = select.select([driver.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(driver.stdout.fileno(), 4096) if ready else b""
        assert data, f"chromedriver did not start: {told!r}"
        told += data
    after = told.rpartition(b"successfully on port ")[2]
    return int(after.split(b".")[0])


def _end(driver: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert driver.stdout is not None
    driver.stdout.close()

"""A headless Chromium, driven over chromedriver's own protocol."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.pool import free_port

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def why_not() -> str | None:
    """Why there is no browser here; None if there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


class Browser:
    """One tab."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def open(self, path: Path) -> None:
        call("POST", f"{self._base}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return call("POST", f"{self._base}/execute/sync", {"script": script, "args": []})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return call("POST", f"{self._base}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        """What the page had to complain of since the last call."""
        return [entry["message"] for entry in call("POST", f"{self._base}/se/log", {"type": "browser"})]

    def size(self, width: int, height: int = 844) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def colours(self, scheme: str) -> None:
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it ends with the block."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session = None
    try:
        wait_for(address)
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        yield Browser(address, session)
    finally:
        if session is not None:
            call("DELETE", f"{address}/session/{session}")
        driver.terminate()
        driver.wait(10)


def call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["value"]


def wait_for(address: str) -> None:
    for _ in range(300):
        try:
            if call("GET", f"{address}/status")["ready"]:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError("chromedriver does not answer")

"""A headless Chromium, driven by chromedriver's own protocol."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.pool import free_port

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        self.address = address

    def call(self, command: str, **body: Any) -> Any:
        return call("POST", f"{self.address}/{command}", body)

    def run(self, script: str) -> Any:
        return self.call("execute/sync", script=script, args=[])

    def emulate(self, command: str, **parameters: Any) -> None:
        self.call("goog/cdp/execute", cmd=f"Emulation.{command}", params=parameters)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with its own profile, and end it with the block."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(address)
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(f"{address}/session/{session}")
        finally:
            call("DELETE", f"{address}/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)


def call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["value"]


def wait_for(address: str) -> None:
    for _ in range(300):
        with suppress(OSError):
            if call("GET", f"{address}/status")["ready"]:
                return
        time.sleep(0.1)
    raise TimeoutError("chromedriver does not answer")

"""Listening sockets of a run, read from the kernel: only loopback or the address that the user set."""

import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from glob import glob
from pathlib import Path

import pytest

from tests.command.project import command, environment, write_project
from tests.faults.test_orphans import descendants
from tests.warm import WarmPopen

LIMIT = 200.0
_LISTENS = "0A"

SCRIPT = """
import sys

import my_module
from trainwright import Trainer

if __name__ == "__main__":
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=4, devices=int(sys.argv[1]), strategy=sys.argv[2], **options)
    trainer.fit(my_module.MyModule(), my_module.MyData())
"""

POD = """
import os
import socket
import sys
from pathlib import Path

from trainwright import compose
from trainwright.launch.engines.kubernetes.node import main
from trainwright.command.run import prepare

words = ("strategy=ddp", "devices=2", "monitor=none", "launch=kubernetes", "launch.image=a", "launch.claim=b")
cfg = prepare(compose("mine", [*words, "run_dir=run", "logger=csv", "report=false"], "my_conf"), "fit")
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
os.environ |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "TRAINWRIGHT_POD_IP": "127.0.0.1"}
os.environ |= {"TRAINWRIGHT_JOB": "mine", "TRAINWRIGHT_WORKDIR": ".", "TRAINWRIGHT_RUN_TOKEN": "a secret"}
sys.exit(main(["fit"], str(Path("run").absolute())))
"""

WORDS = ("fit", "recipe=mine", "--config-dir", "my_conf", "run_dir=run", "logger=csv", "report=false")
OWN_SERVERS = ("strategy=parameter_server", "devices=3", "strategy.server_ranks=own", "strategy.consistency=async")
REPLICAS = ("strategy=ddp", "devices=2", "monitor=none", "launch=resilient", "launch.recovery=replicas")
KINDS = {
    "replicas": command(
        *WORDS, "strategy=ddp", "devices=2", "monitor=none", "launch=resilient", "launch.recovery=replicas"
    ),
    "servers, leases and figures": command(
        *WORDS, *OWN_SERVERS, "strategy.leases=at_least_once", "monitor=prometheus", "monitor.prometheus.port=0"
    ),
    "a pod": [sys.executable, "pod.py"],
    "script": [sys.executable, "script.py", "2", "ddp"],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_loopback_address_listens(kind: str, tmp_path: Path) -> None:
    write_project(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "pod.py").write_text(POD, encoding="utf-8")
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = WarmPopen(
            KINDS[kind], cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        found = _listening_until_end(process)
    finally:
        process.kill()
    assert process.wait() == 0, output.read_text()
    assert found, output.read_text()
    assert not {each for each in found if not ipaddress.ip_address(each).is_loopback}, found


def _listening_until_end(process: subprocess.Popen[bytes]) -> set[str]:
    """Addresses at which a process, or one that it has started, has listened until it ended."""
    end, found = time.monotonic() + LIMIT, set[str]()
    while process.poll() is None and time.monotonic() < end:
        found |= _addresses(_sockets({process.pid, *descendants(process.pid)}))
        time.sleep(0.02)
    return found


def _sockets(pids: Iterable[int]) -> set[str]:
    """Numbers of the sockets that processes have open."""
    found = set()
    for link in (link for pid in pids for link in glob(f"/proc/{pid}/fd/*")):
        with suppress(OSError):  # it was closed
            found.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return found


def _addresses(sockets: set[str]) -> set[str]:
    """Where these sockets listen, from the kernel's tables."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(hexadecimal: str) -> str:
    """An address of the table, whose words of 32 bits are in the order of this machine."""
    words = [int(hexadecimal[start : start + 8], 16) for start in range(0, len(hexadecimal), 8)]
    octets = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, octets)


def test_the_table_shows_listeners_on_all_addresses() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert {"0.0.0.0", "::1"} <= _addresses(_sockets([os.getpid()]))

"""`launch=multinode`: agents on two addresses of this machine, which a script in place of ssh starts."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.command.project import command, environment, write_project
from trainwright import compose
from trainwright.command.run import plan
from trainwright.core.problems import ConfigError
from trainwright.launch.engines.torchrun.host import PROBE, address_here, environment_here, problem_here
from trainwright.launch.engines.torchrun.hosts import Endpoint, Host, endpoint_of, host_problems, hosts_of, is_mine
from trainwright.launch.engines.torchrun.multinode import launch
from trainwright.launch.engines.torchrun.multinode_agent import command_for, environment_of
from trainwright.launch.engines.torchrun.words import Setup, from_agent, to_command, versions
from trainwright.launch.outcome.ends import empty_ends

# In place of ssh: an address of this machine is reached, what is called `gone` is not.
TRANSPORT = """#!/bin/sh
case $1 in gone*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255;; esac
export SSH_CONNECTION="127.0.0.1 50000 $1 22"
exec sh -c "$2"
"""
TOKEN = "TRAINWRIGHT_TEST_OF_MULTINODE"


@pytest.fixture
def transport(tmp_path: Path) -> str:
    path = tmp_path / "transport"
    path.write_text(TRANSPORT)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return write_project(tmp_path)


def words(transport: str, *more: str) -> list[str]:
    given = [
        *("strategy=ddp", "devices=1", "nodes=2", "monitor=none", "logger=csv", "launch=multinode"),
        *("launch.hosts=[127.0.0.2,127.0.0.3]", f"launch.ssh=[{transport}]", *more),
    ]
    keys = [word.split("=")[0] for word in given]
    return [word for at, word in enumerate(given) if word.split("=")[0] not in keys[at + 1 :]]  # the last counts


def configured(conf: Path, transport: str, *more: str) -> DictConfig:
    cfg = compose("mine", words(transport, *more), conf)
    cfg.run_dir = cfg.run_dir or "run"
    return cfg


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_hosts_are_named_with_slots_or_without(conf: Path, transport: str) -> None:
    assert hosts_of(configured(conf, transport, "launch.hosts=[a,localhost]")) == [
        Host("a"),
        Host("localhost", is_local=True),
    ]
    assert hosts_of(configured(conf, transport, "launch.hosts={a:8,b:4}")) == [Host("a", 8), Host("b", 4)]
    assert hosts_of(configured(conf, transport, "launch.ssh=[]"))[0] == Host("127.0.0.2", is_local=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Endpoint()),
        ("node-a", Endpoint("node-a")),
        ("node-a:29400", Endpoint("node-a", 29400)),
        ("fe80::1", Endpoint("fe80::1")),
        ("[fe80::1]:80", Endpoint("fe80::1", 80)),
    ],
)
def test_the_endpoint_is_an_address_with_a_port_or_without(given: str | None, expected: Endpoint) -> None:
    assert endpoint_of(DictConfig({"launch": {"rdzv_endpoint": given}})) == expected


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["nodes=3"], "launch.hosts names 2 host(s), but nodes=3; type nodes=2"),
        (["launch.hosts=[a,a]"], "launch.hosts names a more than once"),
        (["launch.hosts=[-oProxyCommand,b]"], "is no name of a host"),
        (["launch.hosts={a:8,b:1}", "devices=2"], "devices=2 with launch.hosts.b=1"),
        (["launch.hosts=a"], "launch.hosts=a: must be a list"),
        (["launch.rdzv_endpoint='a:port'"], "launch.rdzv_endpoint=a:port: must be an address"),
        (["launch.rdzv_endpoint=0.0.0.0"], "listens on every interface"),
        (["launch.min_nodes=1"], "launch.min_nodes=1 with launch.max_restarts=0"),
        (["launch.min_nodes=3", "launch.max_restarts=1"], "launch.min_nodes=3: must be 1 to 2"),
        (["launch.connect_timeout=0"], "launch.connect_timeout=0: must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    conf: Path, transport: str, more: list[str], said: str
) -> None:
    assert said in "\n".join(host_problems(configured(conf, transport, *more)))


def test_hosts_must_be_named(conf: Path) -> None:
    cfg = compose("mine", ["strategy=ddp", "devices=1", "nodes=2", "launch=multinode"], conf)
    assert "launch.hosts has no value" in "\n".join(plan(cfg, "fit")[1])


def test_variables_go_another_way_than_the_command_line(conf: Path, transport: str) -> None:
    cfg = configured(conf, transport, "launch.forward_env=[WANDB_*]", "launch.env={A:1}", "launch.workdir='/a b'")
    given = environment_of(cfg, {"WANDB_API_KEY": "secret", "HOME": "/root"})
    assert given == {"WANDB_API_KEY": "secret", "A": "1"}
    assert command_for(cfg, Host("a"))[:2] == [transport, "a"]
    assert command_for(cfg, Host("a"))[2].startswith("cd '/a b' && exec ")
    assert "secret" not in " ".join(command_for(cfg, Host("a")))


# ---- what an agent finds ---------------------------------------------------------------------------------------------


def setup(**more: Any) -> Setup:
    return Setup(run_id="run", host="127.0.0.2", verb="fit", run_dir="run", token="token", **more)


def test_an_agent_sees_the_run_directory_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.launch.engines.torchrun.host._SECONDS_TO_SEE", 0.2)
    assert "must see one and the same folder" in str(problem_here(setup()))
    (empty_ends(Path("run")) / PROBE).write_text("that of another run")
    assert "must see one and the same folder" in str(problem_here(setup()))
    (Path("run") / "logs/ends" / PROBE).write_text("token")
    assert problem_here(setup(versions=versions())) is None
    assert "torch " in str(problem_here(setup(versions=versions() | {"torch": "1.0"})))
    assert "there is no network interface eth77" in str(problem_here(setup(interface="eth77")))


def test_an_agent_knows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert address_here(setup()) == ("127.0.0.2", None)
    assert address_here(setup(interface="lo")) == ("127.0.0.1", None)
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.7 22")
    named = Setup("run", "node-a", "fit", "run", "token")
    assert address_here(named) == ("192.0.2.7", "192.0.2.1")
    assert is_mine("127.0.0.1")
    assert not is_mine("192.0.2.7")


def test_ranks_hear_where_they_meet_and_what_they_are_given(conf: Path, transport: str) -> None:
    cfg = configured(conf, transport)
    found = environment_here(cfg, setup(environment={"A": "1", "OMP_NUM_THREADS": "3"}), "127.0.0.2", "127.0.0.2", 5)
    assert found["A"] == "1"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["TRAINWRIGHT_STORE"] == '["127.0.0.2", 5]'
    assert found["TRAINWRIGHT_AGENT"] == str(os.getpid())


def test_what_an_agent_says_is_told_from_what_it_prints() -> None:
    assert from_agent(to_command(ready=True)) == {"ready": True}
    assert from_agent('{"ready": true}') is None


# ---- hosts that are not there ----------------------------------------------------------------------------------------


def test_every_host_that_is_not_there_is_named_with_what_it_says(conf: Path, transport: str) -> None:
    cfg = configured(conf, transport, "launch.hosts=[gone-a,gone-b]")
    with pytest.raises(ConfigError) as refused:
        launch(cfg, "fit")
    assert "host gone-a cannot be reached: try `" in str(refused.value)
    assert "ssh: connect to host gone-b port 22: No route to host" in str(refused.value)


def test_a_host_without_the_python_is_told_so(conf: Path, transport: str) -> None:
    cfg = configured(conf, transport, "launch.hosts=[127.0.0.2]", "nodes=1", "launch.python=/no/python")
    with pytest.raises(ConfigError, match=r"host 127\.0\.0\.2 has no /no/python"):
        launch(cfg, "fit")


# ---- real agents and ranks -------------------------------------------------------------------------------------------


class Command:
    """The command, and everything that it starts on all hosts."""

    def __init__(self, conf: Path, transport: str, *more: str) -> None:
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            command("fit", "--config-dir", str(conf), "recipe=mine", *words(transport, *more)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment() | {TOKEN: self.token},
            start_new_session=True,
        )
        self.output = ""

    def living(self, words: str = "") -> list[int]:
        """Processes that the command has started, on whatever host, in whatever session, and itself."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"{TOKEN}={self.token}".encode() in (folder / "environ").read_bytes()
                if mine and words in (folder / "cmdline").read_text().replace("\0", " "):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has just ended
        return found

    def read_until(self, *texts: str) -> None:
        assert self.process.stdout is not None
        while any(text not in self.output for text in texts):
            line = self.process.stdout.readline()
            assert line, f"ended with {self.process.wait()}:\n{self.output}"
            self.output += line

    def end(self, seconds: float = 240.0) -> int:
        self.output += self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def is_gone(self, seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while self.living() and time.monotonic() < end:
            time.sleep(0.05)
        return not self.living()

    def close(self) -> None:
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for each in started:
        each.close()


def test_a_killed_rank_is_started_again_on_its_host(conf: Path, transport: str, commands: list[Command]) -> None:
    more = (
        *("launch.max_restarts=1", "checkpoint.last.every_n_steps=1", "+inject=[kill(rank=1, at_step=2)]"),
        *("trainer.log_every_n_steps=1", "run_dir=run"),
    )
    run = Command(conf, transport, *more)
    commands.append(run)
    assert run.end() == 0, run.output
    assert run.is_gone()
    with Path("run/metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == [0, 1, 2, 3]
    for rank in (0, 1):
        log = Path(f"run/logs/rank_{rank}.log").read_text()
        assert log.count("first step of rank") == 1  # the second attempt begins behind it
        assert f"[rank {rank}] first step of rank {rank}" in run.output


@pytest.mark.parametrize("how", ["ctrl-c", "agent"])
def test_nothing_is_left_on_any_host(how: str, conf: Path, transport: str, commands: list[Command]) -> None:
    run = Command(conf, transport, "module.sleep=0.1", "max_steps=100000", "max_epochs=100000", "checkpoint=none")
    commands.append(run)
    run.read_until("first step of rank 0", "first step of rank 1")
    assert len(run.living("trainwright.command.started")) == 2
    if how == "ctrl-c":
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130
        assert "trainwright: ended by SIGINT" in run.output
    else:
        agents = run.living("-m trainwright.launch.engines.torchrun.host")
        assert len(agents) == 2
        os.kill(max(agents), signal.SIGKILL)
        assert run.end() == 1
        assert "the agent on 127.0.0." in run.output
        assert "is gone (exit code -9); the others were ended" in run.output
    assert run.is_gone(), f"still there: {run.living()}\n{run.output}"

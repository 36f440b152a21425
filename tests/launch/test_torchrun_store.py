"""Rendezvous of torchrun's ranks in every attempt, and the run of the previous attempt."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from trainwright.core.run.launcher import Launcher
from trainwright.launch.engines.torchrun.agreement import agent_id, previous_run, record_agent
from trainwright.launch.ranks import torchrun_store
from trainwright.launch.ranks.rendezvous import LocalStore
from trainwright.launch.ranks.torchrun_store import meet


@pytest.fixture
def agents_store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Return the store of the agent, which outlives the ranks."""
    store = HashStore()
    monkeypatch.setattr(torchrun_store, "_launchers_store", lambda launcher: store)
    monkeypatch.setattr(torchrun_store, "_kept", [])
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # so that they are put back
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return store


def _rank(rank: int, size: int = 2) -> Launcher:
    return Launcher("torchrun", rank, size, size)


def test_store_of_the_current_attempt(agents_store: HashStore) -> None:
    with LocalStore() as dead:
        dead_port = dead.port
    with LocalStore() as before:
        # Rank 0 of one earlier attempt is dead, that of another lives still; its rank 1 has been there.
        before.store.add("trainwright/joined/1", 1)
        agents_store.set("trainwright/meeting", json.dumps(["127.0.0.1", dead_port]))
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(meet(_rank(1))))
        waiting.start()
        waiting.join(0.3)
        assert not found
        agents_store.set("trainwright/meeting", json.dumps(["127.0.0.1", before.port]))
        waiting.join(0.3)
        assert not found
        own = meet(_rank(0))
        waiting.join(20)
        assert found, "rank 1 has not found rank 0 within 20 s"
        own.set("from", "rank 0")
        assert found[0].get("from") == b"rank 0"
    assert os.environ["MASTER_PORT"] not in (str(before.port), str(dead_port))
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_launcher_store_without_restarts(agents_store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert meet(_rank(0)) is agents_store
    assert meet(_rank(1)) is agents_store


def _environment(folder: str, attempt: int, rank: int = 0) -> dict[str, str]:
    file = f"/tmp/{folder}/attempt_{attempt}/{rank}/error.json"
    return {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "TORCHELASTIC_ERROR_FILE": file}


def test_agent_id() -> None:
    name = agent_id(_environment("agent", 0))
    assert name == agent_id(_environment("agent", 1, rank=3))
    assert name != agent_id(_environment("other", 0))
    assert name != agent_id(_environment("agent", 0) | {"TORCHELASTIC_RUN_ID": "job7"})
    without = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    assert agent_id(without) == agent_id(without)  # of the process above this one
    assert agent_id({"RANK": "0", "WORLD_SIZE": "2"}) is None  # nobody starts these again


def test_previous_run_of_an_agent() -> None:
    for name in ("first", "second", "third"):
        Path("runs/mine", name).mkdir(parents=True)
        Path("runs/mine", name, "config.yaml").touch()
    Path("own").mkdir()
    assert previous_run("mine", None, ("a", "b")) is None
    record_agent(Path("runs/mine/second"), "b")
    record_agent(Path("runs/mine/third"), "c")
    assert previous_run("mine", None, ("a", "b")) == Path("runs/mine/second")
    assert previous_run("mine", None, ()) is None
    assert previous_run("mine", "runs/mine/third", ("a", "b")) is None  # of another agent: begins, or is refused
    assert previous_run("mine", "own", ("b",)) is None
    record_agent(Path("own"), "b")
    assert previous_run("mine", "own", ("b",)) is None  # it failed before there was a run
    Path("own/config.yaml").touch()
    assert previous_run("mine", "own", ("b",)) == Path("own")

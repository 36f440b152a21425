"""`launch=ray`: requested resources, environment of ranks, and a real cluster where Ray is installed."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.command.project import command
from tests.faults.commands import Command, until
from trainwright import compose
from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.launch.checks.check_bounds import bound_problems
from trainwright.launch.engines.ray import placement
from trainwright.launch.engines.ray.actors import RankActors
from trainwright.launch.engines.ray.placement import (
    Place,
    RankPlaces,
    actor_options,
    bundles,
    rank_variables,
    resources_of,
    total,
)
from trainwright.launch.engines.ray.ray import problems
from trainwright.launch.recovery.restarts import RestartLog

WITHOUT_RAY = importlib.util.find_spec("ray") is None


def configured(conf: Path, *overrides: str) -> DictConfig:
    return compose("mine", ["strategy=ddp", "devices=2", "launch=ray", *overrides], conf)


def test_bundles(conf: Path) -> None:
    words = ("nodes=2", "accelerator=gpu", "launch.cpus_per_rank=4", "launch.memory_gb_per_rank=1")
    ranks = "launch.ranks={3: {cpus: 8, gpus: 0, tables: 1}}"
    cfg = configured(conf, *words, "launch.resources.fast=0.5", ranks)
    plain = {"CPU": 4.0, "GPU": 1.0, "memory": float(1 << 30), "fast": 0.5}
    assert resources_of(cfg, 0) == plain
    assert resources_of(cfg, 3) == {"CPU": 8.0, "memory": float(1 << 30), "fast": 0.5, "tables": 1.0}
    assert bundles(cfg) == [
        {"CPU": 8.0, "GPU": 2.0, "memory": float(2 << 30), "fast": 1.0},
        {"CPU": 12.0, "GPU": 1.0, "memory": float(2 << 30), "fast": 1.0, "tables": 1.0},
    ]
    assert total(cfg)["CPU"] == 20.0
    never_again = {"max_restarts": 0, "max_task_retries": 0}
    named = {"num_cpus": 8.0, "num_gpus": 0.0, "memory": 1 << 30, "resources": {"fast": 0.5, "tables": 1.0}}
    assert actor_options(cfg, 3) == named | never_again


def test_rank_variables(conf: Path) -> None:
    cfg = configured(conf, "nodes=2", "accelerator=gpu", "launch.cpus_per_rank=3")
    places = [Place("10.0.0.1", ("4",)), Place("10.0.0.1", ("1",)), Place("10.0.0.2", ("0",))]
    places.append(Place("10.0.0.2", ("1",)))
    told = [rank_variables(cfg, rank, places, ("10.0.0.1", 99), 1, None) for rank in range(4)]
    named = [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"], each["CUDA_VISIBLE_DEVICES"]) for each in told]
    assert named == [("0", "0", "0", "4,1"), ("1", "1", "0", "4,1"), ("2", "0", "1", "0,1"), ("3", "1", "1", "0,1")]
    shared = {name: told[0][name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert shared == {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}
    assert told[0]["OMP_NUM_THREADS"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in told[0]


def test_local_cluster_uses_loopback(conf: Path) -> None:
    cfg = configured(conf, "launch.threads=2")
    assert not problems(cfg)
    told = rank_variables(cfg, 1, [Place("127.0.0.1")] * 2, ("127.0.0.1", 99), 0, "5")
    assert told["GLOO_SOCKET_IFNAME"] == "lo"
    assert told["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in told


@pytest.mark.sample(3)
@pytest.mark.parametrize(("overrides", "said"), [
    (["launch.placement=PAK"], "launch.placement=PAK: unknown; did you mean"),
    (["launch.placement_seconds=0"], "launch.placement_seconds=0.0: must be a finite number above 0"),
    (["launch.cpus_per_rank=-1"], "launch.cpus_per_rank=-1.0: must be a finite number of at least 0"),
    (["launch.resources.x=-2"], "launch.resources.x=-2.0: must be a finite number of at least 0"),
    (["accelerator=gpu", "launch.gpus_per_rank=2"], "a rank trains on one GPU"),
    (["launch.ranks={2: {cpus: 1}}"], "there are ranks 0 to 1"),
    (["launch.ranks={1: {cpus: many}}"], "launch.ranks.1.cpus=many: must be a number"),
    (["launch.ranks={1: 4}"], "launch.ranks.1=4: must be names and amounts"),
    (["preemption.requeue=true"], "Ray has no queue"),
])  # fmt: skip
def test_refused_options(conf: Path, overrides: list[str], said: str) -> None:
    cfg = configured(conf, *overrides)
    [found] = [*bound_problems(cfg).values(), *problems(cfg)]
    assert said in found


class _Group:
    def __init__(self, fits: bool) -> None:
        self._fits = fits

    def wait(self, seconds: float) -> bool:
        return self._fits


class _Cluster:
    """The part of Ray that placement uses: a cluster with a variable number of cores."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.util = self
        self.__spec__ = ModuleSpec("ray", None)

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> _Group:
        return _Group(sum(bundle["CPU"] for bundle in bundles) <= self.cores)

    def remove_placement_group(self, group: _Group) -> None:
        """Nothing is held."""

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(self.cores)}}]


def test_placement_shrinks_and_grows(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = _Cluster(4)
    monkeypatch.setitem(sys.modules, "ray", there)
    words = ("devices=4", "global_batch_size=16", "launch.min_devices=2", "launch.placement_seconds=0.01")
    words += ("launch.max_restarts=null", "run_dir=run")
    monkeypatch.setattr(placement, "_SMALLER_SECONDS", 0.0)
    log = RestartLog(Path("run"))
    room = RankPlaces(configured(conf, *words, "launch.probe_seconds=0.001"), "fit", log, DeferredSignals())
    assert room.size == 4
    there.cores = 3
    assert (room.size, room.look(16)) == (3, False)
    there.cores = 4
    room._look_at = 0.0
    assert room.look(16)
    assert room.size == 4
    there.cores = 1
    with pytest.raises(RankError, match=r"no room for \{CPU: 4\}.*the machines of the cluster have \{CPU: 1\}"):
        room.size  # noqa: B018
    with pytest.raises(ConfigError, match="no room for"):
        RankPlaces(configured(conf, *words), "fit", log, DeferredSignals()).place()


class _Method:
    """Method of an actor, called at once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any) -> Any:
        return _Answer(self._method(*args))


class _Answer:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Actor:
    """Actor whose rank exits at once; rank 1 fails."""

    def __init__(self, rank: int, *_: Any) -> None:
        self.place = _Method(lambda: Place("127.0.0.1"))
        self.open_store = _Method(lambda address: (address, 99))
        self.start = _Method(lambda *_: rank)
        self.wait = _Method(lambda seconds: int(rank == 1))


class _Ray:
    """The part of Ray that such actors need."""

    class exceptions:
        RayError = RuntimeError

    def __init__(self) -> None:
        self.util = self
        self.waits = 0
        self.__spec__ = ModuleSpec("ray", None)

    def remote(self, kind: type) -> Any:
        return self

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=_Actor)

    def wait(self, answers: list[_Answer], num_returns: int, timeout: float) -> tuple[list[_Answer], list[_Answer]]:
        self.waits += 1
        return answers[:num_returns], answers[num_returns:]

    def get(self, answers: Any) -> Any:
        return [each.value for each in answers] if isinstance(answers, list) else answers.value

    def PlacementGroupSchedulingStrategy(self, *_: Any, **__: Any) -> None:
        """Not looked at."""


def test_results_are_collected_together(conf, tmp_path, monkeypatch):
    ray = _Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", ray)
    actors = RankActors(configured(conf, "devices=40", "run_dir=run"), 0, None, DeferredSignals())
    assert actors.start("fit", tmp_path) is None
    ray.waits = 0
    assert actors.collect(1.0)
    assert actors.codes == {rank: int(rank == 1) for rank in range(40)}
    assert not actors.has_ranks
    assert ray.waits == 2


def test_held_signals() -> None:
    done: list[str] = []

    def call(signals: DeferredSignals) -> None:
        with signals.deferred():
            with signals.deferred():
                signal.raise_signal(signal.SIGUSR1)
            done.append("all of it")

    with DeferredSignals([signal.SIGUSR1]) as signals:
        with pytest.raises(Interrupted, match="SIGUSR1"):
            call(signals)
        assert done == ["all of it"]
        with signals.deferred():
            done.append("and nothing is left of it")
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.skipif(WITHOUT_RAY, reason="needs Ray, which `make install` leaves out: pip install 'trainwright[ray]'")
def test_restart_on_a_real_cluster(conf: Path) -> None:
    words = ("recipe=mine", "strategy=ddp", "devices=2", "launch=ray", "monitor=none", "logger=csv", "run_dir=run")
    lasting = ("launch.max_restarts=1", "checkpoint.last.every_n_steps=2", "max_steps=20", "max_epochs=100")
    run = Command(command("fit", "--config-dir", str(conf), *words, *lasting, "module.sleep=0.1"), started="")
    # A cluster and two imports of torch, on a machine that may have other work.
    until(lambda: "first step of rank 1" in run.said(), "the first step", 200)
    holders = [pid for pid, line in run.session().items() if line.startswith("ray::RankHolder")]
    assert len(holders) == 2
    os.kill(holders[0], signal.SIGKILL)
    assert run.end(200) == 0, run.said()
    assert "of 2 was lost with its actor" in Path("run/logs/restarts.log").read_text()
    assert Path("run/checkpoints/step=20").is_dir()
    assert run.said().count("[rank 1] first step of rank 1") >= 2
    assert run.session() == {}

"""Engines: selection, refusals, and the ranks that they start."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from tests.command.project import write_project
from trainwright import compose, run
from trainwright.core.problems import ConfigError
from trainwright.launch.engines import engines
from trainwright.launch.outcome.rank_records import empty_ends, ends_folder, forget_rank

MODULE = "engine_of_a_test"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Register an engine that records its calls."""
    asked: list[tuple[str, str]] = []
    module = ModuleType(MODULE)

    def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
        asked.append((cfg.run_dir, verb))
        return {"loss": 0.5}

    module.launch = launch  # type: ignore[attr-defined]
    wanted = ["this engine wants two"]
    module.problems = lambda cfg: [] if cfg.nodes == 2 else wanted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(engines._ENGINES, "ray", engines._Entry(MODULE))
    return asked


def configured(tmp_path: Path, *overrides: str) -> DictConfig:
    folder = write_project(tmp_path)
    words = ["strategy=ddp", "devices=2", "launch.kind=ray", f"run_dir={tmp_path / 'run'}", *overrides]
    return compose("mine", words, folder)


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


def test_engine_runs_the_prepared_configuration(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    result = run(configured(tmp_path, "nodes=2", "ckpt_path=initial"), "test")
    assert result.metrics == {"loss": 0.5}
    assert calls == [(str(tmp_path / "run"), "test")]
    assert (tmp_path / "run/config.yaml").is_file()


def test_refusing_engine_frees_the_run_directory(tmp_path, calls, monkeypatch):
    def refuse(cfg: DictConfig, verb: str) -> None:
        raise ConfigError(["no host answers"])

    cfg = configured(tmp_path, "nodes=2", "ckpt_path=initial")
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[MODULE], "launch", refuse)
        with pytest.raises(ConfigError, match="no host answers"):
            run(cfg, "test")
    assert run(cfg, "test").metrics == {"loss": 0.5}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("override", "said"), [
    ("nodes=1", "this engine wants two"),
    ("devices=auto", "devices=auto with launch=ray"),
    ("launch.port=1234", "only launch=local reads it"),
])  # fmt: skip
def test_unsupported_engine_options(tmp_path, calls, override, said):
    with pytest.raises(ConfigError, match=said):
        run(configured(tmp_path, override))
    assert not calls
    assert not (tmp_path / "run").exists()


RECOVERY = ["launch.recovery=replicas", "launch.min_devices=1"]


@pytest.mark.parametrize(("kind", "nodes", "refused"), [
    ("slurm", 1, []), ("slurm", 2, RECOVERY), ("ray", 1, RECOVERY[:1]), ("ray", 2, RECOVERY),
    ("kubernetes", 1, RECOVERY),
])  # fmt: skip
def test_engines_that_cannot_recover(tmp_path: Path, kind: str, nodes: int, refused: list[str]) -> None:
    cfg = configured(tmp_path, f"launch.kind={kind}", f"nodes={nodes}", *RECOVERY)
    where = f"launch={kind}" if nodes == 1 else f"launch={kind} on nodes=2"
    assert [text.split(":")[0] for text in engines._common_problems(cfg)] == [
        f"{each} with {where}" for each in refused
    ]


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines._ENGINES, "ray", engines._Entry(MODULE, ("no_such_package",), "mine"))
    with pytest.raises(ConfigError, match=r"needs no_such_package.*pip install 'trainwright\[mine\]'"):
        run(configured(tmp_path))


def test_old_rank_records_are_deleted(tmp_path: Path) -> None:
    folder = empty_ends(tmp_path)
    for rank in range(4):
        (folder / f"{rank}.json").write_text(json.dumps({"rank": rank}))
    forget_rank(tmp_path, 1, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "2.json", "3.json"]
    forget_rank(tmp_path, 0, 2)
    assert list(folder.iterdir()) == []
    (folder / "result").write_text("{}")
    assert list(empty_ends(tmp_path).iterdir()) == []
    assert ends_folder(tmp_path) == folder


ORPHAN = """
import os, subprocess, sys, time
from trainwright.core.processes.orphans import end_with_agent
if len(sys.argv) == 1:
    os.environ["TRAINWRIGHT_AGENT"] = str(os.getpid())
    child = subprocess.Popen([sys.executable, __file__, "rank"])
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
end_with_agent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no process of the end of its parent")
def test_rank_exits_with_its_agent(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(ORPHAN)
    agent = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdin is not None
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    ending = os.pidfd_open(rank)
    try:
        print(file=agent.stdin, flush=True)
        assert agent.wait(timeout=30) == -9
        assert select.select([ending], [], [], 30)[0], "the rank outlives its agent"
    finally:
        os.close(ending)
        agent.stdin.close()
        agent.stdout.close()

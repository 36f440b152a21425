"""`launch=slurm`: options of sbatch, refusals, outcomes of jobs, and real local jobs."""

import os
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.command.project import command, run_command
from tests.faults.commands import Command, until
from trainwright import compose
from trainwright.callbacks.end.requeue import requeue
from trainwright.core.failures.failure import FailureRecorder, RankError, first_failure
from trainwright.core.failures.records import write_result
from trainwright.core.run.interrupt import Interrupted
from trainwright.core.text.messages import RUN_TOKEN, run_token
from trainwright.launch.checks.check_bounds import bound_problems
from trainwright.launch.engines.slurm import job as slurm_job
from trainwright.launch.engines.slurm.job import rendezvous_of
from trainwright.launch.engines.slurm.options import sbatch_options
from trainwright.launch.engines.slurm.slurm import alike, problems
from trainwright.launch.engines.slurm.submit import SubmittedJob, cancel, submit
from trainwright.launch.outcome.interruption import preemption_refusals
from trainwright.launch.outcome.rank_records import (
    NodeOutcome,
    empty_ends,
    ends_folder,
    is_restart,
    metrics_of,
    read_node,
    write_node,
)
from trainwright.launch.ranks.follow import Follower
from trainwright.launch.schema import RunConfig

WORDS = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=csv", "launch=slurm")
LOCAL = "launch.cluster=local"


def configured(conf: Path, *overrides: str) -> DictConfig:
    return compose("mine", ["strategy=ddp", "devices=8", "nodes=2", "launch=slurm", *overrides], conf)


def script(cfg: DictConfig) -> list[str]:
    """Return the lines of submitit's batch script."""
    from submitit.slurm.slurm import _make_sbatch_string

    return _make_sbatch_string("RUN", "/logs", **sbatch_options(cfg)).splitlines()


def test_sbatch_script(conf: Path) -> None:
    words = (
        *("accelerator=gpu", "launch.partition=big", "launch.time=1-12:00:00", "launch.exclusive=true"),
        *("launch.mem_gb=1.5", "launch.setup=[module load cuda]", "launch.sbatch.mail-type=END"),
        *("launch.container_image=/images/a.sqsh", "launch.container_mounts=[/data:/data,/home:/home]"),
    )
    lines = script(configured(conf, *words, "preemption.deadline_seconds=50"))
    for expected in (
        "#SBATCH --job-name=mine",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=big",
        "#SBATCH --time=1-12:00:00",
        "#SBATCH --exclusive",
        "#SBATCH --mem=1536M",
        "#SBATCH --mail-type=END",
        "#SBATCH --signal=USR1@60",  # what the ranks have to save, and ten seconds
        "module load cuda",
    ):
        assert expected in lines
    [run] = [line for line in lines if line.startswith("srun")]
    assert "--wait=110 --container-image=/images/a.sqsh --container-mounts=/data:/data,/home:/home RUN" in run


def test_sbatch_defaults(conf: Path) -> None:
    names = {line.split("=")[0] for line in script(configured(conf)) if line.startswith("#SBATCH")}
    given = {"job-name", "nodes", "ntasks-per-node", "open-mode", "output", "signal", "wckey"}
    assert names == {f"#SBATCH --{name}" for name in given}  # not submitit's five minutes
    assert "#SBATCH --requeue" in script(configured(conf, "preemption.requeue=true"))
    only_term = script(configured(conf, "preemption.signals=[SIGTERM]", "launch.signal_seconds=30"))
    assert "#SBATCH --signal=TERM@30" in only_term


@pytest.mark.sample(4)
@pytest.mark.parametrize(("overrides", "said"), [
    (["launch.cluster=lokal"], "launch.cluster=lokal: unknown"),
    (["launch.cluster=local"], "launch.cluster=local with nodes=2"),
    (["launch.cluster=local", "nodes=1", "preemption.requeue=true"], "there is no queue"),
    (["launch.sbatch.nodes=3"], "launch.sbatch.nodes: nodes sets that"),
    (["launch.sbatch.gpus_per_node=3"], "launch.gpus_per_node sets that"),
    (["launch.cpus_per_task=0"], "launch.cpus_per_task=0: must be a whole number of at least 1, or null"),
    (["launch.container_mounts=[/a:/a]"], "without launch.container_image"),
])  # fmt: skip
def test_refused_options(conf, monkeypatch, overrides, said):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    cfg = configured(conf, *overrides)
    [found] = [*bound_problems(cfg).values(), *problems(cfg)]
    assert said in found


def test_missing_sbatch(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    cfg = configured(conf)
    [found] = problems(cfg)
    assert "there is no sbatch on this machine" in found
    assert "launch.cluster=local" in found
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert not problems(cfg)


def test_requeue_option(conf: Path) -> None:
    cfg = configured(conf, "preemption.requeue=true", "run_dir=run")
    assert not preemption_refusals(cfg, "fit", {})
    cfg.launch.kind = "local"
    assert len(preemption_refusals(cfg, "fit", {})) == 2  # no job, and nothing that would go on


def test_rendezvous() -> None:
    first, second = rendezvous_of("123456", ["a", "b"], 0), rendezvous_of("123456", ["a", "b"], 1)
    assert (first.host, first.port, first.run_id) == (second.host, second.port, second.run_id)
    assert (first.is_host, second.is_host) == (True, False)
    assert first.port != rendezvous_of("123457", ["a", "b"], 0).port


def _fails(folder: Path, rank: int, text: str) -> None:
    """Record an error raised by torch on a rank."""
    try:
        exec("raise RuntimeError(text)", {"__name__": "torch.distributed", "text": text})
    except RuntimeError as error:
        FailureRecorder(folder, rank).record(error)


def ended(run_dir: Path, *ends: NodeOutcome | None) -> dict[str, float]:
    """Return the command's result for the outcomes of machines with one rank each."""
    cfg = OmegaConf.structured(RunConfig(name="mine", devices=1, nodes=len(ends), run_dir=str(run_dir)))
    folder = ends_folder(run_dir)
    for node, end in enumerate(ends):
        if end is not None:
            write_node(folder, node, end)
    return metrics_of(folder, cfg, [read_node(folder, node) for node in range(len(ends))], "silence")


def test_first_failure_of_all_nodes(tmp_path: Path) -> None:
    _fails(empty_ends(tmp_path), 0, "Connection closed by peer")
    with pytest.raises(RankError, match="rank 1 of 2 was ended by SIGKILL"):
        ended(tmp_path, NodeOutcome(1, codes={0: 1}), NodeOutcome(1, codes={1: -signal.SIGKILL}))


def test_error_recorded_by_a_node(tmp_path: Path) -> None:
    folder = empty_ends(tmp_path)
    _fails(folder, 1, "boom")
    error = first_failure(folder, {0: 1, 1: 7}, tmp_path)
    with pytest.raises(RankError, match="boom") as raised:
        ended(tmp_path, NodeOutcome.of_error(error))
    assert (raised.value.rank, raised.value.failure) == (1, error.failure)


@pytest.mark.parametrize("ends", [
    (NodeOutcome(138, int(signal.SIGUSR1)), NodeOutcome(138, int(signal.SIGUSR1))),
    (NodeOutcome(1, codes={0: 138}), NodeOutcome(1, codes={1: 138})),  # one rank was told, and told the others
])  # fmt: skip
def test_interrupted_nodes(tmp_path: Path, ends: tuple[NodeOutcome, ...]) -> None:
    empty_ends(tmp_path)
    with pytest.raises(Interrupted) as told:
        ended(tmp_path, *ends)
    assert (told.value.number, told.value.exit_code) == (signal.SIGUSR1, 138)


def test_nodes_without_failure(tmp_path: Path) -> None:
    folder = empty_ends(tmp_path)
    with pytest.raises(RankError, match="silence"):
        ended(tmp_path, NodeOutcome(0), None)
    write_result(folder, {"loss": 1.0})
    assert ended(tmp_path, NodeOutcome(0), NodeOutcome(0)) == {"loss": 1.0}


def test_is_restart(tmp_path: Path) -> None:
    empty_ends(tmp_path)
    assert [is_restart(tmp_path), is_restart(tmp_path)] == [False, True]
    empty_ends(tmp_path)
    assert not is_restart(tmp_path)


def test_follower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_1.log").write_text("of an earlier run\n")
    follower = Follower()
    follower.add_ranks(tmp_path, range(1, 3))
    follower.poll()
    with (logs / "rank_1.log").open("a") as log:
        log.write("one\nbar 1%\rbar 2%\nhal")
    follower.poll()
    with (logs / "rank_1.log").open("a") as log:
        log.write("f\nlast")
    (logs / "rank_2.log").write_text("two\n")
    follower.poll()
    follower.finish()
    follower.finish()
    said = capsys.readouterr().out.splitlines()
    assert said == ["[rank 1] one", "[rank 1] bar 2%", "[rank 1] half", "[rank 2] two", "[rank 1] last"]


def test_requeue_of_a_cancelled_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    for name, text in (("squeue", "echo $STATE"), ("scontrol", f"echo $@ >> {asked}")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here = {**os.environ, "SLURM_JOB_ID": "12"}
    assert "is already ending it" in str(requeue({**here, "STATE": "COMPLETING"}))
    assert not asked.exists()
    assert requeue({**here, "STATE": "RUNNING"}) is None
    assert asked.read_text() == "requeue 12\n"


def test_failed_cancellation(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Job:
        job_id = "12"

        def cancel(self, check: bool) -> None:
            raise FileNotFoundError("no scancel")

    cancel([SubmittedJob(configured(conf), Job())])
    assert "SLURM job 12 could not be cancelled (no scancel); type scancel 12" in capsys.readouterr().err


@pytest.mark.thorough
def test_restart_and_cancellation(conf: Path) -> None:
    killed = ("launch.max_restarts=1", "checkpoint.last.every_n_steps=2", "+inject=[kill(rank=1, at_step=3)]")
    endless = ("module.sleep=0.05", "max_steps=100000", "max_epochs=100000", "run_dir=run")
    words = command("fit", "--config-dir", str(conf), *WORDS, LOCAL, *killed, *endless)
    run = Command(words, "[rank 0] trainwright: resuming from")
    until(lambda: "step=6" in str(list(Path("run/checkpoints").glob("*"))), "step 6")
    run.tell(signal.SIGINT)
    assert run.process.wait(60) == 130
    said = run.said()
    assert "[rank 1] first step of rank 1" in said
    assert "[rank 0] trainwright: rank 1 was ended by SIGKILL" in said
    assert "cancelling local job" in said
    assert run.left() == {}


def test_job_gets_the_run_token(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a new token, and the one exported by the user."""
    monkeypatch.setattr(slurm_job, "run_node", lambda run_dir, verb: os.environ["TRAINWRIGHT_RUN_TOKEN"])
    cfg = configured(conf, "nodes=1", LOCAL, f"run_dir={tmp_path / 'run'}")
    Path(cfg.run_dir).mkdir()
    for given, expected in (("", r"[0-9a-f]{32}"), ("of the user", "of the user")):
        monkeypatch.setenv(RUN_TOKEN, given)
        [job] = submit([cfg], "fit", tmp_path / "jobs")
        assert re.fullmatch(expected, job.job.result())
        assert job.job.result() == run_token()


@pytest.mark.thorough
def test_failure_with_traceback(conf: Path) -> None:
    failing = ("devices=1", "strategy=single", "module.fail_rank=0", "run_dir=run")
    done = run_command("fit", "--config-dir", str(conf), *WORDS, LOCAL, *failing)
    assert done.returncode == 1, done.stdout
    assert "trainwright: rank 0 of 1 failed with ValueError: boom in rank 0" in done.stdout
    assert 'raise ValueError(f"boom in rank {self.global_rank}")' in done.stdout


def test_arrays(conf: Path) -> None:
    cfgs = [configured(conf, f"seed={seed}", f"nodes={nodes}") for seed, nodes in ((0, 2), (1, 2), (2, 4))]
    assert alike(cfgs) == [[0, 1], [2]]
    for cfg in cfgs:
        cfg.launch.cluster = "local"
    assert alike(cfgs) == [[0], [1], [2]]

"""Preempted runs: saved, ended on all ranks at the same step, and resumed without a difference."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.command.project import environment
from tests.faults.commands import LIMIT, Command, ends, resume_from, training
from tests.faults.preempted import (
    SendSignal,
    evaluate,
    parameters_of,
    points,
    train_asynchronously,
    trainer_of,
    watched,
)
from tests.parity.test_resume_watched import Net
from tests.pool import free_port
from tests.warm import WarmPopen
from trainwright import RunStateCheckpoint
from trainwright.callbacks.end.notice import FILE, URL, NoticePoll
from trainwright.callbacks.end.preemption import Preempted, Preemption
from trainwright.callbacks.save import run_state
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.write.asynchronous import Saved
from trainwright.core.errors import CheckpointError

# ---- exactly the state of that step ----------------------------------------------------------------------------------

# Hook, which call of it, further options of the Trainer.
WHEN: dict[str, tuple[str, int, dict[str, Any]]] = {
    "in a step": ("on_before_optimizer_step", 4, {}),
    "while reading": ("on_train_batch_start", 3, {}),
    "in an accumulated step": ("on_train_batch_end", 3, {"accumulate_grad_batches": 2, "max_steps": 7}),
    "in the last batch of an epoch": ("on_train_batch_end", 6, {}),
    "in a validation at the end of an epoch": ("on_validation_batch_end", 1, {}),
    "in the last batch of a validation": ("on_validation_batch_end", 3, {}),
    "in a validation within an epoch": ("on_validation_batch_end", 2, {"val_check_interval": 2}),
    "in the second validation of an epoch": ("on_validation_batch_end", 4, {"val_check_interval": 2}),
    "at the end of a validation": ("on_validation_epoch_end", 1, {"val_check_interval": 2}),
    "at the end of an epoch": ("on_train_epoch_end", 1, {}),
    "at the beginning of an epoch": ("on_train_epoch_start", 2, {}),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Net]:
    """The recording module of an undisturbed run with these options of the Trainer."""
    known: dict[str, Net] = {}

    def run(**options: Any) -> Net:
        if str(options) not in known:
            known[str(options)], ended = watched(tmp_path_factory.mktemp("whole"), [], None, 5, **options)
            assert ended is None
        return known[str(options)]

    return run


@pytest.mark.sample(5)
@pytest.mark.parametrize("when", WHEN)
def test_a_preempted_run_resumes_exactly(tmp_path: Path, undisturbed: Callable[..., Net], when: str) -> None:
    hook, call, options = WHEN[when]
    whole = undisturbed(**options)
    first, ended = watched(tmp_path / "preempted", [SendSignal(hook, call)], None, 5, **options)
    assert ended is not None
    assert (ended.code, ended.saved) == (143, True)
    [saved] = list_checkpoints(str(tmp_path / "preempted"))
    assert saved.path == ended.checkpoint
    second, ended = watched(tmp_path / "preempted", [], "last", 6, **options)
    assert ended is None
    # An interrupted validation starts over.
    assert first.rows[: len(whole.rows) - len(second.rows)] + second.rows == whole.rows
    assert first.ends + second.ends == whole.ends
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


PLAN = {"last": ["decoder.temperature"]}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {}),
    ("zero3", 2, {}),
    ("pipeline", 2, {"pipeline": 2, "plan": PLAN}),
    ("hybrid", 4, {"pipeline": 2, "shard": 2, "plan": PLAN}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "count", "options"), LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_a_signal_to_one_rank_ends_all_and_they_resume(
    ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str, count: int, options: dict[str, Any]
) -> None:
    whole = ranks(parameters_of, count, strategy, options, tmp_path / "whole", None, None)
    signal_at = ("on_train_batch_end", 3, count - 1)
    ended = ranks(parameters_of, count, strategy, options, tmp_path / "preempted", signal_at, None)
    assert {each["code"] for each in ended} == {143}
    [step] = {each["step"] for each in ended}
    assert step < 8
    [saved] = list_checkpoints(str(tmp_path / "preempted"))
    assert {each["checkpoint"] for each in ended} == {saved.path}
    assert saved.step == step
    resumed = ranks(parameters_of, count, strategy, options, tmp_path / "preempted", None, "last")
    for one, other in zip(whole, resumed, strict=True):
        assert (other["step"], other["code"]) == (8, None)
        assert one["parameters"]
        for name, parameter in one["parameters"].items():
            assert torch.equal(other["parameters"][name], parameter), name


ALONE: list[dict[str, Any]] = [
    {"consistency": "ssp"}, {"consistency": "async"}, {"consistency": "async", "leases": "at_least_once"},
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", ALONE)
def test_asynchronous_workers_end_at_the_same_step(
    ranks: Callable[..., list[Any]], tmp_path: Path, options: dict[str, Any]
) -> None:
    ended = ranks(train_asynchronously, 3, options, tmp_path, ("on_train_batch_end", 4, 1), None)
    assert [(each["code"], each["reason"]) for each in ended] == [(143, "SIGTERM")] * 3
    [step] = {each["step"] for each in ended}
    assert 3 <= step < 40
    [saved] = list_checkpoints(str(tmp_path))
    assert {each["checkpoint"] for each in ended} == {saved.path}
    assert saved.step == step
    resumed = ranks(train_asynchronously, 3, options, tmp_path, None, "last")
    assert {(each["code"], each["step"]) for each in resumed} == {(None, 40)}
    assert sorted(sample for each in (*ended, *resumed) for sample in each["read"]) == list(range(240))


# ---- where nothing is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "test", "predict", "sanity check"])
@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_ends_without_saving(ranks: Callable[..., list[Any]], tmp_path: Path, verb: str, count: int) -> None:
    results = ranks(evaluate, count, verb, tmp_path / "states")
    assert {each["code"] for each in results} == {143}
    assert len({each["batches"] for each in results}) == 1
    assert results[0]["batches"] < 24 // count
    assert not (tmp_path / "states").exists() or not list_checkpoints(str(tmp_path / "states"))


# ---- sources of preemption -------------------------------------------------------------------------------------------


def preempt(callbacks: list[Any]) -> tuple[Any, Preempted]:
    """Train until preempted; return the Trainer and the exception."""
    trainer, module = trainer_of(callbacks)
    with pytest.raises(Preempted) as ended:
        trainer.fit(module, points())
    return trainer, ended.value


@pytest.mark.parametrize(("number", "options", "code"), [
    (signal.SIGUSR1, {"signals": ["SIGUSR1"]}, 138),
    (signal.SIGUSR2, {"signals": ["SIGUSR2"]}, 140),
    (signal.SIGTERM, {"exit_code": 75}, 75),
])  # fmt: skip
def test_signals_and_exit_codes(tmp_path: Path, number: signal.Signals, options: dict[str, Any], code: int) -> None:
    _, ended = watched(tmp_path, [SendSignal("on_train_batch_end", 3, number=number), Preemption(**options)], None, 5)
    assert ended is not None
    assert (ended.code, ended.told.reason, ended.saved) == (code, number.name, True)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_handlers_of_the_user_run_and_are_restored(tmp_path: Path, number: signal.Signals) -> None:
    """By default SIGUSR2 does not preempt."""
    heard: list[int] = []

    def hear(number: int, _: Any) -> None:
        heard.append(number)

    before = signal.signal(number, hear)
    try:
        _, ended = watched(tmp_path, [SendSignal("on_train_batch_end", 3, number=number)], None, 5)
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)
    assert (ended is not None) == (number == signal.SIGTERM)
    assert heard == [number]
    assert signal.set_wakeup_fd(-1) == -1


class Touch(pl.Callback):
    """Creates a file after three batches, then sleeps in each batch so that the poll sees it."""

    def __init__(self, path: Path) -> None:
        self.path, self.batches = path, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        if self.batches == 3:
            self.path.touch()
        if self.batches >= 3:
            time.sleep(0.02)


def test_a_file_that_appears(tmp_path: Path) -> None:
    preemption = Preemption(file=str(tmp_path / "end"), poll_seconds=0.01)
    _, ended = watched(tmp_path / "states", [Touch(tmp_path / "end"), preemption], None, 5, max_steps=2000)
    assert ended is not None
    assert (ended.code, ended.saved) == (143, True)
    assert ended.told.reason == "preemption.file"


class Metadata:
    """A server that answers by paths; ``asked`` has the requested paths, with a header of each request."""

    def __init__(self, answers: dict[str, tuple[int, dict[str, str], bytes]]) -> None:
        self.asked = asked = []  # type: list[tuple[str, str | None]]

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["Metadata-Flavor"]))
                status, headers, body = answers[self.path]
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Metadata:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def poll_of(url: str, file: Path | None = None) -> NoticePoll:
    return NoticePoll(None if file is None else str(file), url, {"Metadata-Flavor": "Google"}, 1.0, lambda _: None)


@pytest.mark.parametrize(("status", "headers", "body", "found"), [
    (404, {}, b"", None),
    (200, {}, b"FALSE", None),
    (200, {}, b"none\n", None),
    (200, {}, b"", None),
    (500, {}, b"TRUE", None),
    # A redirect, for example to a login page, is not followed and must not receive the headers.
    (302, {"Location": "/login"}, b"", None),
    (200, {}, b"TRUE", URL),
    (200, {}, b'{"action": "terminate", "time": "2026-01-31T08:22:00Z"}', URL),
])  # fmt: skip
def test_answers_of_an_address(
    caplog: pytest.LogCaptureFixture, status: int, headers: dict[str, str], body: bytes, found: int | None
) -> None:
    with Metadata({"/preempted": (status, headers, body), "/login": (200, {}, b"TRUE")}) as server:
        assert poll_of(f"{server.address}/preempted").look() == found
    assert server.asked == [("/preempted", "Google")]
    assert "302" in caplog.text or status != 302


def test_polling_continues_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failing file system, an unknown host name and a closed port are each reported once."""
    with Metadata({"/": (200, {}, b"TRUE")}) as server:
        poll = poll_of(f"{server.address}/", tmp_path / ("x" * 300))
        assert [poll.look(), poll.look()] == [URL, URL]
    assert caplog.text.count("File name too long") == 1
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        for url in ("http://..metadata/", f"http://127.0.0.1:{closed.getsockname()[1]}/"):
            caplog.clear()
            poll = poll_of(url, tmp_path / "end")
            assert [poll.look(), poll.look()] == [None, None]
            assert caplog.text.count("gives no answer") == 1
    (tmp_path / "end").touch()
    assert poll.look() == FILE


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_step_that_is_saved_already_is_not_saved_twice(tmp_path: Path) -> None:
    class Count(RunStateCheckpoint):
        saves = 0

        def _save(self, trainer: Any) -> Any:
            self.saves += 1
            return super()._save(trainer)

    saver = Count(str(tmp_path / "every"), every_n_steps=1)
    trainer, ended = preempt([saver, SendSignal("on_train_batch_end", 3)])
    assert (trainer.global_step, saver.saves) == (3, 3)
    assert ended.checkpoint == str(tmp_path / "every" / "step=3")


def test_a_save_that_is_under_way_is_finished_first(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2, asynchronous=True, keep_last=5)
    preempt([SendSignal("on_train_batch_end", 3), saver])
    assert sorted(found.step for found in list_checkpoints(str(tmp_path))) == [2, 3]


@pytest.mark.parametrize(
    ("preemption", "said"),
    [({"save": False}, "nothing is saved (save=False)."), ({}, "step 3 was not saved: no space left")],
)
def test_a_state_that_is_not_saved_names_the_last_good_checkpoint(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    preemption: dict[str, Any],
    said: str,
) -> None:
    class Full(run_state.BlockingSaver):
        def save(self, content: Any, path: str, *more: Any) -> None:
            if path.endswith("step=3"):
                self._saved = Saved(path, CheckpointError("no space left"), 0.0, 0.0)
            else:
                super().save(content, path, *more)

    monkeypatch.setattr(run_state, "BlockingSaver", Full)
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2)
    trainer, ended = preempt([saver, SendSignal("on_train_batch_end", 3), Preemption(**preemption)])
    assert (trainer.global_step, ended.code, ended.saved) == (3, 143, False)
    assert f"{said} The last good checkpoint is {tmp_path / 'step=2'}." in capfd.readouterr().err
    if not preemption:
        assert ended.checkpoint == str(tmp_path / "step=2")


def test_a_run_that_is_done_ends_as_any_other(tmp_path: Path) -> None:
    module, ended = watched(tmp_path, [SendSignal("on_train_batch_end", 4)], None, 5, max_steps=4)
    assert ended is None
    assert [found.step for found in list_checkpoints(str(tmp_path))] == [4]
    assert len(module.rows) == 4


# ---- SLURM -----------------------------------------------------------------------------------------------------------

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/calls
[ ! -e {folder}/broken ] || {{ echo "Job is on hold"; exit 1; }}
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a `scontrol` that records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SCONTROL.format(folder=folder))
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return folder


@pytest.mark.parametrize(
    ("variables", "job"), [({}, "4711"), ({"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}, "4700_11")]
)
def test_the_job_is_requeued_once_after_the_save(
    slurm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str],
    job: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    preemption, states = Preemption(requeue=True), tmp_path / "states"
    saver = RunStateCheckpoint(str(states), every=None)
    trainer, ended = preempt([saver, SendSignal("on_train_batch_end", 3, number=signal.SIGUSR1), preemption])
    assert [found.step for found in list_checkpoints(str(states))] == [3]
    preemption.give_up(trainer, ended.told)  # as the watch does when the process hangs until the deadline
    assert (slurm / "calls").read_text() == f"requeue {job}\n"
    said = capfd.readouterr().err
    assert "was not saved" not in said
    assert f"had not ended within 120 s (preemption.deadline_seconds). The last good checkpoint is {states}/" in said


def test_a_requeue_that_fails_says_what_to_type(slurm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (slurm / "broken").touch()
    preempt([RunStateCheckpoint(str(tmp_path / "s")), SendSignal("on_train_batch_end", 3), Preemption(requeue=True)])
    assert "was not requeued (scontrol: Job is on hold); type `scontrol requeue 4711`" in capfd.readouterr().err


def test_impossible_requeues_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for saver, message in (
        ([RunStateCheckpoint(str(tmp_path))], "SLURM_JOB_ID is not set"),
        ([], "without a RunState"),
    ):
        trainer, module = trainer_of([*saver, Preemption(requeue=True)])
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, points())
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(ValueError, match=r"requeue=True with save=False"):
        Preemption(requeue=True, save=False)
    with pytest.raises(ValueError, match=r"Preemption\(requeue=True\)"):
        trainer_of([], plugins=[SLURMEnvironment(auto_requeue=True)])


# ---- the callback ----------------------------------------------------------------------------------------------------


def test_impossible_options_are_named_all_at_once() -> None:
    with pytest.raises(ValueError, match="Preemption: ") as refused:
        Preemption(signals=["SIGKILL"], url="file:///etc/passwd", poll_seconds=0, deadline_seconds=-1, exit_code=300)
    for name in ("signals[0]='SIGKILL'", "url='file:", "poll_seconds=0", "deadline_seconds=-1", "exit_code=300"):
        assert name in str(refused.value)


@pytest.mark.parametrize(("options", "said"), [
    ({"signals": None}, "signals=None"),
    ({"signals": "SIGTERM"}, "signals='SIGTERM'"),
    ({"signals": [["SIGTERM"]]}, "signals[0]=['SIGTERM']: unknown; did you mean SIGTERM? allowed: SIGTERM"),
    ({"save": "no"}, "save='no': must be true or false"),
    ({"requeue": 1}, "requeue=1"),
    ({"url": "http://metadata:port/"}, "url="),
    ({"url": "http://metadata:99999/"}, "url="),
    ({"url": "http://user:secret@metadata/"}, "url="),
    ({"url": "http://a b/"}, "url="),
    ({"url": "http://metadata/\u00fc"}, "url="),
    ({"url": "http://..metadata/"}, "url="),
    ({"url": "http://metadata/", "url_headers": "Google"}, "url_headers='Google'"),
    ({"url": "http://metadata/", "url_headers": {"Metadata-Flavor": None}}, "url_headers.Metadata-Flavor"),
    ({"url": "http://metadata/", "url_headers": {"Metadata-Flavor": "a\r\nb"}}, "url_headers.Metadata-Flavor"),
    ({"url": "http://metadata/", "url_headers": {"Metadata Flavor": "Google"}}, "url_headers.Metadata Flavor"),
    ({"url_headers": {"Metadata-Flavor": "Google"}}, "url_headers without url"),
])  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="Preemption: ") as refused:
        Preemption(**options)
    assert said in str(refused.value)


def test_the_trainer_of_lightning_and_a_second_callback_are_refused() -> None:
    trainer = pl.Trainer(callbacks=[Preemption()], max_steps=1, logger=False, accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=r"needs trainwright\.Trainer"):
        trainer.fit(Net(), points())
    ours, module = trainer_of([Preemption(), Preemption()])
    with pytest.raises(ValueError, match="Two Preemption callbacks"):
        ours.fit(module, points())


# ---- whole commands --------------------------------------------------------------------------------------------------


def saved_steps() -> list[int]:
    return [found.step for found in list_checkpoints("run/checkpoints")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("who", ["the launching process", "one rank", "every process"])
def test_a_command_saves_ends_and_resumes(conf: Path, who: str) -> None:
    run = Command(training(conf, "data._target_=trouble.WorkerData"))
    to = {"one rank": run.ranks()[1:], "every process": list(run.session())}.get(who)
    run.tell(signal.SIGTERM, to)
    assert run.end() == 143
    [step] = saved_steps()
    assert f"saved step {step}: {Path('run/checkpoints').absolute()}/step={step}" in run.said()
    assert run.said().count("trainwright: ended by SIGTERM") == 1
    assert "Traceback" not in run.said()
    assert run.left() == {}
    if who == "one rank":
        assert "resuming from run/checkpoints/step=" in resume_from(conf)


def test_a_run_is_saved_when_its_output_pipe_is_closed(conf: Path) -> None:
    """A signal to every process of a job ends `tee` too."""
    reading, writing = os.pipe()
    words = training(conf)
    process = WarmPopen(words, stdout=writing, stderr=writing, env=environment(), start_new_session=True)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as said:
            assert any("first step of rank 0" in line for line in said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 143
    finally:
        process.kill()
        process.wait()
    assert len(saved_steps()) == 1


@pytest.mark.thorough
def test_a_save_that_takes_too_long_is_given_up(conf: Path) -> None:
    slow = ("+callbacks.slow._target_=trouble.SlowSave", "checkpoint.last.every_n_steps=2")
    # So that it ends at step 5, which is not saved yet.
    limits = ("preemption.check_seconds=1e-6", "preemption.deadline_seconds=2", "preemption.exit_code=75")
    run = Command(training(conf, *ends("os.kill(os.getpid(), 15)", step=5), *slow, *limits))
    assert run.end() == 75
    said = run.said()
    assert "saving the run state of step 5." in said
    assert "was not saved within 2 s (preemption.deadline_seconds)" in said
    assert said.count(f"The last good checkpoint is {Path('run/checkpoints/step=4').absolute()}.") == 2
    assert "Traceback" not in said
    assert saved_steps() == [4]
    assert run.left() == {}


def test_torchrun_passes_the_signal_on(conf: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run = Command([*torchrun, *training(conf)[1:]], more={"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)})
    run.tell(signal.SIGTERM)
    # torchrun's own code, whatever the ranks end with.
    assert run.end() == 1
    [step] = saved_steps()
    assert f"saved step {step}" in run.said()
    assert "got signal: 15" in run.said()
    assert run.left() == {}


SRUN = """
import os, signal, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(2)
]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda received, _: [task.send_signal(received) for task in tasks])
print("codes", *[task.wait() for task in tasks])
sys.exit(max(task.returncode for task in tasks))
"""


def test_slurm_signals_saves_and_requeues(slurm: Path, conf: Path) -> None:
    allocation = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    allocation |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "train"}
    allocation |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SRUN, *training(conf, "preemption.requeue=true", "resume=auto")]
    run = Command(words, more=allocation)
    run.tell(signal.SIGUSR1)
    assert run.end() == 138
    assert "codes 138 138" in run.said()
    assert (slurm / "calls").read_text() == "requeue 4711\n"
    [step] = saved_steps()
    assert f"saved step {step}" in run.said()
    assert run.left() == {}

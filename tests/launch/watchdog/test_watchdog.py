"""Parts of the watchdog: boxes, limits, answers, stacks, calls and the monitor."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from tests.callbacks.modules import Regression, loader
from tests.parity.harness import QUIET
from trainwright import Trainer, Watchdog
from trainwright.core.config.options import value_problems
from trainwright.core.processes.process import catches, state_of
from trainwright.core.run import phases
from trainwright.core.text.plain import rebuilt
from trainwright.launch.schema import LaunchConfig
from trainwright.launch.watchdog import answers, evidence, monitor
from trainwright.launch.watchdog.answers import Answer, Answerer, ask, own_answer, read_answer
from trainwright.launch.watchdog.boxes import (
    OTHER,
    WARM_UP_STEPS,
    Boxes,
    HangLimits,
    Progress,
    ProgressBox,
)
from trainwright.launch.watchdog.calls import Call, own_calls, own_groups
from trainwright.launch.watchdog.monitor import VARIABLE, HangMonitor
from trainwright.launch.watchdog.report.stacks import Frame, Thread, crash_in, own_threads, place_of


def test_progress_box(tmp_path: Path) -> None:
    boxes = Boxes(2, tmp_path)
    box = ProgressBox(boxes.address, 1, rank=7)
    box.begin(phases.FORWARD)
    box.count(12)
    read = boxes.read(1)
    assert (read.process, read.rank, read.running, read.phase) == (os.getpid(), 7, True, phases.FORWARD)
    assert (read.step, read.micro_batches, read.changes) == (12, 1, 1)
    assert boxes.read(0).process == 0
    box.close()
    assert not boxes.read(1).running
    boxes.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        ProgressBox(boxes.address, 1, rank=7)


def test_learned_times(tmp_path: Path) -> None:
    boxes = Boxes(1, tmp_path)
    box = ProgressBox(boxes.address, 0, 0)
    box.count(7)
    for phase in (phases.FORWARD, phases.SAVING, phases.FORWARD, phases.BACKWARD):
        box.begin(phase)
    assert set(boxes.read(0).longest) == {phases.SAVING}
    box.count(7 + WARM_UP_STEPS)
    box.begin(phases.FORWARD)
    time.sleep(0.02)
    box.begin(phases.BACKWARD)
    box.begin(phases.FORWARD)
    box.begin("a phase of another version")
    longest = boxes.read(0).longest
    assert set(longest) == {phases.SAVING, phases.FORWARD, phases.BACKWARD}
    assert longest[phases.FORWARD] >= 0.02
    assert boxes.read(0).phase == OTHER
    box.close()
    boxes.close()


def _progress(**values: Any) -> Progress:
    plain = {"process": 1, "rank": 0, "running": True, "phase": phases.FORWARD, "step": 0, "micro_batches": 0}
    return Progress(**{**plain, "changes": 0, "longest": {}, **values})


def test_limits() -> None:
    limits = HangLimits(safety_factor=3.0, floor_seconds=10.0, first_timeout=100.0)
    ranks = [_progress(longest={phases.FORWARD: 2.0}), _progress(longest={phases.FORWARD: 4.0, phases.DATA: 1.0})]
    assert limits.limit(phases.FORWARD, ranks) == 12.0
    assert limits.limit(phases.DATA, ranks) == 10.0
    assert limits.limit(phases.SAVING, ranks) == 100.0
    fixed = HangLimits.of(7, 3.0, 10.0, 100.0)
    assert [fixed.limit(phase, ranks) for phase in (phases.FORWARD, phases.SAVING)] == [7.0, 7.0]


@pytest.mark.parametrize(("key", "value"), [
    ("hang_timeout", "soon"),
    ("hang_timeout", 0),
    ("hang_timeout", True),
    ("hang_safety_factor", 0.5),
    ("hang_floor_seconds", 0.0),
    ("hang_first_timeout", -1.0),
])  # fmt: skip
def test_refused_limits(key: str, value: Any) -> None:
    assert list(value_problems(LaunchConfig, vars(LaunchConfig()), "launch.")) == []
    [problem] = value_problems(LaunchConfig, {key: value}, "launch.")
    assert problem.startswith(f"launch.{key}={str(value).lower()}: must be")


def test_refused_callback_limits() -> None:
    assert Watchdog(hang_timeout=None).limits is None
    with pytest.raises(ValueError, match="hang_timeout='soon': must be .* above 0 and .* or auto, or None for off"):
        Watchdog(hang_timeout="soon")
    with pytest.raises(ValueError, match="safety_factor=0.5: must be .* at least 1 .below 1, what took long"):
        Watchdog(safety_factor=0.5)
    with pytest.raises(ValueError, match="floor_seconds=0: must be"):
        Watchdog(floor_seconds=0)


def _acquire(lock: Any) -> None:
    with lock:
        pass


class Holder:
    """Owner of a lock and of a property that must not run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @property
    def trap(self) -> Any:
        raise AssertionError("a stack was read by running the user's code")

    def wait(self) -> None:
        self.lock.acquire()
        self.lock.release()  # whoever comes first, the test takes it again

    def fall(self) -> None:
        time.sleep(0.2 if self.__class__ is Holder else self.trap.acquire())


def _while_in(function: Any, *args: Any) -> Thread:
    thread = threading.Thread(target=function, args=args, name="looked at", daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = [each for each in own_threads() if each.name == "looked at"]
        if found and found[0].state == "S" and any(frame.is_users for frame in found[0].frames):
            return found[0]
        time.sleep(0.01)
    raise AssertionError("the thread does not come to wait")


def test_lock_wait() -> None:
    holder = Holder()
    with holder.lock:
        for function, args in ((_acquire, (holder.lock,)), (holder.wait, ())):
            thread = _while_in(function, *args)
            assert thread.frames[0].holds_lock, thread.frames[0]
            assert evidence.wait_of(thread) == evidence.Wait(evidence.LOCK, "waiting for a lock")
            holder.lock.release()
            holder.lock.acquire()


def test_stacks_run_no_user_code() -> None:
    thread = _while_in(Holder().fall)
    assert not thread.frames[0].holds_lock
    assert evidence.wait_of(thread).kind == evidence.SLEEP
    assert thread.users[0].place.startswith("Holder.fall at test_watchdog.py:")


def _at(file: str, function: str, text: str = "", users: bool = False) -> Frame:
    return Frame(file, 1, function, text, users)


def _kind(*frames: Frame, state: str = "S") -> str:
    return evidence.wait_of(Thread("", True, state, frames)).kind


def test_wait_kinds() -> None:
    wait, get = _at("/usr/lib/threading.py", "Condition.wait"), _at("/usr/lib/queue.py", "Queue.get")
    loader = _at("/x/torch/utils/data/dataloader.py", "_MultiProcessingDataLoaderIter._try_get_data")
    user, fetcher = _at("/me/train.py", "Net.training_step", users=True), _at("/x/lightning/fetchers.py", "next")
    assert _kind(wait, get, loader, fetcher) == evidence.DATA
    assert _kind(wait, get, user, loader) == evidence.QUEUE
    assert _kind(wait, user) == evidence.LOCK
    recv = _at("/x/torch/distributed/distributed_c10d.py", "recv")
    assert _kind(recv, _at("/x/torch/nn/modules/module.py", "Module._call_impl"), user) == evidence.COMMUNICATION
    assert _kind(recv, state="R") == evidence.COMPUTING
    assert _kind(_at("/x/torch/nn/functional.py", "linear"), user) == evidence.TORCH
    assert _kind(_at("/x/torch/_ops.py", "OpOverload.__call__"), recv) == evidence.COMMUNICATION


def test_debugger_and_compiler() -> None:
    user = _at("/me/train.py", "Net.training_step", users=True)
    debugger = _at("/usr/lib/cmd.py", "Cmd.cmdloop"), _at("/usr/lib/pdb.py", "Pdb.interaction")
    assert _kind(*debugger, user) == evidence.DEBUGGER
    compiling = _at("/x/torch/_dynamo/convert_frame.py", "_compile")
    assert _kind(_at("/usr/lib/threading.py", "Condition.wait"), compiling, user) == evidence.COMPILING
    assert _kind(user, _at("/x/torch/_dynamo/eval_frame.py", "compile_wrapper")) == evidence.NATIVE


def test_acting_thread() -> None:
    main = Thread("MainThread", True, "S", (_at("/x/torch/autograd/graph.py", "_engine_run_backward"),))
    other = Thread("reader", False, "S", (_at("/me/data.py", "read", users=True),))
    device = Thread("", False, "S", (_at("/me/train.py", "hook", users=True),))
    assert evidence.acting_thread((main, other, device)) is device
    assert evidence.acting_thread((main, other)) is main


CRASH = """Thread 0x1 (most recent call first):
  File "/me/train.py", line 9 in asked_for_earlier

Fatal Python error: Aborted

Thread 0x2 (most recent call first):
  File "/me/other.py", line 3 in reader

Thread 0x3 (most recent call first):
  File "{torch}", line 5 in all_reduce
  File "/me/train.py", line 7 in on_train_batch_end

Extension modules: a, b"""


def test_crash_location() -> None:
    crash = crash_in(CRASH.format(torch=dist.distributed_c10d.__file__))
    assert crash is not None
    assert place_of(crash) == "Aborted (on_train_batch_end at train.py:7)"
    assert "Extension" not in crash
    assert crash_in("Thread 0x1 (most recent call first):") is None


def test_answerer(tmp_path: Path) -> None:
    assert not ask(tmp_path, 0, "1")  # nobody is there
    answerer = Answerer(tmp_path, 0)
    answerer.start()
    assert answers.SIGNAL is None or catches(os.getpid(), answers.SIGNAL)
    for question in ("1", "2"):
        assert ask(tmp_path, 0, question)
        assert _answer(tmp_path, question).threads[0].is_main
    answerer.stop()
    assert not ask(tmp_path, 0, "3")
    assert "trainwright-watchdog" not in [thread.name for thread in threading.enumerate()]


def _answer(folder: Path, question: str) -> Answer:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        answer = read_answer(folder, 0, question)
        if answer is not None:
            return answer
        time.sleep(0.01)
    raise AssertionError("no answer came")


def test_answer_roundtrip() -> None:
    own = own_answer(own_threads() or [Thread("", True, "S", ())])
    answer = rebuilt(Answer, json.loads(json.dumps(asdict(own))))
    assert answer == own
    assert answer.calls == ()
    assert answer.groups == {}


@pytest.mark.parametrize(("sizes", "kinds", "text"), [
    ((), (), "barrier #3"),
    (((4, 128),), ("float32",), "barrier #3 (512 x float32)"),
    (((4,), (6,)), ("float32", "int64"), "barrier #3 (10 x float32 and int64 in 2 tensors)"),
    (((),), ("bool",), "barrier #3 (1 x bool)"),
])  # fmt: skip
def test_call_text(sizes: Any, kinds: Any, text: str) -> None:
    assert str(Call("0", 3, "barrier", sizes, kinds, True, 1.0)) == text


def names_of_groups() -> dict[str, tuple[int, ...]]:
    group = dist.new_group([0, 1], group_desc="mesh_replicate")
    dist.all_reduce(torch.ones(2), group=group)
    end = time.monotonic() + 30
    while (last := own_calls()[-1]).pending and time.monotonic() < end:
        time.sleep(0.01)  # gloo's thread notes the end of a call a moment after the caller goes on
    assert (last.name, last.sizes, last.kinds, last.pending) == ("all_reduce", ((2,),), ("float32",), False)
    return {group.label: group.ranks for group in own_groups().values()}


def test_group_labels(ranks: Any) -> None:
    assert ranks(names_of_groups, 2) == [{"all ranks": (0, 1), "replicate": (0, 1)}] * 2


@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_progress_of_a_run(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "watchdog"
    folder.mkdir()
    watcher = HangMonitor(1, folder, tmp_path)
    place = json.loads(watcher.environment(0)[VARIABLE])
    monkeypatch.setenv(VARIABLE, json.dumps(place))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")  # what the user has set counts
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "mine")
    seen: list[Progress] = []
    look = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: seen.append(watcher._boxes.read(0)))
    trainer = kind(max_epochs=2, devices=1, callbacks=[Watchdog(), look], **QUIET)
    trainer.fit(Regression(), loader(12, 2), loader(12, 2))
    assert [(each.running, each.rank, each.micro_batches) for each in seen] == [(True, 0, 6), (True, 0, 12)]
    assert {phases.FORWARD, phases.DATA, "evaluation"} <= set(seen[1].longest)
    assert not watcher._boxes.read(0).running
    assert "trainwright-watchdog" not in [thread.name for thread in threading.enumerate()]
    assert (os.environ["TORCH_FR_BUFFER_SIZE"], os.environ["TORCH_FR_DUMP_TEMP_FILE"]) == ("10", "mine")
    watcher.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the monitor's clock; return its seconds."""
    now = [100.0]
    # The monitor's own: those who look for what a test has left need one that goes on.
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class SilentInquiry:
    """Inquiry that only counts."""

    asked = 0

    def __init__(self, *_: Any) -> None:
        type(self).asked += 1

    def advance(self) -> None:
        return None


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> type[SilentInquiry]:
    monkeypatch.setattr(SilentInquiry, "asked", 0)
    monkeypatch.setattr(monitor, "Inquiry", SilentInquiry)
    return SilentInquiry


def _watched_box(watcher: HangMonitor, number: int) -> ProgressBox:
    place = json.loads(watcher.environment(number)[VARIABLE])
    return ProgressBox(place["boxes"], place["box"], rank=number)


def test_sleeping_job(tmp_path: Path, clock: Any, questions: Any) -> None:
    watcher = HangMonitor(1, tmp_path, tmp_path, HangLimits(fixed=10.0))
    box = _watched_box(watcher, 0)
    watcher.check()
    clock[0] += 3600.0  # the ranks slept as well
    watcher.check()
    assert questions.asked == 0
    for _ in range(20):
        clock[0] += 0.5
        watcher.check()
    assert questions.asked == 1
    box.close()
    watcher.close()


def test_progress_and_exit(tmp_path: Path, clock: Any, questions: Any) -> None:
    watcher = HangMonitor(2, tmp_path, tmp_path, HangLimits(fixed=10.0))
    getting_on, ended = _watched_box(watcher, 0), _watched_box(watcher, 1)
    ended.close()
    for phase in itertools.islice(itertools.cycle((phases.FORWARD, phases.BACKWARD)), 40):
        clock[0] += 1.0
        getting_on.begin(phase)
        watcher.check()
    assert questions.asked == 0
    getting_on.close()
    watcher.close()


def test_replaced_process_gets_its_box(tmp_path: Path) -> None:
    watcher = HangMonitor(1, tmp_path, tmp_path)
    box = json.loads(watcher.environment(0)[VARIABLE])["box"]
    watcher.watch(0, os.getpid())
    with pytest.raises(RuntimeError, match="boxes for 1 processes, and all of them live"):
        watcher.environment(1)
    assert json.loads(watcher.environment(0)[VARIABLE])["box"] == box  # started anew under its number
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    watcher.watch(0, gone.pid)
    assert json.loads(watcher.environment(1)[VARIABLE])["box"] == box
    watcher.close()


def test_own_state() -> None:
    assert state_of(os.getpid()) == "R"

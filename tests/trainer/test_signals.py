"""A signal to one rank ends all ranks at the same step."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.command.project import environment
from tests.parity.harness import make_trainer
from tests.parity.modules import Tokens, make_module
from tests.warm import warm_run
from trainwright.callbacks.end.preemption import Preemption
from trainwright.trainer.signals import Pace


class ToldToEnd(pl.Callback):
    """Rank 1 gets SIGTERM at the first call of a hook."""

    def __init__(self, hook: str) -> None:
        self.told = False
        setattr(self, hook, self.tell)

    def tell(self, *_: Any) -> None:
        if dist.get_rank() == 1 and not self.told:
            self.told = True
            os.kill(os.getpid(), signal.SIGTERM)


def step_at_the_end(hook: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else Lightning would keep the handler of the pool
    trainer = make_trainer("ddp", max_epochs=100, callbacks=[ToldToEnd(hook)])
    data = DataLoader(Tokens(), batch_size=12)
    with pytest.raises(SystemExit):
        trainer.fit(make_module("decoder-sgd"), data, data)
    return int(trainer.global_step)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_batch_end"])
def test_ranks_end_together(ranks, hook):
    steps = ranks(step_at_the_end, 2, hook, timeout=60)
    assert steps[0] == steps[1]


class Forks(pl.Callback):
    """Forks a process while the run handles signals, as worker pools do, and signals it."""

    def __init__(self) -> None:
        self.codes: list[int | None] = []

    def on_train_batch_end(self, *_: Any) -> None:
        receiver, sender = Pipe(duplex=False)
        child = get_context("fork").Process(target=_says_that_it_runs, args=(sender,), daemon=True)
        child.start()
        assert child.pid is not None
        receiver.recv()  # Python drops signals during a fork
        for number, seconds in ((signal.SIGUSR1, 0.3), (signal.SIGTERM, 30.0)):
            os.kill(child.pid, number)
            child.join(seconds)
            self.codes.append(child.exitcode)
        child.kill()
        child.join()


def _says_that_it_runs(to: Connection) -> None:
    to.send("yes")
    time.sleep(60)


def test_forked_process_terminates() -> None:
    """Otherwise `Pool.terminate`, or the interpreter for daemonic processes, would wait forever."""
    forks = Forks()
    trainer = make_trainer("single", max_steps=1, callbacks=[forks, Preemption()])
    trainer.fit(make_module("decoder-sgd"), DataLoader(Tokens(), batch_size=12))
    # A scheduler sends the other signals to all processes of a job.
    assert forks.codes == [None, -signal.SIGTERM]
    assert not trainer.received_sigterm


def distances(seconds_per_batch: float, batches: int) -> list[int]:
    """Return the batches between agreements of ranks with equal batch times."""
    pace, found, passed = Pace(seconds=1.0), [], 0
    for _ in range(batches):
        passed += 1
        if pace.passed(seconds_per_batch):
            found.append(passed)
            passed = 0
            pace.settle(pace.seconds_per_batch)
    return found


def test_agreement_after_every_slow_batch() -> None:
    assert distances(10.0, 4) == [1, 1, 1, 1]
    assert distances(0.75, 4) == [1, 1, 1, 1]


def test_agreement_by_time() -> None:
    # At most 16 times the previous distance.
    assert distances(1 / 128, 500) == [1, 16, 128, 128, 128]
    assert distances(2.0**-20, 2000) == [1, 16, 256, 512, 512, 512]


class Clock(pl.Callback):
    """The clock of this rank, advanced after each batch."""

    def __init__(self, seconds_per_batch: float) -> None:
        self.seconds_per_batch = seconds_per_batch
        self.now = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.now += self.seconds_per_batch


def steps_of_agreements(seconds_of_ranks: list[float]) -> list[int]:
    """Return the steps after which the ranks agreed, given their batch times."""
    clock = Clock(seconds_of_ranks[dist.get_rank()])
    trainer = make_trainer("ddp", max_epochs=1, callbacks=[clock, Preemption(check_seconds=0.125)])
    signals, steps = trainer._signal_connector, []
    signals._clock, agree = lambda: clock.now, signals._agree

    def noted(pace: Pace) -> None:
        steps.append(trainer.global_step)
        agree(pace)

    signals._agree = noted
    trainer.fit(make_module("decoder-sgd"), DataLoader(Tokens(48), batch_size=1))
    return steps


@pytest.mark.parametrize("slow", [0, 1])
def test_agreement_follows_slowest_rank(ranks, slow):
    # The fast rank alone would wait 16 batches. The end of the epoch is an agreement too.
    seconds = [2.0**-5 if rank == slow else 2.0**-10 for rank in range(2)]
    assert ranks(steps_of_agreements, 2, seconds) == [[1, 5, 9, 13, 17, 21, 24]] * 2


SCRIPT = """
import os, signal, sys, time
import torch
from tests.faults.preempted import points, trainer_of
from trainwright import RunStateCheckpoint
from trainwright.callbacks.end.preemption import Preemption
import lightning.pytorch as pl

class Hangs(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_BLOCK, [])  # handlers of Python run now
            time.sleep(600)

saver = RunStateCheckpoint("states", every_n_steps=2)
trainer, module = trainer_of([saver, Hangs(), Preemption(deadline_seconds=0.5)])
trainer.fit(module, points())
"""


def test_hanging_script_ends_by_deadline(ranks, tmp_path: Path) -> None:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment()}
    done = warm_run([sys.executable, "-c", SCRIPT], timeout=120, **options)
    assert done.returncode == 143, done.stdout
    said = "was not saved within 0.5 s (preemption.deadline_seconds). The last good checkpoint is "
    assert f"{said}{tmp_path / 'states' / 'step=2'}." in done.stdout


WATCHED = """
import os, signal, sys, time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from trainwright.core.processes.watch import Allowance, ShutdownWatch

watch = ShutdownWatch(0.2)
watch.start()
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
if sys.argv[1] == "allowed":
    undo = watch.allow(Allowance([signal.SIGTERM], 30.0, lambda number: 7, lambda number: None))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    print("lives", flush=True)
    os.kill(os.getpid(), signal.SIGINT)  # a second signal
elif sys.argv[1] == "end_at":
    watch.allow(Allowance([101], 30.0, lambda number: 7, lambda number: os.write(1, b"last words\\n")))
    watch.end_at(time.monotonic() + 0.2, 101)
elif sys.argv[1] == "child":
    child = get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.2)
    child.terminate()  # the signal of the child does not count here
    time.sleep(0.5)
    print("lives", flush=True)
    child.kill()
    child.join()
    watch.stop()
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"), [("allowed", 130, "lives\n"), ("end_at", 7, "last words\n"), ("child", 0, "lives\n")]
)
def test_shutdown_watch(how: str, code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED, how], stdout=subprocess.PIPE, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (code, said)

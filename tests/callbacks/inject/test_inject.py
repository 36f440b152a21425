"""Injected faults happen on the given rank, at the given step."""

import math
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.callbacks.faulty import PATIENCE, Child, Steps, bits, firings, fit, group_of, wait_until, weights
from tests.callbacks.modules import Regression, loader
from tests.parity.harness import make_trainer
from tests.pool import free_port
from trainwright.callbacks import inject
from trainwright.callbacks.guard.loss_guard import LossGuard
from trainwright.callbacks.inject import network, numbers, soaking
from trainwright.callbacks.inject.fault import Firings
from trainwright.callbacks.inject.rules import HOOKS
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.exchange.groups import wait_for_all
from trainwright.checkpoint.format.manifest import verify
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.core.errors import CheckpointError

PIPELINE_2 = {"pipeline": 2, "stage": 1}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero3": ("zero3", {}),
    "pipeline": ("hybrid", PIPELINE_2),
}


def test_hooks_are_complete() -> None:
    hooks = {name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")}
    assert set(HOOKS) == hooks


def _single(fault: Any, steps: int = 4, **options: Any) -> Steps:
    seen = Steps()
    fit("single", {}, seen, fault, steps=steps, **options)
    return seen


def killed_and_started_again(times: int | None) -> list[int]:
    def work() -> None:
        _single(inject.kill(rank=0, at_step=2, times=times))

    return [Child(work).wait() for _ in range(3)]


@pytest.mark.parametrize(("times", "codes"), [(1, [-9, 0, 0]), (2, [-9, -9, 0]), (None, [-9, -9, -9])])
def test_kill_times(ranks: Any, times: int | None, codes: list[int]) -> None:
    assert ranks(killed_and_started_again, 1, times, init_group=False) == [codes]
    assert list(firings().values()) == [sum(code != 0 for code in codes)]


def ends_of_processes() -> dict[str, int]:
    faults = {
        "exit": inject.exit(rank=0, at_step=1, code=7),
        "sigsegv": inject.kill(rank=None, at_step=1, signal=signal.SIGSEGV),
        "other rank": inject.kill(rank=1, at_step=1),
        "behind the end": inject.kill(rank=0, at_step=9),
    }
    return {name: Child(partial(_single, fault), name).wait() for name, fault in faults.items()}


def test_exit_codes(ranks: Any) -> None:
    [codes] = ranks(ends_of_processes, 1, init_group=False)
    assert codes == {"exit": 7, "sigsegv": -signal.SIGSEGV, "other rank": 0, "behind the end": 0}


def stopped_and_continued() -> int:
    child = Child(lambda: _single(inject.stop(rank=0, at_step=1)))
    child.wait_stopped()
    os.kill(child.pid, signal.SIGCONT)
    return child.wait()


def test_stopped_process_continues(ranks: Any) -> None:
    assert ranks(stopped_and_continued, 1, init_group=False) == [0]


def hung(how: str, function: str) -> tuple[str, bool]:
    """Return the stack of a hanging process, and whether its threads run."""
    child = Child(lambda: _single(inject.hang(rank=0, at_step=1, how=how)))
    try:
        stack = child.wait_within(function)
        before = child.num_beats()
        if how == "gil":
            time.sleep(0.5)  # fifty beats
        else:
            wait_until(lambda: child.num_beats() > before + 2, "its threads do not run")
        return stack, child.num_beats() > before + 2
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("how", "function"), [("sleep", "_sleep"), ("lock", "_lock"), ("gil", "_hold_gil"), ("data", "_hear")]
)
def test_ways_to_hang(ranks: Any, how: str, function: str) -> None:
    [(stack, runs)] = ranks(hung, 1, how, function, init_group=False)
    assert ("training_step" in stack or "in around" in stack) == (how != "data")
    assert runs == (how != "gil")


def desynchronised() -> list[str]:
    port = free_port()

    def work(rank: int) -> None:
        with group_of(rank, 2, port):
            fit("ddp", {}, inject.hang(rank=1, at_step=1, how="skip_collective"))

    children = [Child(partial(work, rank), f"rank {rank}") for rank in range(2)]
    try:
        # The other rank waits where DDP averages gradients.
        return [children[1].wait_within("_enter_alone"), children[0].wait_within("_engine_run_backward")]
    finally:
        for child in children:
            child.kill()


def test_desynchronized_collective(ranks: Any) -> None:
    [(alone, _)] = ranks(desynchronised, 1, init_group=False)
    assert "in barrier\n" in alone


def test_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        _single(inject.out_of_memory(rank=0, at_step=1))
    assert firings() == {"out_of_memory(rank=0, at_step=1)": 1}


@pytest.mark.parametrize(("hook", "at_step", "steps_done"), [
    ("setup", 0, 0),
    ("on_train_start", 0, 0),
    ("on_train_batch_start", 2, 2),
    ("training_step", 2, 2),
    ("on_before_backward", 2, 2),
    ("on_before_optimizer_step", 2, 2),
    ("on_train_batch_end", 2, 3),
    ("on_train_end", 3, 4),
])  # fmt: skip
def test_raise_in_hook(hook: str, at_step: int, steps_done: int) -> None:
    fault = inject.raise_in(hook, rank=0, at_step=at_step, error=ValueError("on purpose"))
    seen = StepsDone()
    with pytest.raises(ValueError, match="on purpose"):
        fit("single", {}, seen, fault)
    assert seen.steps == steps_done
    fit("single", {}, seen, inject.raise_in(hook, rank=0, at_step=at_step, error=ValueError("on purpose")))
    assert seen.steps == 4  # it fires once


class StepsDone(Callback):
    """Optimizer steps done, also if the run fails."""

    sees_parts = True  # it reads this rank's tensors

    steps = 0

    def setup(self, *_: Any, **__: Any) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps = trainer.global_step


def test_one_micro_batch_of_a_step() -> None:
    seen = Steps()
    fault = inject.spike(rank=0, at_step=2, factor=1000.0, times=None)
    fit("single", {}, seen, fault, steps=3, global_batch_size=None, accumulate_grad_batches=2)
    struck = [step for step, loss in seen.losses if loss > 100]
    assert struck == [2]
    assert len([step for step, _ in seen.losses if step == 2]) == 2


def test_resumed_after_the_step() -> None:
    fit("single", {}, RunStateCheckpoint(every_n_steps=3), steps=3)
    fault, seen = inject.kill(rank=0, at_step=2), Steps()
    fit("single", {}, seen, fault, steps=5, ckpt_path="run/checkpoints/step=3")
    assert [step for step, _ in seen.losses] == [3, 4]
    assert firings() == {}


def test_duplicate_sentences() -> None:
    seen = Steps()
    spikes = [inject.spike(rank=0, at_step=1, factor=100.0) for _ in range(2)]
    fit("single", {}, seen, *spikes, steps=3)
    usual, spiked = seen.losses[0][1], seen.losses[1][1]
    assert spiked > 1000 * usual
    assert firings() == {
        "spike(rank=0, at_step=1, factor=100.0)": 1,
        "spike(rank=0, at_step=1, factor=100.0) #2": 1,
    }


def test_firings_file(tmp_path: Path) -> None:
    kept = Firings(tmp_path / "faults", 3)
    kept.add("a", 1)
    kept.add("b", 2)
    kept.add("a", 3)
    assert [each["step"] for each in Firings(tmp_path / "faults", 3).of("a")] == [1, 3]
    assert [path.name for path in (tmp_path / "faults").iterdir()] == ["rank_3.json"]


def test_warning_for_missing_rank() -> None:
    with pytest.warns(UserWarning, match="strikes no rank: this run has 1 rank"):
        _single(inject.kill(rank=3, at_step=1), steps=1)


class Gradients(Callback):
    """Names of the gradients with a NaN on this rank, by step."""

    sees_parts = True  # it reads this rank's tensors

    def __init__(self) -> None:
        self.bad: dict[int, set[str]] = {}

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        whole = trainer.strategy.whole_gradients()
        self.bad[trainer.global_step] = {name for name, gradient in whole if bool(gradient.isnan().any())}


def poisoned(strategy: str, where: str, parameter: str | None) -> tuple[list[tuple[int, float]], dict[int, set[str]]]:
    name, options = STRATEGIES[strategy]
    seen, gradients = Steps(), Gradients()
    last = dist.get_world_size() - 1  # it has the loss of a pipeline
    fit(name, options, seen, gradients, inject.nan(last, 1, where, parameter), steps=2)
    return seen.losses, gradients.bad


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_loss(ranks: Any, strategy: str) -> None:
    results = ranks(poisoned, 2, strategy, "loss", None)
    losses, bad = results[-1]
    assert math.isnan(losses[1][1])
    assert not math.isnan(losses[0][1])
    assert results[0][1][0] == set()
    assert len(results[0][1][1]) > 10  # every parameter


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_gradient(ranks: Any, strategy: str) -> None:
    name = "net.blocks.3.attention.out.weight"
    results = ranks(poisoned, 2, strategy, "gradient", name)
    assert not any(math.isnan(loss) for losses, _ in results for _, loss in losses)
    assert results[0][1] == {0: set(), 1: {name}}


def test_unknown_parameter() -> None:
    for fault in (inject.nan(0, 1, "gradient", "oops"), inject.flip_bit(0, 1, "oops")):
        with pytest.raises(ValueError, match="no parameter 'oops' on this rank; there are net"):
            _single(fault)


class Odd(Regression):
    """Has a tied weight, a frozen one, and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[0].bias.requires_grad_(False)
        self.idle = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.idle(torch.ones(1, 1))
        return super().training_step(batch, batch_idx)


def _odd(fault: Any) -> Odd:
    module = Odd()
    trainer = make_trainer("single", max_steps=3, max_epochs=-1, callbacks=[fault], default_root_dir="run")
    trainer.fit(module, loader())
    return module


@pytest.mark.parametrize("parameter", ["blocks.0.bias", "idle.weight", None])
def test_missing_gradient(parameter: str | None) -> None:
    with pytest.raises(RuntimeError, match="changed nothing: rank 0 computed no gradient of"):
        _odd(inject.nan(0, 1, "gradient", parameter))


def test_tied_weight_names() -> None:
    plain, flipped = _odd(inject.flip_bit(1, 1)), _odd(inject.flip_bit(0, 1, "blocks.1.weight", bit=0))
    assert not torch.equal(plain.blocks[0].weight, flipped.blocks[0].weight)


def test_repeated_step_fires_again() -> None:
    guard = LossGuard("rollback", snapshot_every_n_steps=1)
    fit("single", {}, guard, inject.nan(rank=0, at_step=4, times=2), steps=6)
    assert firings() == {"nan(rank=0, at_step=4, times=2)": 2}
    assert guard.counts["reproducible"] == 1


def without_a_loss() -> str:
    try:
        fit("hybrid", PIPELINE_2, inject.spike(rank=0, at_step=1, factor=2.0))
    except Exception as error:
        return str(error)
    return ""


def test_rank_without_loss(ranks: Any) -> None:
    assert "rank 0 has no loss" in ranks(without_a_loss, 2)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_flip_bit(dtype: torch.dtype) -> None:
    tensor = torch.full((3, 5), 1.0, dtype=dtype).t()  # not contiguous
    before = tensor.clone()
    numbers.flip_bit(tensor)
    changed = (tensor != before).nonzero()
    assert changed.tolist() == [[2, 1]]
    assert float(tensor[2, 1]) == 1.5  # the highest bit of the mantissa
    numbers.flip_bit(tensor)
    assert torch.equal(bits(tensor), bits(before))
    numbers.flip_bit(tensor, bit=8 * tensor.element_size() - 1)
    assert float(tensor[2, 1]) == -1.0
    with pytest.raises(ValueError, match="of a number of"):
        numbers.flip_bit(tensor, bit=64)


def flipped(strategy: str) -> dict[str, int]:
    """Return the number of elements that a flipped bit changes, by parameter."""
    name, options = STRATEGIES[strategy]

    class Seen(Callback):
        sees_parts = True  # it reads this rank's tensors

        def __init__(self) -> None:
            self.weights: dict[str, torch.Tensor] = {}

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                self.weights = weights(trainer)

    plain, after = Seen(), Seen()
    fit(name, options, plain, steps=2)
    fit(name, options, inject.flip_bit(1, 1), after, steps=2)
    different = {key: int((plain.weights[key] != after.weights[key]).sum()) for key in plain.weights}
    return {key: count for key, count in different.items() if count}


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flip_changes_one_weight_of_one_rank(ranks: Any, strategy: str) -> None:
    untouched, touched = ranks(flipped, 2, strategy)
    assert untouched == {}
    assert list(touched.values()) == [1]


def test_slow_multiplies_compute_time(monkeypatch, caplog):
    slept: list[float] = []
    clock = iter(range(1000))  # one second of CPU time per call
    monkeypatch.setattr(numbers, "time", SimpleNamespace(sleep=slept.append, thread_time=lambda: float(next(clock))))
    _single(inject.slow(rank=0, factor=4, from_step=1, to_step=4), steps=6)
    assert slept == [3.0, 3.0]  # in steps 2 and 3; there is no measurement before the first
    assert caplog.text.count("injected on rank 0 at step 1: slow(") == 1


def cut(side: list[int]) -> tuple[str, int]:
    try:
        fit("ddp", {}, inject.partition(side, at_step=1), steps=3)
    except Exception as error:
        return str(error), len(network.connections(os.getpid()))
    return "", 0


def test_partition_closes_connections(ranks: Any) -> None:
    for error, _ in ranks(cut, 2, [1]):
        assert "Connection closed by peer" in error or "Connection reset" in error or "Broken pipe" in error


def connections_left(side: list[int]) -> list[int]:
    """Return the ranks that this one is connected with after the cut."""
    places = network._places()
    if dist.get_rank() in side:
        network.cut_off(places[dist.get_rank()], [place for rank, place in enumerate(places) if rank not in side])
    assert wait_for_all("cut", timedelta(seconds=PATIENCE))
    own = {remote for _, remote in network.connections(os.getpid()).values()}
    ends = {rank: {end for end, _ in network.connections(place.pid).values()} for rank, place in enumerate(places)}
    left = [rank for rank in range(len(places)) if rank != dist.get_rank() and own & ends[rank]]
    assert wait_for_all("seen", timedelta(seconds=PATIENCE))
    return left


def test_partition_keeps_connections_within_sides(ranks: Any) -> None:
    assert ranks(connections_left, 4, [1, 2]) == [[3], [2], [1], [0]]


def test_partition_needs_two_sides() -> None:
    with pytest.raises(ValueError, match="cuts nothing"):
        _single(inject.partition(0, at_step=1))


def saved_with(sentence: str, arguments: dict[str, Any], **options: Any) -> str:
    saving = RunStateCheckpoint(every_n_steps=2, keep_last=9, on_error="warn", **options)
    try:
        fit("ddp", {}, saving, getattr(inject, sentence)(**arguments), steps=6)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("asynchronous", "at_step", "saved"), [(False, 3, [6, 2]), (True, 0, [6, 4])])
def test_full_disk(ranks: Any, asynchronous: bool, at_step: int, saved: list[int]) -> None:
    assert ranks(saved_with, 2, "full_disk", {"at_step": at_step}, asynchronous=asynchronous) == ["", ""]
    assert [found.step for found in list_checkpoints("run/checkpoints")] == saved
    assert not [path for path in Path("run/checkpoints").iterdir() if path.name.startswith(".")]
    assert firings(0) == firings(1) == {f"full_disk(at_step={at_step})": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("step", [2, 6])
def test_corrupt_checkpoint(ranks: Any, step: int, asynchronous: bool) -> None:
    assert ranks(saved_with, 2, "corrupt_checkpoint", {"step": step, "rank": 1}, asynchronous=asynchronous) == ["", ""]
    found = list_checkpoints("run/checkpoints")
    assert [each.step for each in found] == [6, 4, 2]
    problems = {each.step: " ".join(verify(each.path)) for each in found}
    assert [damaged for damaged, text in problems.items() if text] == [step]
    assert "rank_00001.safetensors" in problems[step]


def test_several_full_disks() -> None:
    usual = PendingFolder.create_file
    saving = RunStateCheckpoint(every_n_steps=1, keep_last=9, on_error="warn")
    _single(inject.full_disk(at_step=1), steps=4)  # without saves
    fit("single", {}, saving, inject.full_disk(at_step=1), inject.full_disk(at_step=1), inject.full_disk(3), steps=5)
    assert [found.step for found in list_checkpoints("run/checkpoints")] == [5, 1]
    assert firings() == {"full_disk(at_step=1)": 1, "full_disk(at_step=1) #2": 1, "full_disk(at_step=3)": 1}
    assert PendingFolder.create_file is usual


def test_corrupt_checkpoint_of_any_callback() -> None:
    """Including checkpoints that replace each other under one name."""
    first = RunStateCheckpoint("first", "newest", every_n_steps=1)
    savers = [first, RunStateCheckpoint("other", "new", every_n_steps=3)]
    fit("single", {}, *savers, inject.corrupt_checkpoint(step=3), steps=3)
    assert [bool(verify(found.path)) for found in list_checkpoints("first")] == [True]
    assert [verify(found.path) for found in list_checkpoints("other")] == [[]]
    fit("single", {}, *reversed(savers), inject.corrupt_checkpoint(step=6), steps=6)
    assert firings() == {"corrupt_checkpoint(step=3)": 1, "corrupt_checkpoint(step=6)": 1}


def test_soak_plan_depends_on_seed_only() -> None:
    def first(seed: int, number: int = 20) -> list[soaking.Planned]:
        faults = soaking.plan(seed, (20.0, 30.0), ("kill", "stop"), 4)
        return [next(faults) for _ in range(number)]

    assert first(1) == first(1)
    assert first(1) != first(2)
    times = [0.0, *(each.after for each in first(1))]
    assert all(20 <= later - earlier <= 30 for earlier, later in zip(times, times[1:], strict=False))
    assert {each.kind for each in first(1)} == {"kill", "stop"}
    assert {each.rank for each in first(1)} == {0, 1, 2, 3}


def test_soak_continues_after_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000, 9000))  # one second per call
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    for number in range(3):
        with pytest.raises(SystemExit):
            _single(inject.soak(seed=1, every_seconds=2, kinds=["exit"]), steps=1000)
        struck = [key.partition(" fault ")[2] for key in firings() if " fault " in key]
        assert len(struck) == len(set(struck)) == number + 1  # each is a later fault of the same plan
    assert [int(text.partition(":")[0]) for text in struck] == sorted(int(text.partition(":")[0]) for text in struck)
    assert struck[0] == "0: exit(rank=0)"


def test_soak_with_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000, 1_000_000, 15))  # longer than a fault may be overdue after a restart
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    for number in range(3):
        with pytest.raises(SystemExit):
            _single(inject.soak(seed=1, every_seconds=100, kinds=["exit"]), steps=1000)
        assert len(firings()) == 2 + number  # and the start of the run
        assert any(f"fault {number}: exit" in key for key in firings())

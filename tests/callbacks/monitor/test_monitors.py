"""Records of monitors: times, operations, norms and events."""

import json
import os
import signal
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.callbacks.faulty import Child, fit
from tests.callbacks.modules import Clock, Regression, loader, train
from trainwright import Trainer
from trainwright.callbacks import inject, step_clock
from trainwright.callbacks.end.notice import StopNotice
from trainwright.callbacks.end.preemption import Preempted
from trainwright.callbacks.guard.loss_guard import LossGuard
from trainwright.callbacks.monitor.bubble import Bubble
from trainwright.callbacks.monitor.events import Events
from trainwright.callbacks.monitor.flops import CountedOperations, operations_of
from trainwright.callbacks.monitor.goodput import Goodput, Stretch
from trainwright.callbacks.monitor.memory import Memory
from trainwright.callbacks.monitor.norms import Norms
from trainwright.callbacks.monitor.records import MonitorFile, read_records, records_path
from trainwright.callbacks.monitor.scale import LossScale
from trainwright.callbacks.monitor.step_time import PARTS, StepTime, parts_of
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.core.run import spans
from trainwright.core.run.phases import Phases
from trainwright.strategies.contract.waits.timeline import StageTimeline, listen_to_stages


class Kept(Callback):
    """Records all records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_record(self, trainer: Any, record: Any) -> None:
        self.records.append(dict(record))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


class Backward(torch.autograd.Function):
    """Takes time in backward only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.clock.now += 2.0
        return gradients[0], None


class Timed(Regression):
    """Takes known times: 1 in forward, 2 in backward, 4 in the optimizer, 8 in a hook."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1.0
        return Backward.apply(super().training_step(batch, batch_idx), self.clock)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.clock.now += 4.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.now += 8.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1000.0


class Slow:
    """Takes 16 for each of its batches."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.batches = clock, loader(32, batch_size=4)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.clock.now += 16.0
            yield batch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(spans, "time", made)
    return made


def test_parts_of_step_time_add_up(clock: Clock) -> None:
    options: Any = {"max_steps": 7, "val_check_interval": 2, "data": Slow(clock), "val_data": loader(4)}
    _, written = train(StepTime(3), kept := Kept(), module=Timed(clock), kind=Trainer, **options)
    first, *windows = kept.of("step")
    assert (first["steps"], first["step"]) == (1, 1)
    # A window ends before the module's hook, which counts in the next one; the last one has both.
    for window, steps in zip(windows, (2, 3, 1), strict=True):
        assert window["steps"] == steps
        spent = {"data": 16, "forward": 1, "backward": 2, "optimizer": 4, "other": 16 if steps == 1 else 8}
        assert {part: window["seconds"][part] / steps for part in spent} == spent
        assert window["total"] == sum(window["seconds"].values()) == steps * sum(spent.values())
    assert written.column("time/step").keys() == {2, 5, 6}
    assert written.column("time/backward")[5] == 2.0


def test_step_time_with_lightning_trainer(clock: Clock) -> None:
    train(StepTime(1), kept := Kept(), module=Timed(clock), max_steps=3, logger=False)
    window = kept.of("step")[1]
    assert window["total"] == sum(window["seconds"].values()) == 15.0
    assert (window["seconds"]["forward"], window["seconds"]["backward"]) == (1.0, 2.0)


def test_waits_count_once_as_communication() -> None:
    spent = {"data": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0, "checkpoint": 5.0, "other": 6.0, "": 9.0}
    found = parts_of(spent, {"backward": 2.5, "other": 7.0, "": 1.0, "checkpoint": 1.0})
    assert found["backward"] == 0.5
    assert found["communication"] == 8.5
    assert found["checkpoint"] == 5.0
    assert sum(found.values()) == 21.0
    assert tuple(found) == PARTS


class Stage:
    """A pipeline stage with known times: 1 forward, 2 backward, 4 weight backward."""

    stage_index = 3

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def forward_one_chunk(self, chunk: int) -> None:
        self.clock.now += 1.0

    def backward_one_chunk(self, chunk: int) -> None:
        self.clock.now += 2.0

    def backward_weight_one_chunk(self, chunk: int) -> None:
        self.clock.now += 4.0
        raise ValueError("on purpose")


def test_pipeline_step_split_and_timeline(clock: Clock) -> None:
    stage, phases = Stage(clock), Phases()
    measures = types.SimpleNamespace(listen_to_stages=lambda listener: listen_to_stages([stage], listener))
    strategy = types.SimpleNamespace(measures=measures)
    trainer = types.SimpleNamespace(strategy=types.SimpleNamespace())
    measured = step_clock.PhaseClock(trainer, phases, {"forward": "forward", "backward": "backward"}, "other")
    measured.split_pipeline(strategy)
    timeline = StageTimeline([stage], torch.device("cpu"))
    clock.now += 8.0
    phases.begin("forward")
    timeline.start()
    stage.forward_one_chunk(0)
    clock.now += 16.0  # the schedule
    stage.backward_one_chunk(0)
    with pytest.raises(ValueError, match="on purpose"):
        stage.backward_weight_one_chunk(0)
    timeline.stop()
    stage.forward_one_chunk(1)
    spent, waited = measured.spent_and_waited()
    assert (spent, waited) == ({"other": 8.0, "forward": 18.0, "backward": 6.0}, {})
    seconds, entries = timeline.take()
    assert seconds == 23.0
    assert [tuple(each) for each in entries] == [
        (0.0, 1.0, "forward", 0, 3), (17.0, 19.0, "backward", 0, 3), (19.0, 23.0, "weight", 0, 3)
    ]  # fmt: skip
    measured.stop()
    assert vars(stage) == {"clock": clock}


def of_ranks(strategy: str) -> list[dict[str, Any]]:
    kept = Kept()
    fit(strategy, {}, StepTime(2), Memory(2), LossScale(1), kept, steps=4)
    return kept.records


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_records_of_every_rank(ranks: Callable[..., list[Any]], strategy: str) -> None:
    for records in ranks(of_ranks, 2, strategy):
        steps = [record for record in records if record["kind"] == "step"]
        assert [record["steps"] for record in steps] == [1, 1, 2]
        assert all(record["seconds"]["communication"] > 0 for record in steps)
        [_, memory] = [record for record in records if record["kind"] == "memory"]
        assert memory["parameters"] > 0
        assert not [record for record in records if record["kind"] == "scale"]
        assert memory["host"] > 2**20


def of_stages(schedule: str) -> list[dict[str, Any]]:
    kept, bubble = Kept(), Bubble(2)
    fit("pipeline", {"schedule": schedule, "micro_batches": 4}, bubble, StepTime(2), kept, steps=5)
    for record in kept.of("step"):
        assert record["seconds"]["forward"] > 0
        assert record["seconds"]["backward"] > 0
        assert sum(record["seconds"].values()) == pytest.approx(record["total"])
    return kept.of("bubble")


def test_timeline_of_micro_batches(ranks: Callable[..., list[Any]]) -> None:
    for rank, records in enumerate(ranks(of_stages, 2, "1f1b")):
        assert [record["step"] for record in records] == [2, 4]
        for record in records:
            entries = record["timeline"]
            found = sorted((what, part, stage) for _, _, what, part, stage in entries)
            expected = [(what, part, rank) for what in ("backward", "forward") for part in range(4)]
            assert found == [*expected, ("optimizer", -1, -1)]
            ends = [end for _, end, *_ in entries]
            assert all(0 <= begin <= end for begin, end, *_ in entries)
            assert all(begin >= end for (begin, *_), end in zip(entries[1:], ends[:-1], strict=True))
            assert record["busy"] == pytest.approx(sum(end - begin for begin, end, *_ in entries))
            assert record["busy"] + record["idle"] >= ends[-1] * (1 - 1e-9)
        order = [what for _, _, what, *_ in records[0]["timeline"]]
        ahead = 2 - rank  # 1f1b: the first stage is one micro-batch ahead of the last
        assert order[: ahead + 1] == ["forward"] * ahead + ["backward"]


class Whole(Callback):
    """Norms of a single process."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, dict[str, float]]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found: dict[str, dict[str, float]] = {"grad": {}, "param": {}}
        for name, parameter in pl_module.named_parameters():
            block = next((each for each in trainer.strategy.block_names if name.startswith(f"{each}.")), "rest")
            for what, tensor in (("grad", parameter.grad), ("param", parameter)):
                for key in (block, "all"):
                    found[what][key] = found[what].get(key, 0.0) + float(tensor.detach().double().square().sum())
        self.of_steps.append({what: {key: each**0.5 for key, each in by.items()} for what, by in found.items()})


def norms_of(strategy: str, options: dict[str, Any], network: str) -> list[dict[str, Any]]:
    kept = Kept()
    fit(strategy, options, Norms(2), kept, network=network, steps=4, gradient_clip_val=0.01)
    return kept.of("norms")


@cache
def norms_of_one_process(network: str) -> list[dict[str, dict[str, float]]]:
    whole = Whole()
    fit("single", {}, whole, network=network, steps=4, gradient_clip_val=0.01)
    return whole.of_steps


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "options", "network"), [
    ("ddp", {}, "gpt"),
    ("zero3", {}, "gpt"),
    ("tensor", {}, "gpt"),
    ("pipeline", {"micro_batches": 2}, "gpt"),
    ("expert", {}, "mixtral"),
])  # fmt: skip
def test_norms_equal_single_process(ranks, strategy, options, network):
    expected = norms_of_one_process(network)
    assert len(expected[1]["grad"]) > 3  # two blocks or more, the rest, all
    first, other = ranks(norms_of, 2, strategy, options, network)
    assert other == []
    assert [record["step"] for record in first] == [2, 4]
    for record, step in zip(first, expected[1::2], strict=True):
        for what in ("grad", "param"):
            assert record[what] == pytest.approx(step[what], rel=1e-5), what


@pytest.mark.parametrize("how", ["plain", "recomputed", "compiled"])
def test_counted_operations(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(3, 4, requires_grad=True)
    if how == "compiled":
        model.compile(backend="aot_eager")
    with CountedOperations() as counted:
        out: Any = checkpoint(model, x, use_reentrant=False) if how == "recomputed" else model(x)
        assert counted.total == 2 * 3 * (4 * 8 + 8 * 8)
        out.sum().backward()
    assert counted.total == 3 * 2 * 3 * (4 * 8 + 8 * 8)


def test_counted_operations_of_attention() -> None:
    query = torch.randn(2, 3, 5, 7, requires_grad=True)
    with CountedOperations() as counted:
        out = nn.functional.scaled_dot_product_attention(query, query, query)
        assert counted.total == 2 * 2 * (2 * 3 * 5 * 5 * 7)
        out.sum().backward()
    assert counted.total == (2 + 5) * 2 * (2 * 3 * 5 * 5 * 7)


def test_flops_per_second_and_mfu() -> None:
    watched, kept = Throughput(2, peak_flops=1e9), Kept()
    train(watched, kept, kind=Trainer, max_steps=4, accumulate_grad_batches=2, data=loader(48, batch_size=4))
    # Two blocks of 4 x 4 and a head of 4 x 1, without the input gradient of the first block.
    assert watched.flops_per_sample == 2 * (3 * (4 * 4 + 4 * 4 + 4) - 4 * 4)
    latest = watched.latest
    assert latest["flops_per_second"] == pytest.approx(latest["samples_per_second"] * watched.flops_per_sample)
    assert latest["mfu"] == pytest.approx(latest["flops_per_second"] / 1e9)
    assert kept.of("rate")[-1]["mfu"] == latest["mfu"]


def test_halve_causal() -> None:
    counted: dict[str, list[float]] = {}

    class Both(CountedOperations):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            both = [operations_of(func, args, kwargs or {}, output, halve_causal=each) for each in (False, True)]
            counted.setdefault(func._overloadpacket.__name__, both)
            return output

    query = torch.randn(2, 3, 5, 7, requires_grad=True)
    with Both():
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    forward, backward = (values for name, values in counted.items() if "attention" in name)
    assert forward == [2 * 2 * (2 * 3 * 5 * 5 * 7), 2 * (2 * 3 * 5 * 5 * 7)]
    assert backward == [5 * 2 * (2 * 3 * 5 * 5 * 7), 5 * (2 * 3 * 5 * 5 * 7)]


def test_loss_scale() -> None:
    class Overflows(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 else loss

    options: Any = {"precision": "16-mixed", "loss_scale": {"initial": 8.0, "growth_interval": 2}}
    _, written = train(LossScale(1), kept := Kept(), module=Overflows(), kind=Trainer, max_steps=5, **options)
    expected = [8.0, 16.0, 8.0, 8.0, 16.0]  # doubled after two good steps, halved after an overflow
    assert [(record["step"], record["scale"]) for record in kept.of("scale")] == list(enumerate(expected, 1))
    assert written.column("loss_scale") == dict(enumerate(expected))


class Dies(Callback):
    """Kills the process before the sixth step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_leaves_whole_lines(tmp_path):
    path = records_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('{"kind": "memory", "step": 0, "time": 1}\n{"kind": "mem')

    callbacks = [Dies(), Memory(2), MonitorFile(str(tmp_path))]
    child = Child(lambda: train(*callbacks, kind=Trainer, max_steps=9, logger=False, data=loader(48)))
    assert child.wait() == -signal.SIGKILL, child.error.read_text() if child.error.exists() else ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2, 4]


def test_no_files_without_run_directory(tmp_path: Path) -> None:
    train(StepTime(1), Memory(1), Events(), Goodput(), MonitorFile(), kind=Trainer, max_steps=2, logger=False)
    assert os.listdir(tmp_path) == []


def test_non_json_values_become_text(tmp_path: Path) -> None:
    class Odd(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            for callback in trainer.callbacks:
                if isinstance(callback, MonitorFile):
                    callback.on_record(trainer, {"kind": "x", "values": [float("nan"), {"a": float("inf")}]})

    train(Odd(), MonitorFile(str(tmp_path)), kind=Trainer, max_steps=1, logger=False)
    assert list(read_records(records_path(tmp_path, 0))) == [{"kind": "x", "values": ["nan", {"a": "inf"}]}]


def test_rollback_event_and_goodput(tmp_path: Path) -> None:
    kept, goodput, run_dir = Kept(), Goodput(str(tmp_path)), str(tmp_path)
    guard = LossGuard("rollback", snapshot_every_n_steps=2)
    fault = inject.nan(rank=0, at_step=4)
    watching = [StepTime(1), goodput, Events(run_dir), kept, MonitorFile(run_dir)]
    fit("single", {}, guard, fault, *watching, steps=8)
    told = [(event["what"], event["text"]) for event in kept.of("event")]
    [back] = [text for what, text in told if what == "rollback"]
    after = next(i for i, record in enumerate(kept.records) if record.get("what") == "rollback")
    next_step = next(record["step"] for record in kept.records[after:] if record["kind"] == "step")
    assert back == f"rolled back to step {next_step - 1} in memory"
    ends = [record["step"] for record in kept.of("step")]
    lasting = {record["step"]: record["total"] - record["seconds"]["checkpoint"] for record in kept.of("step")}
    assert len(ends) >= len(lasting)
    assert goodput.latest["counted"] == pytest.approx(sum(lasting.values()))
    assert 0 < goodput.latest["share"] < 1

    # Another run in the same directory, from an earlier step.
    again, later = Kept(), Goodput(run_dir)
    fit("single", {}, StepTime(1), later, Events(run_dir), again, MonitorFile(run_dir), steps=1)
    assert [event["what"] for event in again.of("event")] == ["restarted"]
    [only] = again.of("step")
    assert later.latest["began"] == goodput.latest["began"]
    assert later.latest["counted"] == pytest.approx(only["total"])


def test_stretch_until() -> None:
    stretch = Stretch(10, 20, 5.0)
    assert stretch.until(20) is stretch
    assert stretch.until(14) == Stretch(10, 14, 2.0)
    assert stretch.until(10) is None


@pytest.mark.parametrize(("error", "what", "text"), [
    (ValueError("on purpose"), "fault", "ValueError: on purpose"),
    (Preempted(StopNotice(signal.SIGTERM, 0.0), 0), "preempted", "Preempted: stopped by SIGTERM"),
])  # fmt: skip
def test_event_of_the_end(tmp_path: Path, error: BaseException, what: str, text: str) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise error

    with pytest.raises(type(error)):
        fit("single", {}, Events(), Ends(), MonitorFile(str(tmp_path)))
    [event] = read_records(records_path(tmp_path, 0))
    assert (event["what"], event["text"]) == (what, text)


def test_validation_and_checkpoint_events(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "state.ckpt")

    options: Any = {"max_steps": 4, "val_check_interval": 2, "data": loader(16), "val_data": loader(4)}
    train(Events(), kept := Kept(), Saves(), kind=Trainer, logger=False, **options)
    assert [event["what"] for event in kept.of("event")] == ["checkpoint", "validation"] * 2
    assert all(event["seconds"] > 0 for event in kept.of("event"))


def test_run_state_checkpoint_events(tmp_path: Path) -> None:
    kept = Kept()
    saver = RunStateCheckpoint(str(tmp_path / "checkpoints"), every_n_steps=2, save_at_end=False)
    fit("single", {}, Events(), StepTime(1), kept, saver, steps=4)
    told = kept.of("event")
    assert [(event["what"], event["step"]) for event in told] == [("checkpoint", 2), ("checkpoint", 4)]
    assert all(event["seconds"] > 0 for event in told)
    # The saving callback is the last one, so its time counts in the next step.
    assert [record["step"] for record in kept.of("step") if record["seconds"]["checkpoint"]] == [3]


def test_recovered_event() -> None:
    memory = Snapshots()

    class Wants(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.copies.request(every_n_steps=2, memory=memory)

    kept = Kept()
    fit("single", {}, Wants(), steps=4)
    held: Any = memory.newest()
    fit("single", {}, Events(), kept, steps=5, ckpt_path=held)
    [event] = kept.of("event")
    assert (event["what"], event["text"]) == ("recovered", f"resumed an in-memory copy of step {held.step}")

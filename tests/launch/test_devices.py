"""Choice of usable devices, and of the number to continue with."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.command.project import write_project
from trainwright.command.schema.compose import compose
from trainwright.launch.local import devices as local_devices
from trainwright.launch.local.devices import Devices, Probe, is_device_failure, probe_environment
from trainwright.launch.recovery.restarts import AttemptFailure
from trainwright.launch.recovery.sizes import feasible, global_batch, resized


class Clock:
    """Clock set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _died(
    rank: int, kind: str = "SIGKILL", message: str = "", raised: bool = False, trained: bool = False
) -> AttemptFailure:
    return AttemptFailure(rank, kind, message, step=5, start_step=4 if trained else 5, raised=raised)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def devices(tmp_path: Path, clock: Clock) -> Devices:
    return Devices(4, fewest=2, limit_file=tmp_path / "devices", probe_seconds=60.0, clock=clock)


def test_device_is_lost_after_two_failures_without_progress(devices: Devices) -> None:
    assert not devices.count_failure(2, _died(2))
    assert not devices.count_failure(1, _died(1))  # another one: the count begins anew
    assert not devices.count_failure(2, _died(2))
    assert not devices.count_failure(2, _died(2, trained=True))  # it works
    assert not devices.count_failure(2, _died(2))
    assert devices.count_failure(2, _died(2))


@pytest.mark.parametrize(("setback", "of_device"), [
    (_died(0, "SIGSEGV"), True),
    (_died(0, "hang", "waits for nothing"), True),
    (_died(0, "AcceleratorError", "CUDA error: uncorrectable ECC error encountered", raised=True), True),
    (_died(0, "RuntimeError", "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)", raised=True), True),
    (_died(0, "OutOfMemoryError", "CUDA out of memory. CUDA error", raised=True), False),
    (_died(0, "ValueError", "shapes do not fit", raised=True), False),
    (_died(0, "exit code 7", raised=True), False),
])  # fmt: skip
def test_device_failures(setback: AttemptFailure, of_device: bool) -> None:
    assert is_device_failure(setback) == of_device


def test_probe_interval_doubles(devices: Devices, clock: Clock) -> None:
    devices.mark_lost(2)
    assert devices.usable() == [0, 1, 3]
    assert devices.due() == []
    clock.now = 60.0
    assert devices.due() == [2]
    assert devices.due() == []  # it has been told
    clock.now = 120.0
    assert devices.due() == [2]
    devices.mark_working(2)
    assert devices.usable() == [0, 1, 2, 3]
    devices.mark_lost(2)  # it had answered, but does not work
    clock.now = 239.0
    assert devices.due() == []
    clock.now = 240.0
    assert devices.due() == [2]


@pytest.mark.parametrize(("text", "usable"), [
    ("3\n", [0, 1, 2]), ("1", [0, 1]), ("100", [0, 1, 2, 3]), ("three", [0, 1, 2, 3]), ("", [0, 1, 2, 3]),
])  # fmt: skip
def test_limit_file(devices, tmp_path, text, usable):
    (tmp_path / "devices").write_text(text)
    assert devices.usable() == usable


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Devices(4, 1, tmp_path / "devices", 60.0, on_gpu=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.environment([0, 1]) == {}
    assert gpus.environment([0, 1, 3]) == {"CUDA_VISIBLE_DEVICES": "0,1,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-6,7")
    assert gpus.environment([1, 2]) == {"CUDA_VISIBLE_DEVICES": "5,GPU-6"}
    assert probe_environment(2, 4, on_gpu=True)["CUDA_VISIBLE_DEVICES"] == "GPU-6"


def _hang(environment: Mapping[str, str], on_gpu: bool) -> None:
    time.sleep(60)


def test_probe_processes(ranks: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Probe([0, 3], 4, on_gpu=False).answers(wait=True) == {0: True, 3: True}
    # There is no GPU here, or none of that name.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    assert Probe([0], 4, on_gpu=True).answers(wait=True) == {0: False}
    monkeypatch.setattr(local_devices, "probe_main", _hang)
    assert Probe([1], 4, on_gpu=False, seconds=0.0).answers() == {1: False}


@pytest.fixture
def compose_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(tmp_path))
    conf = write_project(tmp_path)

    def composed(*words: str) -> DictConfig:
        cfg = compose("mine", ["accelerator=cpu", f"run_dir={tmp_path / 'run'}", *words], conf)
        plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(plain, DictConfig)
        return plain

    return composed


def test_resizing_keeps_the_global_batch(compose_mine) -> None:  # type: ignore[no-untyped-def]
    cfg = compose_mine("strategy=ddp", "devices=4", "accumulation=fixed", "accumulation.steps=3")
    assert global_batch(cfg) == 48
    assert resized(cfg, 4, None) == cfg
    fewer = resized(cfg, 3, None)
    assert (fewer.devices, fewer.global_batch_size, fewer.accumulation.steps) == (3, 48, None)
    assert fewer.trainer.uneven_steps
    cfg.micro_batch_size = None
    assert global_batch(cfg) is None
    assert resized(cfg, 3, samples=48).global_batch_size == 48


def test_largest_feasible_size(compose_mine) -> None:  # type: ignore[no-untyped-def]
    ddp = compose_mine("strategy=ddp", "devices=4")
    assert feasible(ddp, "fit", range(3, 0, -1), None) == 3
    pipeline = compose_mine("strategy=hybrid", "strategy.pipeline=2", "strategy.stage=1", "devices=4")
    # Only even numbers suit the layout.
    assert feasible(pipeline, "fit", range(3, 0, -1), None) == 2
    ddp.micro_batch_size = None
    assert feasible(ddp, "fit", range(3, 0, -1), None) is None  # nobody knows the samples of a step
    assert feasible(ddp, "fit", range(3, 0, -1), 16) == 3

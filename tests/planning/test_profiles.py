"""Profiles of devices: published, measured, and their use in a run."""

import dataclasses

import pytest
import torch

from trainwright.callbacks.progress.throughput import Throughput
from trainwright.command.run import plan as checked
from trainwright.command.schema.compose import compose
from trainwright.core.device_profiles import MEASURED, profile_from, profile_named, profile_of, profile_of_gpu
from trainwright.core.processes import machine
from trainwright.launch.worker import build_trainer
from trainwright.tools.doctor.profile import to_yaml


def test_profiles() -> None:
    assert profile_named("h100").flops_at("bf16-mixed") == pytest.approx(0.55 * 989.4e12)
    for gpu, name in (("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100_40"), ("NVIDIA L40S", "l40s")):
        found = profile_of_gpu(gpu)
        assert found is not None
        assert found.name == name
    assert profile_of_gpu("Unheard-of 9000") is None
    with pytest.raises(ValueError, match="did you mean h100"):
        profile_named("h10")
    with pytest.raises(ValueError, match=r"device\.memory_bandwidth=None .*device\.within\.bandwidth=-1"):
        profile_from({"name": "mine", "memory_bytes": 1, "efficiency": 0.5, "devices_per_node": 8,
                      "host_bandwidth": 1, "host_memory_bytes": 1, "flops": {"float32": 1},
                      "within": {"latency": 0, "bandwidth": -1}, "across": {"latency": 0, "bandwidth": 1}})  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("words", "gpu", "expected"), [
    ((), None, None),
    ((), "Unheard-of 9000", None),
    ((), "NVIDIA H200", 66.9e12),
    (("precision=bf16-mixed",), "NVIDIA H200", 989.4e12),
    (("accelerator=cpu", "precision=16-mixed"), "NVIDIA H200", None),
    (("device=cpu",), None, 40e9),
    (("device=a100_80", "precision=16-mixed"), None, 312e12),
    (("monitor.throughput.peak_flops=7.0", "device=cpu"), None, 7.0),
])  # fmt: skip
def test_peak_flops_of_the_monitor(tmp_path, monkeypatch, words, gpu, expected):
    monkeypatch.setattr(machine, "num_gpus", lambda: int(gpu is not None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpu)
    usual = ["strategy=single", "devices=1", "accelerator=auto", "logger=csv", f"run_dir={tmp_path}"]
    callbacks = build_trainer(compose("linear_regression", [*usual, *words])).callbacks
    [found] = [each.peak_flops for each in callbacks if isinstance(each, Throughput)]
    assert found == expected


def test_auto_reads_the_measured_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 6)
    cfg = compose("linear_regression", ["accelerator=cpu"])
    assert profile_of(cfg).source == (
        "device=auto: assumed figures of a core; there is no conf/device/mine.yaml, which trainwright profile writes"
    )
    values = {**dataclasses.asdict(profile_named("cpu")), "name": "mine_cpu", "measured_on": "6 CPU cores"}
    values["memory_bandwidth"] = 7e9
    del values["source"]
    MEASURED.parent.mkdir(parents=True)
    MEASURED.write_text(to_yaml(values, ["measured"]))
    found = profile_of(cfg)
    assert (found.name, found.memory_bandwidth) == ("mine_cpu", 7e9)
    assert found.source == "device=auto: conf/device/mine.yaml, measured on 6 CPU cores by trainwright profile"
    assert profile_of(compose("linear_regression", ["accelerator=cpu", "device=cpu"])).source == ""
    MEASURED.write_text(to_yaml({**values, "measured_on": "NVIDIA H200"}, ["elsewhere"]))
    assert "is of NVIDIA H200, this is 6 CPU cores; trainwright profile --overwrite" in profile_of(cfg).source
    MEASURED.write_text("memory_bytes: many\n")
    with pytest.raises(ValueError, match=r"device=auto: conf/device/mine.yaml cannot be used: .*memory_bytes=many"):
        profile_of(cfg)


def test_invalid_profile_is_refused() -> None:
    given = ["strategy=single", "device=h100", "device.efficiency=-1"]
    problems = checked(compose("linear_regression", given), "fit")[1]
    assert any("device=h100 cannot be used: device.efficiency=-1" in each for each in problems)

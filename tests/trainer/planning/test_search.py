"""What the planner finds possible, refuses, and ranks."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console

from tests.trainer.project import write_project
from trainwright.callbacks.throughput import Throughput
from trainwright.strategies.layout import Layout
from trainwright.trainer import machine
from trainwright.trainer.cli import main
from trainwright.trainer.compose import compose
from trainwright.trainer.doctor.profile import to_yaml
from trainwright.trainer.planning.cost import Cut
from trainwright.trainer.planning.facts import ModelFacts
from trainwright.trainer.planning.in_flight import in_flight, passes_of
from trainwright.trainer.planning.plan import Plan
from trainwright.trainer.planning.profiles import MEASURED, profile_from, profile_named, profile_of, profile_of_gpu
from trainwright.trainer.planning.search import plan
from trainwright.trainer.planning.table import print_plan
from trainwright.trainer.planning.time import bubble_of, collective, link_of
from trainwright.trainer.planning.without_memory import FactsError
from trainwright.trainer.run import plan as checked
from trainwright.trainer.worker import build_trainer


@cache
def planned(*words: str) -> Plan:
    return plan(compose(None, words))


# Size, devices, profile, precision, global batch, axes; who trained so.
PUBLISHED: dict[str, tuple[str, int, str, str, int, dict[str, int]]] = {
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    # (arXiv:2104.04473): table 1 has tensor 8 x pipeline 16 for 175 G parameters on 1024 A100 with a batch of 1536
    # (data 8), and tensor 8 x pipeline 64 for 1 T on 3072 with 3072 (data 6).
    "Megatron, 175 G": ("175b", 1024, "a100_80", "bf16-mixed", 1536, {"tensor": 8, "pipeline": 16, "context": 1}),
    "Megatron, 1 T": ("1t", 3072, "a100_80", "bf16-mixed", 3072, {"tensor": 8, "pipeline": 64, "context": 1}),
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: FSDP 8, TP 8, PP 8 with a batch of 256 and full
    # checkpointing, on H100 of 96 GB; the same without a pipeline is its 2D layout (table 4, of 70 G).
    "torchtitan, 405 G, 2D": ("405b", 512, "h100", "bf16-true", 256, {"tensor": 8, "pipeline": 1, "shard": 64}),
    "torchtitan, 405 G, 3D": ("405b", 512, "h100", "bf16-true", 256, {"tensor": 8, "pipeline": 8, "shard": 8}),
    # "The Llama 3 Herd of Models" (arXiv:2407.21783), table 4: TP 8, CP 1, PP 16, DP 128 and 2048 sequences of 8192;
    # section 3.3.2: gradients are accumulated and reduced in FP32.
    "Llama 3, 405 G": ("405b", 16384, "h100", "bf16-mixed", 2048, {"tensor": 8, "pipeline": 16, "context": 1}),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_layouts_are_possible_and_in_the_better_half(name: str) -> None:
    size, devices, device, precision, batch, axes = PUBLISHED[name]
    found = planned(
        "recipe=llama_3d", f"size={size}", f"devices={devices}", f"device={device}", f"precision={precision}",
        f"global_batch_size={batch}",
    )  # fmt: skip
    places = [i for i, each in enumerate(found.ranked) if axes.items() <= dataclasses.asdict(each.layout).items()]
    assert places, f"{axes} is not possible"
    assert places[0] < len(found.ranked) / 2, (places[0], len(found.ranked))


SMALL = ("recipe=llama_3d", "devices=8", "device=cpu", "accelerator=cpu", "global_batch_size=16")


def test_the_best_comes_first_and_each_layout_once() -> None:
    found = planned(*SMALL)
    seconds = [each.time.total for each in found.ranked]
    assert seconds == sorted(seconds)
    assert len({(each.layout, each.work.stage, each.strategy) for each in found.ranked}) == len(found.ranked)
    assert {each.strategy for each in found.ranked} >= {"ddp", "zero1", "zero2", "zero3", "hybrid"}
    for each in found.ranked:
        assert each.layout.world_size == 8
        assert each.work.micro_batch * each.work.parts * each.work.rounds * each.layout.data_ranks == 16


def test_what_is_possible_is_accepted_by_the_strategies() -> None:
    """The overrides of every layout pass all checks of a run."""
    found = planned(*SMALL)
    chosen = [*found.ranked[::9], *(each for each in found.ranked if each.work.has_pipeline)][:8]
    for each in chosen:
        cfg = compose(None, [*SMALL, *each.overrides])
        assert checked(cfg, "fit")[1] == [], each.overrides


def test_refusals_are_those_of_the_strategies() -> None:
    """What is refused is refused by a run of the same overrides, with the same words."""
    found = planned("recipe=llama_3d", "devices=24", "device=cpu", "accelerator=cpu", "global_batch_size=16")
    judged = [each for each in found.refused if each.kind in ("layout", "batch")]
    assert {each.kind for each in judged} == {"layout", "batch"}
    for each in judged[::3][:8]:
        words = [word for word in each.overrides if not word.startswith("micro_batch_size")] + [
            word for word in each.overrides if word.startswith("micro_batch_size")
        ]
        problems = checked(compose(None, ["recipe=llama_3d", "devices=24", "accelerator=cpu",
                                          "global_batch_size=16", *words]), "fit")[1]  # fmt: skip
        assert any(each.reason in problem for problem in problems), (each, problems)


def test_out_of_memory_says_what_is_needed_and_there() -> None:
    found = planned("recipe=gpt", "size=7b", "module.meta=true", "devices=2", "device=l40s", "precision=bf16-mixed")
    (ddp,) = (each for each in found.refused if each.what.startswith("ddp"))
    assert ddp.kind == "memory"
    assert "GiB a rank at the least (parameters 26.0, gradients 26.0, optimizer 52.0" in ddp.reason
    assert f"device=l40s has {0.92 * profile_named('l40s').memory_bytes / 2**30:.1f} GiB" in ddp.reason
    assert all(each.memory.total < 0.92 * found.profile.memory_bytes for each in found.ranked)


def test_one_device() -> None:
    found = planned("recipe=gpt", "device=cpu", "accelerator=cpu")
    assert [each.strategy for each in found.ranked] == ["single"]
    assert found.best is not None
    assert "strategy=single" in found.best.overrides


def test_more_memory_is_never_less_possible() -> None:
    words = [word for word in SMALL if not word.startswith("devices")]
    few = planned(*words, "devices=4", "device.memory_bytes=24000000")
    many = planned(*words, "devices=4")
    assert {each.title for each in few.ranked} < {each.title for each in many.ranked}
    assert {each.kind for each in few.refused} >= {"memory"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (4, 8)])
def test_passes_in_flight_are_those_of_torchs_order(schedule: str, ranks: int, parts: int) -> None:
    stages = 2 if schedule in ("interleaved_1f1b", "looped_bfs") else 1
    for rank in range(ranks):
        computed = in_flight(schedule, ranks, stages, parts, rank)
        if stages == 2:
            assert computed == max(each.live for each in passes_of(schedule, ranks, stages, parts, rank))
        assert computed == {"gpipe": parts, "1f1b": min(parts, ranks - rank)}.get(schedule, computed)


def test_seconds_of_collectives_and_bubbles() -> None:
    profile = profile_named("h100")
    within = link_of(profile, Layout(shard=2, tensor=8), "tensor")
    assert (within.ranks, within.bandwidth) == (8, 450e9)
    across = link_of(profile, Layout(shard=4, tensor=8), "state")
    assert across.bandwidth == 50e9, "one rank of a node sends over one card"
    whole = link_of(profile, Layout(shard=64), "state")
    assert whole.bandwidth == 400e9, "eight ranks of a node send over eight"
    sent, seconds = collective(whole, "all_gather", 64e9)
    assert sent == pytest.approx(63e9)
    assert seconds == pytest.approx(63e9 / 400e9 + 63 * whole.latency + whole.call)
    assert bubble_of("1f1b", 4, 1, 1.0, 2.0) == pytest.approx(9.0)
    assert bubble_of("interleaved_1f1b", 4, 3, 1.0, 2.0) == pytest.approx(3.0)
    assert bubble_of("zbv", 4, 2, 1.0, 2.0) == pytest.approx(1.5)
    assert bubble_of("1f1b", 1, 1, 1.0, 2.0) == 0.0


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


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        ((), None, None),
        ((), "Unheard-of 9000", None),
        ((), "NVIDIA H200", 66.9e12),
        (("precision=bf16-mixed",), "NVIDIA H200", 989.4e12),
        (("accelerator=cpu", "precision=16-mixed"), "NVIDIA H200", None),
        (("device=cpu",), None, 40e9),
        (("device=a100_80", "precision=16-mixed"), None, 312e12),
        (("monitor.throughput.peak_flops=7.0", "device=cpu"), None, 7.0),
    ],
)
def test_the_monitor_is_told_what_a_rank_could_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], gpu: str | None, expected: float | None
) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: int(gpu is not None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpu)
    usual = ["strategy=single", "devices=1", "accelerator=auto", "logger=csv", f"run_dir={tmp_path}"]
    callbacks = build_trainer(compose("linear_regression", [*usual, *words])).callbacks
    [told] = [each.peak_flops for each in callbacks if isinstance(each, Throughput)]
    assert told == expected


def test_auto_takes_what_was_measured_here_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_operations_cost_time_of_their_own() -> None:
    """On a core on top of computing; on a GPU only where starting them takes longer than computing."""
    words = ("recipe=gpt", "accelerator=cpu", "device=cpu", "global_batch_size=8", "micro_batch_size=1")
    free, usual, slow = (
        planned(*words, f"device.operation_seconds={seconds}").ranked[0].time.compute for seconds in (0, 1e-5, 1e-3)
    )
    assert usual - free == pytest.approx((slow - free) / 100)
    on_gpu = [
        planned("recipe=gpt", "accelerator=cpu", "device=h100", f"device.operation_seconds={seconds}")
        .ranked[0].time.compute
        for seconds in (0, 1e-12, 1e-3)
    ]  # fmt: skip
    assert on_gpu[0] == on_gpu[1] < on_gpu[2]


def test_a_profile_that_cannot_be_used_is_refused() -> None:
    given = ["strategy=single", "device=h100", "device.efficiency=-1"]
    problems = checked(compose("linear_regression", given), "fit")[1]
    assert any("device=h100 cannot be used: device.efficiency=-1" in each for each in problems)


def test_no_column_is_cut_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_plan(planned(*SMALL), console)
    text = console.file.getvalue()
    assert "…" not in text
    title = planned(*SMALL).ranked[0].title
    assert title in text, "a row is one line"
    assert "activations  buffers" in text


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    return write_project(tmp_path)


def test_the_command(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config-dir", str(conf), "recipe=mine", "devices=4", "device=cpu"]
    assert main([*words, "--html", "plan.html"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("4 x cpu", "layouts possible", "what to type for the first:", "strategy="):
        assert part in out
    page = Path("plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "http" not in page, "it needs nothing from anywhere"
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == document["ranked"][0]
    assert document["best"]["bytes"]["total"] > 0
    assert not Path("runs").exists()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["recipe=gpt", "device=h10"], "did you mean"),
        (["recipe=gpt", "-m"], "--multirun with plan"),
        (["recipe=gpt", "device=h100", "device.memory_bytes=0"], "device.memory_bytes=0"),
    ],
)
def test_refused(words: list[str], part: str, conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert part in capsys.readouterr().err


def test_only_plan_takes_its_options(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "recipe=gpt", "--prove"]) == 2
    assert "--prove: only plan takes it" in capsys.readouterr().err


class NeedsTrainer(pl.LightningModule):
    """Reads in its step what only a run has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).mean() * self.trainer.max_steps


def test_a_module_that_needs_a_trainer_says_so() -> None:
    with torch.device("meta"):
        module = NeedsTrainer()
    facts = ModelFacts(module, torch.zeros(2, 4), 2)
    with pytest.raises(FactsError, match="training_step of NeedsTrainer cannot be run without a Trainer"):
        facts.of(Cut())

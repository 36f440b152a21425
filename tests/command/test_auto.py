"""Choices of `strategy=auto` and `micro_batch_size=auto`."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from trainwright import compose, run
from trainwright.checkpoint.foreign.export import export
from trainwright.command import auto
from trainwright.command.run import choose, plan, prepare
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import Launcher
from trainwright.launch.ranks.forkserver import call_in_subprocess
from trainwright.launch.recovery.sizes import feasible
from trainwright.planning.search.auto import _cut
from trainwright.strategies.compose.engine_options import engine_options_of
from trainwright.strategies.compose.hybrid_options import HybridOptions
from trainwright.strategies.compose.world import options_of

TINY = [
    "module.config.layers=4", "module.config.dim=16", "module.config.heads=2", "module.config.seq_len=16",
    "callbacks.sample=null", "logger=csv", "trainer.val_check_interval=null", "trainer.limit_val_batches=0",
    "accelerator=cpu",
]  # fmt: skip


def composed(*words: str) -> DictConfig:
    return compose("gpt", [*TINY, *words])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in this process, which has all imports."""
    monkeypatch.setattr(auto, "call_in_subprocess", lambda function, *arguments: function(*arguments))


def decided(cfg: DictConfig) -> DictConfig:
    planned, problems = plan(cfg, "fit")
    assert not problems
    resolved = OmegaConf.create(OmegaConf.to_container(planned, resolve=True))
    assert isinstance(resolved, DictConfig)
    return resolved


def without_directory(cfg: DictConfig) -> str:
    text = OmegaConf.to_yaml(cfg, resolve=True)
    return text.replace(str(cfg.run_dir), "")


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]


def weights(run_dir: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint by name."""
    [checkpoint] = (run_dir / "checkpoints").iterdir()
    file = tmp_path / f"{run_dir.name}.safetensors"
    export(str(checkpoint), file, "safetensors")
    return load_file(file)


def test_auto_equals_its_explicit_overrides(tmp_path: Path) -> None:
    words = ["devices=4", "max_steps=4", "trainer.log_every_n_steps=1"]
    chosen = run(composed(*words, "strategy=auto", f"run_dir={tmp_path / 'auto'}")).run_dir
    document = json.loads((chosen / "plan.json").read_text())
    by_hand = document["lines"][2].removeprefix("the same by hand: ").split()

    again = run(composed(*words, *by_hand, f"run_dir={tmp_path / 'hand'}")).run_dir
    first, second = (OmegaConf.load(folder / "config.yaml") for folder in (chosen, again))
    assert isinstance(first, DictConfig)
    assert isinstance(second, DictConfig)
    assert without_directory(first) == without_directory(second)
    assert len(losses(chosen)) == 4
    assert losses(chosen) == losses(again)

    # The first steps were held against the plan; of the run that had none nothing was.
    assert not (again / "plan.json").exists()
    records = [json.loads(line) for line in (chosen / "monitor" / "rank_0.jsonl").read_text().splitlines()]
    assert [each["text"] for each in records if each.get("what") == "plan"] == [document["measured"]["line"]]
    measured, predicted = document["measured"], document["chosen"]["bytes_at_step"]
    assert measured["seconds"]["step"] > 0
    assert measured["steps"] == 2
    for kind in ("parameters", "gradients", "optimizer"):
        assert measured["bytes"][kind] == pytest.approx(predicted[kind], rel=0.05)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_typed_options_are_kept(tmp_path: Path) -> None:
    free = decided(composed("strategy=auto", "devices=4", f"run_dir={tmp_path}"))
    assert free.micro_batch_size != 2  # that of the recipe is no wish
    assert free.global_batch_size == 32

    stage = composed("strategy=auto", "devices=2", "strategy.stage=2", "strategy.bucket_mib=3", f"run_dir={tmp_path}")
    zero = decided(stage).strategy
    assert (zero.stage, zero.bucket_mib) == (2, 3)

    typed = ["micro_batch_size=2", "strategy.pipeline=2", "strategy.stage=1", "strategy.activation_checkpointing=full"]
    cfg = decided(composed("strategy=auto", "devices=4", *typed, f"run_dir={tmp_path}"))
    assert (cfg.micro_batch_size, cfg.global_batch_size) == (2, 32)
    assert (cfg.strategy.pipeline, cfg.strategy.stage) == (2, 1)
    assert cfg.strategy.activation_checkpointing == "full"


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_bucket_size_is_optimal_for_the_links(tmp_path: Path) -> None:
    links = ["device=cpu", "device.devices_per_node=2", "device.within.latency=1e-2", "device.within.bandwidth=1e6"]
    words = ["strategy=auto", "devices=2", "strategy.stage=0", "strategy.replicate=2", *links, f"run_dir={tmp_path}"]
    cfg = decided(composed(*words, "module.config.dim=256"))
    assert cfg.strategy._target_.endswith("DDPStrategy")
    numbers = sum(p.numel() for p in instantiate(cfg.module, _convert_="all").parameters())
    # k buckets cost k A + B / k: A the latency of an all-reduce of two ranks (2 messages), B of sending all once.
    pieces = math.sqrt(4 * numbers / 1e6 / 2e-2)
    assert cfg.strategy.bucket_mib == pytest.approx(4 * numbers / pieces / 2**20, rel=0.01)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_chosen_layout_can_shrink(tmp_path: Path) -> None:
    words = ["strategy=auto", "strategy.shard=2", "devices=4", "launch.min_devices=2", f"run_dir={tmp_path}"]
    cfg = decided(composed(*words, "launch.max_restarts=1"))
    assert feasible(cfg, "fit", (3, 2), None) == 2


@pytest.fixture
def searches(here: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the queries of the planner."""
    found: list[dict[str, Any]] = []
    search = auto._search

    def remembering(asked: dict[str, Any], limits: Any) -> dict[str, Any]:
        found.append(asked)
        return search(asked, limits)

    monkeypatch.setattr(auto, "_search", remembering)
    return found


@pytest.mark.thorough
def test_sweep_job_is_planned_once(searches: list[dict[str, Any]], tmp_path: Path) -> None:
    """The choice made when a sweep checks all jobs is the one that runs."""
    cfg = composed("strategy=auto", "devices=2", f"run_dir={tmp_path / 'job'}")
    choice, problems = choose(cfg, "fit")
    assert not problems
    prepared = prepare(cfg, "fit", choice=choice)
    assert len(searches) == 1
    document = json.loads((tmp_path / "job" / "plan.json").read_text())
    assert f"micro_batch_size={prepared.micro_batch_size}" in document["explicit"]
    explicit = composed(*document["explicit"], "devices=2", f"run_dir={tmp_path / 'hand'}")
    assert without_directory(prepare(explicit, "fit")) == without_directory(prepared)


@pytest.mark.thorough
def test_planner_gets_the_nodes_of_the_launcher(searches: list[dict[str, Any]], tmp_path: Path) -> None:
    words = ["strategy=auto", "launch=torchrun", "devices=auto", "device=h100", f"run_dir={tmp_path}"]
    cfg, problems = plan(composed(*words), "fit", Launcher("torchrun", rank=0, world_size=4, local_world_size=2))
    assert not problems
    assert (cfg.devices, cfg.nodes) == (2, 2)
    assert [(asked["devices"], asked["nodes"]) for asked in searches] == [(2, 2)]


@pytest.mark.thorough
def test_resumed_run_may_get_another_layout(tmp_path: Path) -> None:
    """From one process to two shards, with the same training result."""
    words = ["trainer.log_every_n_steps=1", "strategy=auto", "global_batch_size=8"]
    whole = run(composed(*words, "max_steps=4", f"run_dir={tmp_path / 'whole'}")).run_dir
    fresh = [*words, "max_steps=2", "resume=auto", f"run_dir={tmp_path / 'run'}"]
    begun = run(composed(*fresh)).run_dir
    assert losses(begun) == losses(whole)[:2]
    again = [*words, "max_steps=4", "devices=2", "strategy.stage=3", f"run_dir={tmp_path / 'run'}"]
    gone_on = run(composed(*again, "ckpt_path=last")).run_dir
    first, second = (OmegaConf.load(gone_on / name) for name in ("config.1.yaml", "config.yaml"))
    assert [each.strategy._target_.rsplit(".", 1)[-1] for each in (first, second)] == [
        "SingleDeviceStrategy", "ZeroStrategy"
    ]  # fmt: skip
    torch.testing.assert_close(*(weights(folder, tmp_path) for folder in (gone_on, whole)), rtol=1e-4, atol=1e-5)
    # The samples of a step are those of the checkpoint where nobody types them.
    cfg, problems = plan(composed(*again[1:2], "devices=2", f"run_dir={gone_on}", "global_batch_size=null",
                                  "max_steps=6", "resume=auto"), "fit")  # fmt: skip
    assert not problems
    assert cfg.global_batch_size == 8


REFUSED: list[tuple[Sequence[str], str]] = [
    (["strategy=auto", "devices=4", "strategy.tensor=3"], "3 does not divide 4 ranks"),
    (
        ["strategy=auto", "strategy.stage=7"],
        "strategy.stage=7: must be a whole number of at least 0 and at most 3",
    ),
    (["strategy=auto", "strategy.activation_checkpointing=selective"], "allowed: none, full"),
    (["strategy=auto", "strategy.shard=-1"], "strategy.shard=-1: must be a whole number of at least 1, or null to"),
    (["strategy=auto", "data.batch_size=4"], "does not read micro_batch_size"),
    (["strategy=auto", "global_batch_size=null", "micro_batch_size=null"], "type global_batch_size=32"),
    (["strategy=auto", "devices=2", "micro_batch_size=5"], "no layout of 2 rank(s) with micro_batch_size=5"),
    (["strategy=auto", "devices=0", "max_steps=-1"], "devices=0: must be a whole number of at least 1"),
    (["strategy=auto", "module._target_=nowhere.Module"], "nowhere"),
    (["micro_batch_size=most"], "must be a whole number of at least 1 or auto, or null"),
    (["micro_batch_size=auto", "strategy=local_sgd", "devices=2"], "the memory of its ranks cannot be predicted"),
    (["micro_batch_size=auto", "global_batch_size=null"], "type global_batch_size=32"),
    (["micro_batch_size=auto", "device=cpu", "device.memory_bytes=100000"], "even 1 sample(s) need"),
]


@pytest.mark.sample(3)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_refused(words: Sequence[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(composed(*words, f"run_dir={tmp_path / 'run'}"), "fit")
    assert reason in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["strategy=zero2", "devices=2"], ["strategy=pipeline", "devices=2"]])
@pytest.mark.usefixtures("here")
def test_largest_fitting_micro_batch(words: Sequence[str], tmp_path: Path) -> None:
    device = ["device=cpu", "device.memory_bytes=4000000"]
    given = ["micro_batch_size=auto", "global_batch_size=64", *words, f"run_dir={tmp_path}"]
    cfg = prepare(composed(*given, *device), "fit")
    document = json.loads((tmp_path / "plan.json").read_text())
    chosen = document["chosen"]
    assert chosen["micro_batch_size"] == cfg.micro_batch_size == cfg.data.batch_size
    assert chosen["micro_batch_size"] * chosen["accumulation"] * cfg.devices in (64, 128)
    assert chosen["bytes"]["total"] <= document["usable_bytes"] < document["next"]["bytes"]
    assert document["next"]["micro_batch_size"] > cfg.micro_batch_size


def candidate(strategy: str, seconds: float, **layout: int) -> dict[str, Any]:
    plain = {"offload": "none", "activation_checkpointing": "none"}
    return {"strategy": strategy, "layout": layout, "seconds": {"step": seconds}, **plain}


def test_simplest_of_equally_fast_layouts() -> None:
    fastest, alike = candidate("zero3", 1.0, shard=4), candidate("ddp", 1.02, replicate=4)
    slow = candidate("zero1", 1.1)
    assert auto._order([fastest, alike, slow]) == [alike, fastest, slow]
    assert auto._order([fastest, slow]) == [fastest, slow]


@pytest.mark.parametrize("given", [True, False])
def test_prediction_uses_the_balance_of_the_context_axis(given: bool) -> None:
    options = options_of({"_target_": HybridOptions._target_, "context": 2, "balance": given})
    assert _cut(engine_options_of(options), Layout(context=2), "none").balance is given


def _refuse() -> None:
    raise ConfigError(["one", "two"])


def _fail() -> None:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("function", "problems"), [(_refuse, ("one", "two")), (_fail, ("_fail failed: KeyError: 'gone'",))]
)
def test_subprocess_errors_are_raised(function, problems):
    with pytest.raises(ConfigError) as error:
        call_in_subprocess(function)
    assert error.value.problems == problems

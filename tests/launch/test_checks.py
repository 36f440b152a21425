"""Options of strategies, compression, guards and recovery that are refused before a process starts."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.command.project import problems_of
from trainwright.callbacks.guard.options import guard_refusals
from trainwright.command.auto import ways_to_send
from trainwright.command.schema.compose import compose
from trainwright.core.layout import Layout
from trainwright.launch.checks.check_run import compression_of, compression_refusals, with_compression
from trainwright.launch.recovery.check_recovery import recovery_problems
from trainwright.launch.worker import build_trainer
from trainwright.strategies.averaging.compression.codecs import Int8
from trainwright.strategies.averaging.compression.options import CompressionChoice, compressor_names
from trainwright.strategies.compose.check_strategy import strategy_problems
from trainwright.strategies.compose.world import options_of
from trainwright.strategies.contract.options import PlannedRun
from trainwright.strategies.data.options import DDPOptions, ZeroOptions
from trainwright.strategies.parameter_server.options import ParameterServerOptions

SERVER = ("recipe=digits", "strategy=parameter_server", "devices=2", "accelerator=cpu")
LEASING = ("strategy.consistency=async", "strategy.leases=at_most_once", "monitor=none")
HYBRID = ("recipe=wide_deep", "strategy=hybrid", "devices=2", "accelerator=cpu")
TABLES = "strategy.placement={embedding.*:parameter_server,*:shard}"
REPLICATED = "strategy.placement={embedding.*:parameter_server,*:replicate}"
OWN = "strategy.server_ranks=own"


@pytest.mark.sample(2)
@pytest.mark.parametrize("words", [
    (*SERVER, *LEASING, "trainer.limit_train_batches=10"),
    (*HYBRID, TABLES, "strategy.table_servers=2", "strategy.stage=2"),
    (*HYBRID, REPLICATED, "strategy.shard=1", "strategy.replicate=-1", "module.sparse=true"),
    *((*SERVER, f"compression={name}") for name in ("fp16", "bf16", "topk", "onebit", "none")),
])  # fmt: skip
def test_accepted(words: tuple[str, ...]) -> None:
    assert problems_of(*words) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(("words", "expected"), [
    ((*SERVER, "strategy.leases=twice"), "leases=twice: unknown; allowed: none, at_least_once, at_most_once"),
    ((*SERVER, "strategy.leases=at_least_once"), "type strategy.consistency=async"),
    (
        (*SERVER, "strategy.leases=at_least_once", "strategy.consistency=ssp", "strategy.staleness=3", "monitor=none"),
        "no worker could read over strategy.staleness=3 chunks more than the slowest",
    ),
    ((*SERVER, *LEASING, "trainer.val_check_interval=5"), "type trainer.val_check_interval=1.0"),
    ((*SERVER, *LEASING, "trainer.limit_train_batches=0.5"), "type a whole number"),
    ((*SERVER, *LEASING, "trainer.data_partition=hash"), "type trainer.data_partition=interleave"),
    ((*SERVER, *LEASING, "trainer.uneven_steps=true"), "type trainer.uneven_steps=false"),
    ((*SERVER, *LEASING, "checkpoint.last.every_n_steps=5"), "type checkpoint.last.every_n_epochs=1"),
    ((*SERVER, "compression=powersgd"), "fp16, bf16, int8, topk, onebit, or none; type compression=int8"),
    ((*SERVER, OWN, "strategy.servers=2"), "strategy.servers=2 with strategy.server_ranks=own on 2 rank(s): no rank"),
    ((*SERVER, "compression=int8", "strategy.compression=topk"), "compression=int8 with strategy.compression=topk"),
    ((*SERVER, "compression=topk", "compression.ratio=2.0"), "compression.ratio=2.0"),
])  # fmt: skip
def test_refused_once(words: tuple[str, ...], expected: str) -> None:
    [problem] = problems_of(*words)
    assert expected in problem


@pytest.mark.sample(3)
@pytest.mark.parametrize(("words", "expected"), [
    (["strategy.placement={embedding.*:server}"], "server: unknown; allowed are parameter_server, shard, replicate"),
    (["strategy.placement={*:shard}"], "assigns nothing to parameter_server"),
    (["strategy.placement={*:parameter_server}"], "type strategy=parameter_server"),
    ([REPLICATED], "type strategy.shard=1 strategy.replicate=-1"),
    (["strategy.placement={e*:parameter_server,d*:shard,*:replicate}"], "both shard and replicate"),
    ([TABLES, "strategy.table_servers=3"], "table_servers=3 with 2 rank(s)"),
    ([TABLES, "strategy.table_servers=0"], "whole number of at least 1"),
    (["strategy.table_servers=2"], "without strategy.placement has no effect"),
    ([TABLES, "compression=int8", "strategy.stage=2"], "compression=int8"),
    ([TABLES, "launch=resilient", "launch.recovery=replicas"], "type launch.recovery=restart"),
    ([TABLES, "strategy=local_sgd"], "placement with local updates"),
    (["strategy=parameter_server", "monitor=norms"], "monitor.norms"),
])  # fmt: skip
def test_refused(words: list[str], expected: str) -> None:
    found = problems_of(*HYBRID, *words)
    assert any(expected in each for each in found), found


def test_dedicated_servers_do_not_count_as_training_ranks() -> None:
    words = (OWN, "devices=4", "micro_batch_size=16", "global_batch_size=64", "inject=[kill(rank=3,at_step=1)]")
    batch, fault = problems_of(*SERVER, *words)
    assert "3 data rank" in batch
    assert "rank 3 only serves (strategy.server_ranks=own)" in fault
    assert "type one below 3" in fault


# ---- compression -----------------------------------------------------------------------------------------------------

DDP = "trainwright.strategies.data.ddp.DDPStrategy"
ZERO = "trainwright.strategies.data.zero.ZeroStrategy"
TWO = Layout(replicate=2)


def compression_problems(
    compression: dict[str, Any],
    layout: Layout | None = TWO,
    target: str = DDP,
    optimizer: str = "AdamW",
    precision: str = "32",
) -> list[str]:
    given: Any = {"compression": compression, "strategy": {"_target_": target}, "precision": precision}
    cfg = OmegaConf.create({**given, "optimizer": {"_target_": f"torch.optim.{optimizer}"}})
    options = with_compression(cfg, options_of(cfg.strategy))
    refused = list(compression_refusals(cfg, options))
    return refused if options is None else [*refused, *strategy_problems(cfg, PlannedRun(cfg, layout=layout), options)]


@pytest.mark.parametrize("arguments", [
    ({"name": "none"}, Layout(), "other.Strategy"),
    *(({"name": name},) for name in compressor_names()),
    ({"name": "topk"}, TWO, DDP, "SGD", "16-mixed"),
    ({"name": "powersgd", "sends": "steps"},),
    ({"name": "topk"}, Layout(replicate=2, shard=2), ZERO),
    ({"name": "topk"}, None),
])  # fmt: skip
def test_accepted_compression(arguments: Any) -> None:
    assert compression_problems(*arguments) == []


@pytest.mark.parametrize(("arguments", "expected"), [
    (({"name": "topp"},), "did you mean topk?"),
    (({"name": "topk", "ratio": 2.0},), "compression.ratio=2.0: must be a finite number above 0 and at most 1"),
    (({"name": "topk"}, Layout(shard=4), ZERO), "type strategy.replicate=2 (or more)"),
    (({"name": "bf16"}, Layout(), DDP), "compression=bf16 with replicate=1"),
    (({"name": "bf16"}, Layout(), "other.Strategy"), "only strategies built on this project"),
    (({"name": "onebit"}, TWO, DDP, "SGD"), "type optimizer=adamw, or compression=topk"),
    (({"name": "onebit"}, TWO, DDP, "AdamW", "16-mixed"), "type precision=bf16-mixed"),
    (({"name": "topk", "sends": "steps"}, TWO, DDP, "SGD"), "or compression.sends=auto"),
    (({"name": "topk", "sends": "steps", "warmup_steps": 0},), "Adam has no variance before a warm-up"),
])  # fmt: skip
def test_refused_compression(arguments: Any, expected: str) -> None:
    [problem] = compression_problems(*arguments)
    assert expected in problem


def test_parameter_servers_ignore_the_default_warmup_and_refuse_a_typed_one() -> None:
    cfg = OmegaConf.create({"compression": {"name": "topk", **CompressionChoice("topk").all_options}})
    assert compression_of(cfg, DDPOptions())["warmup_steps"] == 100
    assert compression_of(cfg, ParameterServerOptions()).keys() == {"name", "ratio", "values"}
    typed = {"name": "topk", "warmup_steps": 7}
    assert compression_of(OmegaConf.create({"compression": typed}), ParameterServerOptions()) == typed
    [problem] = ParameterServerOptions(compression=typed).problems()
    assert "compressed from the first one on" in problem


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", compressor_names())
def test_compression_groups_have_the_default_options(name: str) -> None:
    cfg = compose("digits", [f"compression={name}"])
    assert OmegaConf.to_container(cfg.compression) == {"name": name, **CompressionChoice(name).all_options}


def test_parameter_servers_push_with_the_codec_of_the_group(tmp_path: Path) -> None:
    words = (*SERVER, "logger=csv", "compression=int8", "compression.block=64", f"run_dir={tmp_path}")
    codec = build_trainer(compose(None, words)).strategy._factory.codec
    assert isinstance(codec, Int8)
    assert codec.row_bytes(640) == Int8(block=64).row_bytes(640) != Int8(256).row_bytes(640)


def test_a_progress_bar_of_the_recipe_replaces_the_default(tmp_path: Path) -> None:
    bar = "lightning.pytorch.callbacks.RichProgressBar"
    words = ("recipe=digits", "accelerator=cpu", f"run_dir={tmp_path}", f"+callbacks.bar._target_={bar}")
    assert type(build_trainer(compose(None, words)).progress_bar_callback).__name__ == "RichProgressBar"


# ---- loss guards -----------------------------------------------------------------------------------------------------

GUARD = {"_target_": "trainwright.callbacks.guard.loss_guard.LossGuard", "policy": "rollback"}
SWA = {"swa": {"_target_": "a.StochasticWeightAveraging"}}


@pytest.mark.parametrize(("guard", "callbacks", "optimizer", "expected"), [
    ({}, {}, "AdamW", []),
    ({"loss": GUARD}, {}, "AdamW", []),
    ({"loss": None}, {"own": {"_target_": "package.Other", "policy": "x"}}, "AdamW", []),
    ({"loss": {**GUARD, "policy": "skip"}}, SWA, "AdamW", []),
    ({"loss": {**GUARD, "policy": "again"}}, {}, "AdamW", ["guard.loss.policy=again: unknown; allowed: skip,"]),
    ({"loss": {**GUARD, "keep_snapshots": 0}}, {}, "AdamW", ["guard.loss.keep_snapshots=0: must be a whole"]),
    ({"loss": GUARD}, {"mine": GUARD}, "AdamW", ["guard.loss and callbacks.mine are both a LossGuard"]),
    ({"loss": GUARD}, {}, "LBFGS", ["guard.loss with optimizer LBFGS"]),
    ({"loss": GUARD}, SWA, "AdamW", ["type guard=skip"]),
])  # fmt: skip
def test_guards(guard: dict[str, Any], callbacks: dict[str, Any], optimizer: str, expected: list[str]) -> None:
    cfg = {"guard": guard, "callbacks": callbacks, "optimizer": {"_target_": f"torch.optim.{optimizer}"}}
    found = guard_refusals(OmegaConf.create(cfg))
    assert [part in problem for part, problem in zip(expected, found, strict=True)] == [True] * len(expected), found


# ---- averaging over replicas and prefetching -------------------------------------------------------------------------


def communication_problems(
    layout: Layout | None, compression: str = "none", launch: dict[str, Any] | None = None, **given: Any
) -> list[str]:
    options = ZeroOptions(**{"stage": 2, "compression": compression, **given})
    launch = {"recovery": "restart", "min_devices": None, **(launch or {})}
    cfg = OmegaConf.create({"precision": "32-true", "compression": {"name": compression}, "launch": launch})
    found = [*options.problems(), *options.run_problems(PlannedRun(cfg, layout=layout, devices=4))]
    return [*found, *([] if layout is None else options.layout_problems(layout))]


EIGHT = Layout(replicate=8)


@pytest.mark.parametrize(("layout", "options", "parts"), [
    (EIGHT, {"average_by": "hierarchical"}, []),
    (Layout(replicate=4), {"average_by": "hierarchical", "ranks_per_node": 2}, []),
    (None, {"average_by": "hierarchical"}, []),
    (Layout(shard=4), {"stage": 3, "prefetch": 2}, []),
    (Layout(), {"stage": 3, "prefetch": 2}, []),  # a single rank
    (Layout(replicate=4), {"average_by": "hierarchical"}, ["one node holds all", "strategy.ranks_per_node"]),
    (Layout(shard=8), {"average_by": "reduce_scatter"}, ["there is only one", "strategy.replicate=2"]),
    (EIGHT, {"average_by": "tree"}, ["strategy.average_by=tree", "all_reduce, reduce_scatter"]),
    (EIGHT, {"average_by": "hierarchical", "compression": "int8"}, ["compression=int8", "compression=none"]),
    (EIGHT, {"average_by": "reduce_scatter", "launch": {"recovery": "replicas"}}, ["launch.recovery=restart"]),
    (EIGHT, {"average_by": "hierarchical", "launch": {"min_devices": 2}}, ["min_devices=2", "unequal numbers"]),
    (Layout(shard=8), {"prefetch": 2}, ["stage 2 has no effect", "strategy.stage=3"]),
    (EIGHT, {"prefetch": 2, "stage": 3}, ["shard=1 has no effect", "strategy.shard=2"]),
])  # fmt: skip
def test_communication_options(layout: Layout | None, options: dict[str, Any], parts: list[str]) -> None:
    found = communication_problems(layout, **options)
    assert len(found) == bool(parts), found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize(("asked", "launch", "expected"), [
    ({}, {}, ["strategy.average_by=hierarchical", "strategy.prefetch=3"]),
    ({"average_by": "all_reduce", "prefetch": 0}, {}, ["strategy.average_by=all_reduce", "strategy.prefetch=0"]),
    ({}, {"min_devices": 2}, ["strategy.prefetch=3"]),
])  # fmt: skip
def test_typed_communication_options_override_the_planner(asked, launch, expected):
    launch = {"recovery": "restart", "min_devices": None, **launch}
    strategy = {"average_by": None, "prefetch": None, **asked}
    cfg = OmegaConf.create({"strategy": strategy, "compression": {"name": "none"}, "launch": launch})
    chosen = {"average_by": "hierarchical", "prefetch": 3, "strategy": "hybrid", "stage": 3, "layout": {"replicate": 4}}
    assert list(ways_to_send(cfg, chosen)) == expected


# ---- recovery --------------------------------------------------------------------------------------------------------

LAUNCH: dict[str, Any] = {"recovery": "replicas", "max_restarts": None, "min_devices": None, "spares": 1, "mtbf": 3.0}


@pytest.mark.parametrize(("launch", "given", "expected"), [
    ({}, {}, []),
    ({"recovery": "restart", "spares": 0}, {"layout": Layout(shard=2)}, []),
    ({}, {"has_launcher": True}, ["under a launcher"]),
    ({}, {"verb": "validate"}, ["only fit can recover"]),
    ({"max_restarts": 0}, {}, ["launch=resilient"]),
    ({"min_devices": 1}, {}, ["lost ranks are replaced"]),
    ({}, {"layout": Layout(shard=2)}, ["which has only one replica"]),
    ({"recovery": "restart"}, {}, ["leave launch.spares out"]),
])  # fmt: skip
def test_recovery_by_replicas(launch: dict[str, Any], given: dict[str, Any], expected: list[str]) -> None:
    given = {"verb": "fit", "layout": Layout(replicate=3), "has_launcher": False, **given}
    found = recovery_problems(OmegaConf.create({"launch": {**LAUNCH, **launch}}), options=DDPOptions(), **given)
    assert [part in problem for part, problem in zip(expected, found, strict=True)] == [True] * len(expected), found


@pytest.mark.parametrize(("strategy", "verb", "launch", "expected"), [
    ({"servers": 1}, "fit", {}, (1, 2)),
    ({"servers": 2}, "fit", {"recovery": "auto"}, (2,)),
    ({"servers": 1, "server_ranks": "own"}, "fit", {}, (1,)),
    ({"servers": 1}, "fit", {"recovery": "restart"}, ()),
    ({"servers": 1}, "validate", {"recovery": "auto"}, ()),
    ({"servers": 1}, "fit", {"recovery": "auto", "max_restarts": 0}, ()),
    ({"stage": 3}, "fit", {"recovery": "auto"}, ()),
    ({"stage": 3}, "fit", {}, "strategy=parameter_server"),
    ({"servers": 3}, "fit", {}, "every rank holds a server"),
    ({"servers": 2, "server_ranks": "own"}, "fit", {}, "only one worker"),
    ({"servers": 1}, "fit", {"max_restarts": 0}, "launch=resilient"),
    ({"servers": 1}, "fit", {"spares": 1}, "leave launch.spares out"),
])  # fmt: skip
def test_recovery_by_rejoining(strategy: dict[str, Any], verb: str, launch: dict[str, Any], expected: Any) -> None:
    """On three ranks: the ranks that may be lost, or the problem."""
    given = {**LAUNCH, "recovery": "rejoin", "spares": 0, **launch}
    cfg = OmegaConf.create({"launch": given, "strategy": strategy, "devices": 3})
    options = ParameterServerOptions(**strategy) if "servers" in strategy else ZeroOptions(**strategy)
    found = recovery_problems(cfg, verb, options, None, False)
    if isinstance(expected, str):
        assert expected in "".join(found)
        assert len(found) == 1
    else:
        assert (found, PlannedRun(cfg, verb).replaceable_ranks(options)) == ([], expected)

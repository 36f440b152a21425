"""What is impossible about local updates (`strategy=local_sgd|diloco`), as far as it is known before a start."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import class_of
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.options import OFF as UNCOMPRESSED
from trainwright.strategies.contract.communication.options import OFF, chosen_already, replicas_step_alone
from trainwright.strategies.local_updates.rules import (
    MANUAL_OPTIMIZATION,
    averaging_callback_problem,
    compressed_parameters_problem,
    fragment_problem,
    local_update_problems,
    sync_batchnorm_problem,
)

_PREFIX = "strategy."
# Lightning's; their subclasses are refused by the ranks.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
_LOCAL_SGD, _DILOCO = "LocalSGDStrategy", "DiLoCoStrategy"
_NAMES = {_LOCAL_SGD: "local_sgd", _DILOCO: "diloco"}


def local_update_refusals(cfg: DictConfig, verb: str, layout: Layout | None) -> list[str]:
    """What speaks against local updates in a resolved configuration; empty where another strategy is chosen.

    Args:
        cfg: resolved.
        verb: fit, validate, test or predict.
        layout: closed; None if the layout is refused anyway.
    """
    if class_of(cfg.strategy) not in (_LOCAL_SGD, _DILOCO):
        return []
    plain: Any = OmegaConf.to_container(cfg.strategy)
    problems = local_update_problems(_ours(plain), _PREFIX)
    if plain.get("communication", OFF) != OFF:
        problems.append(chosen_already(plain["communication"]))
    if plain.get("average_by"):
        problems.append(replicas_step_alone(plain["average_by"]))
    if verb == "fit":
        problems += [*_layout_problems(cfg, layout), *_compression_problems(cfg), *_beside(cfg)]
    return problems


def difference_from_one_process(cfg: DictConfig, steps: int) -> str | None:
    """Why the first steps are not those of one process, where that is known beforehand; None if it is not.

    Args:
        cfg: as it was composed.
        steps: how many steps are compared.
    """
    strategy, name = cfg.strategy, class_of(cfg.strategy)
    if name not in (_LOCAL_SGD, _DILOCO) or strategy.warmup_steps >= steps:
        return None
    wanted: dict[str, Any] = {"sync_every": 1}
    if name == _DILOCO:
        wanted |= {"outer_lr": 1, "outer_momentum": 0, "outer_nesterov": False, "compression": None}
    if cfg.compression.name == UNCOMPRESSED and all(strategy.get(key) == value for key, value in wanted.items()):
        return None
    typed = " ".join(f"{_PREFIX}{key}={_typed(value)}" for key, value in wanted.items())
    return (
        f"strategy={_NAMES[name]} with {_PREFIX}sync_every={strategy.sync_every}: replicas that step by themselves do "
        f"not train as one process does. What can be compared is {typed} with an SGD, or steps with averaged "
        f"gradients: {_PREFIX}warmup_steps={steps} (or more)"
    )


def _typed(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def local_update_refusals_of_module(cfg: DictConfig, verb: str) -> list[str]:
    """What speaks against local updates of the module of a configuration. Imports torch and builds it without memory.

    A module that cannot be built so is left to the ranks, which ask the same questions.
    """
    if class_of(cfg.strategy) not in (_LOCAL_SGD, _DILOCO) or verb != "fit" or "_target_" not in cfg.module:
        return []
    from trainwright.strategies.compose.check_layout import meta_module

    module = meta_module(cfg)
    if module is None:
        return []
    problems = [] if module.automatic_optimization else [f"{type(module).__name__}: {MANUAL_OPTIMIZATION}"]
    if cfg.strategy.get("fragments", 1) > 1:
        from trainwright.strategies.plan.blocks import find_blocks

        patterns = cfg.strategy.get("blocks")
        try:
            blocks = len(find_blocks(module, None if patterns is None else list(patterns)))
        except ValueError:
            return problems  # said of the patterns elsewhere
        problem = fragment_problem(cfg.strategy.fragments, blocks, _PREFIX)
        problems += [problem] if problem else []
    return problems


def _ours(plain: dict[str, Any]) -> dict[str, Any]:
    """Options of the strategy; a compressor of a local SGD is judged for itself."""
    if plain["_target_"].endswith(_LOCAL_SGD):
        return {key: value for key, value in plain.items() if key != "compression"}
    return plain


def _layout_problems(cfg: DictConfig, layout: Layout | None) -> Iterator[str]:
    if layout is None:
        return
    if layout.replicate == 1:
        others = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "one rank"
        yield (
            f"strategy.replicate=1 of {layout.world_size} rank(s) ({others}): there are no replicas to bring together; "
            "type devices=2 or more (with strategy.replicate=-1), or strategy=ddp (or hybrid) without local updates"
        )
    if class_of(cfg.strategy) == _LOCAL_SGD and layout.replicate == layout.world_size:
        yield from (
            f"{key}: ReplicaCheck compares what ranks hold alike, and replicas of local_sgd that are one rank each "
            "hold nothing alike between two averages; type monitor=default, or strategy=diloco, whose common "
            "parameters it compares"
            for key, value in _callbacks(cfg)
            if class_of(value) == "ReplicaCheck"
        )


def _compression_problems(cfg: DictConfig) -> Iterator[str]:
    """What speaks against the group `compression`, which says how outer gradients are sent where it is not none."""
    name, own = cfg.compression.name, cfg.strategy.get("compression")
    if class_of(cfg.strategy) == _LOCAL_SGD:
        of_group = compressed_parameters_problem(name, _PREFIX, is_group=True)
        yield from (each for each in (of_group, compressed_parameters_problem(own, _PREFIX)) if each is not None)
    elif name != UNCOMPRESSED and own is not None:
        yield (
            f"compression={name} and {_PREFIX}compression={own}: both say how outer gradients are sent; type "
            f"compression=none, or {_PREFIX}compression=null"
        )
    elif name == "onebit":
        yield (
            f"compression=onebit with strategy=diloco: its {cfg.compression.warmup_steps} warmup_steps are for Adam's "
            "momentum, and nothing reads them of an outer gradient; type "
            f"{_PREFIX}compression=onebit, which sends signs without a warm-up, and {_PREFIX}warmup_steps=... for "
            "steps with averaged gradients at the beginning"
        )


def _beside(cfg: DictConfig) -> Iterator[str]:
    """What else cannot be had together with replicas that differ."""
    for key, value in _callbacks(cfg):
        if class_of(value) in _AVERAGING:
            yield f"{key}: {averaging_callback_problem(class_of(value))}"
    if cfg.balance.kind != "none":
        yield (
            f"balance={cfg.balance.kind} with local updates: unequal shares of the global batch are weighed in the "
            "average of every step, and replicas that step by themselves take none; type balance=none"
        )
    if cfg.trainer.sync_batchnorm:
        yield f"trainer.{sync_batchnorm_problem()}"


def _callbacks(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    for group in ("callbacks", "monitor"):
        for name, value in cfg[group].items():
            yield f"{group}.{name}", value

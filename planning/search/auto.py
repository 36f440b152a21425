"""Planner's answers for `strategy=auto` and `micro_batch_size=auto`, as plain values for another process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.options import class_of
from trainwright.core.device_profiles import profile_of, shared_by
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.fake_run import FactsError
from trainwright.planning.report.table import as_dict, reasons
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.plan import LayoutCandidate
from trainwright.planning.search.planned_config import PlannedConfig
from trainwright.planning.search.search import plan
from trainwright.planning.search.sizes import divisors_of
from trainwright.planning.search.work import Work
from trainwright.planning.time.communication_options import average_by, bucket_mib, prefetch
from trainwright.planning.time.cost import ModelCut
from trainwright.strategies.compose.engine_options import EngineOptions, engine_options_of
from trainwright.strategies.compose.world import Surroundings, closed_layout, options_of


def ranked_layouts(asked: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return all layouts possible on this machine, ranked: the document of `as_dict`, with reasons.

    Args:
        asked: a configuration as plain values, with numbers of devices and of samples per step.
        limits: fixed choices.

    Raises:
        ConfigError: if nothing can be planned.
    """
    found = plan(_on_this_machine(asked), limits)
    document = as_dict(found)
    for entry, candidate in zip(document["ranked"], found.ranked, strict=True):
        entry |= {  # None: the default
            "bucket_mib": bucket_mib(found, candidate),
            "average_by": average_by(found, candidate),
            "prefetch": prefetch(found, candidate),
        }
    document["reasons"] = reasons(found.refused)
    document["profile"] = asdict(found.profile)
    return document


def largest_micro_batch(asked: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """Return the plan of the largest micro-batch that fits with the layout of a configuration.

    Args:
        asked: a configuration as plain values, with numbers of devices and of samples per step.
        most: largest size not yet found too large by trial; None: no limit.

    Returns:
        The plan's document, with `why` and `smaller`: the smaller micro-batches.

    Raises:
        ConfigError: if not even the smallest fits, or nothing can be predicted.
    """
    cfg = _on_this_machine(asked)
    layout = closed_layout(cfg, Surroundings())
    assert layout is not None
    config = PlannedConfig(cfg)
    options = engine_options_of(options_of(cfg.strategy))
    cut = _cut(options, layout, cfg.strategy.get("activation_checkpointing", "none"))
    try:
        cost = config.facts.of(cut)
    except FactsError as error:
        raise ConfigError([f"micro_batch_size=auto: the memory of the layout cannot be predicted: {error}"]) from error
    samples = cfg.global_batch_size // layout.data_ranks
    parts = options.micro_batches_for(layout.pipeline) if layout.pipeline > 1 else 1
    above: tuple[int, Held] | None = None
    sizes = [size for size in _sizes(samples, parts) if most is None or size <= most]
    for size in sizes:
        work = _work(cfg.strategy, options, layout, size, samples // size, parts)
        held = config.held(work, cost)
        if config.fits(held):
            document = _document(config, config.candidate(_name(cfg), work, cut, cost, held), above)
            if above is None and most is not None:
                document["why"] = "larger ones did not fit when tried."
            return {**document, "smaller": [each for each in sizes if each < size]}
        above = size, held
    assert above is not None
    raise ConfigError(
        [
            f"micro_batch_size=auto: even {above[0]} sample(s) need {above[1].total / 2**30:.2f} GiB per rank, "
            f"device={config.profile.name} has {config.capacity / 2**30:.2f} GiB; type strategy=auto for a "
            "layout that fits, or strategy.activation_checkpointing=full"
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------


def _on_this_machine(asked: dict[str, Any]) -> DictConfig:
    """Return the configuration with the device profile of this machine in place of its name."""
    cfg = OmegaConf.create(asked)
    assert isinstance(cfg, DictConfig)
    try:
        profile = profile_of(cfg)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    cfg.device = asdict(shared_by(profile, cfg.devices))
    return cfg


def _document(config: PlannedConfig, chosen: LayoutCandidate, above: tuple[int, Held] | None) -> dict[str, Any]:
    why, following = "all samples of a rank fit at once", None
    if above is not None:
        following = {"micro_batch_size": above[0], "bytes": above[1].total}
        needed = above[1].total / 2**30
        why = f"{above[0]} at a time would need {needed:.2f} GiB of {config.capacity / 2**30:.2f} GiB per rank"
    document = as_dict(config.result([chosen]))
    more = {"chosen": document["best"], "next": following, "why": f"{why}.", "profile": asdict(config.profile)}
    return document | more


def _cut(options: EngineOptions, layout: Layout, checkpointing: str) -> ModelCut:
    return ModelCut(
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
        attention=options.attention,
        balance=options.balance,
        # Savings of selective checkpointing depend on the modules, so none are assumed.
        checkpointing="full" if checkpointing == "full" else "none",
    )


def _sizes(samples: int, parts: int) -> list[int]:
    """Return the samples that a data rank may read at a time, in descending order."""
    if samples % parts:
        raise ConfigError(
            [
                f"micro_batch_size=auto: the {samples} samples per step and data rank are not a multiple of "
                f"strategy.micro_batches={parts}; type another global_batch_size"
            ]
        )
    return [parts * size for size in reversed(divisors_of(samples // parts))]


def _work(strategy: DictConfig, options: EngineOptions, layout: Layout, size: int, rounds: int, parts: int) -> Work:
    return Work(
        layout,
        strategy.get("stage") or 0,
        size // parts,
        rounds,
        parts,
        options.schedule,
        options.stages(layout.pipeline) // layout.pipeline,
        strategy.get("offload") or "none",
        bool(strategy.get("no_sync_accumulation")),
        prefetch=strategy.get("prefetch"),
    )


def _name(cfg: DictConfig) -> str:
    options = options_of(cfg.strategy)
    assert options is not None  # it has a layout
    return options.planned_as or class_of(cfg.strategy)

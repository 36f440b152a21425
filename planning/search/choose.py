"""The planner's answers for a run that is about to start, as plain values that another process can be told."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.options import class_of
from trainwright.core.device_profiles import profile_of, shared_by
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.planning.memory.peak import Held
from trainwright.planning.model.without_memory import FactsError
from trainwright.planning.report.table import as_dict, candidate_as_dict, extras, reasons
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.plan import LayoutCandidate, Plan
from trainwright.planning.search.search import plan
from trainwright.planning.search.searched import Searched
from trainwright.planning.search.sizes import divisors_of
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut
from trainwright.planning.time.sending import average_by, bucket_mib, prefetch
from trainwright.strategies.compose.rules import micro_batches_for
from trainwright.strategies.compose.world import Surroundings, closed_layout, options_of
from trainwright.strategies.pipeline.schedules import stages_per_rank_of


def ranked_layouts(asked: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """All layouts that are possible on this machine, ranked; what `as_dict` tells, with titles and reasons.

    Args:
        asked: a configuration as plain values, with the number of devices and of samples of a step.
        limits: what has been decided.

    Raises:
        ConfigError: if nothing can be planned.
    """
    found = plan(_on_this_machine(asked), limits)
    document = as_dict(found)
    document["ranked"] = [{**_told(found, each), **_sending(found, each)} for each in found.ranked]
    document["best"] = document["ranked"][0] if found.ranked else None
    document["reasons"] = reasons(found.refused)
    document["profile"] = asdict(found.profile)
    return document


def _sending(plan: Plan, candidate: LayoutCandidate) -> dict[str, Any]:
    """Options of how it sends; None: the default."""
    return {
        "bucket_mib": bucket_mib(plan, candidate),
        "average_by": average_by(plan, candidate),
        "prefetch": prefetch(plan, candidate),
    }


def largest_micro_batch(asked: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """The largest micro-batch with which the layout of a configuration fits.

    Args:
        asked: a configuration as plain values, with the number of devices and of samples of a step.
        most: samples that larger ones were found not to fit beyond; None: no such thing is known.

    Returns:
        A plan's document, with `why` and `smaller`: the micro-batches below the chosen one.

    Raises:
        ConfigError: if not even the smallest fits, or nothing can be predicted.
    """
    cfg = _on_this_machine(asked)
    layout = closed_layout(cfg, Surroundings())
    assert layout is not None
    searched = Searched(cfg)
    cut = _cut(cfg, layout)
    try:
        cost = searched.facts.of(cut)
    except FactsError as error:
        raise ConfigError([f"micro_batch_size=auto: what the layout needs cannot be predicted: {error}"]) from error
    samples = cfg.global_batch_size // layout.data_ranks
    parts = _parts(cfg, layout)
    above: tuple[int, Held] | None = None
    sizes = [size for size in _sizes(samples, parts) if most is None or size <= most]
    for size in sizes:
        work = _work(cfg, layout, size // parts, samples // size, parts)
        held = searched.held(work, cost)
        if searched.fits(held):
            document = _document(searched, searched.candidate(_name(cfg), work, cut, cost, held), above)
            if above is None and most is not None:
                document["why"] = "larger ones did not fit when they were tried."
            return {**document, "smaller": [each for each in sizes if each < size]}
        above = size, held
    assert above is not None
    raise ConfigError(
        [
            f"micro_batch_size=auto: even {above[0]} sample(s) at a time need {above[1].total / 2**30:.2f} GiB a rank, "
            f"device={searched.profile.name} has {searched.capacity / 2**30:.2f} GiB for it; type strategy=auto for a "
            "layout that fits, or strategy.activation_checkpointing=full"
        ]
    )


# ---------------------------------------------------------------------------------------------------------------------


def _on_this_machine(asked: dict[str, Any]) -> DictConfig:
    """The configuration with the profile of the devices as they are used here in the place of its name."""
    cfg = OmegaConf.create(asked)
    assert isinstance(cfg, DictConfig)
    try:
        profile = profile_of(cfg)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    cfg.device = asdict(shared_by(profile, cfg.devices))
    return cfg


def _told(plan: Plan, candidate: LayoutCandidate) -> dict[str, Any]:
    """What `candidate_as_dict` tells, with what can be seen of the bytes in a run: when the optimizer steps."""
    at_step = {kind: getattr(candidate.at_step, kind) for kind in ("parameters", "gradients", "optimizer")}
    return {
        **candidate_as_dict(plan, candidate),
        "title": candidate.title,
        "extras": extras(candidate),
        "bytes_at_step": at_step,
    }


def _document(searched: Searched, chosen: LayoutCandidate, above: tuple[int, Held] | None) -> dict[str, Any]:
    cfg = searched.cfg
    found = Plan(
        name=cfg.name,
        world_size=searched.world_size,
        profile=searched.profile,
        precision=cfg.precision,
        global_batch_size=cfg.global_batch_size,
        ranked=(chosen,),
        refused=(),
        parameters=searched.parameters,
    )
    why, following = "all samples of a rank fit at once", None
    if above is not None:
        following = {"micro_batch_size": above[0], "bytes": above[1].total}
        needed = above[1].total / 2**30
        why = f"{above[0]} at a time would need {needed:.2f} GiB of {searched.capacity / 2**30:.2f} GiB a rank"
    told = _told(found, chosen)
    return {
        **as_dict(found),
        "ranked": [told],
        "best": told,
        "chosen": told,
        "next": following,
        "why": why + ".",
        "profile": asdict(searched.profile),
    }


def _cut(cfg: DictConfig, layout: Layout) -> ModelCut:
    strategy = cfg.strategy
    checkpointing = strategy.get("activation_checkpointing", "none")
    return ModelCut(
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        sequence_parallel=bool(strategy.get("sequence_parallel")),
        loss_parallel=bool(strategy.get("loss_parallel")),
        attention=strategy.get("attention") or "ring",
        # What selective checkpointing saves depends on the modules: nothing is counted on.
        checkpointing="full" if checkpointing == "full" else "none",
    )


def _parts(cfg: DictConfig, layout: Layout) -> int:
    if layout.pipeline == 1:
        return 1
    return micro_batches_for(cfg.strategy.schedule, cfg.strategy.micro_batches, layout.pipeline)


def _sizes(samples: int, parts: int) -> list[int]:
    """Samples that a data rank may read at a time, the most first."""
    if samples % parts:
        raise ConfigError(
            [
                f"micro_batch_size=auto: the {samples} samples of a step and data rank are no multiple of "
                f"strategy.micro_batches={parts}; type another global_batch_size"
            ]
        )
    return [parts * size for size in reversed(divisors_of(samples // parts))]


def _work(cfg: DictConfig, layout: Layout, micro_batch: int, rounds: int, parts: int) -> Work:
    strategy = cfg.strategy
    schedule = strategy.get("schedule") or "1f1b"
    several = 1
    if layout.pipeline > 1:
        several = stages_per_rank_of(schedule, strategy.stages_per_rank)
    return Work(
        layout,
        strategy.get("stage") or 0,
        micro_batch,
        rounds,
        parts,
        schedule,
        several,
        strategy.get("offload") or "none",
        bool(strategy.get("no_sync_accumulation")),
        prefetch=strategy.get("prefetch"),
    )


def _name(cfg: DictConfig) -> str:
    options = options_of(cfg.strategy)
    assert options is not None  # it has a layout
    return options.planned_as or class_of(cfg.strategy)

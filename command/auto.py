"""Resolution of `strategy=auto` and `micro_batch_size=auto` before ranks start, recorded as if typed.

The planner (`trainwright.planning`) imports torch and creates fake process groups, so wherever ranks will be started it
runs in a process of its own and returns plain values.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.config.options import class_of
from trainwright.core.config.override_words import typed
from trainwright.core.config.references import literal
from trainwright.core.errors import CheckpointError
from trainwright.core.failures.records import write_whole
from trainwright.core.problems import ConfigError
from trainwright.core.run.run_directory import PLAN_FILE
from trainwright.core.text.sizes import size_text
from trainwright.launch.auto_options import AUTO_TARGET, MICRO_BATCH, AutoOptions
from trainwright.launch.checks.validate import problems_before_layout, validate
from trainwright.launch.ranks.forkserver import call_in_subprocess
from trainwright.launch.recovery.check_resume import recorded_global_batch
from trainwright.launch.recovery.sizes import size_problems
from trainwright.planning.search.limits import Limits
from trainwright.strategies.compose.world import Surroundings, closed_layout, options_of, world_size_of
from trainwright.strategies.contract.registry import all_options, strategy_names

TOLERANCE = 0.03
"""Largest fraction by which the predicted step of a simpler layout may exceed the fastest, for it to be preferred."""
# Layouts that are validated before the configuration is refused.
_MAX_VALIDATED = 8
# Options that the planner takes as limits, by their common names in Limits and AutoOptions.
_LIMIT_OPTIONS = tuple(each.name for each in fields(Limits) if each.name in AutoOptions.__dataclass_fields__)
# Options copied from strategy=auto to the chosen strategy.
_STRATEGY_OPTIONS = ("blocks", "compile", "certificate")
_MODEL_OPTIONS = ("plan", "batch_dims", "attention")


@dataclass(frozen=True)
class Choice:
    """A choice of the planner.

    Attributes:
        document: contents of plan.json.
        smaller: smaller micro-batches to try if the chosen one does not fit; None = the size was not auto.
    """

    document: dict[str, Any]
    smaller: tuple[int, ...] | None = None

    @property
    def lines(self) -> list[str]:
        """Lines for the user: the choice, the reason, and overrides that give the same."""
        return list(self.document["lines"])


def decide(cfg: DictConfig, surroundings: Surroundings, most: int | None = None) -> tuple[Choice | None, list[str]]:
    """Replace `auto` in the configuration by the planner's choice; do nothing if there is no `auto`.

    Args:
        cfg: with the run directory and the checkpoint decided; changed in place.
        surroundings: the verb and the launcher.
        most: upper limit of `micro_batch_size=auto`; None = as many as are predicted to fit.

    Returns:
        The choice, or None, and the problems that prevented it.
    """
    size = cfg.micro_batch_size
    if not is_auto(cfg.strategy) and size != AUTO:
        return None, []
    problems = problems_before_layout(cfg, surroundings)
    if problems:
        return None, problems
    try:
        if is_auto(cfg.strategy):
            return _decide_layout(cfg, surroundings), []
        return _decide_micro_batch(cfg, surroundings, most), []
    except ConfigError as error:
        return None, list(error.problems)


def is_auto(strategy: Any) -> bool:
    """Return whether a strategy's configuration leaves the layout to the planner."""
    return isinstance(strategy, DictConfig) and strategy.get("_target_") == AUTO_TARGET


def copy_choice(chosen: DictConfig, cfg: DictConfig) -> None:
    """Copy the choice made for one configuration into another that asked for the same.

    Args:
        chosen: after :func:`decide`.
        cfg: the same configuration before it; changed in place.
    """
    cfg.strategy = chosen.strategy
    cfg.micro_batch_size, cfg.global_batch_size = chosen.micro_batch_size, chosen.global_batch_size
    cfg.accumulation.steps = chosen.accumulation.steps


def write_plan(choice: Choice, run_dir: Path) -> None:
    """Write plan.json into a run directory, atomically."""
    write_whole(run_dir / PLAN_FILE, json.dumps(choice.document, indent=1, allow_nan=False) + "\n")


def choice_lines(run_dir: Path) -> list[str]:
    """Return the lines that describe the choice of a run; empty without one."""
    try:
        return list(json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8")).get("lines", []))
    except (OSError, ValueError):
        return []


# ---- strategy=auto --------------------------------------------------------------------------------------------------


def _decide_layout(cfg: DictConfig, surroundings: Surroundings) -> Choice:
    limits, problems = _limits(cfg, surroundings)
    problems += _micro_batch_problems(cfg, "strategy=auto")
    if problems:
        raise ConfigError(problems)
    batch = _global_batch(cfg, surroundings, "strategy=auto")
    asked = _planner_config(cfg, surroundings, batch)
    document = _call(_search, surroundings, cfg, asked, limits)
    ranked = document["ranked"]
    if not ranked:
        raise ConfigError(_refusal(document, limits))
    first: tuple[list[str], list[str]] | None = None
    for candidate in _order(ranked)[:_MAX_VALIDATED]:
        trial = cfg.copy()
        words = _apply(trial, candidate, batch)
        found = validate(trial, surroundings)
        if not found and surroundings.world_size is None and cfg.launch.min_devices is not None:
            found = size_problems(trial, surroundings.verb)
        if not found:
            _apply(cfg, candidate, batch)
            return _choice(document, candidate, words, limits)
        if first is None:
            first = found, words
        elif found == first[0]:
            break  # the layout does not matter for these problems
    assert first is not None
    raise ConfigError([f"{text} (in the layout chosen by strategy=auto: {' '.join(first[1])})" for text in first[0]])


def _limits(cfg: DictConfig, surroundings: Surroundings) -> tuple[Limits, list[str]]:
    """Return the options that the user has set, and what is invalid about them."""
    given: Any = OmegaConf.to_container(cfg.strategy, resolve=True)
    strategy = AutoOptions(**given)
    keeps_size = MICRO_BATCH in strategy.keep and isinstance(cfg.micro_batch_size, int)
    return (
        Limits(
            **{name: getattr(strategy, name) for name in _LIMIT_OPTIONS},
            axes=strategy.axes(),
            micro_batch_size=cfg.micro_batch_size if keeps_size else None,
            accumulation=cfg.accumulation.steps,
        ),
        list(strategy.problems(world_size_of(cfg, surroundings))),
    )


def _global_batch(cfg: DictConfig, surroundings: Surroundings, who: str) -> int:
    """Return the samples per optimizer step, which the choice keeps.

    Without `global_batch_size`, those of the checkpoint to resume, or micro_batch_size x accumulation.steps x world
    size.
    """
    if cfg.global_batch_size is not None:
        return int(cfg.global_batch_size)
    saved = _saved_batch(cfg) if surroundings.verb == "fit" else None
    if saved is not None:
        return saved
    if isinstance(cfg.micro_batch_size, int) and cfg.micro_batch_size >= 1:
        return int(cfg.micro_batch_size * (cfg.accumulation.steps or 1) * world_size_of(cfg, surroundings))
    raise ConfigError(
        [f"{who} with global_batch_size=null: the batch size would depend on the choice; type global_batch_size=32"]
    )


def _saved_batch(cfg: DictConfig) -> int | None:
    if cfg.ckpt_path is not None and not cfg.ckpt_path.startswith("http"):
        with suppress(CheckpointError, OSError):  # `validate` reports it
            return recorded_global_batch(cfg.ckpt_path)
    return None


def _micro_batch_problems(cfg: DictConfig, who: str) -> list[str]:
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    if "${micro_batch_size" in str([raw.get("module"), raw.get("data")]):
        return []
    return [
        f"{who}: the recipe {cfg.name!r} does not read micro_batch_size, so another size cannot be chosen; write "
        "`batch_size: ${micro_batch_size}` under data in the recipe, or choose a strategy and a size by hand"
    ]


def _planner_config(cfg: DictConfig, surroundings: Surroundings, batch: int) -> dict[str, Any]:
    """Return the configuration as plain values, with numbers in place of `auto`."""
    asked = cfg.copy()
    world = world_size_of(cfg, surroundings)
    local = surroundings.local_world_size
    nodes = cfg.nodes if local is None else world // local
    asked.nodes = nodes if world % nodes == 0 else 1
    asked.devices = world // asked.nodes
    asked.global_batch_size, asked.accumulation.steps = batch, None
    if not isinstance(asked.micro_batch_size, int):
        asked.micro_batch_size = 1  # only to read the shapes of a batch
    plain: Any = literal(OmegaConf.to_container(asked, resolve=True))
    return dict(plain)


def _call(function: Any, surroundings: Surroundings, cfg: DictConfig, *arguments: Any) -> dict[str, Any]:
    """Call a function of the planner, in this process if training will be, else in one of its own."""
    alone = surroundings.world_size is None and world_size_of(cfg, surroundings) == 1 and cfg.launch.max_restarts == 0
    answer = function(*arguments) if alone else call_in_subprocess(function, *arguments)
    return dict(answer)


def _search(asked: dict[str, Any], limits: Limits) -> dict[str, Any]:
    from trainwright.planning.search.auto import ranked_layouts

    return ranked_layouts(asked, limits)


def _refusal(document: Mapping[str, Any], limits: Limits) -> list[str]:
    refused = document["reasons"]
    given = [f"{key}={value}" for key, value in vars(limits).items() if value not in (None, {})]
    within = f" with {', '.join(given)}" if given else ""
    why = "; ".join(refused[:3]) or "none of the remaining layouts can run"
    return [f"strategy=auto: no layout of {document['world_size']} rank(s){within} is possible: {why}"]


def _order(ranked: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort the layouts: those nearly as fast as the fastest by simplicity, then the others by speed."""
    best = ranked[0]["seconds"]["step"]
    near = [each for each in ranked if each["seconds"]["step"] <= (1 + TOLERANCE) * best]
    rest = [each for each in ranked if each["seconds"]["step"] > (1 + TOLERANCE) * best]
    return [*sorted(near, key=_complexity), *rest]


def _complexity(candidate: Mapping[str, Any]) -> tuple[Any, ...]:
    axes = sum(size > 1 for size in candidate["layout"].values())
    helps = (candidate["offload"] != "none") + (candidate["activation_checkpointing"] != "none")
    return strategy_names().index(candidate["strategy"]), axes, helps, candidate["seconds"]["step"]


def _apply(cfg: DictConfig, candidate: Mapping[str, Any], batch: int) -> list[str]:
    """Replace `auto` by a candidate; return the overrides that give the same."""
    asked, words = cfg.strategy, []
    chosen = [word for word in candidate["overrides"] if word.startswith("strategy")]
    scalars = [word for word in chosen if word.split("=")[0].removeprefix("strategy.") not in _MODEL_OPTIONS]
    scalars = [word for word in scalars if not word.startswith("strategy.blocks=")]
    words = list(_elastic_overrides(scalars, candidate["layout"], asked))
    bucket = candidate["bucket_mib"]
    if bucket is not None:  # else gradients are not sent in buckets
        words.append(f"strategy.bucket_mib={bucket if asked.bucket_mib is None else asked.bucket_mib}")
    words += ways_to_send(cfg, candidate)
    node = _composed(words)
    for key in (*_STRATEGY_OPTIONS, *_MODEL_OPTIONS):
        value = OmegaConf.to_container(asked).get(key)  # type: ignore[union-attr]
        if key in node and value not in (None, {}, node[key]):
            node[key] = value
            words.append(f"strategy.{key}={typed(value)}")
    cfg.strategy = node
    cfg.micro_batch_size, cfg.global_batch_size = candidate["micro_batch_size"], batch
    cfg.accumulation.steps = None
    return [*words, f"micro_batch_size={cfg.micro_batch_size}", f"global_batch_size={batch}"]


def ways_to_send(cfg: DictConfig, candidate: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides for the averaging over replicas and the prefetch, where they are not the default.

    Args:
        cfg: with `strategy=auto`.
        candidate: a layout of the planner, with its `average_by` and `prefetch`.
    """
    asked, layout = cfg.strategy, candidate["layout"]
    # Typed values are kept, and checked later; chosen ones must be possible.
    is_free = cfg.compression.name == "none" and cfg.launch.recovery == "restart" and cfg.launch.min_devices is None
    average_by = asked.average_by or (candidate["average_by"] if is_free else None)
    if average_by is not None and layout["replicate"] > 1:
        yield f"strategy.average_by={average_by}"
    prefetch = candidate["prefetch"] if asked.prefetch is None else asked.prefetch
    if prefetch is not None and candidate["stage"] == 3:
        yield f"strategy.prefetch={prefetch}"


def _elastic_overrides(words: Sequence[str], layout: Mapping[str, int], asked: DictConfig) -> Iterator[str]:
    """Yield the overrides with -1 for one data-parallel axis, so that a run can continue on fewer ranks."""
    free = next((axis for axis in ("shard", "replicate") if layout[axis] > 1 and asked[axis] is None), None)
    for word in words:
        yield f"strategy.{free}=-1" if free and word.startswith(f"strategy.{free}=") else word


def _composed(words: Sequence[str]) -> DictConfig:
    from trainwright.command.schema.compose import compose

    node = compose("digits", list(words)).strategy
    assert isinstance(node, DictConfig)
    return node


def _choice(document: dict[str, Any], chosen: Mapping[str, Any], words: Sequence[str], limits: Limits) -> Choice:
    ranked = document["ranked"]
    lines = [
        f"strategy=auto: {_summary(chosen)}: {_predicted(document, chosen)}.",
        f"because: {_reason(ranked, chosen, limits)}",
        f"the same by hand: {' '.join(shlex.quote(word) for word in words)}",
    ]
    return Choice({**document, "chosen": dict(chosen), "explicit": list(words), "lines": lines, "measured": None})


def _summary(chosen: Mapping[str, Any]) -> str:
    accumulated = f" x {chosen['accumulation']} accumulated" if chosen["accumulation"] > 1 else ""
    more = "".join(f", {each}" for each in chosen["extras"])
    return f"{chosen['title']}, micro-batches of {chosen['micro_batch_size']}{accumulated}{more}"


def _predicted(document: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    seconds, held = chosen["seconds"]["step"], chosen["bytes"]["total"]
    return (
        f"predicted {seconds:.3g} s per step ({chosen['samples_per_second']:.4g} samples/s) and "
        f"{size_text(held, digits=2)} of {size_text(document['usable_bytes'], digits=2)} a rank, "
        f"{document['device_source']}"
    )


def _reason(ranked: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], limits: Limits) -> str:
    best, step = ranked[0], chosen["seconds"]
    if len(ranked) == 1:
        reason = "it is the only possible layout"
    elif chosen is best or chosen["title"] == best["title"]:
        slower = 100 * (ranked[1]["seconds"]["step"] / step["step"] - 1)
        runner_up = f"{ranked[1]['title']}, {slower:.1f} % slower"
        reason = f"it is the fastest of {len(ranked)} possible layouts (next: {runner_up})"
    elif step["step"] <= (1 + TOLERANCE) * best["seconds"]["step"]:
        reason = f"it is the simplest within {100 * TOLERANCE:.0f} % of the fastest of {len(ranked)} ({best['title']})"
    else:
        reason = f"it is the fastest of {len(ranked)} layouts that the other options allow"
    parts = {"computing": step["compute"], "waiting": step["exposed"], "bubble": step["bubble"]}
    parts["optimizer"] = step["optimizer"]
    spent = ", ".join(f"{100 * value / step['step']:.0f} % {name}" for name, value in parts.items() if value > 0)
    decided = " within the given options" if limits != Limits() else ""
    return f"{reason}{decided}; a step is {spent}."


# ---- micro_batch_size=auto ------------------------------------------------------------------------------------------


def _decide_micro_batch(cfg: DictConfig, surroundings: Surroundings, most: int | None) -> Choice:
    options, name = options_of(cfg.strategy), class_of(cfg.strategy)
    if options is None or options.planned_as is None:
        planned = [each for each, kind in all_options() if kind().planned_as is not None]
        unknown = f"micro_batch_size=auto with {name}: the memory of its ranks cannot be predicted"
        raise ConfigError([f"{unknown}; type a number, or one of the strategies {', '.join(planned)}"])
    batch = _global_batch(cfg, surroundings, "micro_batch_size=auto")
    problems = _micro_batch_problems(cfg, "micro_batch_size=auto")
    if cfg.accumulation.steps is not None:
        given = f"micro_batch_size=auto with accumulation.steps={cfg.accumulation.steps}"
        problems.append(f"{given}: each follows from the other; leave accumulation.steps out")
    trial = cfg.copy()
    trial.micro_batch_size = None
    problems += validate(trial, surroundings)
    layout = None if problems else closed_layout(trial, surroundings)
    if layout is None:
        raise ConfigError(problems or [f"micro_batch_size=auto with {name}: its layout is not known"])
    if batch % layout.data_ranks:
        possible = math.ceil(batch / layout.data_ranks) * layout.data_ranks
        given = f"micro_batch_size=auto: global_batch_size={batch}"
        ranks = f"the {layout.data_ranks} data-parallel ranks"
        raise ConfigError([f"{given} is not a multiple of {ranks}; type global_batch_size={possible}"])
    document = _call(_largest, surroundings, cfg, _planner_config(cfg, surroundings, batch), most)
    chosen = document["chosen"]
    cfg.micro_batch_size, cfg.global_batch_size = chosen["micro_batch_size"], batch
    words = [f"micro_batch_size={cfg.micro_batch_size}", f"global_batch_size={batch}"]
    lines = [
        f"micro_batch_size=auto: {chosen['micro_batch_size']} samples x {chosen['accumulation']} accumulated x "
        f"{layout.data_ranks} data-parallel rank(s): {_predicted(document, chosen)}.",
        f"because: {document['why']}",
        f"the same by hand: {' '.join(words)}",
    ]
    smaller = tuple(document.pop("smaller"))
    return Choice({**document, "explicit": words, "lines": lines, "measured": None}, smaller)


def _largest(asked: dict[str, Any], most: int | None) -> dict[str, Any]:
    from trainwright.planning.search.auto import largest_micro_batch

    return largest_micro_batch(asked, most)

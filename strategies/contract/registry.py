"""Registry of strategies by name, the simplest first: name -> options dataclass -> strategy class.

To add one, add a line here, or an entry point in the ``pyproject.toml`` of another package::

    [project.entry-points."trainwright.strategies"]
    hypercube = "my_strategies.options:HypercubeOptions"
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

from trainwright.core.config.synonyms import Vocabulary
from trainwright.core.problems import nearest
from trainwright.strategies.contract.options import StrategyOptions

GROUP = "trainwright.strategies"
"""Group of entry points."""
_OPTIONS = {
    "single": "data.options.SingleOptions",
    "ddp": "data.options.DDPOptions",
    "zero1": "data.options.Zero1Options",
    "zero2": "data.options.Zero2Options",
    "zero3": "data.options.Zero3Options",
    "hybrid": "compose.hybrid_options.HybridOptions",
    "tensor": "compose.hybrid_options.TensorOptions",
    "pipeline": "compose.hybrid_options.PipelineOptions",
    "context": "compose.hybrid_options.ContextOptions",
    "parameter_server": "parameter_server.options.ParameterServerOptions",
    "expert": "compose.hybrid_options.ExpertOptions",
    "local_sgd": "local_updates.options.LocalSGDOptions",
    "diloco": "local_updates.options.DiLoCoOptions",
}


def strategy_names() -> tuple[str, ...]:
    """Return the names that ``Trainer(strategy=...)`` and ``strategy=`` accept; those of other packages come last."""
    return (*_OPTIONS, *(each.name for each in entry_points(group=GROUP) if each.name not in _OPTIONS))


def is_strategy(name: str) -> bool:
    """Return whether a strategy of that name exists."""
    return name in _OPTIONS or name in strategy_names()


def options_of_others() -> dict[str, type[StrategyOptions]]:
    """Return the options of other packages' strategies, by name.

    Raises:
        ValueError: if an entry point cannot be loaded, is no options dataclass, or has the name of a built-in.
    """
    return {each.name: _loaded(each) for each in entry_points(group=GROUP)}


def strategy_options(name: str) -> type[StrategyOptions]:
    """Return the options of the strategy called ``name``.

    Raises:
        ValueError: if there is no strategy of that name; the message lists the nearest and all valid names.
    """
    if name in _OPTIONS:
        module, _, cls = _OPTIONS[name].rpartition(".")
        return getattr(importlib.import_module(f"trainwright.strategies.{module}"), cls)  # type: ignore[no-any-return]
    others = options_of_others()
    if name not in others:
        names = strategy_names()
        near = nearest(name, names)
        meaning = Vocabulary((), {"strategy": names}).meaning(name)
        hint = f" {meaning}." if meaning else f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"Unknown strategy {name!r}.{hint} Available: {', '.join(names)}.")
    return others[name]


def all_options() -> Iterator[tuple[str, type[StrategyOptions]]]:
    """Yield name and options of every strategy."""
    yield from ((name, strategy_options(name)) for name in _OPTIONS)
    yield from options_of_others().items()


def target_of(options: type[StrategyOptions]) -> str:
    """Return the import path of the strategy class for these options."""
    return str(options.__dataclass_fields__["_target_"].default)


def options_for_target(target: str) -> type[StrategyOptions] | None:
    """Return the options of the strategy class at an import path; ``None`` if unknown."""
    for _, named in all_options():
        for options in named.__mro__:
            if "_target_" in vars(options) and vars(options)["_target_"] == target:
                return options
    return None


def make_strategy(name: str, **options: Any) -> Any:
    """Build the strategy called ``name``, passing ``options`` to its constructor.

    Raises:
        ValueError: if there is no strategy of that name.
    """
    known = strategy_options(name)
    module, _, cls = target_of(known).rpartition(".")
    defaults = known()
    given = {f.name: getattr(defaults, f.name) for f in fields(known) if f.name not in ("_target_", "checks")}
    return getattr(importlib.import_module(module), cls)(**{**given, **options})


def _loaded(entry: Any) -> type[StrategyOptions]:
    where = f"{entry.value} of the package {entry.dist.name if entry.dist else 'unknown'}"
    if entry.name in _OPTIONS:
        raise ValueError(f"{where} would be strategy={entry.name}, which is built in; rename its entry point")
    try:
        found = entry.load()
    except Exception as error:
        raise ValueError(f"strategy={entry.name}: {where} cannot be loaded: {type(error).__name__}: {error}") from error
    is_options = isinstance(found, type) and issubclass(found, StrategyOptions)
    if not is_options or "_target_" not in found.__dataclass_fields__:
        raise ValueError(
            f"strategy={entry.name}: {where} must be a dataclass of options, built on one of Trainwright's, with "
            "_target_: the import path of the strategy's class"
        )
    return found  # type: ignore[no-any-return]

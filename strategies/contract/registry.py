"""The strategies by name. A new strategy is one new file, one yaml and one line here."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("trainwright.strategies.data.single.SingleDeviceStrategy", {}),
    "ddp": ("trainwright.strategies.data.ddp.DDPStrategy", {}),
    "zero1": ("trainwright.strategies.data.zero.ZeroStrategy", {"stage": 1}),
    "zero2": ("trainwright.strategies.data.zero.ZeroStrategy", {"stage": 2}),
    "zero3": ("trainwright.strategies.data.zero.ZeroStrategy", {"stage": 3}),
    "hybrid": ("trainwright.strategies.compose.hybrid.HybridStrategy", {}),
    "tensor": ("trainwright.strategies.compose.one_axis.TensorParallelStrategy", {}),
    "pipeline": ("trainwright.strategies.compose.one_axis.PipelineStrategy", {}),
    "context": ("trainwright.strategies.compose.one_axis.ContextParallelStrategy", {}),
    "parameter_server": ("trainwright.strategies.parameter_server.strategy.ParameterServerStrategy", {}),
    "expert": ("trainwright.strategies.compose.one_axis.ExpertParallelStrategy", {}),
    "local_sgd": ("trainwright.strategies.local_updates.strategy.LocalSGDStrategy", {}),
    "diloco": ("trainwright.strategies.local_updates.strategy.DiLoCoStrategy", {}),
}


def strategy_names() -> tuple[str, ...]:
    """Names that ``Trainer(strategy=...)`` and ``strategy=`` on the command line take."""
    return tuple(_STRATEGIES)


def strategy_target(name: str) -> tuple[str, dict[str, Any]]:
    """Import path of the class behind ``name`` and the options that the name stands for.

    Raises:
        ValueError: if there is no strategy of that name; the message lists the nearest and all valid names.
    """
    if name not in _STRATEGIES:
        near = difflib.get_close_matches(name, _STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown strategy {name!r}.{hint} Available: {', '.join(_STRATEGIES)}.")
    path, options = _STRATEGIES[name]
    return path, dict(options)


def make_strategy(name: str, **options: Any) -> Any:
    """Build the strategy called ``name``; ``options`` go to its constructor.

    Raises:
        ValueError: if there is no strategy of that name.
    """
    path, fixed = strategy_target(name)
    module, _, cls = path.rpartition(".")
    return getattr(importlib.import_module(module), cls)(**{**fixed, **options})

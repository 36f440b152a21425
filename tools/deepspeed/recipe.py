"""Values of a recipe and the command line, for keys that a file omits or sets to "auto"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.core.run.launcher import detect_launcher
from trainwright.strategies.compose.world import resolve_devices

# The choice of the group with the fewest arguments, which all optimizers accept.
LEAST_OPTIMIZER = "adagrad"


@dataclass(frozen=True)
class Recipe:
    """Composed configuration without the file.

    Attributes:
        name: of the recipe.
        world_size: number of ranks.
        micro_batch_size, global_batch_size: of the run; None: open.
        precision: one of `PRECISIONS`.
        optimizer: its node, including `_target_`; empty if there is none.
        own_optimizer_keys: arguments of the optimizer that remain with any choice of the group.
        takes_optimizer: whether the module uses `${optimizer}`; False: it configures its own.
        max_steps: optimizer steps; None: no limit.
        warmup_steps: of its schedule; None if it has none.
        axes: sizes of `pipeline`, `tensor`, `context` and `expert` of its strategy.
        gradient_clip_val: None: off.
    """

    name: str
    world_size: int
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    precision: str = "32"
    optimizer: dict[str, Any] = field(default_factory=dict)
    own_optimizer_keys: frozenset[str] = frozenset()
    takes_optimizer: bool = True
    max_steps: int | None = None
    warmup_steps: int | None = None
    axes: dict[str, int] = field(default_factory=dict)
    gradient_clip_val: float | None = None


def recipe_of(cfg: DictConfig, with_least: DictConfig | None = None) -> Recipe:
    """Return the recipe of a configuration from `compose`, with unresolved interpolations.

    Args:
        cfg: configuration without the file.
        with_least: the same with `optimizer=LEAST_OPTIMIZER`; None: it cannot be composed.
    """
    raw: Any = OmegaConf.to_container(cfg.module, resolve=False)
    strategy = cfg.strategy if not OmegaConf.is_missing(cfg, "strategy") else {}
    axes = {name: strategy.get(name) for name in ("pipeline", "tensor", "context", "expert")}
    optimizer = None if OmegaConf.is_missing(cfg, "optimizer") else cfg.optimizer
    return Recipe(
        name="unnamed" if OmegaConf.is_missing(cfg, "name") else str(cfg.name),
        world_size=_world_size(cfg),
        micro_batch_size=cfg.micro_batch_size,
        global_batch_size=cfg.global_batch_size,
        precision=cfg.precision,
        optimizer=_plain(optimizer),
        own_optimizer_keys=frozenset() if with_least is None else frozenset(_plain(with_least.optimizer)),
        takes_optimizer="${optimizer}" in str(raw),
        max_steps=cfg.max_steps,
        warmup_steps=_warmup(cfg),
        axes={name: size for name, size in axes.items() if isinstance(size, int) and size > 1},
        gradient_clip_val=cfg.trainer.gradient_clip_val,
    )


def _world_size(cfg: DictConfig) -> int:
    launcher = detect_launcher()
    if launcher is not None:
        return launcher.world_size
    try:
        return max(1, resolve_devices(cfg) * int(cfg.nodes))
    except (TypeError, ValueError):
        return 1  # refused elsewhere


def _plain(node: Any) -> dict[str, Any]:
    if not isinstance(node, DictConfig):
        return {}
    try:
        plain: Any = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException:
        return {}
    return dict(plain)


def _warmup(cfg: DictConfig) -> int | None:
    own = _whole(cfg, "module.warmup_steps")
    return _whole(cfg, "schedule.warmup") if own is None and cfg.schedule.shape != "none" else own


def _whole(cfg: DictConfig, key: str) -> int | None:
    try:
        value = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
    return int(value) if is_whole else None

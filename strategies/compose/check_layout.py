"""A layout that cuts the module against the module itself, before a process starts.

The module is built in this process on the meta device, where it takes no memory, and asked what the ranks would ask of
it. Torch is imported for this, so only strategies that cut the module come here.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.layout import Layout
from trainwright.strategies.compose.rules import PLAN_PARTS, manual_optimization_problems

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from trainwright.strategies.compose.engines import EngineOptions

_PREFIX = "strategy."


def problems_of_model(cfg: DictConfig, layout: Layout, *, with_options: bool = True) -> list[str]:
    """What makes `layout` impossible for the module of a configuration; empty if nothing does or it cannot be told.

    A module that cannot be built without memory, because its constructor reads weights or needs a Trainer, is left to
    the ranks, which ask the same questions of the real one.

    Args:
        cfg: resolved, with `module` and `strategy`.
        layout: closed.
        with_options: look at the options of the strategy too; False when they have been refused already.
    """
    module = meta_module(cfg)
    if module is None:
        return []
    from trainwright.strategies.compose.engines import plan_for, problems_of

    options = engine_options(cfg.strategy, with_options=with_options)
    problems = []
    if not module.automatic_optimization:
        problems += manual_optimization_problems(layout, _plain(cfg.strategy), _PREFIX)
    try:
        problems += problems_of(module, plan_for(module, layout, options), layout, options)
    except ValueError as error:
        problems.append(str(error))
    except Exception:
        return problems  # not a refusal; if it is a fault of the module, the ranks show it with its traceback
    return [f"{layout} for {type(module).__name__}: {problem}" for problem in problems]


def meta_module(cfg: DictConfig) -> LightningModule | None:
    """The module of a configuration, whole, on the meta device; None if it cannot be built there."""
    try:
        return build_on_meta(cfg)
    except Exception:
        return None


def build_on_meta(cfg: DictConfig) -> LightningModule:
    """The module of a configuration, whole, on the meta device.

    What its constructor prints is dropped, and random numbers are drawn as if it had not been built.

    Raises:
        Exception: whatever the module's constructor or `configure_model` raises where tensors have no values.
    """
    import torch
    from hydra.utils import instantiate

    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(silence))
        stack.enter_context(contextlib.redirect_stderr(silence))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        module: LightningModule = instantiate(cfg.module, _convert_="all")
        module.configure_model()
    return module


def engine_options(strategy: DictConfig, *, with_options: bool = True) -> EngineOptions:
    """How the engines are told to cut, from the configuration of a strategy.

    Args:
        strategy: the group's choice.
        with_options: False takes nothing but what the user says about the model (`plan`, `blocks`).
    """
    from dataclasses import fields

    from trainwright.strategies.compose.engines import EngineOptions

    given = _plain(strategy)
    names = {item.name for item in fields(EngineOptions)} if with_options else {"plan", "blocks"}
    values: dict[str, Any] = {name: given[name] for name in names if given.get(name) is not None}
    if not with_options and "plan" in values:
        values["plan"] = {part: value for part, value in values["plan"].items() if part in PLAN_PARTS}
    if not isinstance(values.get("split", ""), str):
        values["split"] = tuple(values["split"])
    return EngineOptions(**values)


def _plain(strategy: DictConfig) -> Mapping[str, Any]:
    plain: Any = OmegaConf.to_container(strategy, resolve=True)
    return dict(plain)

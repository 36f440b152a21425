"""A configuration to plan for: its module, the module's costs, and the devices."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from omegaconf import DictConfig, OmegaConf, open_dict

from trainwright.core.config.lightning_alias import instantiate
from trainwright.core.device_profiles import profile_of
from trainwright.core.failures.error_text import first_line, named_line
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.planning.memory.peak import Held, held_by, moments
from trainwright.planning.memory.share import StageShare, share_of
from trainwright.planning.memory.state import StateTable
from trainwright.planning.model.facts import ModelFacts
from trainwright.planning.search.plan import USABLE, LayoutCandidate, Plan
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import ModelCut, PassCost
from trainwright.planning.time.step import PredictedStepTime, step_time
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import stage_spans
from trainwright.strategies.compose.meta_module import build_on_meta, meta_module
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.compose.world import Surroundings, world_size_of
from trainwright.strategies.plan.blocks import count_parameters
from trainwright.strategies.plan.model_plan import ModelPlan


class PlannedConfig:
    """A configuration to plan for.

    Args:
        cfg: resolved.

    Attributes:
        profile: of the devices.
        world_size: number of ranks.
        module: on the meta device.
        parameters: number of its elements.
        model_options: model options of ``strategy``.
        facts: costs of a pass of the module.
        small: the module with two blocks of each kind, for checks with the same result for all blocks.
        table: state bytes of its parameters.
        capacity: device memory for tensors, bytes.

    Raises:
        ConfigError: if the module cannot be built without memory, its data cannot be read, or the profile is unknown.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        try:
            self.profile = profile_of(cfg)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        self.world_size = world_size_of(cfg, Surroundings())
        self.module = _built(cfg)
        plain: Any = OmegaConf.to_container(cfg.strategy)
        self.model_options = {key: plain[key] for key in ("plan", "blocks", "batch_dims") if plain.get(key)}
        self.attention = plain.get("attention") or "ring"
        batch, samples = one_batch(cfg, self.module)
        self.facts = ModelFacts(
            self.module,
            batch,
            samples,
            cfg.precision,
            plan=self.model_options.get("plan"),
            blocks=self.model_options.get("blocks"),
            real=lambda: _real(cfg),
        )
        self.small, self._small_blocks = self.facts.reduced()
        self.table = StateTable(self.facts, self.plan_of, self.small, cfg.precision == "bf16-true")
        self.parameters = count_parameters(self.module)
        self.capacity = USABLE * self.profile.memory_bytes

    @cache  # noqa: B019 - lives as long as one search
    def plan_of(self, tensor: int) -> ModelPlan:
        """Return the plan of :attr:`small` for a size of the tensor axis."""
        return plan_for(self.small, Layout(tensor=tensor), self.options())

    def options(self, **given: Any) -> EngineOptions:
        """Return engine options for :attr:`small`, with the model options of the configuration."""
        plan = dict(self.model_options.get("plan", {}))
        if self._small_blocks:
            plan["blocks"] = self._small_blocks
        dims = self.model_options.get("batch_dims", {})
        return EngineOptions(plan=plan, batch_dims=dims, attention=self.attention, **given)

    def shares(self, work: Work) -> tuple[StageShare, ...]:
        """Return the parts of the model on the first and the last rank of a pipeline."""
        return self._shares_of(work.layout.pipeline, work.stages_per_rank, work.schedule)

    @cache  # noqa: B019 - lives as long as one search
    def _shares_of(self, pipeline: int, per_rank: int, schedule: str) -> tuple[StageShare, ...]:
        kinds, spans = self.facts.kinds, [range(len(self.facts.kinds))]
        if pipeline > 1:
            plan = ModelPlan(blocks=tuple(self.facts.blocks))
            spans = stage_spans(self.module, plan, pipeline * per_rank, "balanced")
        return tuple(share_of(kinds, spans, pipeline, schedule, rank) for rank in sorted({0, pipeline - 1}))

    def held(self, work: Work, cost: PassCost) -> Held:
        """Return the peak memory of the first or the last rank of a pipeline, whichever is larger.

        Args:
            work: layout and step.
            cost: of a pass, cut as the layout cuts it.
        """
        return max((held_by(self.table, cost, work, share) for share in self.shares(work)), key=lambda held: held.total)

    def fits(self, held: Held) -> bool:
        """Return whether a device and its host have enough memory."""
        return held.total <= self.capacity and held.host <= self.profile.host_memory_bytes

    def time_of(self, work: Work, cost: PassCost) -> PredictedStepTime:
        """Return the predicted step time."""
        return step_time(self.table, cost, work, self.shares(work), self.profile, self.cfg.precision)

    def candidate(self, strategy: str, work: Work, cut: ModelCut, cost: PassCost, held: Held) -> LayoutCandidate:
        """Return an execution of a layout with its predictions.

        Args:
            strategy: name.
            work: layout and step.
            cut: of a pass.
            cost: of a pass with this cut.
            held: peak memory of the largest rank.
        """
        shares = self.shares(work)
        _, heaviest, _ = self.table.of_share(shares[0], work.division)
        return LayoutCandidate(
            strategy,
            work,
            cut,
            memory=held,
            time=self.time_of(work, cost),
            samples=work.micro_batch * work.rounds * work.parts * work.layout.data_ranks,
            at_step=self._held_at_step(work, cost),
            blocks=sum(shares[0].blocks.values()),
            block=heaviest,
        )

    def result(self, ranked: Iterable[LayoutCandidate], **more: Any) -> Plan:
        """Return the plan with these layouts, fastest first."""
        return Plan(
            name=self.cfg.name,
            world_size=self.world_size,
            profile=self.profile,
            precision=self.cfg.precision,
            global_batch_size=self.cfg.global_batch_size,
            ranked=tuple(ranked),
            parameters=self.parameters,
            **more,
        )

    def _held_at_step(self, work: Work, cost: PassCost) -> Held:
        """Return the maximum of each kind on the first and the last rank of a pipeline at the optimizer step."""
        last = [moments(self.table, cost, work, share)[-1] for share in self.shares(work)]
        kinds = ("parameters", "gradients", "optimizer", "host")
        most = {kind: max(getattr(held, kind) for held in last) for kind in kinds}
        return Held(**most, moment=last[0].moment)


def _built(cfg: DictConfig) -> LightningModule:
    module = meta_module(cfg)
    if module is not None:
        return module
    try:
        return build_on_meta(cfg)
    except Exception as error:
        why = first_line(error)
        raise ConfigError([f"module: it cannot be built without memory, so it cannot be planned: {why}"]) from error


def _real(cfg: DictConfig) -> LightningModule:
    """Build the module of a configuration with memory on the CPU."""
    module: LightningModule = instantiate(cfg.module)
    module.configure_model()
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                with torch.no_grad():
                    reset()
    return module


def one_batch(cfg: DictConfig, module: LightningModule) -> tuple[Any, int]:
    """Return the first training batch and its number of samples.

    Args:
        cfg: resolved, with `data`.
        module: whose own data loader is used if `data` is empty.

    Raises:
        ConfigError: if the data cannot be read here.
    """
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            batch = next(iter(_loader(cfg, module)))
            return batch, extract_batch_size(batch)
    except Exception as error:  # a data module can raise anything
        raise ConfigError(
            [f"data: reading a training batch failed, whose shapes a plan needs: {named_line(error)}"]
        ) from error


def _loader(cfg: DictConfig, module: LightningModule) -> Any:
    if "_target_" not in cfg.data:
        return module.train_dataloader()
    data = OmegaConf.create(OmegaConf.to_container(cfg.data))
    assert isinstance(data, DictConfig)
    with open_dict(data):
        if "num_workers" in data:
            data.num_workers = 0  # worker processes cost more than one batch
    source = instantiate(data)
    source.prepare_data()
    source.setup("fit")
    return source.train_dataloader()

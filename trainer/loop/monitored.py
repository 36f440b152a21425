"""Values that schedulers monitor by step, as one process would see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from trainwright.core.run.traits import traits_of
from trainwright.strategies.base.data_peers import refuse_different_rates
from trainwright.trainer.loop.optimization import LossDivisor
from trainwright.trainer.loop.results import LeanResults

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer

_OF_RANKS: dict[str, Callable[[Iterable[float]], float]] = {"mean": math.fsum, "sum": math.fsum, "max": max, "min": min}


class MonitoredValues:
    """Step values of the global batch, from those that data ranks log for their micro-batches.

    With ``global_batch_size`` it is the value of all micro-batches of an optimizer step, else, as in Lightning, of the
    last one.

    Args:
        trainer: of the run.
        results: of the training loop.
    """

    def __init__(self, trainer: RunTrainer, results: LeanResults) -> None:
        self._trainer, self._results = trainer, results
        self._seen: dict[str, float] = {}

    def see(self, divisor: LossDivisor, batch_idx: int) -> None:
        """Add the values of a micro-batch, after its last hook."""
        begins = not divisor.whole_step or batch_idx % self._trainer.accumulate_grad_batches == 0
        seen, self._seen = {} if begins else self._seen, {}
        weight = divisor.weight(batch_idx)
        share = 1 / divisor.divisor(batch_idx) if divisor.whole_step else weight
        for _, metric in self._results.valid_items():
            kind, of_all_ranks = _kind(metric), metric.meta.sync.should
            if kind and metric._forward_cache is not None and (weight or not of_all_ranks):
                factor = share / weight if of_all_ranks else share
                value = float(metric._forward_cache) * (factor if kind == "mean" else 1)
                name = metric.meta.name
                self._seen[name] = _OF_RANKS[kind]([value, *([seen[name]] if name in seen else [])])

    def agreed(self, key: str, value: Any, of_step: bool) -> Any:
        """Return the value of all data ranks. A collective, unless ranks step independently.

        Args:
            key: of the monitored value.
            value: this rank's; ``None``: there is none.
            of_step: whether a value that is also collected over the epoch is meant as that of the step.

        Raises:
            RuntimeError: on all ranks, if their values differ and have no common one, or if learning rates differ.
        """
        trainer = self._trainer
        if not traits_of(trainer.strategy).steps_are_collective:
            return value
        metric = next((m for _, m in self._results.valid_items() if key in (m.meta.name, f"{m.meta.name}_step")), None)
        kind = "" if metric is None or (metric.meta.on_epoch and not of_step) else _kind(metric)
        mine = self._seen.get(metric.meta.name) if kind else None if value is None else float(value)  # type: ignore[union-attr]
        rates = [str([group.get("lr") for group in each.param_groups]) for each in trainer.strategy.optimizers]
        fit_loop: Any = trainer.fit_loop
        gathered = fit_loop.data_ranks.gather((mine, rates))
        refuse_different_rates([each for _, each in gathered])
        found = [each for each, _ in gathered if each is not None]
        if value is None or not found:
            return value
        if kind and not metric.meta.sync.should:  # type: ignore[union-attr]
            found = [_OF_RANKS[kind](found) / (len(found) if kind == "mean" else 1)]
        if len({repr(each) for each in found}) > 1:
            raise RuntimeError(
                f"A scheduler monitors {key}, which differs between ranks ({', '.join(map(str, found[:4]))}), so their "
                "learning rates would. Log a number, self.log(name, value, sync_dist=True), or give the metric "
                "dist_sync_on_step=True."
            )
        return torch.as_tensor(value).new_tensor(found[0])


def _kind(metric: Any) -> str:
    """Return how the values of a step are reduced over ranks; empty: they cannot be, or there are none."""
    meta = metric.meta
    kinds = ("mean", "sum", "max", "min") if metric.is_tensor and meta.on_step else ()
    return next((kind for kind in kinds if getattr(meta, f"is_{kind}_reduction")), "")

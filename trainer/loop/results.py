"""Results of ``self.log``: exact over ranks, and cheap for metrics logged every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from trainwright.core.lightning_internals import _ResultCollection, _ResultMetric
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.data.batch_norm import SynchronizedBatchNorm
from trainwright.trainer.loop.remembered_logs import RememberedLogs


class LeanResults(_ResultCollection):
    """A result collection that recognizes metrics logged again with the same arguments.

    Values of whole epochs are reduced over data ranks even without ``sync_dist=True`` (except with
    ``rank_zero_only=True``), so that all ranks monitor the same number and every sample counts once. Values of single
    steps keep Lightning's meaning: this rank's own unless ``sync_dist=True``; the mean over ranks is then one over
    samples, also with unequal numbers of samples.

    Args:
        training: whether it belongs to the training loop.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self._padding = False
        self._weight = 1.0
        self._reduces: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._known: dict[tuple[str, str, int | None], tuple[dict[str, Any], _ResultMetric]] = {}
        self._remembered = RememberedLogs()

    def remember(self, logs: RememberedLogs) -> None:
        """Restore what an interrupted run had collected of this epoch."""
        self._remembered = logs
        self._known.clear()  # so that each first call takes the slow path

    def reset_all(self) -> None:
        """Drop everything logged."""
        self.reset()
        self.clear()
        self._known.clear()

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Let values logged inside, and statistics, take part in collectives without weight.

        In an evaluation, those that only padding has logged are dropped; see :func:`~.remembered_logs.match_logged`.
        """
        self._padding, before = True, set(self)
        SynchronizedBatchNorm.has_samples = False
        try:
            yield
        finally:
            self._padding, SynchronizedBatchNorm.has_samples = False, True
            for key in () if self.training else self.keys() - before:
                del self[key]
                self._known.clear()

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        """Weight this rank's values of a step logged inside in means over ranks."""
        return with_attributes(self, _weight=weight)

    def _weighting(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def weight_and_reduce(value: Any, *args: Any, **kwargs: Any) -> Any:
            if self._weight != 1 and kwargs.get("reduce_op") == "mean":
                value = value * self._weight
            return reduce(value, *args, **kwargs)

        # Cached: Lightning refuses a metric that is logged again with another function.
        return self._reduces.setdefault(reduce, weight_and_reduce)

    @torch.compiler.disable
    def log(
        self,
        fx: str,
        name: str,
        value: Any,
        *,
        batch_size: int | None = None,
        sync_dist_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`, whose other arguments are ``options``."""
        if self._padding and isinstance(value, Tensor):
            reduce_fx, batch_size = options.get("reduce_fx", torch.mean), 0
            # What a hook logs, such as a norm of gradients, is not of this rank's batch.
            if not (fx.startswith("on_") and reduce_fx in (torch.mean, "mean", "avg")):
                value = _neutral(value, reduce_fx)
        key = (fx, name, self.dataloader_idx)
        known = self._known.get(key)
        if known is not None and known[0] == options and isinstance(value, Tensor):
            self._log_again(known[1], value, batch_size, options.get("enable_graph", False))
            return
        if sync_dist_fn is not None:
            sync_dist_fn = self._weighting(sync_dist_fn)
        super().log(fx, name, value, batch_size=batch_size, sync_dist_fn=sync_dist_fn, **options)
        has_index = self.dataloader_idx is not None and options.get("add_dataloader_idx", True)
        metric = self[f"{fx}.{name}.{self.dataloader_idx}" if has_index else f"{fx}.{name}"]
        if isinstance(value, Tensor):
            _count_in_floats(metric)
            self._known[key] = (options, metric)
        if self._remembered:
            self._remembered.add_to(metric)

    def _get_cache(self, result_metric: _ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        meta = result_metric.meta
        if not on_step and meta.on_epoch and result_metric.is_tensor and result_metric._computed is None:
            asked, meta.sync.should = meta.sync.should, not meta.sync.rank_zero_only
            try:
                return super()._get_cache(result_metric, on_step)
            finally:
                meta.sync.should = asked
        return super()._get_cache(result_metric, on_step)

    def _log_again(self, metric: _ResultMetric, value: Tensor, batch_size: int | None, enable_graph: bool) -> None:
        if not enable_graph:
            value = value.detach()
        if metric.value.device != value.device:
            metric.to(value.device)
        metric.forward(value, self._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False

    def to(self, *args: Any, **kwargs: Any) -> LeanResults:
        """Move all values to a device."""
        self._known.clear()
        return super().to(*args, **kwargs)  # type: ignore[return-value]


class RepeatedLog:
    """A faster ``self.log`` for repeated calls.

    Lightning checks each call anew: types, names, the current hook, the signature of ``training_step``. A call that
    differs from an earlier one only in its value passes the same checks, and goes straight to the result. Any other
    goes to the module's own ``log``.

    Args:
        module: whose ``log`` is called.
        trainer: its trainer.
        results: of the training loop.
    """

    def __init__(self, module: LightningModule, trainer: Trainer, results: LeanResults) -> None:
        self._module = module
        self._trainer = trainer
        self._results = results
        self._connector = trainer._logger_connector
        self._calls: dict[tuple[str, str], tuple[tuple[Any, ...], dict[str, Any], _ResultMetric]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Shadow the module's ``log`` for an epoch, unless the module overrides it."""
        own = "log" in vars(self._module) or type(self._module).log is not LightningModule.log
        if own:
            yield
            return
        self._module.__dict__["log"] = self
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        fx = self._module.__dict__["_current_fx_name"]
        known = self._calls.get((fx, name))
        if known is None or not self._repeats(fx, value, (known[0], known[1]) == (args, kwargs)):
            LightningModule.log(self._module, name, value, *args, **kwargs)
            self._remember(fx, name, args, kwargs)
            return
        metric = known[2]
        self._results._log_again(metric, value, kwargs.get("batch_size"), metric.meta.enable_graph)
        self._connector._current_fx = fx

    def _repeats(self, fx: str, value: Any, same_call: bool) -> bool:
        connector = self._connector
        return (
            same_call
            and not self._results._padding
            and type(value) is Tensor
            and value.dim() == 0
            and self._trainer.training  # not while validating
            and not (connector._current_fx != fx and connector._first_loop_iter in (None, True))
        )

    def _remember(self, fx: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self._results._known.get((fx, name, self._results.dataloader_idx))
        if known is not None and not args and kwargs.keys().isdisjoint(("metric_attribute",)):
            self._calls[fx, name] = (args, dict(kwargs), known[1])


def _count_in_floats(metric: _ResultMetric) -> None:
    """Count samples as floats: Lightning's integer counts are truncated in means over ranks (23 on 2 ranks became
    11).
    """
    if metric.meta.is_mean_reduction and not metric.cumulated_batch_size.is_floating_point():
        metric.cumulated_batch_size = metric.cumulated_batch_size.to(metric.value.dtype)
        metric._defaults["cumulated_batch_size"] = torch.tensor(0.0, dtype=metric.value.dtype)


def _neutral(value: Tensor, reduce_fx: Callable[..., Any] | str) -> Tensor:
    """Return the neutral element of ``reduce_fx``."""
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
    fill = {"min": float("inf"), "max": float("-inf")}.get(name.lower(), 0.0)
    return torch.full_like(value, fill, dtype=value.dtype if value.is_floating_point() else torch.float32)

"""Steps of a pipeline: forward and backward of all micro-batches, and evaluation on all stages together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor
from torchmetrics import Metric

from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.data import metric_states, set_metric_states
from trainwright.strategies.data.sharding.gathering import parameter_groups
from trainwright.strategies.pipeline.engine import PipelineEngine
from trainwright.strategies.state.wholes import whole_on_device


class PipelineSteps:
    """Runs the user's steps through a pipeline.

    Args:
        strategy: of this stage.
        evaluate: runs a method of the user's module without gradients, within a context.
    """

    def __init__(self, strategy: Any, evaluate: Callable[..., Any]) -> None:
        self._strategy, self._evaluate = strategy, evaluate
        self._engine: PipelineEngine
        self._evaluation = ExitStack()
        self._is_evaluating = False

    def attach(self, engines: Engines) -> None:
        """Connect the pipeline, at the end of setup."""
        self._engine = engines.attach(self)

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward and backward of a whole batch, then average gradients over data-parallel ranks."""
        with self._local_gradients():
            samples = self._samples_of_loader()
            output = self._engine.train(args, kwargs, batch=args[0], scale=self._scaled, samples=samples)
        self._average_gradients()
        return output

    @property
    def written(self) -> AsWritten:
        """The module as written."""
        return self._strategy.certificate.written  # type: ignore[no-any-return]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rehearses: bool = False) -> Any:
        """Run the user's step on one micro-batch; rehearsals without collectives of the strategy."""
        strategy, step = self._strategy, self._strategy._step
        with strategy.precision_plugin.train_step_context(), self._observed(args[0]), strategy.ranks.among_data_ranks():
            if step is not None and not rehearses:
                return step("training_step", *args, **kwargs)
            # Calls of modules do not gather their weights: data ranks with one micro-batch do not rehearse.
            with nullcontext() if step is None else with_attributes(step, running=True):
                return self._engine.call(partial(strategy.lightning_module.training_step, *args, **kwargs))

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's step without gradients on all pipeline stages together."""
        try:
            with self._strategy.ranks.among_data_ranks():
                context = self._strategy.precision_plugin.train_step_context
                return self._evaluate("training_step", context, *args, **kwargs)
        finally:
            self._reshard_blocks()

    def whole(self, name: str) -> Tensor:
        """Return a parameter of this stage, gathered along the data axes."""
        return whole_on_device(self._strategy.lightning_module.get_parameter(name))

    def take_metric(self, metric: Metric) -> None:
        """Copy a metric's states from the last stage, the only one that updates it in a training step."""
        if not self._strategy.ranks.leaders_only:
            states = self._engine.from_last_stage(metric_states(metric), type(metric).__name__)
            set_metric_states(metric, states)

    def _samples_of_loader(self) -> int | None:
        """Return the batch size of the loader; ``None``: unknown."""
        loader = getattr(self._strategy.lightning_module.trainer, "train_dataloader", None)
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    def _observed(self, batch: Any) -> AbstractContextManager[Any]:
        """Count tokens inside, if the Trainer weighs losses by them."""
        weights = getattr(self._strategy.lightning_module.trainer, "token_weights", None)
        return nullcontext() if weights is None else weights.observe(batch)

    def _scaled(self, loss: Tensor, share: float) -> Tensor:
        """Return the scaled loss of a micro-batch that holds this share of the samples."""
        strategy = self._strategy
        if strategy.certificate.is_on:
            strategy.certificate.patterns.see(loss)
        trainer = strategy.lightning_module.trainer
        divisor = strategy.loss_divisor or trainer.accumulate_grad_batches
        weights = getattr(trainer, "token_weights", None)
        if weights is None:
            loss = loss * (strategy.loss_factor / divisor * share)
        else:
            loss = weights.weight(loss, padding=math.isinf(divisor), share=share)
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        return scaler.scale(loss) if scaler is not None else loss

    @contextmanager
    def _local_gradients(self) -> Iterator[None]:
        """Keep whole local gradients in backward passes inside."""
        step = self._strategy._step
        with ExitStack() as stack:
            for reducer in self._strategy._exchanges.reducers:
                reducer.begin()
                stack.enter_context(reducer.accumulate(shards_too=True))
            if step is not None:
                step.set_is_last_backward(False)
                step.set_reshard_after_backward(False)
                step.set_requires_gradient_sync(False)
            yield

    def _average_gradients(self) -> None:
        strategy, step = self._strategy, self._strategy._step
        for reducer in strategy._exchanges.reducers:
            reducer.finish()
        if step is None:
            return
        step.set_is_last_backward(True)
        step.set_reshard_after_backward(True)
        step.set_requires_gradient_sync(not (strategy._accumulates_gradients and strategy._holds_whole_gradients))
        state = step._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in parameter_groups(each):
                group.post_backward()
        state._root_post_backward_final_callback()
        step.set_requires_gradient_sync(True)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[[], Any], method: str) -> Any:
        """Run a step, which runs ``method`` of the user's module, on all stages together."""
        if not self._is_evaluating and not self._strategy.lightning_module.trainer.training:
            # At the first step: callbacks may exchange weights (averages) when an evaluation starts.
            self._evaluation.enter_context(self._engine.evaluating())
            self._is_evaluating = True
        with self._engine.evaluating():  # reentrant; also for steps of callbacks
            try:
                return self._engine.relay(step, method)
            finally:
                self._reshard_blocks()

    def relay_summary(self, callback: ModelSummary) -> None:
        """Let the callback run the module's ``example_input_array`` on all stages together, once."""

        def summary(trainer: Trainer, module: LightningModule) -> Any:
            del vars(callback)["_summary"]
            run = partial(callback._summary, trainer, module)
            relays = trainer.strategy is self._strategy and module.example_input_array is not None
            return self.evaluate(run, "forward") if relays else run()

        vars(callback)["_summary"] = summary

    def end_evaluation(self) -> None:
        """Free parameters of other stages."""
        self._is_evaluating = False
        self._evaluation.close()

    def _reshard_blocks(self) -> None:
        """Reshard, since no backward follows and callbacks may look at the parameters."""
        step = self._strategy._step
        if step is not None:
            for state in step._get_fsdp_state()._state_ctx.all_states:
                for group in parameter_groups(state):
                    group.reshard()
            self._strategy._drop_prefetched()

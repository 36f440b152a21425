"""``trainwright.Trainer``: Lightning's Trainer on any layout.

A script that creates one starts its ranks as with Lightning: by running itself once per other rank of this machine.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from trainwright.callbacks.guard.copies import StateCopies
from trainwright.callbacks.traffic.communication_advice import CommunicationAdvice
from trainwright.checkpoint.exchange.groups import WorldGroup, default_store
from trainwright.core.config.lightning_alias import refuse_other_package
from trainwright.core.config.options import refuse
from trainwright.core.failures.failure import describe_end
from trainwright.core.failures.uncaught import STARTED, Uncaught, is_one_of_many, report_uncaught
from trainwright.core.lightning_internals import _SubprocessScriptLauncher
from trainwright.core.processes.machine import threads_of_rank, use_threads
from trainwright.core.processes.orphans import end_with_agent
from trainwright.core.processes.scratch import scratch
from trainwright.core.run.hooks import refuse_missing_hooks
from trainwright.core.run.peers import service_of
from trainwright.core.run.phases import SAVING
from trainwright.core.run.traits import traits_of
from trainwright.core.text.messages import token_environment
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.communication.options import OFF
from trainwright.strategies.contract.precision import set_loss_scale
from trainwright.strategies.contract.registry import strategy_names
from trainwright.trainer.arguments import (
    accelerator_for,
    check_data_options,
    check_words,
    fp16_on_cpu,
    from_environment,
    of_lightning,
    resolve_strategy,
    type_problems,
    with_progress_bar,
)
from trainwright.trainer.balance.balance import Balance, make_balance
from trainwright.trainer.balance.options import BalanceArgument
from trainwright.trainer.contract import RunTrainer
from trainwright.trainer.data.data_connector import OrderedDataConnector
from trainwright.trainer.data.partition import DataKey, resolve_data_key
from trainwright.trainer.leases.batches import LeasedBatchSampler, SampleLeases
from trainwright.trainer.loop.epoch import LeanEpochLoop
from trainwright.trainer.loop.evaluation import ExactEvaluationLoop, OrderedPredictionLoop
from trainwright.trainer.loop.fit_loop import ResumableFitLoop
from trainwright.trainer.loop.loss_scale import PRECISION, LossScaling, loss_scale_problems
from trainwright.trainer.loop.loss_weighting import LossWeighting, TokenCount, make_token_weights
from trainwright.trainer.resume import ResumeConnector
from trainwright.trainer.signals import FlagOnSignal

WAITING_SECONDS = 10.0
_PAUSE = 0.05
_KEY = "trainwright/interrupted"
_Init = TypeVar("_Init", bound=Callable[..., None])


def _with_environment(init: _Init) -> _Init:
    """Complete arguments from the variables ``PL_TRAINER_<ARGUMENT>``; the signature shows Lightning's arguments, too.

    Libraries look there for arguments that a Trainer takes.
    """

    @wraps(init)
    def wrapper(self: Trainer, **kwargs: Any) -> None:
        given = from_environment(type(self), kwargs)
        problems = type_problems(LightningTrainer.__init__, given)
        try:
            init(self, **given)
        except (MisconfigurationException, TypeError, ValueError) as error:  # of Lightning, whose kind is kept
            named = [f"{name}={value!r}" for name, value in given.items() if f"`{name}`" in str(error)]
            error.args = ("; ".join([*(problems or named), str(error)]),)
            raise
        if problems:
            raise TypeError("; ".join(problems))

    own, theirs = signature(init), signature(LightningTrainer.__init__).parameters
    both = {**own.parameters, **theirs, **own.parameters}
    both.pop("kwargs")
    wrapper.__signature__ = own.replace(parameters=list(both.values()))  # type: ignore[attr-defined]
    return cast(_Init, wrapper)


class Trainer(RunTrainer):
    """Trains a ``LightningModule`` on any layout of devices.

    Args:
        strategy: a name in any case (``"auto"``, ``"single"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ...),
            one of Lightning's own names, or a strategy object. ``"auto"`` is one device, or DDP on several.
        global_batch_size: samples per optimizer step, the same under every layout; the number of accumulated
            micro-batches follows from it, the loader's batch size and the number of data ranks. ``None`` (off) keeps
            Lightning's meaning: the loader's batch size per rank, times ``accumulate_grad_batches``.
        uneven_steps: let the last micro-batches of a step be smaller, or missing on some ranks, if
            ``global_batch_size`` is not a multiple of full ones: the same numbers, with time lost to waiting. For a run
            that keeps its global batch when the number of ranks changes. ``False`` (off) refuses such a batch.
        balance: shares of data ranks in the global batch, which stays the same: ``"none"`` (off): equal; ``"auto"``: by
            measured speed; a list with one share per data rank; or options of ``"auto"`` by name, see
            :class:`~trainwright.trainer.balance.options.BalanceOptions`.
        data_seed: seed of the order of samples, which depends only on it and the epoch. ``None``: the seed of
            ``seed_everything``, or 0.
        loss_weighting: ``"micro_batch"`` is Lightning's mean over micro-batches (and ranks) of their losses;
            ``"tokens"`` makes gradients and the logged loss those of the mean over all valid tokens of the global
            batch, see :mod:`trainwright.trainer.loop.loss_weighting`.
        token_count: with ``"tokens"``, batch -> number of tokens over which ``training_step`` takes its mean, a
            function or ``"package.module:function"``; ``None`` counts the targets of the one ``cross_entropy`` or
            ``nll_loss`` in ``training_step``.
        data_partition: assignment of samples to data ranks: ``"interleave"`` in the order of the epoch; ``"range"``: a
            contiguous range of indices per rank; ``"hash"``: the same rank in every epoch, which changes only as far as
            necessary with the number of ranks. Evaluation always interleaves.
        data_key: with ``"hash"``, the key of a sample: a function ``(dataset, index) -> str | int | bytes`` or
            ``"package.module:function"``; ``None``: the index.
        seed_samples: draw each sample of map-style training data under random number generators seeded from (seed,
            epoch, index), so that augmentations do not depend on layout, workers or resuming; ``False`` (off) uses
            the generators of the process.
        allow_changed_data: ``False`` refuses to resume with another global batch, data set, order or partition than
            the saved run; ``True`` warns of the consequences and continues.
        loss_scale: with ``precision="16-mixed"``, how the loss is scaled: ``initial`` (65536; on CPUs 1024),
            ``growth_interval`` (2000), ``least`` (0), ``fixed`` (False), see ``LossScaling``. ``None``
            is torch's dynamic scaling.
        error_if_nonfinite: stop with an error when ``gradient_clip_val`` meets a norm that is NaN or infinite; off by
            default, as in Lightning.
        **kwargs: everything that ``lightning.pytorch.Trainer`` takes, with the same meaning; the progress bar is
            :class:`~trainwright.callbacks.progress.progress_bar.ProgressBar` unless ``callbacks`` has another.

    Raises:
        ValueError: if arguments are invalid or conflict.
    """

    _checkpoint_connector: ResumeConnector
    _data_connector: OrderedDataConnector

    if not TYPE_CHECKING:  # read twenty times per step, so without a Python frame each
        strategy = property(attrgetter("_accelerator_connector.strategy"))
        lightning_module = property(attrgetter("_accelerator_connector.strategy.lightning_module"))
        # Lightning compares stages as lower-case strings.
        training = property(lambda self: self.state.stage is RunningStage.TRAINING, LightningTrainer.training.fset)
        current_epoch = property(attrgetter("fit_loop.epoch_progress.current.completed"))
        fit, validate = of_lightning(LightningTrainer.fit), of_lightning(LightningTrainer.validate)
        test, predict = of_lightning(LightningTrainer.test), of_lightning(LightningTrainer.predict)

    @_with_environment
    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        global_batch_size: int | None = None,
        uneven_steps: bool = False,
        balance: BalanceArgument = "none",
        data_seed: int | None = None,
        loss_weighting: LossWeighting = "micro_batch",
        token_count: str | TokenCount | None = None,
        data_partition: str = "interleave",
        data_key: str | DataKey | None = None,
        seed_samples: bool = False,
        allow_changed_data: bool = False,
        loss_scale: Mapping[str, Any] | None = None,
        error_if_nonfinite: bool = False,
        **kwargs: Any,
    ) -> None:
        root = str(kwargs.get("default_root_dir") or os.getcwd())
        run_dir = Path(os.getcwd() if "://" in root else root)
        end_with_agent()
        if is_one_of_many():
            report_uncaught(run_dir)
        refuse_other_package([strategy, *kwargs.values()])
        check_words(type(self), kwargs)
        check_data_options(global_batch_size, data_partition, data_key, kwargs)
        kwargs.update(fp16_on_cpu(kwargs))
        strategy = resolve_strategy(strategy, kwargs)
        kwargs.update(accelerator_for(strategy, kwargs))
        kwargs["callbacks"] = with_progress_bar(kwargs)
        # Bypasses Lightning's wrapper, which would read the environment again.
        LightningTrainer.__init__.__wrapped__(self, strategy=strategy, **kwargs)  # type: ignore[attr-defined]
        self.global_batch_size = global_batch_size
        self.uneven_steps = uneven_steps
        self.global_batch = self.settled_accumulation = None
        self._data_seed = data_seed
        self.data_partition, self.data_key = data_partition, resolve_data_key(data_key)
        self.seed_samples, self.allow_changed_data = seed_samples, allow_changed_data
        self._agreement_group = WorldGroup()
        self._all_interrupted: bool | None = None  # whether all ranks have raised, once known
        self.copies = StateCopies(self)
        self.balance: Balance | None = make_balance(self, balance)
        leased = traits_of(self.strategy).leases_samples
        self.leases = None if leased is None else SampleLeases(self)
        self.token_weights = make_token_weights(self.strategy, loss_weighting, token_count)
        _set_loss_scale(self, loss_scale or {})
        _set_error_if_nonfinite(self, error_if_nonfinite)
        asks_advice = isinstance(self.strategy, LayoutStrategy) and self.strategy.averaging.communication != OFF
        callbacks: list[Any] = self.callbacks  # type: ignore[attr-defined]
        if asks_advice and not any(isinstance(each, CommunicationAdvice) for each in callbacks):
            callbacks.insert(0, CommunicationAdvice())
        self._use_own_loops(inference_mode=kwargs.get("inference_mode", True))
        self._use_own_connectors()
        if type(self.strategy.launcher) is _SubprocessScriptLauncher:
            self.strategy._launcher = ScriptLauncher(self.strategy.launcher, run_dir)

    def _use_own_loops(self, inference_mode: bool) -> None:
        # Parameters gathered under inference_mode could not be trained afterwards.
        inference_mode = inference_mode and not traits_of(self.strategy).forward_is_collective
        old = self.fit_loop.epoch_loop
        self.fit_loop = ResumableFitLoop(self, self.fit_loop.min_epochs, self.fit_loop.max_epochs)
        self.fit_loop.epoch_loop = LeanEpochLoop(self, old.min_steps, old.max_steps)

        evaluation = partial(ExactEvaluationLoop, self)
        validating, testing = RunningStage.VALIDATING, RunningStage.TESTING
        self.fit_loop.epoch_loop.val_loop = evaluation(TrainerFn.FITTING, validating, False, False)
        self.validate_loop = evaluation(TrainerFn.VALIDATING, validating, self.validate_loop.verbose, inference_mode)
        self.test_loop = evaluation(TrainerFn.TESTING, testing, self.test_loop.verbose, inference_mode)
        self.predict_loop = OrderedPredictionLoop(self, inference_mode=inference_mode)

    def _use_own_connectors(self) -> None:
        data, signals, checkpoints = OrderedDataConnector(self), FlagOnSignal(self), ResumeConnector(self)
        data.__dict__.update(self._data_connector.__dict__)
        signals.__dict__.update(self._signal_connector.__dict__)
        checkpoints.__dict__.update(self._checkpoint_connector.__dict__)
        self._data_connector, self._signal_connector, self._checkpoint_connector = data, signals, checkpoints

    @property
    def reads_evenly(self) -> bool:
        """True if ``training_step`` is running on a micro-batch with equally many samples on every data rank.

        ``False`` if unknown, and outside of it.
        """
        loop: Any = self.fit_loop.epoch_loop
        divisor = loop.automatic_optimization.loss_divisor
        within = getattr(self.lightning_module, "_current_fx_name", None) == "training_step"
        return within and divisor is not None and divisor.is_even(loop.batch_idx)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as Lightning does; monitors are notified, so that they do not report a slow step.

        After an exception it saves only if all ranks have raised one, and else warns: saving is a collective.
        """
        if self.interrupted and self._all_interrupted is None:
            self._all_interrupted = all_are_interrupted()
        if self._all_interrupted is False:
            warnings.warn(
                f"No checkpoint is saved after the exception on rank {self.global_rank}: saving needs all ranks, but "
                "others are still running and wait for this one. Resume the latest checkpoint.",
                stacklevel=2,
            )
            return
        with self.phases.within(SAVING):
            super().save_checkpoint(*args, **kwargs)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """As Lightning's; with leased samples, the number of global batches, which schedulers count then."""
        found: int | float = super().estimated_stepping_batches
        loop: Any = self.fit_loop
        leased: LeasedBatchSampler | None = loop.leased
        if leased is None or self.global_batch is None or self.max_epochs in (None, -1):
            return found
        steps = math.ceil(leased.epoch_samples / self.global_batch.size) * max(self.max_epochs or 1, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    def _run(self, model: LightningModule, ckpt_path: Any = None, weights_only: bool | None = None) -> Any:
        self._all_interrupted = None
        # Lightning drops it for strategies that restore late.
        self._checkpoint_connector.weights_only = weights_only
        if service_of(self.strategy).serves:
            return serve(self, model)
        return super()._run(model, ckpt_path, weights_only)

    def _teardown(self) -> None:
        super()._teardown()
        self._data_connector.restore()
        self.copies.stop()
        if self.leases is not None:
            self.leases.close()
        self._agreement_group.forget()


def _set_loss_scale(trainer: Trainer, given: Mapping[str, Any]) -> None:
    # Whether the precision supports it is checked by its plugin.
    refuse(loss_scale_problems(given, PRECISION, "loss_scale."))
    asked = LossScaling(**given)
    if asked != LossScaling():
        set_loss_scale(trainer.precision_plugin, asked.initial, asked.growth_interval, asked.least, asked.fixed)


def _set_error_if_nonfinite(trainer: Trainer, error_if_nonfinite: bool) -> None:
    if not error_if_nonfinite:
        return
    plugin = trainer.precision_plugin
    if not hasattr(plugin, "error_if_nonfinite"):
        raise ValueError(
            f"error_if_nonfinite=True is not supported with {type(plugin).__name__} and "
            f"{type(trainer.strategy).__name__}. Use one of the strategies {', '.join(strategy_names())} "
            "with precision 32, bf16-mixed, bf16-true or 16-mixed."
        )
    plugin.error_if_nonfinite = True


def all_are_interrupted(seconds: float = WAITING_SECONDS) -> bool:
    """Return whether every rank has called this within ``seconds``; all callers get the same answer.

    Call once per exception that ends a run. Other ranks are not contacted.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
    try:
        number = store.add(f"{_KEY}/{rank}", 1)
        arrived, answer = f"{_KEY}/{number}/here", f"{_KEY}/{number}/answer"
        until = time.monotonic() + seconds
        all_arrived = store.add(arrived, 1) == ranks
        while not all_arrived and time.monotonic() < until and not store.check([answer]):
            time.sleep(_PAUSE)
        decision: bytes = store.compare_set(answer, "", "all" if all_arrived else "some")
    except (RuntimeError, dist.DistError):  # the store's process has ended
        return False
    return decision == b"all"


def serve(trainer: RunTrainer, module: LightningModule) -> None:
    """Run a server rank until the workers have ended.

    For ``fit`` the user's code builds module and optimizer as on the other ranks. Nothing is trained, logged, saved or
    evaluated, and no callback or logger is called.

    Args:
        trainer: of this rank.
        module: the user's.
    """
    strategy: Any = trainer.strategy
    strategy.connect(module)
    if trainer.state.fn == TrainerFn.FITTING:
        callbacks, loggers = trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
        # Workers obey a stop signal; here it is only recorded.
        trainer._signal_connector.register_signal_handlers()
        trainer.callbacks, trainer.loggers = [], []  # type: ignore[attr-defined]
        try:
            strategy.setup_environment()
            trainer._data_connector.prepare_data()
            call._call_setup_hook(trainer)
            call._call_configure_model(trainer)
            strategy.setup(trainer)
            service_of(strategy).serve()
            trainer._teardown()
            call._call_teardown_hook(trainer)
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers  # type: ignore[attr-defined]
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None


# Time for other ranks to end after a failure; a rank in a collective may never notice one.
_GRACE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, which reports an error once and leaves no rank behind.

    Args:
        like: Lightning's launcher.
        run_dir: its `logs/` gets the tracebacks.
    """

    def __init__(self, like: _SubprocessScriptLauncher, run_dir: Path) -> None:
        super().__init__(like.cluster_environment, like.num_processes, like.num_nodes)
        self._run_dir = run_dir

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks if necessary, then call `function` in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = threads_of_rank(None, self.num_processes)  # of the other ranks, too
            use_threads(int(os.environ["OMP_NUM_THREADS"]))
        if not self.cluster_environment.creates_processes_externally:
            refuse_missing_hooks(trainer)
            sizes = f"{self.num_processes}/{self.num_processes * self.num_nodes}"
            os.environ[STARTED] = f"{sizes}@{scratch() / 'error_told'}"
            os.environ.update(token_environment())
            self._call_children_scripts()
            report_uncaught(self._run_dir, self._silent_end, partial(_end, self.procs, _GRACE_SECONDS))
            threading.Thread(target=self._watch, name="trainwright-ranks", daemon=True).start()
        return function(*args, **kwargs)

    def _silent_end(self) -> str | None:
        """Describe the end of another rank that could not report it itself."""
        ended = [(process.poll(), rank) for rank, process in enumerate(self.procs, 1) if process.poll() is not None]
        # Those that reported an error exit with 1, too, but then nothing more is printed.
        for code, rank in sorted(ended, key=lambda each: (each[0] in (0, 1), each[0] == 0)):
            return f"rank {rank} of {len(self.procs) + 1} {describe_end(code)}; the others were ended"
        return None

    def _watch(self) -> None:
        """End all ranks when one has failed and this one does not end by itself."""
        while any(process.poll() is None for process in self.procs):
            if any(process.poll() for process in self.procs):
                break
            time.sleep(_LOOK_SECONDS)
        failed = next((process for process in self.procs if process.poll()), None)
        if failed is None:
            return
        time.sleep(_GRACE_SECONDS)  # the process may end meanwhile, and this thread with it
        silent = self._silent_end()
        if silent is not None:
            Uncaught(self._run_dir).print_once(silent)
        _end(self.procs, 0.0)
        os.kill(os.getpid(), signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[Any]], grace: float) -> None:
    """Wait for processes to end, then kill those that have not."""
    end = time.monotonic() + grace
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        process.kill()

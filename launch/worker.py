"""One rank of a run: build the objects that the configuration names, and run the verb.

This is the only module of the command line that imports torch and Lightning at its top; the fork server imports it once
for all ranks.
"""

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.inject.sentences import make_faults
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.callbacks.schedule.learning_rate_schedule import LearningRateSchedule
from trainwright.callbacks.schedule.schedules import RunSchedule
from trainwright.checkpoint.memory.snapshots import PENDING, Snapshot
from trainwright.checkpoint.read.candidates import LAST
from trainwright.core.config.lightning_alias import instantiate, refuse_other_package
from trainwright.core.config.masking import MaskedParameters
from trainwright.core.config.missing import resolved
from trainwright.core.config.options import class_of
from trainwright.core.device_profiles import peak_flops_of
from trainwright.core.failures.error_text import is_refusal, is_secondary, message_of
from trainwright.core.failures.failure import log_file
from trainwright.core.failures.refusal import refused_as
from trainwright.core.problems import ConfigError
from trainwright.core.processes.machine import keep_freed_memory, on_one_stack, use_threads
from trainwright.core.run.launcher import detect_launcher
from trainwright.core.run.traits import traits_of
from trainwright.launch.checks.check_run import compression_of
from trainwright.launch.watchdog.boxes import AUTO
from trainwright.launch.watchdog.callback import Watchdog
from trainwright.strategies.averaging.compression.options import OFF
from trainwright.strategies.compose.world import options_of
from trainwright.trainer.loggers.lenient import lenient
from trainwright.trainer.loggers.metrics_csv import MetricsCSV
from trainwright.trainer.loggers.runs import LoggerRuns, in_same_run, runs_before
from trainwright.trainer.loggers.tensorboard import HyperParameters, references_of
from trainwright.trainer.resume import search_folders
from trainwright.trainer.trainer import Trainer

PREDICTIONS = "predictions.pt"
_RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_LIBRARIES = re.compile(r"[/\\](lightning|torch|tensorboard)[/\\]")

# Resuming another run's checkpoint changes the directory; resuming in place finds it filled.
_OF_RESUMING = re.compile(r"The dirpath has changed from|Checkpoint directory .* exists and is not empty")


@on_one_stack
def run_verb(
    cfg: DictConfig,
    verb: str,
    on_exception: Callable[[BaseException], None],
    *,
    held: Snapshot | None = None,
    more_callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Build module, data, strategy, callbacks and loggers from a resolved configuration and run the verb.

    Args:
        cfg: the resolved configuration of the run directory.
        verb: fit, validate, test or predict.
        on_exception: called with an exception as soon as it is raised, before teardown.
        held: an in-memory snapshot to resume from instead of `cfg.ckpt_path`; None = off.
        more_callbacks: in addition to those of the configuration.

    Returns:
        The final metrics by name.

    Raises:
        ConfigError: if a part cannot be built, or this package refuses it before training starts.
    """
    if cfg.launch.threads or "OMP_NUM_THREADS" in os.environ:
        # torch read the variable when the fork server imported it, before it was set for this run.
        use_threads(int(cfg.launch.threads or os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    _log_to_file(Path(cfg.run_dir))
    asked, cfg = cfg, resolved(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    hook = _ExceptionHook(on_exception, cfg.ckpt_path, has_started=held is not None)
    module, data, trainer = build(asked, [*more_callbacks, hook])
    if not cfg.strict:
        module.strict_loading = False
    try:
        result = getattr(trainer, verb)(module, datamodule=data, **_loading(trainer, cfg, held))
    except Exception as error:
        hook.raise_refusal(error)
        raise
    if verb == "predict" and trainer.is_global_zero:
        _save_predictions(result, Path(trainer.default_root_dir))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def build(
    cfg: DictConfig, more_callbacks: Sequence[Callback] = ()
) -> tuple[LightningModule, LightningDataModule | None, Trainer]:
    """Build the module, the data module and the Trainer of a configuration.

    Raises:
        ConfigError: naming the part that cannot be built.
    """
    asked, cfg = cfg, resolved(cfg)
    module = _built(cfg.module, "module", LightningModule)
    data = _built(cfg.data, "data", LightningDataModule) if cfg.data else None
    _try_optimizer(cfg.optimizer)
    with refused_as("the Trainer cannot be built"):
        return module, data, build_trainer(asked, more_callbacks)


def _try_optimizer(optimizer: Any) -> None:
    """Check the options of a torch optimizer by building it for one weight; the module builds the real one later."""
    if class_of(optimizer) and str(optimizer._target_).startswith("torch.optim.") and optimizer.get("_partial_"):
        factory = instantiate(optimizer)
        with refused_as(f"optimizer: {optimizer._target_} cannot be built"):
            factory([torch.nn.Parameter(torch.zeros(1, 1))])


def _built(value: DictConfig, key: str, kind: type) -> Any:
    """Instantiate one part of the configuration.

    Raises:
        ConfigError: if it cannot be built, or is not a `kind`.
    """
    target = value.get("_target_")
    with refused_as(f"{key}: {target} cannot be built"):
        made = instantiate(value)
        refuse_other_package([made])
    if isinstance(made, kind) or isinstance(getattr(made, "_orig_mod", None), kind):  # torch.compile wraps a module
        return made
    raise ConfigError(
        [f"{key}._target_={target}: is a {type(made).__name__}; type the path of a {kind.__name__} class"]
    )


def build_trainer(cfg: DictConfig, more_callbacks: Sequence[Callback] = ()) -> Trainer:
    """Build the Trainer with its strategy, callbacks and loggers."""
    asked, cfg = cfg, resolved(cfg)
    monitors, saving, own = (_build_all(cfg, group) for group in ("monitor", "checkpoint", "callbacks"))
    if any(isinstance(each, ProgressBar) for each in own):  # the user's replaces the default: a Trainer has only one
        monitors = [each for each in monitors if not isinstance(each, ProgressBar)]
    callbacks = [*monitors, *saving, *own]
    _set_peak_flops(cfg, callbacks)
    callbacks.append(instantiate(cfg.preemption))
    callbacks += [*_watchdog(cfg, callbacks), *scheduled(cfg, callbacks)]
    # The guard comes last, because it checks what the others may have changed.
    callbacks += [*make_faults(cfg.inject), *_build_all(cfg, "guard"), *more_callbacks]
    known = runs_before(Path(cfg.run_dir), cfg.ckpt_path)
    loggers = _loggers(cfg, known)
    for logger in loggers.values():
        if isinstance(logger, MaskedParameters):
            logger.references = references_of(asked)
    typed = HyperParameters(asked)
    callbacks += [typed, LoggerRuns(loggers, Path(cfg.run_dir), known, typed.values, report=cfg.report)]
    options: Any = OmegaConf.to_container(cfg.trainer)
    # Passed only where it is set: the strategies of other libraries have no such argument.
    begin: dict[str, Any] = {} if cfg.init_from is None else {"init_from": cfg.init_from}
    if cfg.compression.name != OFF:
        begin["compression"] = compression_of(cfg, options_of(cfg.strategy))
    has_end = cfg.max_steps is not None or cfg.max_epochs is not None
    strategy = {str(key): value for key, value in cfg.strategy.items() if key != "checks"}  # they have run by now
    return Trainer(
        strategy=instantiate(strategy, **begin),
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        accelerator=cfg.accelerator,
        precision=cfg.precision,
        callbacks=callbacks,
        logger=list(loggers.values()),
        max_steps=-1 if cfg.max_steps is None else cfg.max_steps,
        # With neither limit Lightning would train for 1000 epochs.
        max_epochs=cfg.max_epochs if has_end else -1,
        global_batch_size=cfg.global_batch_size,
        balance=OmegaConf.to_container(cfg.balance),  # type: ignore[arg-type]
        accumulate_grad_batches=cfg.accumulation.steps or 1,
        default_root_dir=cfg.run_dir,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        **options,
    )


def _set_peak_flops(cfg: DictConfig, callbacks: Sequence[Callback]) -> None:
    """Set the peak FLOP/s of callbacks that log a fraction of it, where the user has not."""
    ignorant = [each for each in callbacks if isinstance(each, Throughput) and each.peak_flops is None]
    peak = peak_flops_of(cfg) if ignorant else None
    for callback in ignorant:
        callback.peak_flops = peak


def scheduled(cfg: DictConfig, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the learning rate's schedule, unless it is the module's or one of the callbacks."""
    if cfg.schedule.shape == "none" or any(isinstance(callback, LearningRateSchedule) for callback in callbacks):
        return []
    return [LearningRateSchedule(RunSchedule(**cfg.schedule))]


def _watchdog(cfg: DictConfig, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the watchdog of this rank, unless the user configured one. With hang_timeout=auto only ranks started by a
    launcher are watched: in the process of the command a debugger may hold the run.
    """
    launch = cfg.launch
    if launch.hang_timeout is None or any(isinstance(callback, Watchdog) for callback in callbacks):
        return []
    if launch.hang_timeout == AUTO and detect_launcher() is None:
        return []
    return [
        Watchdog(launch.hang_timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout)
    ]


class _ExceptionHook(Callback):
    """Callback that reports exceptions at once, and a refusal before the first batch as a ConfigError.

    Args:
        on_exception: called with the exception.
        ckpt_path: checkpoint that is restored first; None = none.
        has_started: whether the run has trained before.
    """

    def __init__(self, on_exception: Callable[[BaseException], None], ckpt_path: str | None, has_started: bool) -> None:
        self._on_exception = on_exception
        self._ckpt_path = ckpt_path
        self._has_started = has_started

    def on_exception(self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self.raise_refusal(exception)
        except ConfigError as error:
            exception = error
        self._on_exception(exception)

    def raise_refusal(self, error: BaseException) -> None:
        """Raise a ConfigError from `error` if training has not started and the error explains itself."""
        if self._has_started or not isinstance(error, Exception):
            return
        if is_refusal(error):
            raise ConfigError([message_of(error)]) from error
        if self._ckpt_path is not None and _raised_in_restore(error) and not is_secondary(error):
            with refused_as(f"ckpt_path={self._ckpt_path}: does not match this run"):
                raise error

    def _mark_started(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        self._has_started = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = _mark_started


def _raised_in_restore(error: Exception) -> bool:
    """Return whether an error was raised while restoring a checkpoint into the module and the loops."""
    return any(
        frame.f_globals.get("__name__") == _RESTORING and frame.f_code.co_name.startswith("restore")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _build_all(cfg: DictConfig, group: str) -> list[Any]:
    return [_built(value, f"{group}.{name}", Callback) for name, value in cfg[group].items() if value is not None]


def _loggers(cfg: DictConfig, known: Mapping[str, Mapping[str, str]]) -> dict[str, Logger]:
    """Build the loggers by name. metrics.csv is always among them, and only its errors end a run."""
    loggers: dict[str, Logger] = {}
    for name, value in cfg.logger.items():
        if value is not None:
            options = OmegaConf.create(in_same_run(value, known.get(name, {})))
            made = _built(options, f"logger.{name}", Logger)
            loggers[name] = made if isinstance(made, CSVLogger) else lenient(made)
    if not any(isinstance(logger, CSVLogger) for logger in loggers.values()):
        loggers["metrics.csv"] = MetricsCSV(cfg.run_dir)
    return loggers


def _loading(trainer: Trainer, cfg: DictConfig, held: Snapshot | None) -> dict[str, Any]:
    """Return the checkpoint arguments of fit, validate, test or predict. Only a trusted file may hold code."""
    if held is None and traits_of(trainer.strategy).joins:
        held = PENDING
    if held is not None:
        return {"ckpt_path": held}
    ckpt_path = cfg.ckpt_path
    if cfg.resume_folders:
        # The ranks read contents; the launching process has read only manifests.
        search_folders(trainer, cfg.resume_folders)
        ckpt_path = cfg.resume or LAST
    return {"ckpt_path": ckpt_path, "weights_only": not cfg.trust}


def _save_predictions(predictions: Any, run_dir: Path) -> None:
    path = run_dir / PREDICTIONS
    partial = path.with_suffix(".pt.partial")
    torch.save(predictions, partial)
    os.replace(partial, path)


def _log_to_file(run_dir: Path) -> None:
    """Log to this rank's file; the terminal of rank 0 shows only warnings and errors."""
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    path = log_file(run_dir, rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _RankLog(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("lightning.pytorch", "lightning.fabric", "trainwright"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler):  # of an earlier run in this process
                logger.removeHandler(handler)
                handler.close()
            else:
                handler.setLevel(logging.WARNING)
        logger.addHandler(to_file)
    _warnings_to(to_file, terminal=rank == 0)


class _RankLog(logging.FileHandler):
    """Log file of a rank. On a full disk it drops records, where logging would print a traceback for each."""

    def _open(self) -> TextIOWrapper:
        try:
            return super()._open()
        except OSError:
            return open(os.devnull, "w", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop a record that cannot be written."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _warnings_to(to_file: logging.FileHandler, terminal: bool) -> None:
    """Send warnings to the file, and those that a user can act on to the terminal."""
    # Lightning warns of a run directory that is not empty; it always contains config.yaml.
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
    show = getattr(warnings.showwarning, "of_python", warnings.showwarning)

    def show_and_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line).strip()
        to_file.handle(logging.LogRecord("warnings", logging.WARNING, filename, lineno, text, None, None))
        if terminal and not _is_advice(text, category, filename):
            show(message, category, filename, lineno, file, line)

    show_and_log.of_python = show  # type: ignore[attr-defined]
    warnings.showwarning = show_and_log


def _is_advice(text: str, category: type[Warning], filename: str) -> bool:
    """Return whether a warning is a hint that may not apply, an effect of resuming, or a deprecation in libraries."""
    if not _LIBRARIES.search(filename):
        return False
    deprecation = issubclass(category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning))
    return deprecation or issubclass(category, PossibleUserWarning) or _OF_RESUMING.search(text) is not None

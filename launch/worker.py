"""One rank of a run: build what the configuration names, run the verb.

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
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.inject.sentences import make_faults
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.checkpoint.memory.held import PENDING, HeldState
from trainwright.checkpoint.read.candidates import LAST
from trainwright.core.config.masking import MaskedParameters
from trainwright.core.config.missing import resolved
from trainwright.core.config.options import class_of
from trainwright.core.device_profiles import peak_flops_of
from trainwright.core.failures.error_text import is_refusal, is_secondary, message_of
from trainwright.core.failures.failure import log_file
from trainwright.core.failures.refusal import refused_as
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import detect_launcher
from trainwright.core.run.traits import traits_of
from trainwright.launch.checks.check_compression import compression_of
from trainwright.launch.watchdog.callback import Watchdog
from trainwright.launch.watchdog.limits import AUTO
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

# A run that goes on from another one's checkpoint has its own directory, and one that goes on in place finds it filled.
_OF_RESUMING = re.compile(r"The dirpath has changed from|Checkpoint directory .* exists and is not empty")


def run_verb(
    cfg: DictConfig,
    verb: str,
    on_exception: Callable[[BaseException], None],
    *,
    held: HeldState | None = None,
    more_callbacks: Sequence[Callback] = (),
) -> dict[str, float]:
    """Build module, data, strategy, callbacks and loggers from a resolved configuration and run the verb.

    Args:
        cfg: the resolved configuration of the run directory.
        verb: fit, validate, test or predict.
        on_exception: told of an exception as soon as it appears, before anything is torn down.
        held: a state in memory to go on from, in place of what the configuration says; `None`: off.
        more_callbacks: beside those of the configuration.

    Returns:
        The metrics of the end, by name.

    Raises:
        ConfigError: if something cannot be built, or this package refuses it before training begins.
    """
    if cfg.launch.threads or "OMP_NUM_THREADS" in os.environ:
        # torch has read the variable when the fork server imported it, before it was decided for this run.
        torch.set_num_threads(int(cfg.launch.threads or os.environ["OMP_NUM_THREADS"]))
    _log_to_file(Path(cfg.run_dir))
    asked, cfg = cfg, resolved(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    hook = _ExceptionHook(on_exception, cfg.ckpt_path, has_begun=held is not None)
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
    """Build the module, the data and the Trainer of a configuration.

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
    """Let an optimizer of torch judge its options on one weight; the module makes the real one later."""
    if class_of(optimizer) and str(optimizer._target_).startswith("torch.optim.") and optimizer.get("_partial_"):
        factory = instantiate(optimizer, _convert_="all")
        with refused_as(f"optimizer: {optimizer._target_} cannot be built"):
            factory([torch.nn.Parameter(torch.zeros(1, 1))])


def _built(value: DictConfig, key: str, kind: type) -> Any:
    """What one part of the configuration builds.

    Raises:
        ConfigError: if it cannot be built, or is no `kind`.
    """
    target = value.get("_target_")
    with refused_as(f"{key}: {target} cannot be built"):
        made = instantiate(value, _convert_="all")
    if isinstance(made, kind) or isinstance(getattr(made, "_orig_mod", None), kind):  # torch.compile wraps a module
        return made
    raise ConfigError(
        [f"{key}._target_={target}: gives a {type(made).__name__}; type the path of a class of a {kind.__name__}"]
    )


def build_trainer(cfg: DictConfig, more_callbacks: Sequence[Callback] = ()) -> Trainer:
    """The Trainer of a configuration, with its strategy, callbacks and loggers."""
    asked, cfg = cfg, resolved(cfg)
    callbacks = [built for group in ("monitor", "checkpoint", "callbacks") for built in _build_all(cfg, group)]
    _tell_peak(cfg, callbacks)
    callbacks.append(instantiate(cfg.preemption, _convert_="all"))
    callbacks += _watchdog(cfg, callbacks)
    # The guard looks at what the others may have changed.
    callbacks += [*make_faults(cfg.inject), *_build_all(cfg, "guard"), *more_callbacks]
    known = runs_before(Path(cfg.run_dir), cfg.ckpt_path)
    loggers = _loggers(cfg, known)
    for logger in loggers.values():
        if isinstance(logger, MaskedParameters):
            logger.references = references_of(asked)
    typed = HyperParameters(asked)
    callbacks += [typed, LoggerRuns(loggers, Path(cfg.run_dir), known, typed.values, report=cfg.report)]
    options: Any = OmegaConf.to_container(cfg.trainer)
    # Only where it is asked for: a strategy of another library takes no such argument.
    begin: dict[str, Any] = {} if cfg.init_from is None else {"init_from": cfg.init_from}
    if cfg.compression.name != OFF:
        begin["compression"] = compression_of(cfg, options_of(cfg.strategy))
    has_end = cfg.max_steps is not None or cfg.max_epochs is not None
    strategy = {str(key): value for key, value in cfg.strategy.items() if key != "checks"}  # they were run by now
    return Trainer(
        strategy=instantiate(strategy, _convert_="all", **begin),
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        accelerator=cfg.accelerator,
        precision=cfg.precision,
        callbacks=callbacks,
        logger=list(loggers.values()),
        max_steps=-1 if cfg.max_steps is None else cfg.max_steps,
        # With neither limit Lightning would take 1000 epochs.
        max_epochs=cfg.max_epochs if has_end else -1,
        global_batch_size=cfg.global_batch_size,
        balance=OmegaConf.to_container(cfg.balance),  # type: ignore[arg-type]
        accumulate_grad_batches=cfg.accumulation.steps or 1,
        default_root_dir=cfg.run_dir,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        **options,
    )


def _tell_peak(cfg: DictConfig, callbacks: Sequence[Callback]) -> None:
    """Tell those that log a part of what the device could do what that is, unless they were told."""
    ignorant = [each for each in callbacks if isinstance(each, Throughput) and each.peak_flops is None]
    peak = peak_flops_of(cfg) if ignorant else None
    for callback in ignorant:
        callback.peak_flops = peak


def _watchdog(cfg: DictConfig, callbacks: Sequence[Callback]) -> list[Callback]:
    """Who watches this rank, unless the user has one: not a run in the process of the command, where a debugger works,
    but one that a launcher has started."""
    launch = cfg.launch
    if launch.hang_timeout is None or any(isinstance(callback, Watchdog) for callback in callbacks):
        return []
    if launch.hang_timeout == AUTO and detect_launcher() is None:
        return []
    return [
        Watchdog(launch.hang_timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout)
    ]


class _ExceptionHook(Callback):
    """Passes an exception on as soon as the Trainer sees it; a refusal before the first batch as a ConfigError.

    Args:
        on_exception: called with the exception.
        ckpt_path: checkpoint that is restored first; None: none is.
        has_begun: whether the run has trained before.
    """

    def __init__(self, on_exception: Callable[[BaseException], None], ckpt_path: str | None, has_begun: bool) -> None:
        self._on_exception = on_exception
        self._ckpt_path = ckpt_path
        self._has_begun = has_begun

    def on_exception(self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self.raise_refusal(exception)
        except ConfigError as error:
            exception = error
        self._on_exception(exception)

    def raise_refusal(self, error: BaseException) -> None:
        """Raise a ConfigError in the place of `error` if it says what is wrong with a run that has not begun."""
        if self._has_begun or not isinstance(error, Exception):
            return
        if is_refusal(error):
            raise ConfigError([message_of(error)]) from error
        if self._ckpt_path is not None and _was_restoring(error) and not is_secondary(error):
            with refused_as(f"ckpt_path={self._ckpt_path}: does not fit this run"):
                raise error

    def _begin(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        self._has_begun = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = _begin


def _was_restoring(error: Exception) -> bool:
    """Whether an error comes of putting what a checkpoint holds into the module and the loops."""
    return any(
        frame.f_globals.get("__name__") == _RESTORING and frame.f_code.co_name.startswith("restore")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _build_all(cfg: DictConfig, group: str) -> list[Any]:
    return [_built(value, f"{group}.{name}", Callback) for name, value in cfg[group].items() if value is not None]


def _loggers(cfg: DictConfig, known: Mapping[str, Mapping[str, str]]) -> dict[str, Logger]:
    """The loggers of the configuration by name; metrics.csv is always among them, and only its errors end a run."""
    loggers: dict[str, Logger] = {}
    for name, value in cfg.logger.items():
        if value is not None:
            options = OmegaConf.create(in_same_run(value, known.get(name, {})))
            made = _built(options, f"logger.{name}", Logger)
            loggers[name] = made if isinstance(made, CSVLogger) else lenient(made)
    if not any(isinstance(logger, CSVLogger) for logger in loggers.values()):
        loggers["metrics.csv"] = MetricsCSV(cfg.run_dir)
    return loggers


def _loading(trainer: Trainer, cfg: DictConfig, held: HeldState | None) -> dict[str, Any]:
    """What fit and its like are told of checkpoints. Only a trusted file may be more than weights and plain values."""
    if held is None and traits_of(trainer.strategy).joins:
        held = PENDING
    if held is not None:
        return {"ckpt_path": held}
    ckpt_path = cfg.ckpt_path
    if cfg.resume_folders:
        # The ranks look again, into the contents: the launching process has read manifests alone.
        search_folders(trainer, cfg.resume_folders)
        ckpt_path = cfg.resume or LAST
    return {"ckpt_path": ckpt_path, "weights_only": not cfg.trust}


def _save_predictions(predictions: Any, run_dir: Path) -> None:
    path = run_dir / PREDICTIONS
    partial = path.with_suffix(".pt.partial")
    torch.save(predictions, partial)
    os.replace(partial, path)


def _log_to_file(run_dir: Path) -> None:
    """Everything that is logged goes to this rank's file; the terminal of rank 0 shows warnings and errors alone."""
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
    """The log of a rank. On a full disk it says nothing, where logging would print a traceback for each record."""

    def _open(self) -> TextIOWrapper:
        try:
            return super()._open()
        except OSError:
            return open(os.devnull, "w", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Leave a record out that cannot be written."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _warnings_to(to_file: logging.FileHandler, terminal: bool) -> None:
    """Send warnings to the file, and to the terminal those that a user can do something about."""
    # Lightning warns of a run directory that is not empty; it never is, config.yaml is in it.
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
    """Hints that may not apply, what resuming does anyway, and deprecations between Lightning and torch."""
    if not _LIBRARIES.search(filename):
        return False
    deprecation = issubclass(category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning))
    return deprecation or issubclass(category, PossibleUserWarning) or _OF_RESUMING.search(text) is not None

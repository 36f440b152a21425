"""Interpretation and validation of the Trainer's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from trainwright.callbacks.progress.progress_bar import ProgressBar
from trainwright.core.config.lightning_alias import refuse_other_package
from trainwright.core.config.options import members, refuse, refuse_unknown_arguments
from trainwright.core.config.references import python_value, python_values
from trainwright.core.config.synonyms import Vocabulary, names_for
from trainwright.core.lightning_internals import _parse_env_variables, _select_auto_accelerator
from trainwright.core.problems import did_you_mean
from trainwright.core.run.run_directory import RunDirRollback
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.contract.precision import AutocastPrecision
from trainwright.strategies.contract.registry import is_strategy, make_strategy, strategy_names, strategy_options
from trainwright.trainer.data.partition import PARTITIONS

# Numbers that Lightning does not check: less than this fails in a step, or turns gradients around.
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0}
# Values whose type is checked; Lightning also takes objects that only behave like those it asks for.
_PLAIN = (str, int, float, list, tuple, dict, type, FunctionType)


def check_data_options(
    global_batch_size: int | None, partition: str, data_key: object, kwargs: Mapping[str, Any]
) -> None:
    """Raise a ``ValueError`` with all problems of ``global_batch_size``, ``data_partition`` and least numbers.

    Args:
        global_batch_size: of the Trainer.
        partition: ``data_partition`` of the Trainer.
        data_key: of the Trainer.
        kwargs: its arguments for Lightning.
    """
    has_schedule = any(isinstance(each, GradientAccumulationScheduler) for each in _listed(kwargs.get("callbacks")))
    numbers = ((name, kwargs.get(name), least) for name, least in _LEAST.items())
    problems = [f"{n}={v}: must be {m} or more" for n, v, m in numbers if isinstance(v, int | float) and v < m]
    if global_batch_size is not None:
        if not isinstance(global_batch_size, int) or global_batch_size < 1:
            problems.append(f"global_batch_size={global_batch_size!r} (allowed: a whole number of samples, 1 or more)")
        if kwargs.get("accumulate_grad_batches", 1) != 1:
            problems.append(
                f"accumulate_grad_batches={kwargs['accumulate_grad_batches']} together with global_batch_size="
                f"{global_batch_size} (give one of them: the accumulation follows from the global batch)"
            )
        if has_schedule:
            problems.append("GradientAccumulationScheduler together with global_batch_size (give one of them)")
    if partition not in PARTITIONS:
        problems.append(f"data_partition={partition!r} (allowed: {', '.join(map(repr, PARTITIONS))})")
    elif data_key is not None and partition != "hash":
        problems.append(f"data_key={data_key!r} with data_partition={partition!r}, which asks for no key (use 'hash')")
    if partition != "interleave" and has_schedule:
        problems.append(
            f"GradientAccumulationScheduler together with data_partition={partition!r}, which partitions whole steps "
            "(use one of them)"
        )
    refuse(problems)


def with_progress_bar(kwargs: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks of Lightning's arguments, with a progress bar unless there is one, or is to be none.

    Lightning's own count micro-batches against optimizer steps where ``max_steps`` ends a run.
    """
    callbacks = _listed(kwargs.get("callbacks"))
    is_shown = kwargs.get("enable_progress_bar") is not False and not kwargs.get("barebones")
    if is_shown and not any(isinstance(each, LightningProgressBar) for each in callbacks):
        callbacks.append(ProgressBar())
    return callbacks


def _listed(given: Any) -> list[Any]:
    """Return callbacks or plugins, which may be given one by one, as a list."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]


def resolve_strategy(strategy: str | Strategy, kwargs: dict[str, Any]) -> str | Strategy:
    """Return the strategy of a name; names of Lightning's own are returned as they are.

    Args:
        strategy: of the Trainer.
        kwargs: its arguments for Lightning; ``"auto"`` depends on their devices.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(strategy, str):
        return strategy
    strategy = strategy.lower()
    if strategy == "auto":
        count = _device_count(kwargs)
        if count is None:
            return strategy
        strategy = "single" if count == 1 else "ddp"
    if is_strategy(strategy):
        return make_strategy(strategy)  # type: ignore[no-any-return]
    if strategy not in StrategyRegistry.available_strategies():
        strategy_options(strategy)  # raises with the known names
    if own := names_for(strategy, strategy_names()):
        rank_zero_info(
            f"strategy={strategy!r} is Lightning's own; that of Trainwright is {' or '.join(map(repr, own))}."
        )
    return strategy


def check_words(trainer: type, kwargs: Mapping[str, Any]) -> None:
    """Raise for unknown arguments and an unknown precision, with what they are called and what to type.

    Args:
        trainer: its class.
        kwargs: arguments for Lightning.

    Raises:
        TypeError: for an argument.
        ValueError: for the precision.
    """
    given, precisions = kwargs.get("precision"), get_args(accelerator_connector._PRECISION_INPUT_STR)
    refuse_unknown_arguments(trainer, kwargs, strategy=strategy_names(), precision=precisions)
    if isinstance(given, str) and not {given, f"{given}-true"}.intersection(precisions):  # Lightning takes "16" as well
        hint = Vocabulary((), {"precision": precisions}).meaning(given)
        raise ValueError(f"precision={given!r}: {hint or did_you_mean(given, precisions, 'precisions')}")


def of_lightning(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of the Trainer take lists of OmegaConf, refuse wrong arguments, and leave no logs without a batch.

    Objects of the package ``pytorch_lightning`` are refused, too.
    """

    @wraps(run)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(python_value, args)), python_values(kwargs)
        refuse_other_package((*args, *kwargs.values()))
        refuse_unknown_arguments(run, kwargs)
        if problems := type_problems(run, dict(zip(signature(run).parameters, (self, *args), strict=False)) | kwargs):
            raise TypeError("; ".join(problems))
        logs = ((each, each.log_dir) for each in (self.loggers if self.is_global_zero else ()))
        new = [(each, RunDirRollback(Path(at))) for each, at in logs if isinstance(at, str) and not os.path.exists(at)]
        try:
            return run(self, *args, **kwargs)
        except Exception:
            loops = (self.fit_loop.epoch_loop, self.validate_loop, self.test_loop, self.predict_loop)
            for logger, folder in () if any(each.batch_progress.total.completed for each in loops) else new:
                folder.restore()
                logger._experiment = None  # makes its folder again if the trainer is used again
            raise

    return checked


def type_problems(run: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return a problem for each class, function, text, number or mapping where an argument takes none.

    Args:
        run: function with the arguments; others are ignored.
        given: arguments by name.
    """
    problems, hints = [], get_type_hints(run)
    for name in filter(hints.__contains__, given):
        kinds = [get_args(kind)[0] if get_origin(kind) in (list, Iterable) else kind for kind in members(hints[name])]
        kinds = list(dict.fromkeys(each for kind in kinds for each in members(kind)))
        for value in _listed(given[name]):
            if isinstance(value, _PLAIN) and not any(_takes(kind, value) for kind in kinds):
                names = " or ".join(kind.__name__.removesuffix("Type") for kind in kinds)
                meant = f"; type {name}={value.__name__}(...)" if isinstance(value, type) else ""
                problems.append(f"{name}={getattr(value, '__name__', repr(value))}: must be {names}{meant}")
    return problems


def _takes(kind: Any, value: Any) -> bool:
    is_number = kind in (bool, int) and isinstance(value, int | float) and value % 1 == 0  # such as max_steps=1e5
    return is_number or kind is Any or get_origin(kind) is Literal or isinstance(value, get_origin(kind) or kind)


def from_environment(trainer: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments, completed from the variables ``PL_TRAINER_<ARGUMENT>``.

    Args:
        trainer: its class, whose own arguments are read as well as Lightning's.
        given: by the caller; these take precedence.
    """
    found = {**vars(_parse_env_variables(Trainer)), **vars(_parse_env_variables(trainer))}
    found = {name: value for name, value in found.items() if name not in given}
    if found:
        values = ", ".join(f"{name}={value!r}" for name, value in found.items())
        rank_zero_info(f"From PL_TRAINER_* variables of the environment: {values}.")
    # Hydra instantiates with OmegaConf's lists and mappings.
    return {**found, **python_values(given)}


def accelerator_for(strategy: str | Strategy, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``accelerator`` for a machine with an Apple GPU: the CPU for strategies that need collectives.

    Args:
        strategy: resolved.
        kwargs: arguments for Lightning.

    Raises:
        MisconfigurationException: for a GPU where there is none.
        ValueError: if such a strategy is combined with the Apple GPU.
    """
    if kwargs.get("accelerator") == "gpu" and _select_auto_accelerator() == "cpu":
        raise MisconfigurationException("accelerator='gpu': No supported gpu backend found! Type accelerator='cpu'.")
    options = getattr(strategy, "options", None)
    if not isinstance(options, StrategyOptions) or options.takes_mps or _accelerator_name(kwargs) != "mps":
        return {}
    name = type(strategy).__name__
    if kwargs.get("accelerator", "auto") != "auto":
        raise ValueError(
            f"accelerator={kwargs['accelerator']!r} with {name}: an Apple GPU has no collectives and supports only "
            "strategy='single'. Use that, or accelerator='cpu'."
        )
    rank_zero_info(f"Training on the CPU: {name} needs collectives, which the Apple GPU here does not have.")
    return {"accelerator": "cpu"}


def _accelerator_name(kwargs: dict[str, Any]) -> str | None:
    accelerator = kwargs.get("accelerator", "auto")
    if accelerator == "auto":
        return _select_auto_accelerator()
    if accelerator == "gpu" and not CUDAAccelerator.is_available() and MPSAccelerator.is_available():
        return "mps"
    return accelerator if isinstance(accelerator, str) else None


def _device_count(kwargs: dict[str, Any]) -> int | None:
    """Return the number of devices of the run; ``None`` if Lightning chooses (unknown accelerators)."""
    name = _accelerator_name(kwargs)
    name = "cuda" if name == "gpu" and CUDAAccelerator.is_available() else name
    if name not in ("cpu", "cuda", "mps"):
        return None
    accelerator = AcceleratorRegistry[name]["accelerator"]
    devices = kwargs.get("devices", "auto")
    if devices == "auto":  # in a notebook Lightning takes one GPU
        devices = 1 if name == "cuda" and accelerator_connector._IS_INTERACTIVE else accelerator.auto_device_count()
    if devices in ([], 0, "0"):
        return None  # Lightning's own error
    if name == "mps":  # there is only one; several devices are CPU processes
        name = "mps" if devices in (1, "1", [0], -1, "-1") else "cpu"
        accelerator = AcceleratorRegistry[name]["accelerator"]
    parsed = accelerator.parse_devices(devices)
    return len(accelerator.get_parallel_devices(parsed)) * int(kwargs.get("num_nodes", 1))


def fp16_on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that keep fp16 on the CPU, which Lightning replaces by bf16."""
    if str(kwargs.get("precision")) not in ("16-mixed", "16") or _accelerator_name(kwargs) != "cpu":
        return {}
    plugins = [*_listed(kwargs.get("plugins")), AutocastPrecision("16-mixed", "cpu")]
    return {"precision": None, "plugins": plugins}

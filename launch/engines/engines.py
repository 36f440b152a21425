"""Registry of engines, which start the ranks of a run on other machines: one module each, imported when chosen.

An engine starts `python -m trainwright.command.engine_rank RUN_DIR VERB` once per rank, with the environment that
torchrun or SLURM would give a rank. The configuration was composed and checked before, and is in the run directory.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from omegaconf import DictConfig

from trainwright.core.config.references import variables_of
from trainwright.launch.recovery.check_recovery import RESTART


class Engine(Protocol):
    """Interface of an engine's module."""

    def problems(self, cfg: DictConfig) -> list[str]:
        """Return the problems of the engine's options, with what to type instead.

        Args:
            cfg: resolved, with `run_dir` decided.
        """

    def launch(self, cfg: DictConfig, verb: str) -> dict[str, float] | None:
        """Start the ranks and wait for their exit.

        Args:
            cfg: the resolved configuration, already written to its run directory.
            verb: fit, validate, test or predict.

        Returns:
            The final metrics of rank 0 by name; None = the run was submitted and has not ended.

        Raises:
            RankError: if a rank failed; all others have exited.
            Interrupted: if this process was interrupted; all ranks have exited.
        """


@dataclass(frozen=True)
class _Entry:
    """Module and requirements of an engine.

    Attributes:
        module: that is an :class:`Engine`.
        packages: that must be importable.
        extra: of this project, which installs them; empty = there is none.
        recovers: whether it supports `launch.recovery` on one machine.
        shrinks: whether it supports `launch.min_devices` on one machine.
        gives_variables: whether ranks receive the environment variables that the configuration refers to.
    """

    module: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    recovers: bool = False
    shrinks: bool = False
    gives_variables: bool = True


_ENGINES: dict[str, _Entry] = {
    "kubernetes": _Entry("trainwright.launch.engines.kubernetes.kubernetes", gives_variables=False),
    "slurm": _Entry("trainwright.launch.engines.slurm.slurm", ("submitit",), "slurm", recovers=True, shrinks=True),
    "ray": _Entry("trainwright.launch.engines.ray.ray", ("ray",), "ray", shrinks=True),
}


def kinds() -> tuple[str, ...]:
    """Return the values of `launch.kind` besides local and torchrun."""
    return tuple(_ENGINES)


def uses_engine(cfg: DictConfig) -> bool:
    """Return whether an engine starts the ranks of this run."""
    return cfg.launch.kind in _ENGINES


def engine_of(cfg: DictConfig) -> Engine:
    """Return the engine of a configuration that uses one."""
    return cast(Engine, importlib.import_module(_ENGINES[cfg.launch.kind].module))


def starts_together(cfgs: Sequence[DictConfig]) -> Callable[..., list[Any]] | None:
    """Return the function that starts all of these runs at once; None = they are started one after the other.

    It is called with the resolved configurations, the verb, a folder for its files and a title per run, and returns for
    each the metrics, the error that ended it, or None if it was submitted.
    """
    if len({cfg.launch.kind for cfg in cfgs}) > 1 or not uses_engine(cfgs[0]):
        return None
    found: Callable[..., list[Any]] | None = getattr(engine_of(cfgs[0]), "launch_all", None)
    return found


def engine_problems(cfg: DictConfig) -> list[str]:
    """Return the problems of a configuration that uses an engine.

    Args:
        cfg: resolved, with `run_dir` decided.
    """
    problems = list(_common_problems(cfg))
    missing = [name for name in _ENGINES[cfg.launch.kind].packages if importlib.util.find_spec(name) is None]
    if missing:
        kind, extra = cfg.launch.kind, _ENGINES[cfg.launch.kind].extra
        missed = f"launch={kind} needs {' and '.join(missing)}, which is not installed"
        return [*problems, f"{missed}; type pip install 'trainwright[{extra}]'"]
    return problems + engine_of(cfg).problems(cfg)


def variable_problems(cfg: DictConfig) -> list[str]:
    """Return variables of this process that ranks on other machines would lack.

    Args:
        cfg: with its references to environment variables.
    """
    if not uses_engine(cfg) or _ENGINES[cfg.launch.kind].gives_variables:
        return []
    return [
        f"${{oc.env:{name}}} with launch={cfg.launch.kind}: the pods would lack this variable; type "
        f"launch.secret_env={{{name}: <secret>/<key>}}, or launch.env={{{name}: <value>}} if it is no secret"
        for name in sorted(variables_of(cfg) & set(os.environ) - {*cfg.launch.env, *cfg.launch.secret_env})
    ]


def _common_problems(cfg: DictConfig) -> Iterator[str]:
    if cfg.devices == "auto":
        yield f"devices=auto with launch={cfg.launch.kind}: type the ranks per machine, like devices=8"
    entry, one_machine = _ENGINES[cfg.launch.kind], cfg.nodes == 1
    where = f"launch={cfg.launch.kind}" + ("" if one_machine else f" on nodes={cfg.nodes}")
    if cfg.launch.recovery != RESTART and not (entry.recovers and one_machine):
        yield f"launch.recovery={cfg.launch.recovery} with {where}: all ranks restart; type launch.recovery=restart"
    if cfg.launch.min_devices is not None and not (entry.shrinks and one_machine):
        yield f"launch.min_devices={cfg.launch.min_devices} with {where}: the ranks cannot become fewer; leave it out"
    if cfg.launch.port is not None:
        yield f"launch.port={cfg.launch.port} with launch={cfg.launch.kind}: only launch=local reads it; leave it out"

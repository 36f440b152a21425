"""From a composed configuration to a finished run."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.command.auto import Choice, decide, hand_over, write_plan
from trainwright.core.config.missing import unresolved
from trainwright.core.config.references import settled
from trainwright.core.failures.failure import RankError
from trainwright.core.failures.refusal import refused_as
from trainwright.core.problems import ConfigError
from trainwright.core.processes.watch import ShutdownWatch
from trainwright.core.run.interrupt import Interrupted
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.core.run.run_directory import (
    RunDirRollback,
    default_run_dir,
    make_default_run_dir,
    read_config,
    write_command,
    write_config,
)
from trainwright.core.tools import tool
from trainwright.launch.checks.validate import validate
from trainwright.launch.engines.engines import engine_of, uses_engine
from trainwright.launch.engines.torchrun.begun import begun_run
from trainwright.launch.engines.torchrun.external import agree
from trainwright.launch.outcome.ends import begins_again
from trainwright.launch.ranks.importing import without_collector
from trainwright.launch.recovery.check_resume import decide_resume, going_on_in_place, run_name, saved_global_batch
from trainwright.launch.recovery.sizes import resized, size_problems
from trainwright.strategies.compose.world import Surroundings, resolve_devices

# What there was before the run directories that were prepared and not launched yet, by their paths.
_PREPARED: dict[str, RunDirRollback] = {}


@dataclass(frozen=True)
class RunResult:
    """What is left of a run.

    Attributes:
        run_dir: where everything it wrote is.
        metrics: the last value of every metric that was logged, by name.
        has_ended: false where the run was handed to an engine that goes on without this process.
    """

    run_dir: Path
    metrics: dict[str, float] = field(default_factory=dict)
    has_ended: bool = True


def run(cfg: DictConfig, verb: str = "fit") -> RunResult:
    """Check a configuration, make its run directory and run it, on as many processes as it asks for.

    With one device everything happens in this process, so that a debugger works. With several, this process starts and
    watches the ranks. Under torchrun or SLURM this process is one rank, and what rank 0 was given counts for all.

    Args:
        cfg: as `trainwright.compose` returns it; not changed.
        verb: fit, validate, test or predict.

    Raises:
        ConfigError: with everything that is wrong with the configuration, or what a rank refused before training
            began; the run directory is as it was.
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end by a signal; all ranks have ended.
    """
    launcher = detect_launcher()
    if launcher is not None:
        agreed = agree(launcher, lambda launcher: prepare(cfg, verb, launcher))
        if agreed is None:
            raise ConfigError(["rank 0 has refused the configuration; its message says why"])
        return launch(agreed, verb, launcher)
    return launch(prepare(cfg, verb), verb)


def prepare(
    cfg: DictConfig,
    verb: str,
    launcher: Launcher | None = None,
    choice: Choice | None = None,
    words: Sequence[str] | None = None,
) -> DictConfig:
    """Check a configuration, decide and make the run directory, write config.yaml there.

    Where a launcher has started the ranks again, the run that they were in goes on instead, as it was configured.

    Args:
        cfg: as `trainwright.compose` returns it.
        verb: fit, validate, test or predict.
        launcher: what has started this process as a rank; None when it is to start ranks itself.
        choice: that :func:`choose` has made and put into `cfg`.
        words: of the command, to be kept in the run directory; None: there is none.

    Returns:
        The resolved configuration: `run_dir`, `devices` and `ckpt_path` final, and no references left but those to
        environment variables, which have their values where they are read.

    Raises:
        ConfigError: with everything that is wrong.
    """
    if launcher is not None:
        begun = begun_run(run_name(cfg), cfg.run_dir, launcher.agents)
        if begun is not None:
            return _go_on(begun, verb, launcher)
    planned, problems, made = _planned(cfg, verb, launcher)
    choice = made or choice
    if problems:
        raise ConfigError(problems)
    if choice is not None and choice.smaller is not None and verb == "fit":
        planned, choice = _tried(cfg, planned, choice, launcher)
    before: RunDirRollback | None = None
    try:
        before = RunDirRollback(Path(planned.run_dir))
        if cfg.run_dir is None:
            planned.run_dir = str(make_default_run_dir(run_name(cfg)))
            before.run_dir = Path(planned.run_dir).absolute()
        prepared = settled(planned)
        write_config(prepared)
        if choice is not None:
            write_plan(choice, Path(prepared.run_dir))
        if words is not None:
            write_command(Path(prepared.run_dir), words)
    except OSError as error:
        if before is not None:
            before.restore()
        raise ConfigError([f"run_dir={planned.run_dir}: {error.strerror}; type another run_dir=..."]) from error
    _PREPARED[prepared.run_dir] = before
    return prepared


def begin_or_go_on(run_dir: Path, verb: str, launcher: Launcher) -> DictConfig:
    """The configuration of a run that an engine has begun; of its next attempt where its ranks were started again.

    Args:
        run_dir: with the resolved `config.yaml`.
        verb: fit, validate, test or predict.
        launcher: what has started the ranks.
    """
    return _go_on(run_dir, verb, launcher) if begins_again(run_dir) else read_config(run_dir)


def _tried(
    cfg: DictConfig, planned: DictConfig, choice: Choice, launcher: Launcher | None
) -> tuple[DictConfig, Choice]:
    """Try the micro-batch that was chosen, then smaller ones, until one fits."""
    from trainwright.command import probe

    asked = cfg.copy()
    OmegaConf.set_readonly(asked, False)
    asked.micro_batch_size = AUTO  # a sweep has put the choice into it
    tried: list[probe.Probed] = []
    while True:
        tried.append(probe.try_out(planned, launcher))
        if tried[-1].fits is not False:
            return planned, probe.told(choice, tried)
        most = tried[-1].next_of(choice.smaller or ())
        if most is None:
            raise ConfigError([probe.refusal(tried)])
        planned, problems, smaller = _planned(asked, "fit", launcher, most)
        if problems or smaller is None:
            raise ConfigError(problems)
        choice = smaller


def _go_on(run_dir: Path, verb: str, launcher: Launcher) -> DictConfig:
    """The configuration of the next attempt of a run, on as many ranks as the launcher has started now."""
    devices, nodes = launcher.local_world_size, launcher.world_size // launcher.local_world_size
    first = read_config(run_dir)
    cfg = going_on_in_place(resized(first, devices, saved_global_batch(first), nodes), verb)
    if verb == "fit":
        cfg.resume = AUTO  # it may have ended before its first checkpoint
    problems = validate(cfg, Surroundings(verb, launcher.world_size))
    if problems:
        raise ConfigError(problems)
    return cfg


def plan(cfg: DictConfig, verb: str, launcher: Launcher | None = None) -> tuple[DictConfig, list[str]]:
    """Decide what the user left open, and find everything that is wrong; nothing is written.

    Returns:
        A copy of the configuration with run_dir, ckpt_path and devices decided, `auto` replaced by what was chosen, and
        the problems.
    """
    planned, problems, _ = _planned(cfg, verb, launcher)
    return planned, problems


def choose(cfg: DictConfig, verb: str) -> tuple[Choice | None, list[str]]:
    """Put what `auto` stands for into a configuration that is prepared later, so that it is not planned twice.

    Args:
        cfg: as `trainwright.compose` returns it; changed in place where something was chosen.
        verb: fit, validate, test or predict.

    Returns:
        What was chosen, for :func:`prepare`; and everything that is wrong.
    """
    planned, problems, choice = _planned(cfg, verb)
    if choice is not None and not problems:
        hand_over(planned, cfg)
    return choice, problems


def _planned(
    cfg: DictConfig, verb: str, launcher: Launcher | None = None, most_samples: int | None = None
) -> tuple[DictConfig, list[str], Choice | None]:
    with refused_as("the configuration cannot be checked"):
        return _decided(cfg.copy(), verb, launcher, most_samples)


def _decided(
    cfg: DictConfig, verb: str, launcher: Launcher | None, most_samples: int | None
) -> tuple[DictConfig, list[str], Choice | None]:
    OmegaConf.set_readonly(cfg, False)
    problems = unresolved(cfg)
    if problems:
        return cfg, problems, None  # nothing that refers to them can be read
    if cfg.run_dir:
        cfg.run_dir = str(Path(cfg.run_dir).expanduser())
    problems = decide_resume(cfg, verb)
    if cfg.run_dir is None:
        cfg.run_dir = str(default_run_dir(run_name(cfg)))
    surroundings = Surroundings(verb)
    if launcher is not None:
        surroundings = Surroundings(verb, launcher.world_size, launcher.local_world_size)
    choice, undecided = decide(cfg, surroundings, most_samples)
    if undecided:
        return cfg, [*problems, *undecided], None  # without a layout the rest says nothing
    problems += validate(cfg, surroundings)
    if not problems and launcher is None and cfg.launch.min_devices is not None:
        problems += size_problems(cfg, verb)
    if not problems:
        if launcher is not None:
            cfg.devices = launcher.local_world_size
            cfg.nodes = launcher.world_size // launcher.local_world_size
        else:
            cfg.devices = resolve_devices(cfg)
    return cfg, problems, choice


def launch(cfg: DictConfig, verb: str, launcher: Launcher | None = None, *, own_processes: bool = False) -> RunResult:
    """Run a prepared configuration.

    Args:
        cfg: as `prepare` returns it.
        verb: fit, validate, test or predict.
        launcher: what has started this process as a rank; None when it is to start ranks itself.
        own_processes: start a process even for a single rank (a sweep does: one job leaves nothing to the next). A run
            that is to be restarted after failures has one in any case.
    """
    before = _PREPARED.pop(cfg.run_dir, None)
    writes_page = verb == "fit" and cfg.report and (launcher is None or launcher.rank == 0)
    metrics: dict[str, float] | None
    try:
        if launcher is None and uses_engine(cfg):
            metrics = engine_of(cfg).launch(cfg, verb)
        elif launcher is None and (cfg.devices > 1 or own_processes or cfg.launch.max_restarts != 0):
            from trainwright.launch.local.local import launch_local

            metrics = launch_local(cfg, verb)
        else:
            metrics = run_here(cfg, verb)
    except ConfigError:
        # A part that cannot be built, or an engine that cannot reach its machines: nothing was trained.
        if before is not None and launcher is None:
            before.restore()
        raise
    except Exception as error:
        if before is not None and isinstance(error, RankError) and error.is_refused and error.failure is not None:
            before.restore()
            raise ConfigError([error.failure.message]) from None
        if writes_page:
            tool("write_report")(Path(cfg.run_dir))
        raise
    if metrics is None:
        return RunResult(Path(cfg.run_dir), has_ended=False)
    if writes_page:
        tool("write_report")(Path(cfg.run_dir))
    return RunResult(Path(cfg.run_dir), metrics)


def run_here(
    cfg: DictConfig, verb: str, on_exception: Callable[[BaseException], None] | None = None
) -> dict[str, float]:
    """Run in this process, and turn its ways of being interrupted into one.

    Args:
        cfg: as `prepare` returns it.
        verb: fit, validate, test or predict.
        on_exception: told of an exception as soon as it appears, before anything is torn down.

    Returns:
        The metrics of the end, by name.

    Raises:
        Interrupted: if this process was told to end.
    """
    with without_collector():
        from trainwright.callbacks.end.preemption import Preempted
        from trainwright.launch.worker import run_verb

    seen: list[BaseException] = []

    def see(error: BaseException) -> None:
        seen.append(error)
        if on_exception is not None:
            on_exception(error)

    stop = _watch(cfg.launch.grace_seconds)
    try:
        return run_verb(cfg, verb, on_exception=see)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    except Preempted as ended:
        raise Interrupted(ended.told.signal, ended.exit_code) from None
    except SystemExit:
        # Lightning answers Ctrl-C with exit code 1; a shell expects 130.
        if any(isinstance(error, KeyboardInterrupt) for error in seen):
            raise Interrupted(signal.SIGINT) from None
        raise
    finally:
        stop()


def _watch(grace_seconds: float) -> Callable[[], None]:
    """Watch this process for signals; returns how to stop that."""
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        return lambda: None
    previous = signal.getsignal(signal.SIGINT)
    watch = ShutdownWatch(grace_seconds)
    watch.start()

    def stop() -> None:
        watch.stop()
        signal.signal(signal.SIGINT, previous)  # Lightning ignores SIGINT from the first Ctrl-C on

    return stop

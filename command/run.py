"""Runs, from a composed configuration to the end."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.command.auto import Choice, copy_choice, decide, write_plan
from trainwright.core.config.missing import unresolved
from trainwright.core.config.references import settled
from trainwright.core.failures.failure import RankError
from trainwright.core.failures.refusal import refused_as
from trainwright.core.problems import ConfigError
from trainwright.core.processes.watch import ShutdownWatch
from trainwright.core.run.interrupt import InsistentSignals, Interrupted
from trainwright.core.run.launcher import Launcher, detect_launcher
from trainwright.core.run.run_directory import (
    RunDirRollback,
    default_run_dir,
    list_run,
    make_default_run_dir,
    read_config,
    write_command,
    write_config,
)
from trainwright.core.tools import tool
from trainwright.launch.checks.validate import validate
from trainwright.launch.engines.engines import engine_of, uses_engine
from trainwright.launch.engines.torchrun.agreement import agree, previous_run
from trainwright.launch.outcome.rank_records import is_restart
from trainwright.launch.ranks.forkserver import without_collector
from trainwright.launch.recovery.check_resume import decide_resume, resume_in_place, run_name, saved_global_batch
from trainwright.launch.recovery.sizes import resized, size_problems
from trainwright.strategies.compose.world import Surroundings, resolve_devices

PREPARED: dict[str, RunDirRollback] = {}
"""State before the run directories were prepared, by path; only of runs that have not been launched."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        run_dir: run directory.
        metrics: last value of every logged metric, by name.
        has_ended: false if the run was submitted to an engine and continues without this process.
    """

    run_dir: Path
    metrics: dict[str, float] = field(default_factory=dict)
    has_ended: bool = True


def run(cfg: DictConfig, verb: str = "fit") -> RunResult:
    """Check a configuration, create its run directory and run it, on as many processes as it asks for.

    With one device everything happens in this process, so that a debugger works. With several, this process starts and
    supervises the ranks. Under torchrun or SLURM this process is one rank, and rank 0's configuration applies to all.

    Args:
        cfg: as `trainwright.compose` returns it; not changed.
        verb: fit, validate, test or predict.

    Raises:
        ConfigError: with all problems of the configuration, or what a rank refused before training started; the run
            directory is unchanged.
        RankError: if a rank failed; all others have exited.
        Interrupted: if this process was interrupted by a signal; all ranks have exited.
    """
    launcher = detect_launcher()
    if launcher is not None:
        agreed = agree(launcher, lambda launcher: prepare(cfg, verb, launcher))
        if agreed is None:
            raise ConfigError(["rank 0 has refused the configuration; see its message"])
        return launch(agreed, verb, launcher)
    return launch(prepare(cfg, verb), verb)


def prepare(
    cfg: DictConfig,
    verb: str,
    launcher: Launcher | None = None,
    choice: Choice | None = None,
    words: Sequence[str] | None = None,
) -> DictConfig:
    """Check a configuration, create the run directory and write config.yaml there.

    If a launcher has restarted the ranks, their earlier run is resumed instead, as it was configured.

    Args:
        cfg: as `trainwright.compose` returns it.
        verb: fit, validate, test or predict.
        launcher: that has started this process as a rank; None = this process starts the ranks.
        choice: of :func:`choose`, already applied to `cfg`.
        words: of the command, stored in the run directory; None = there is no command.

    Returns:
        The resolved configuration: `run_dir`, `devices` and `ckpt_path` are final, and the only references left are
        environment variables, which are resolved where they are read.

    Raises:
        ConfigError: with all problems.
    """
    if launcher is not None:
        earlier = previous_run(run_name(cfg), cfg.run_dir, launcher.agents)
        if earlier is not None:
            return _next_attempt(earlier, verb, launcher)
    planned, problems, made = _plan(cfg, verb, launcher)
    choice = made or choice
    if problems:
        raise ConfigError(problems)
    if choice is not None and choice.smaller is not None and verb == "fit":
        planned, choice = _probed(cfg, planned, choice, launcher)
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
    PREPARED[prepared.run_dir] = before
    return prepared


def next_config(run_dir: Path, verb: str, launcher: Launcher) -> DictConfig:
    """Return the configuration of an engine's run, or of its next attempt if its ranks were restarted.

    Args:
        run_dir: with the resolved `config.yaml`.
        verb: fit, validate, test or predict.
        launcher: that has started the ranks.
    """
    return _next_attempt(run_dir, verb, launcher) if is_restart(run_dir) else read_config(run_dir)


def _probed(
    cfg: DictConfig, planned: DictConfig, choice: Choice, launcher: Launcher | None
) -> tuple[DictConfig, Choice]:
    """Try the chosen micro-batch, then smaller ones, until one fits."""
    from trainwright.command import probe

    asked = cfg.copy()
    OmegaConf.set_readonly(asked, False)
    asked.micro_batch_size = AUTO  # a sweep has put the choice into it
    tried: list[probe.ProbeResult] = []
    while True:
        tried.append(probe.probe(planned, launcher))
        if tried[-1].fits is not False:
            return planned, probe.with_probes(choice, tried)
        most = tried[-1].next_of(choice.smaller or ())
        if most is None:
            raise ConfigError([probe.refusal(tried)])
        planned, problems, smaller = _plan(asked, "fit", launcher, most)
        if problems or smaller is None:
            raise ConfigError(problems)
        choice = smaller


def _next_attempt(run_dir: Path, verb: str, launcher: Launcher) -> DictConfig:
    """Return the configuration of a run's next attempt, on as many ranks as the launcher has started now."""
    devices, nodes = launcher.local_world_size, launcher.world_size // launcher.local_world_size
    first = read_config(run_dir)
    cfg = resume_in_place(resized(first, devices, saved_global_batch(first), nodes), verb)
    if verb == "fit":
        cfg.resume = AUTO  # it may have ended before its first checkpoint
    problems = validate(cfg, Surroundings(verb, launcher.world_size))
    if problems:
        raise ConfigError(problems)
    return cfg


def plan(cfg: DictConfig, verb: str, launcher: Launcher | None = None) -> tuple[DictConfig, list[str]]:
    """Decide what the user left open and return all problems; nothing is written.

    Returns:
        A copy of the configuration with run_dir, ckpt_path and devices decided and `auto` replaced, and the problems.
    """
    planned, problems, _ = _plan(cfg, verb, launcher)
    return planned, problems


def choose(cfg: DictConfig, verb: str) -> tuple[Choice | None, list[str]]:
    """Replace `auto` in a configuration that is prepared later, so that it is planned only once.

    Args:
        cfg: as `trainwright.compose` returns it; changed in place if something is chosen.
        verb: fit, validate, test or predict.

    Returns:
        The choice, for :func:`prepare`, and all problems.
    """
    planned, problems, choice = _plan(cfg, verb)
    if choice is not None and not problems:
        copy_choice(planned, cfg)
    return choice, problems


@refused_as("the configuration cannot be checked")
def _plan(
    cfg: DictConfig, verb: str, launcher: Launcher | None = None, most_samples: int | None = None
) -> tuple[DictConfig, list[str], Choice | None]:
    cfg = cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    problems = unresolved(cfg)
    if problems:
        return cfg, problems, None  # references to them cannot be read
    if cfg.run_dir:
        cfg.run_dir = str(Path(cfg.run_dir).expanduser())
    problems = decide_resume(cfg, verb)
    if cfg.run_dir is None:
        cfg.run_dir = str(default_run_dir(run_name(cfg)))
    started = () if launcher is None else (launcher.world_size, launcher.local_world_size)
    surroundings = Surroundings(verb, *started)
    choice, undecided = decide(cfg, surroundings, most_samples)
    if undecided:
        return cfg, [*problems, *undecided], None  # other checks are meaningless without a layout
    problems += validate(cfg, surroundings)
    if not problems and launcher is None and cfg.launch.min_devices is not None:
        problems += size_problems(cfg, verb)
    if not problems and launcher is not None:
        cfg.devices, cfg.nodes = launcher.local_world_size, launcher.world_size // launcher.local_world_size
    elif not problems:
        cfg.devices = resolve_devices(cfg)
    return cfg, problems, choice


def launch(cfg: DictConfig, verb: str, launcher: Launcher | None = None, *, own_processes: bool = False) -> RunResult:
    """Run a prepared configuration.

    Args:
        cfg: as `prepare` returns it.
        verb: fit, validate, test or predict.
        launcher: that has started this process as a rank; None = this process starts the ranks.
        own_processes: start a process even for a single rank, as a sweep does so that jobs do not affect each other. A
            run that may be restarted has one in any case.
    """
    before = PREPARED.pop(cfg.run_dir, None)
    writes_page = verb == "fit" and cfg.report and (launcher is None or launcher.rank == 0)
    metrics: dict[str, float] | None
    try:
        if launcher is None and uses_engine(cfg):
            metrics = engine_of(cfg).launch(cfg, verb)
        elif launcher is None and (cfg.devices > 1 or own_processes or cfg.launch.max_restarts != 0):
            from trainwright.launch.local.local import launch_local

            metrics = launch_local(cfg, verb)
        else:
            metrics = run_in_process(cfg, verb)
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
    finally:
        if verb == "fit" and not own_processes and (launcher is None or launcher.rank == 0):
            list_run(run_name(cfg), Path(cfg.run_dir))
    if metrics is None:
        return RunResult(Path(cfg.run_dir), has_ended=False)
    if writes_page:
        tool("write_report")(Path(cfg.run_dir))
    return RunResult(Path(cfg.run_dir), metrics)


def run_in_process(
    cfg: DictConfig, verb: str, on_exception: Callable[[BaseException], None] | None = None
) -> dict[str, float]:
    """Run in this process; raise Interrupted for every kind of interruption.

    Args:
        cfg: as `prepare` returns it.
        verb: fit, validate, test or predict.
        on_exception: called with an exception as soon as it is raised, before teardown.

    Returns:
        The final metrics by name.

    Raises:
        Interrupted: if this process was interrupted.
    """
    with InsistentSignals(), without_collector():
        from trainwright.callbacks.end.preemption import Preempted
        from trainwright.launch.worker import run_verb

    seen: list[BaseException] = []

    def see(error: BaseException) -> None:
        seen.append(error)
        if on_exception is not None:
            on_exception(error)

    try:
        with _watched(cfg.launch.grace_seconds):
            return run_verb(cfg, verb, on_exception=see)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    except Preempted as ended:
        raise Interrupted(ended.told.signal, ended.exit_code) from None
    except SystemExit:
        # Lightning answers Ctrl-C with exit code 1; shells expect 130.
        if any(isinstance(error, KeyboardInterrupt) for error in seen):
            raise Interrupted(signal.SIGINT) from None
        raise


@contextlib.contextmanager
def _watched(grace_seconds: float) -> Iterator[None]:
    """Watch this process for signals."""
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    watch = ShutdownWatch(grace_seconds)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        signal.signal(signal.SIGINT, previous)  # Lightning ignores SIGINT after the first Ctrl-C

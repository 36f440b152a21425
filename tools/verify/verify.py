"""`trainwright verify`: compare training under a layout with training in one process.

Both train a few optimizer steps of the same samples, each in its own processes and through the normal launch. Measures
and tolerances: `trainwright.tools.verify.compare`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.command.bare_training import only_training, temporary_folder, train_in_subprocesses
from trainwright.command.run import plan
from trainwright.command.schema.compose import compose_checked
from trainwright.command.schema.expansion import report_import
from trainwright.command.sweep import Job, expand
from trainwright.command.verify_options import VerifyOptions, take_options
from trainwright.core.charts.html import write_page
from trainwright.core.config.masking import masked_words
from trainwright.core.problems import ConfigError
from trainwright.core.run.launcher import detect_launcher
from trainwright.core.run.run_directory import command_words
from trainwright.launch.ranks.output import ranks_to_stderr
from trainwright.strategies.compose.world import Surroundings, num_data_ranks, options_of, world_size_of
from trainwright.tools.verify.page import page
from trainwright.tools.verify.report import VerifyReport

_DEFAULTS = VerifyOptions()
_SINGLE = {"_target_": "trainwright.strategies.data.single.SingleDeviceStrategy"}
_RECORDER = "trainwright.tools.verify.record.Recorder"


def verify(
    cfg: DictConfig, options: VerifyOptions = _DEFAULTS, on_progress: Callable[[str], None] | None = None
) -> VerifyReport:
    """Train a few steps under the configured layout and in one process, and compare.

    Both runs use the configured module, data, optimizer, schedulers, clipping, seed and precision, the same global
    batch and micro-batches. Dropout is off in both; validation, loggers, checkpoints and configured callbacks are left
    out. No files remain.

    Args:
        cfg: as returned by `trainwright.compose`; not changed.
        options: number of steps and tolerance.
        on_progress: called with a line of text at each phase.

    Raises:
        ConfigError: with all problems of the configuration; no process was started.
        RankError: if a rank of one of the runs failed.
        Interrupted: if a signal ended this process.
    """
    say = on_progress or (lambda text: None)
    with temporary_folder("verify") as name:
        folder = Path(name)
        planned = _planned(cfg, options, folder)
        layout = _settled(planned, options, folder / "layout")
        say(f"{options.steps} step(s) on {layout.devices} process(es) with {_class_of(layout.strategy)}")
        train_in_subprocesses(layout)
        reference = _one_process(planned, options, folder)
        say(f"{options.steps} step(s) on one process")
        train_in_subprocesses(reference)
        say("comparing")
        return _compare(layout, folder, options)


def problems_of(cfg: DictConfig, options: VerifyOptions) -> list[str]:
    """Return the problems of verifying `cfg`, besides those of running it."""
    problems = options.problems(str(cfg.precision))
    launcher = detect_launcher()
    if launcher is not None:
        problems.append(
            f"{launcher.name}: verify starts its own ranks on one machine; type trainwright verify ... without it"
        )
    given = {key: cfg[key] for key in ("ckpt_path", "resume") if cfg[key] is not None}
    problems += [f"{key}={v}: verify starts from the initial weights; leave {key} out" for key, v in given.items()]
    if cfg.inject:
        problems.append("inject: verify compares runs without faults; leave inject out")
    if cfg.run_dir is not None:
        problems.append(f"run_dir={cfg.run_dir}: verify keeps no files; leave run_dir out")
    if cfg.global_batch_size is None and cfg.micro_batch_size is None:
        problems.append(
            "global_batch_size and micro_batch_size are both null, so the samples per step would depend on the "
            "number of ranks; type global_batch_size=32"
        )
    strategy = options_of(cfg.strategy)
    if strategy is not None:
        problems += filter(None, [strategy.difference_from_one_process(options.steps, cfg.compression.name)])
    return problems


def _planned(cfg: DictConfig, options: VerifyOptions, folder: Path) -> DictConfig:
    """Return the layout's configuration with all sizes of batches decided, interpolations unresolved."""
    problems = problems_of(cfg, options)
    cfg = cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.run_dir, cfg.ckpt_path, cfg.resume = str(folder / "layout"), None, None
    if cfg.max_steps is None and cfg.max_epochs is None:
        cfg.max_steps = options.steps  # gives the run an end; a recipe may read the original value
    planned, found = plan(cfg, "fit")
    problems += found
    if problems:
        raise ConfigError(problems)
    if planned.global_batch_size is None:
        ranks = num_data_ranks(planned, world_size_of(planned, Surroundings("fit")))
        planned.global_batch_size = planned.micro_batch_size * (planned.accumulation.steps or 1) * ranks
    planned.accumulation.steps = None
    return planned


def _settled(planned: DictConfig, options: VerifyOptions, run_dir: Path, *, one_process: bool = False) -> DictConfig:
    """Resolve, and keep only the training of `steps` steps and the recorder."""
    recorder = {"_target_": _RECORDER, "folder": str(run_dir / "record"), "watch_execution": one_process}
    resolved = only_training(planned, options.steps, run_dir, {"recorder": recorder})
    if one_process:
        resolved.strategy, resolved.devices, resolved.nodes = _SINGLE, 1, 1
    return resolved


def _one_process(planned: DictConfig, options: VerifyOptions, folder: Path) -> DictConfig:
    """Return the configuration of the one-process run, which processes the micro-batches of all ranks in turn."""
    from trainwright.tools.verify.compare import Record

    record = Record(folder / "layout" / "record")
    wave = record.wave_size
    whole_wave = planned.trainer.sync_batchnorm or not record.run["automatic_optimization"]
    if whole_wave and wave is not None:
        # Ranks normalize over, or manually step after, one wave: it becomes one micro-batch.
        planned = planned.copy()
        planned.micro_batch_size = wave
    return _settled(planned, options, folder / "one", one_process=True)


def _compare(layout_cfg: DictConfig, folder: Path, options: VerifyOptions) -> VerifyReport:
    from trainwright.tools.verify import compare as compare

    layout, reference = (compare.Record(folder / name / "record") for name in ("layout", "one"))
    tolerance, problems = options.bound, _mismatches(layout, reference)

    losses = compare.compare_losses(layout.losses(), reference.losses(), tolerance)
    gradients, parameters = compare.compare_steps(layout, reference, tolerance)
    samples = compare.compare_samples(layout, reference)
    start = compare.find_start(problems, samples, losses, gradients, parameters, reference.run["execution"])
    return VerifyReport(
        recipe=str(layout_cfg.name),
        strategy=_class_of(layout_cfg.strategy),
        ranks=len(layout.ranks),
        layout=layout.run["layout"],
        precision=str(layout_cfg.precision),
        tolerance=tolerance,
        global_batch=_batch_text(layout, layout_cfg),
        dropout_off=reference.run["dropout"],
        losses=losses,
        samples=list(samples.values()),
        gradients=gradients,
        parameters=parameters,
        problems=problems,
        start=start,
    )


def _mismatches(layout: Any, reference: Any) -> list[str]:
    """Return what the runs must have in common but do not."""
    problems = []
    if layout.steps != reference.steps:
        problems.append(f"{layout.steps} optimizer step(s) under the layout, {reference.steps} on one process")
    ours, theirs = (list(record.tensors("parameters", 0)) for record in (layout, reference))
    missing, extra = ([name for name in a if name not in set(b)] for a, b in ((theirs, ours), (ours, theirs)))
    if missing:
        problems.append(f"parameters missing under the layout: {', '.join(missing)}")
    if extra:
        problems.append(f"parameters only under the layout: {', '.join(extra)}")
    return problems


def _batch_text(record: Any, cfg: DictConfig) -> str:
    run = record.run
    if run["micro_batch_size"] is None:
        return f"{cfg.global_batch_size} samples per step"
    return (
        f"{run['micro_batch_size']} samples x {run['accumulation']} accumulated x {run['data_ranks']} data rank(s) "
        f"= {record.wave_size * run['accumulation']} samples per step"
    )


def _class_of(strategy: Any) -> str:
    stage = f" stage {strategy.stage}" if "stage" in strategy else ""
    return str(strategy["_target_"]).rsplit(".", 1)[-1] + stage


OK, FAILED = 0, 1


def run_verify_command(arguments: argparse.Namespace) -> int:
    """Run `verify`; standard output holds only the report.

    Args:
        arguments: parsed command line.

    Returns:
        The exit code: 0 equal, 1 different.

    Raises:
        ConfigError: if the configuration is invalid.
    """
    options, overrides, problems = take_options(arguments.overrides)
    if arguments.report is not None and not Path(arguments.report).parent.is_dir():
        problems.append(f"--report {arguments.report}: its folder does not exist; create it, or type another path")
    jobs = expand(overrides, arguments.config_dir) if arguments.multirun else [Job(0, tuple(overrides), ())]
    compositions = [compose_checked(job.overrides, arguments.config_dir) for job in jobs]
    for composition in compositions:
        problems += composition.problems
        if (problems or len(jobs) > 1) and composition.cfg is not None and composition.guessed:
            problems += [*problems_of(composition.cfg, options), *plan(composition.cfg, "fit")[1]]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))

    def say(text: str) -> None:
        print(f"verify: {text}", file=sys.stderr, flush=True)

    reports: list[tuple[str, VerifyReport]] = []
    for job, composition in zip(jobs, compositions, strict=True):
        assert composition.cfg is not None
        report_import(composition.import_report, sys.stderr)
        with ranks_to_stderr():
            report = verify(composition.cfg, options, on_progress=say)
        reports.append((" ".join(masked_words(job.varied)), report))
        if not arguments.json:
            print(report.to_text().rstrip() + ("\n" if len(jobs) > 1 else ""), flush=True)
    if arguments.json:
        documents = [report.to_dict() for _, report in reports]
        print(json.dumps(documents if arguments.multirun else documents[0], allow_nan=False), flush=True)
    if arguments.report is not None:
        _write_page(arguments, reports)
    return OK if all(report.passed for _, report in reports) else FAILED


def _write_page(arguments: argparse.Namespace, reports: Sequence[tuple[str, VerifyReport]]) -> None:
    multirun = ["-m"] if arguments.multirun else []
    words = masked_words(command_words("verify", [*multirun, *arguments.overrides], arguments.config_dir))
    write_page(page(reports, [*words, "--report", arguments.report]), arguments.report, "--report")
    print(f"page: {arguments.report}", file=sys.stderr, flush=True)

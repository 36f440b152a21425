"""Peers: the command of each one for every layout that it supports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.task import Task
from benchmarks.ranks import free_port

SIDES = Path(__file__).parent / "sides"
LAYOUTS = ("single", "ddp", "zero2", "zero3", "tensor", "pipeline")
BY_HAND = "torch by hand"
OURS = "trainwright"
_NOT_COUNTED = "# bench"


@dataclass(frozen=True)
class Place:
    """Where a side runs.

    Args:
        layout: one of :data:`LAYOUTS`.
        ranks: processes.
        cache: folder of the environments.
        folder: of this run; what is written goes there.
        task: what is trained.
    """

    layout: str
    ranks: int
    cache: Path
    folder: Path
    task: Task


@dataclass(frozen=True)
class Side:
    """A peer and the layouts that it has.

    Args:
        name: in the table.
        layouts: those it can be asked for.
        command: what is typed. A peer that is not installed raises RuntimeError.
        files: written by the user, as names in ``sides/``, by layout.
        environment: name of the environment in which it runs; ``None``: that of this project.
    """

    name: str
    layouts: tuple[str, ...]
    command: Callable[[Place], list[str]]
    files: Callable[[str], tuple[str, ...]]
    environment: str | None = None

    def lines(self, layout: str) -> int:
        """Lines of code that a user writes: no empty ones, comments or docstrings, and none that only measure."""
        return sum(count_lines(SIDES / name) for name in self.files(layout))

    def version(self) -> str | None:
        """Of the peer's own package, where it has an environment of its own."""
        return None if self.environment is None else ENVIRONMENTS[self.environment].version()


def count_lines(file: Path) -> int:
    """Lines of a Python or YAML file that say something; see :meth:`Side.lines`."""
    lines = file.read_text().splitlines()
    said = {
        number
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#") and not line.rstrip().endswith(_NOT_COUNTED)
    }
    if file.suffix == ".py":
        for node in ast.walk(ast.parse("\n".join(lines))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                said -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(said)


def _python(place: Place, environment: str | None) -> str:
    return sys.executable if environment is None else str(ENVIRONMENTS[environment].python(place.cache))


def _torchrun(place: Place, script: str, *arguments: str, environment: str | None = None) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={place.ranks}"]
    python = _python(place, environment)
    return [python, *(launcher if place.ranks > 1 else []), str(SIDES / script), *arguments]


_HAND = {
    "single": "hand_single.py",
    "ddp": "hand_ddp.py",
    "zero2": "hand_fsdp.py",
    "zero3": "hand_fsdp.py",
    "tensor": "hand_tensor.py",
    "pipeline": "hand_pipeline.py",
}
_LIGHTNING_NAMES = {"single": "auto", "ddp": "ddp"}
_FULLY_SHARDED = ("zero2", "zero3")
_MODEL_PARALLEL = {"zero2": "lightning_fsdp2.py", "zero3": "lightning_fsdp2.py", "tensor": "lightning_tensor.py"}
_DEEPSPEED_STAGES = {"single": 0, "ddp": 0, "zero2": 2, "zero3": 3}


def _lightning(place: Place) -> list[str]:
    name = _LIGHTNING_NAMES[place.layout]
    return [sys.executable, str(SIDES / "lightning_trainer.py"), name, str(place.ranks)]


def _lightning_fsdp(place: Place) -> list[str]:
    return [sys.executable, str(SIDES / "lightning_fsdp.py"), place.layout, str(place.ranks)]


def _model_parallel(place: Place) -> list[str]:
    return [sys.executable, str(SIDES / _MODEL_PARALLEL[place.layout]), place.layout, str(place.ranks)]


def _deepspeed(place: Place) -> list[str]:
    script, arguments = "deepspeed_pipeline.py", []
    if place.layout in _DEEPSPEED_STAGES:
        script, arguments = "deepspeed_engine.py", [f"--stage={_DEEPSPEED_STAGES[place.layout]}"]
    python = _python(place, "deepspeed")
    launcher = str(ENVIRONMENTS["deepspeed"].folder(place.cache) / "bin" / "deepspeed")
    options = [f"--num_gpus={place.ranks}", f"--master_port={free_port()}"]
    return [python, launcher, *options, str(SIDES / script), *arguments]


def _trainwright(place: Place) -> list[str]:
    """``trainwright fit`` as it is by default, but for what speaks to the terminal and for checkpoints."""
    task = place.task
    data_ranks = place.ranks if place.layout in ("ddp", "zero2", "zero3") else 1
    options = [
        f"strategy={place.layout}",
        f"devices={place.ranks}",
        f"accelerator={'gpu' if task.device == 'cuda' else 'cpu'}",
        f"precision={'bf16-mixed' if task.bf16 else '32'}",
        f"micro_batch_size={task.batch // data_ranks}",
        f"global_batch_size={task.batch}",
        f"max_steps={task.total}",
        f"run_dir={place.folder / 'run'}",
        "checkpoint=none",
        "monitor.progress_bar=null",
        "monitor.start_summary=null",
        "report=false",
        "trainer.limit_val_batches=0",
        "+callbacks.turns._target_=benchmarks.peers.sides.lightning_turns.TurnsCallback",
    ]
    if task.compile:
        options.append("strategy.compile=true")
    if place.layout == "pipeline":
        options += ["strategy.schedule=1f1b", f"strategy.micro_batches={task.micro_batches}"]
    folder = ["--config-dir", str(SIDES / "conf")]
    return [sys.executable, "-m", "trainwright", "fit", *folder, "recipe=peers", *options]


FIELD = (
    Side(
        BY_HAND,
        LAYOUTS,
        lambda place: _torchrun(place, _HAND[place.layout], *([place.layout] if "zero" in place.layout else [])),
        lambda layout: (_HAND[layout],),
    ),
    Side("Lightning", tuple(_LIGHTNING_NAMES), _lightning, lambda layout: ("lightning_trainer.py",)),
    Side("Lightning FSDPStrategy", _FULLY_SHARDED, _lightning_fsdp, lambda layout: ("lightning_fsdp.py",)),
    Side(
        "Lightning ModelParallel",
        tuple(_MODEL_PARALLEL),
        _model_parallel,
        lambda layout: (_MODEL_PARALLEL[layout],),
    ),
    Side(
        "Accelerate",
        (*_LIGHTNING_NAMES, *_FULLY_SHARDED),
        lambda place: _torchrun(place, "accelerate_loop.py", place.layout, environment="accelerate"),
        lambda layout: ("accelerate_loop.py",),
        "accelerate",
    ),
    Side(
        "DeepSpeed",
        (*_DEEPSPEED_STAGES, "pipeline"),
        _deepspeed,
        lambda layout: ("deepspeed_engine.py" if layout in _DEEPSPEED_STAGES else "deepspeed_pipeline.py",),
        "deepspeed",
    ),
    Side(
        "torchtitan",
        ("zero3", "tensor", "pipeline"),
        lambda place: _torchrun(place, "torchtitan_trainer.py", environment="torchtitan"),
        lambda layout: ("torchtitan_trainer.py",),
        "torchtitan",
    ),
    Side(OURS, LAYOUTS, _trainwright, lambda layout: ("trainwright_module.py", "conf/recipe/peers.yaml")),
)


def sides_of(layout: str, names: list[str] | None = None) -> list[Side]:
    """Return the sides that support a layout, in the order of :data:`FIELD`; always by hand, others only if named."""
    return [side for side in FIELD if layout in side.layouts and (names is None or side.name in {BY_HAND, *names})]

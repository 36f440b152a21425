"""How much code there is and how far a step travels: lines and entries of each folder, classes and methods of each
strategy, the files that one optimizer step passes through, and those that validate a key before ranks start."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright
from benchmarks.quiet import PLAIN_TRAINER
from benchmarks.ranks import run_ranks
from trainwright.command.cli import main as command
from trainwright.strategies.contract.registry import make_strategy, strategy_names, strategy_options, target_of
from trainwright.trainer.trainer import Trainer

LINKS = Path(trainwright.__file__).parent
FOLDERS = {link.resolve().name: link.resolve() for link in sorted(LINKS.iterdir()) if link.is_symlink()}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
WALKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "zero3": ("zero3", {}),
    "pipeline=2": ("hybrid", {"pipeline": 2, "micro_batches": 2}),
}
# Of the measured steps: by then everything that happens once has happened.
MEASURED_STEP = 5


# ---- lines and entries -----------------------------------------------------------------------------------------------


def code_lines(file: Path) -> int:
    """Lines of a Python file that are neither blank, nor a comment, nor part of a docstring."""
    nodes = ast.walk(ast.parse(file.read_text()))
    owners = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    texts = [node.body[0] for node in owners if ast.get_docstring(node, clean=False) is not None]
    docstrings = {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    with file.open("rb") as stream:
        tokens = [token for token in tokenize.tokenize(stream.readline) if token.type not in NOT_CODE]
    # The first token is the encoding.
    return len({line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def folder_counts() -> dict[str, dict[str, int]]:
    """Lines, files and entries of each folder of the package, subfolders by themselves; largest first."""
    found = {}
    for root in FOLDERS.values():
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
            files = list(folder.glob("*.py"))
            entries = [entry for entry in folder.iterdir() if entry.name not in ("__init__.py", "__pycache__")]
            name = str(folder.relative_to(root.parent))
            found[name] = {"lines": sum(map(code_lines, files)), "files": len(files), "entries": len(entries)}
    return dict(sorted(found.items(), key=lambda item: -item[1]["lines"]))


# ---- classes ---------------------------------------------------------------------------------------------------------


def own_bases(cls: type) -> list[type]:
    """Classes of this project that ``cls`` inherits from, nearest first."""
    return [base for base in cls.__mro__[1:] if base.__module__.startswith("trainwright.")]


def own_methods(cls: type) -> dict[str, Any]:
    """Methods and properties by name that this project defines for ``cls``, in it or in a class above it."""
    kinds = (property, staticmethod, classmethod)
    return {
        name: value
        for base in reversed([cls, *own_bases(cls)])
        for name, value in vars(base).items()
        if inspect.isfunction(value) or isinstance(value, kinds)
    }


def strategy_class(name: str) -> type:
    """The class behind the name of a strategy."""
    module, _, cls = target_of(strategy_options(name)).rpartition(".")
    found: type = getattr(importlib.import_module(module), cls)
    return found


def strategy_counts() -> dict[str, dict[str, int]]:
    """Count own base classes and methods of each strategy; public methods and overrides of Lightning's separately."""
    found = {}
    for name in strategy_names():
        cls = strategy_class(name)
        methods, bases = own_methods(cls), own_bases(cls)
        lightnings = {each for base in cls.__mro__[1:] if base not in bases for each in vars(base)}
        public = {method for method in methods if not method.startswith("_")}
        found[name] = {
            "own bases": len(bases),
            "methods": len(methods),
            "overrides": len(public & lightnings),
            "public": len(public - lightnings),
        }
    return found


# ---- the path of a step ----------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """Project functions called in one optimizer step of one rank."""

    files: list[str]
    """Files of this project in the order of their first call."""
    calls: int
    """Calls of this project's functions."""
    moves: int
    """Calls from a function of one folder of this project straight or by way of others' code into another folder."""


class _Recorder:
    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.moves = 0
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        file = _own_file(frame.f_code.co_filename)
        if file is None:
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        folder = file.partition("/")[0]
        self.moves += bool(self._stack) and self._stack[-1] != folder
        self._stack.append(folder)
        self.files[file] = self.files.get(file, 0) + 1


def _own_file(name: str) -> str | None:
    path = Path(name)
    folder = next((root for root in FOLDERS.values() if root in path.resolve().parents), None)
    return None if folder is None or folder.name == "recipes" else str(path.resolve().relative_to(folder.parent))


def walk(strategy: str, options: dict[str, Any]) -> Walk:
    """Train a small model and record one optimizer step; on every rank."""
    recorder = _Recorder()
    trainer = Trainer(
        max_steps=MEASURED_STEP + 2,
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(strategy, **options),
        **PLAIN_TRAINER,
    )
    _record_step(trainer, recorder)
    trainer.fit(_Stack(), DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=4))
    return Walk(list(recorder.files), sum(recorder.files.values()), recorder.moves)


class _Stack(pl.LightningModule):
    """Four equal blocks, which a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (hidden,) = batch
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(hidden).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _record_step(trainer: Any, recorder: _Recorder) -> None:
    loop, steps = trainer.fit_loop.epoch_loop, iter(range(1_000_000))
    advance = loop.advance

    def recorded(fetcher: Any) -> None:
        if next(steps) != MEASURED_STEP:
            advance(fetcher)
            return
        sys.setprofile(recorder)
        try:
            advance(fetcher)
        finally:
            sys.setprofile(None)

    loop.advance = recorded


def walks() -> dict[str, Walk]:
    """The path of a step of rank 0 under each strategy of :data:`WALKS`; starts two ranks for each."""
    return {name: run_ranks(walk, 2, strategy, options)[0] for name, (strategy, options) in WALKS.items()}


# ---- the path of a key -----------------------------------------------------------------------------------------------

KEY = ("fit", "recipe=gpt", "strategy=hybrid", "strategy.pipeline=2", "devices=2", "accelerator=cpu")
RANKS_START = "launch/ranks/supervisor.py"


class _RanksStart(BaseException):
    """Ends the command where it would start the first rank; nothing catches it on the way."""


def key_path(words: tuple[str, ...] = KEY) -> list[str]:
    """Files whose functions a command calls before its first rank starts, in the order of their first call."""
    found: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        # Bodies of modules and classes, which imports run, have no optimized locals.
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        file = own_file(frame.f_code.co_filename)
        if file == RANKS_START:
            sys.setprofile(None)
            raise _RanksStart
        if file is not None:
            found[file] = None

    own_file = cache(_own_file)
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(record)
        try:
            command([*words, f"run_dir={folder}/run"])
        except _RanksStart:
            return list(found)
        finally:
            sys.setprofile(None)
    raise RuntimeError(f"{' '.join(words)} started no rank")


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(found: dict[str, Any]) -> Iterator[str]:
    for title in ("folders", "strategies"):
        rows = found[title]
        columns = list(next(iter(rows.values())))
        yield f"{title:40}" + "".join(f"{column:>12}" for column in columns)
        yield from (f"{name:40}" + "".join(f"{row[c]:>12,}" for c in columns) for name, row in rows.items())
        yield ""
    for name, step in found["steps"].items():
        yield f"one optimizer step under {name}: {len(step.files)} files, {step.calls} calls, {step.moves} moves"
        yield from (f"    {file}" for file in step.files)
    if found["key"]:
        yield f"{' '.join(KEY)}: {len(found['key'])} files before a rank starts"
        yield from (f"    {file}" for file in found["key"])


def main() -> None:
    """Print the counts; with ``--json`` for programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-steps", action="store_true", help="start no ranks, count only")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    steps, key = ({}, []) if arguments.no_steps else (walks(), key_path())
    found = {"folders": folder_counts(), "strategies": strategy_counts(), "steps": steps, "key": key}
    print(json.dumps(found) if arguments.json else "\n".join(_report(found)))


if __name__ == "__main__":
    main()

"""The Python of a page, run by ranks of the pool as a reader would run it, with a module and data at hand.

Blocks of a page follow one another in one namespace; scripts that a page shows and calls run with the words that it
gives them. Training is made small: on the CPU, a few steps, nothing printed.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.docs.blocks import Block
from tests.imported import forget_modules_of

MOST_STEPS = 4
"""Optimizer steps that a Trainer of the documentation makes here at most."""
NAME = "documented"


def run_blocks(blocks: Sequence[Block]) -> list[str]:
    """Run blocks one after the other on this rank.

    Args:
        blocks: of one page.

    Returns:
        The names that they have defined.
    """
    Path(f"{NAME}.py").write_text(page_source(blocks), encoding="utf-8")  # what looks for source finds it
    module = ModuleType(NAME)
    module.__file__ = os.path.abspath(f"{NAME}.py")
    module.__dict__.update(at_hand())
    before = set(module.__dict__)
    with reader_here():
        sys.modules[NAME] = module
        for block in blocks:
            code = compile("\n" * block.line + block.text, block.page, "exec")
            exec(code, module.__dict__)
        return sorted(set(module.__dict__) - before)


def run_script(words: Sequence[str]) -> int:
    """Run a script on this rank.

    Args:
        words: its path, and what is typed behind it.

    Returns:
        The number of ranks that its Trainer asks for: if that is another one than there are, it was stopped there.
    """
    try:
        with reader_here(), patch.object(sys, "argv", list(words)):
            runpy.run_path(words[0], run_name="__main__")
    except _OtherRanksError as asked:
        return asked.devices
    return int(os.environ["WORLD_SIZE"])


def page_source(blocks: Sequence[Block]) -> str:
    """The blocks as one file in which each stands on the lines that it has in its page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def at_hand() -> dict[str, Any]:
    """Return the objects behind "any LightningModule" and "any loaders"."""
    import lightning.pytorch as pl

    from tests.callbacks.modules import Regression, loader

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(256)

        def val_dataloader(self) -> Any:
            return loader(16)

        test_dataloader = predict_dataloader = val_dataloader

    data = Data()
    return {"module": Regression(), "data": data, "datamodule": data}


class _OtherRanksError(Exception):
    """A Trainer asks for another number of ranks than there are."""

    def __init__(self, devices: int) -> None:
        super().__init__(f"devices={devices}, on {os.environ['WORLD_SIZE']} rank(s)")
        self.devices = devices


@contextmanager
def reader_here() -> Iterator[None]:
    """Modules beside the reader are found, and forgotten afterwards; training is small."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with small_runs():
            yield
    finally:
        sys.path.remove(folder)
        forget_modules_of(folder)


@contextmanager
def small_runs() -> Iterator[None]:
    """Limit every Trainer to a few silent steps on the CPU."""
    from lightning.pytorch.loggers import CSVLogger

    from trainwright.trainer.trainer import Trainer

    original = Trainer.__init__

    @functools.wraps(original)
    def init(self: Trainer, **given: Any) -> None:
        devices = given.get("devices", "auto")
        if str(devices).isdecimal() and int(devices) != int(os.environ["WORLD_SIZE"]):
            raise _OtherRanksError(int(devices))
        steps = given.get("max_steps")
        given["max_steps"] = MOST_STEPS if steps in (None, -1) else min(steps, MOST_STEPS)
        # A logger, as by default: without one Lightning saves into `checkpoints`, where a page may keep its own.
        quiet = {"logger": CSVLogger("."), "enable_progress_bar": False, "enable_model_summary": False}
        original(self, **{**quiet, **given, "accelerator": "cpu"})

    with patch.object(Trainer, "__init__", init):
        yield

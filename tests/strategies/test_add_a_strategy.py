"""The strategy of docs/add_a_strategy.md is what the page says: its files are written as they stand there, and used."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.imported import forget_modules_of
from tests.parity.harness import QUIET, Case, Record, Recorder, bare_loop, differences, make_loader, world_size
from tests.parity.modules import make_module
from tests.parity.test_strategies import bit_differences
from trainwright.command import run
from trainwright.command.schema.compose import compose, compose_checked
from trainwright.core.layout import Layout
from trainwright.strategies.compose.world import Surroundings, closed_layout

PAGE = Path(__file__).parents[2] / "docs" / "add_a_strategy.md"
CASE = Case("decoder-adamw", accumulation=3)


def write_files(folder: Path) -> None:
    """The files that the page shows, in a folder of a user's own."""
    shown = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in [("my_strategies/__init__.py", ""), *shown]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def problems(own: Path, *overrides: str) -> list[str]:
    given = ["recipe=digits", "accelerator=cpu", "strategy=hypercube", *overrides]
    composed = compose_checked(given, own / "my_conf")
    assert composed.cfg is not None
    return composed.problems + run.plan(composed.cfg, "fit")[1]


def test_what_it_refuses_before_a_process_starts(own: Path) -> None:
    assert problems(own, "devices=4") == []
    assert problems(own, "devices=3", "global_batch_size=24") == [
        "strategy=hypercube on 3 ranks: in each round every rank needs a partner, so their number must be a power of "
        "two; type devices=2 or devices=4, or strategy=ddp"
    ]
    [found] = problems(own, "devices=4", "launch=resilient", "launch.recovery=replicas")
    assert found.startswith("launch.recovery=replicas with strategy=hypercube")
    assert not [name for name in sys.modules if name == "my_strategies.hypercube"], "checks must import no torch"


def test_its_layout_is_known_from_what_it_builds_on(own: Path) -> None:
    cfg = compose("digits", ["accelerator=cpu", "strategy=hypercube", "devices=4"], own / "my_conf")
    assert closed_layout(cfg, Surroundings()) == Layout(replicate=4)


class Sent(pl.Callback):
    """Bytes that this rank sends from rank to rank in the last optimizer step."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._meter: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._meter is None and trainer.global_step == trainer.max_steps - 1:
            self._meter = trainer.strategy.measure_communication()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.stop()
        self.bytes = self._meter.take()["replicate", "send"].bytes


def train_with_it(folder: str) -> tuple[Record, float, int]:
    """On every rank: what was computed, the bytes of a step, and the parameters."""
    sys.path.insert(0, folder)
    try:
        from my_strategies.hypercube import HypercubeStrategy  # type: ignore[import-not-found]

        from trainwright import Trainer

        recorder, sent = Recorder(), Sent()
        trainer = Trainer(
            strategy=HypercubeStrategy(),
            devices=world_size(),
            global_batch_size=CASE.global_batch_size,
            max_steps=CASE.steps,
            max_epochs=-1,
            callbacks=[recorder, sent],
            **QUIET,
        )
        micro_batch_size = CASE.global_batch_size // (world_size() * CASE.accumulation)
        module = make_module(CASE.module)
        trainer.fit(module, make_loader(CASE.samples, micro_batch_size))
        return recorder.record, sent.bytes, sum(parameter.numel() for parameter in module.parameters())
    finally:
        sys.path.remove(folder)
        forget_modules_of(folder)


@pytest.mark.parametrize("number", [2, 4])
def test_it_computes_what_one_process_computes_and_sends_what_the_page_says(ranks: Any, own: Path, number: int) -> None:
    results = ranks(train_with_it, number, str(own))
    expected = bare_loop(Case(CASE.module, global_batch_size=CASE.global_batch_size, steps=CASE.steps))
    for record, sent, parameters in results:
        assert differences(record, expected) == []
        assert bit_differences(record, results[0][0]) == []
        assert sent == 4 * parameters * math.log2(number)

"""The strategy of docs/add_a_strategy.md is what the page says: its files are written as they stand there, and used."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.command.project import environment
from tests.imported import forget_modules_of
from tests.installed import install
from tests.parity.harness import QUIET, Case, Record, Recorder, bare_loop, differences, make_loader, world_size
from tests.parity.modules import make_module
from tests.parity.test_strategies import bit_differences
from trainwright.command import run
from trainwright.command.help import help_of_verb
from trainwright.command.schema.compose import compose, compose_checked
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.strategies.compose.world import Surroundings, closed_layout
from trainwright.strategies.contract.registry import make_strategy, strategy_names

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
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def problems(*overrides: str) -> list[str]:
    composed = compose_checked(["recipe=digits", "accelerator=cpu", "strategy=hypercube", *overrides])
    assert composed.cfg is not None
    return composed.problems + run.plan(composed.cfg, "fit")[1]


def test_what_it_refuses_before_a_process_starts(own: Path) -> None:
    assert problems("devices=4") == []
    assert problems("devices=3", "global_batch_size=24") == [
        "strategy=hypercube on 3 ranks: in each round every rank needs a partner, so their number must be a power of "
        "two; type devices=2 or devices=4, or strategy=ddp"
    ]
    [found] = problems("devices=4", "launch=resilient", "launch.recovery=replicas")
    assert found.startswith("launch.recovery=replicas with strategy=hypercube")
    [found] = problems("devices=2", "strategy.farthest_frist=true")
    assert "did you mean farthest_first?" in found
    [found] = problems("devices=2", "strategy.bucket_mib=0")
    assert found.startswith("strategy.bucket_mib=0")
    assert not [name for name in sys.modules if name == "my_strategies.hypercube"], "checks must import no torch"


def test_its_name_is_one_of_the_strategies(own: Path) -> None:
    assert strategy_names()[-1] == "hypercube"
    [line] = [line for line in help_of_verb("fit").splitlines() if line.strip().startswith("hypercube")]
    assert "gradients averaged in rounds between pairs" in line
    strategy = make_strategy("hypercube", farthest_first=True)
    assert (type(strategy).__name__, strategy.options.farthest_first) == ("HypercubeStrategy", True)
    with pytest.raises(ValueError, match=r"Unknown strategy 'hypercub'. Did you mean 'hypercube'"):
        make_strategy("hypercub")


def test_its_constructor_refuses_the_same(own: Path) -> None:
    [said] = problems("devices=2", "strategy.ranks_per_node=2")
    with pytest.raises(ValueError, match=re.escape(said.replace("strategy.", ""))):
        make_strategy("hypercube", ranks_per_node=2)


def test_the_planner_knows_what_it_holds(own: Path) -> None:
    words = ["accelerator=cpu", "strategy=hypercube", "micro_batch_size=auto", "global_batch_size=64"]
    planned, found = run.plan(compose("digits", words), "fit")
    assert found == []
    assert 1 <= planned.micro_batch_size <= 64


def test_its_layout_is_known(own: Path) -> None:
    cfg = compose("digits", ["accelerator=cpu", "strategy=hypercube", "devices=4"])
    assert closed_layout(cfg, Surroundings()) == Layout(replicate=4)
    (own / "my_conf/strategy").mkdir(parents=True)
    (own / "my_conf/strategy/far.yaml").write_text("defaults: [_hypercube, _self_]\nfarthest_first: true\n")
    assert compose("digits", ["strategy=far"], own / "my_conf").strategy.farthest_first


def test_the_command_trains_with_it(own: Path) -> None:
    words = ["recipe=digits", "accelerator=cpu", "strategy=hypercube", "devices=2", "max_steps=2", "run_dir=mine"]
    command = [sys.executable, "-m", "trainwright", "fit", *words]
    subprocess.run(command, cwd=own, env=environment(), check=True, timeout=300, stdout=subprocess.DEVNULL)
    assert (own / "mine/checkpoints").is_dir()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("my_strategies.options:Hypercube", "cannot be loaded: AttributeError"),
        ("my_strategies.options:Layout", "must be a dataclass of options"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_refused(own: Path, value: str, said: str) -> None:
    entries = next(own.glob("*.dist-info")) / "entry_points.txt"
    entries.write_text(f"[trainwright.strategies]\nhypercube = {value}\n")
    with pytest.raises(ValueError, match=rf"strategy=hypercube: {value} of the package my-strategies {said}"):
        make_strategy("hypercube")
    entries.write_text("[trainwright.strategies]\nddp = my_strategies.options:HypercubeOptions\n")
    with pytest.raises(ConfigError, match="would be strategy=ddp, which is built in"):
        compose("digits")


class Sent(pl.Callback):
    """Bytes that this rank sends from rank to rank in the last optimizer step."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._meter: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._meter is None and trainer.global_step == trainer.max_steps - 1:
            self._meter = trainer.strategy.measures.measure_communication()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.stop()
        self.bytes = self._meter.take()["replicate", "send"].bytes


def train_with_it(folder: str) -> tuple[Record, float, int]:
    """On every rank: what was computed, the bytes of a step, and the parameters."""
    sys.path.insert(0, folder)
    try:
        from trainwright import Trainer

        recorder, sent = Recorder(), Sent()
        trainer = Trainer(
            strategy=make_strategy("hypercube", farthest_first=world_size() == 4),
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

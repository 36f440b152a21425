"""Errors of a layout with a model and other settings, reported by the command before a process starts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command.project import environment, write_project
from trainwright.command.cli import main
from trainwright.command.schema.compose import compose
from trainwright.core.processes import machine
from trainwright.strategies.compose.engine_options import engine_options_of
from trainwright.strategies.compose.meta_module import meta_module
from trainwright.strategies.compose.world import options_of

HYBRID = ("strategy=hybrid", "devices=4", "strategy.shard=-1")
EMA = "+callbacks.ema._target_=lightning.pytorch.callbacks.EMAWeightAveraging"

# Words after `trainwright fit recipe=gpt` (4 blocks, 4 heads, micro-batch 4, sequence 128), parts of the one problem.
REFUSED: list[tuple[list[str], list[str]]] = [
    # ---- the model
    (["strategy=tensor", "devices=4", "module.config.kv_heads=2"], ["tensor 4 for GPTModule", "kv_heads = 2", "1, 2"]),
    (["strategy=pipeline", "devices=4", "module.config.layers=3"], ["3 blocks", "4 stages", "pipeline to at most 3"]),
    (["strategy=pipeline", "devices=2", "strategy.split=[3,2]"], ["split=[3, 2]", "4 in all", "[2, 2]"]),
    (["strategy=expert", "devices=2"], ["strategy.expert needs experts", "GPTModule", "To start from"]),
    (["recipe=moe", "strategy=expert", "devices=2", "module.config.experts=5"], ["expert=2", "5 experts", "1, 5"]),
    (
        ["strategy=context", "devices=4", "strategy.attention=ulysses", "module.config.heads=2"],
        ["context 4 for GPTModule", "'ulysses' and 2 query heads", "context of 1, 2;", "'ring'"],
    ),
    (["strategy=tensor", "devices=2", "strategy.loss_parallel=true"], ["splits no output head", "loss_parallel=false"]),
    (["strategy=pipeline", "devices=2", "strategy.blocks=[model.layers.*]"], ["model.layers.*", "model.blocks"]),
    # ---- options; all of them are in test_rules.py
    (["strategy=pipeline", "devices=2", "strategy.split=[1,1,2]"], ["names 3 stages", "give 2 numbers"]),
    ([*HYBRID, "strategy.batch_dims={x: 1}"], ["strategy.batch_dims", "with pipeline=1 has no effect"]),
    (["strategy=zero1", "devices=2", "strategy.no_sync_accumulation=true"], ["stage 1 has no", "strategy=zero2"]),
    # ---- sizes
    (["strategy=hybrid", "devices=6", "strategy.tensor=4"], ["tensor=4", "6 rank(s)"]),
    (["recipe=moe", "strategy=expert", "devices=4", "strategy.expert=3"], ["expert=3 does not divide", "1, 2, 4"]),
    (
        ["strategy=pipeline", "devices=2", "micro_batch_size=1"],
        ["micro_batch_size=1 with strategy.micro_batches=2, the default of schedule=1f1b", "type micro_batch_size=2"],
    ),
    (["strategy=context", "devices=2", "module.config.seq_len=126"], ["data.seq_len=126", "multiple of 4", "124"]),
    (
        ["strategy=tensor", "devices=2", "strategy.sequence_parallel=true", "module.config.seq_len=127"],
        ["data.seq_len=127", "strategy.sequence_parallel=true on strategy.tensor=2", "multiple of 2, such as 126"],
    ),
    # ---- callbacks and others
    (["recipe=moe", "strategy=expert", "devices=2", EMA], ["callbacks.ema", "EMAWeightAveraging averages", "expert=1"]),
    (["strategy=pipeline", "devices=2", "trainer.sync_batchnorm=true"], ["sync_batchnorm=true", "pipeline=2"]),
    (["strategy=tensor", "devices=2", *LBFGS], ["LBFGS with tensor=2", "AdamW"]),
]  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    monkeypatch.setattr("trainwright.command.cli.start_forkserver", lambda: None)  # start no process
    return write_project(tmp_path)


def problems_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["fit", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trainwright: nothing was started, because")
    assert "Traceback" not in err
    assert not Path("runs").exists()
    return err


@pytest.mark.sample(4)
@pytest.mark.parametrize(("words", "parts"), REFUSED)
def test_refused(words: list[str], parts: list[str], conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = [] if words[0].startswith("recipe=") else ["recipe=gpt"]
    err = problems_of([*recipe, *words], capsys)
    assert "because:" in err, "one problem alone"
    for part in parts:
        assert part in err


def test_all_at_once(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=gpt", "strategy=hybrid", "devices=2", "strategy.tensor=2", "module.config.kv_heads=1"]
    err = problems_of(
        [*words, "strategy.schedule=zbv", "global_batch_size=7", "micro_batch_size=2", "trainer.sync_batchnorm=true"],
        capsys,
    )
    for part in ("4 problems", "global_batch_size=7", "strategy.schedule=zbv", "sync_batchnorm=true", "kv_heads = 1"):
        assert part in err


def test_options_of_an_axis_without_ranks_have_no_effect(conf, capsys):
    err = problems_of(["recipe=gpt", "strategy=pipeline", "devices=1", "strategy.schedule=gpipe"], capsys)
    assert "strategy.schedule=gpipe with pipeline=1 has no effect" in err


def test_manual_optimization(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(conf, "self.save_hyperparameters()", "self.automatic_optimization = False")
    words = ["--config-dir", str(conf), "recipe=mine", "strategy=pipeline", "devices=2", "strategy.blocks=[net.*]"]
    assert "Manual optimization" in problems_of(words, capsys)


def test_a_module_that_cannot_be_built_on_meta_is_not_checked(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-dir", str(conf), "recipe=mine", "strategy=pipeline", "devices=4", "strategy.schedule=gpipe"]
    assert "blocks" in problems_of(words, capsys)
    change(conf, "self.save_hyperparameters()", "print('built'); self.x = float(torch.ones(1))")
    assert main(["fit", *words, "--print-config"]) == 0
    assert "built" not in capsys.readouterr().out


def change(conf: Path, old: str, new: str) -> None:
    module = conf.parent / "my_module.py"
    module.write_text(module.read_text().replace(old, new))
    sys.modules.pop("my_module", None)


def test_building_on_meta_has_no_side_effects() -> None:
    cfg = compose("gpt", ["strategy=tensor", "devices=2", "strategy.plan.blocks=[model.blocks.*]"])
    before = torch.get_rng_state()
    module = meta_module(cfg)
    assert module is not None
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.empty(1).device.type == "cpu"
    options = engine_options_of(options_of(cfg.strategy))
    assert (options.plan, options.split) == ({"blocks": ["model.blocks.*"]}, "balanced")
    assert meta_module(compose("gpt", ["module.config.heads=3"])) is None


@pytest.mark.thorough
def test_data_parallel_startup_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from trainwright.command.schema.compose import compose\n"
        "from trainwright.command.run import plan\n"
        "for strategy in ('zero3', 'ddp', 'hybrid'):\n"
        "    assert plan(compose('gpt', ['strategy=' + strategy, 'devices=2', 'accelerator=cpu']), 'fit')[1] == []\n"
        "    assert 'torch' not in sys.modules, strategy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment(), cwd=tmp_path)

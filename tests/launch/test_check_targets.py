"""Classes of a configuration that lack hooks, or are given wrong arguments, are refused from their source."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.command.project import MODULE, environment, problems_of, run_command
from tests.warm import warm_run

CLASSES = """
import lightning.pytorch as pl
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from my_module import MyData, MyModule


class Empty(LightningModule):
    def __init__(self, width, depth=1, *, optimizer=None):
        super().__init__()

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


class Steps:
    def training_step(self, batch, batch_idx): ...

    test_step = validation_step = training_step

    def configure_optimizers(self): ...


class Mixed(Steps, Empty): ...


class OfLightning(BoringModel):
    def __init__(self, width):
        super().__init__()


class SetInInit(Empty):
    def __init__(self, width):
        super().__init__(width)
        self.training_step = self.configure_optimizers = print


@str
class Decorated(Empty): ...


class WithLoaders(MyModule):
    def train_dataloader(self): ...


class NoLoaders(LightningDataModule): ...


class Open(pl.Callback):
    def __init__(self, needed, **kwargs): ...


def build(width): ...
"""


@pytest.fixture
def classes(conf: Path, tmp_path: Path) -> Path:
    (tmp_path / "my_classes.py").write_text(CLASSES)
    importlib.invalidate_caches()  # folders that change within a tick of the clock look unchanged
    return conf


def found(conf: Path, module: str, *words: str, verb: str = "fit") -> list[str]:
    # The arguments of the recipe are of another class.
    none = ("~module.hidden", "~module.fail_rank", "~module.sleep")
    weights = () if verb == "fit" else ("ckpt_path=initial",)
    words = (f"module._target_=my_classes.{module}", *none, *weights, *words)
    return problems_of("recipe=mine", *words, conf=conf, verb=verb)


@pytest.mark.parametrize(("module", "verb", "hooks"), [
    ("Empty", "fit", ["training_step", "configure_optimizers"]),
    ("Empty", "test", ["test_step"]),
    ("Empty", "validate", []),
    ("Mixed", "fit", []),
    ("Mixed", "test", []),
    ("OfLightning", "fit", []),
    ("OfLightning", "test", []),
    ("SetInInit", "fit", []),
    ("Decorated", "fit", []),
    ("build", "fit", []),
])  # fmt: skip
def test_missing_steps(classes: Path, module: str, verb: str, hooks: list[str]) -> None:
    said = found(classes, module, "+module.width=3", verb=verb)
    where = f"module._target_=my_classes.{module}: has no"
    assert said == [f"{where} {hook}, which {verb} calls; define it, or type another class" for hook in hooks]


def test_missing_loaders(classes: Path) -> None:
    other = ("data._target_=my_classes.NoLoaders", "~data.batch_size")
    none = ("~data._target_", "~data.batch_size")
    for words, key in ((other, "data._target_=my_classes.NoLoaders"), (none, "module._target_=my_classes.With")):
        [said] = found(classes, "WithLoaders", *words, verb="predict")
        assert said.startswith(key)
        assert "has no predict_dataloader, which predict calls" in said
        assert found(classes, "WithLoaders", *words) == []
    assert found(classes, "WithLoaders", verb="predict") == []


@pytest.mark.parametrize(("words", "expected"), [
    (["+module.width=3", "+module.detph=2"], "module.detph: my_classes.Empty has no such argument; did you mean d"),
    (["+module.width=3", "+data.bath_size=2"], "data.bath_size: my_module.MyData has no such argument; did you"),
    (["+module.width=3", "+module.on=true"], "module.on: my_classes.Empty has no such argument; its arguments: depth"),

    ([], "module: my_classes.Empty needs width; type +module.width=..., or set it in the recipe"),
    (["+module._args_=[3]"], None),
    (["+module.width=3", "+callbacks.mine={_target_:my_classes.Open,more:1}"], "callbacks.mine: my_classes.Open needs"),
    (["+module.width=3", "+callbacks.mine={_target_:my_classes.Open,needed:1,more:1}"], None),
    (["+module.width=3", "+module.depth={_target_:my_classes.build}"], "module.depth: my_classes.build needs width"),
    (["+module.width=3", "+module._recursive_=false", "+module.depth={_target_:my_classes.build}"], None),
    (["+module.width=3", "+module.depth={_target_:my_classes.build,_partial_:true}"], None),
])  # fmt: skip
def test_arguments(classes: Path, words: list[str], expected: str | None) -> None:
    said = found(classes, "Empty", *words, verb="validate")
    assert len(said) == (expected is not None), said
    if expected is not None:
        assert said[0].startswith(expected)


def test_argument_of_a_shared_group() -> None:
    [said] = problems_of("recipe=digits", "+optimizer.momentun=0.9", "optimizer=sgd", "accelerator=cpu")
    assert said.startswith("optimizer.momentun: torch.optim.SGD has no such argument; did you mean momentum?")


def test_class_of_a_shared_group() -> None:
    [said] = problems_of("recipe=digits", "optimizer._target_=absent.SGD", "accelerator=cpu")
    assert said.startswith("optimizer._target_=absent.SGD: there is no module 'absent'")


SCRIPT = (
    MODULE
    + """
import trainwright as tw

print("a rank has started", flush=True)
del MyModule.training_step
trainer = tw.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1)
trainer.fit(MyModule(), MyData())
"""
)


def test_nothing_is_left(classes: Path, tmp_path: Path) -> None:
    words = ("fit", "--config-dir", str(classes), "recipe=mine", "module._target_=my_classes.Empty", "run_dir=made")
    done = run_command(*words)
    assert done.returncode == 2
    assert "has no training_step" in done.stdout
    (tmp_path / "script.py").write_text(SCRIPT)
    before = {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"}
    done = warm_run([sys.executable, "script.py"], capture_output=True, env=environment(), timeout=120)
    assert done.returncode == 1
    assert "No `training_step()` method defined" in done.stderr
    assert done.stdout.count("a rank has started") == 1
    assert {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"} == before
    assert not Path("made").exists()

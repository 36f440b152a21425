"""Libraries that import ``pytorch_lightning``: one line, or the command line, makes it another name of Lightning's."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

import trainwright
from tests.command.project import MODULE, environment, run_command
from tests.warm import warm_run
from trainwright.core.config import lightning_alias
from trainwright.core.config.targets import definition, lineage, problem_of_target

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
LIBRARY = (
    MODULE.replace("lightning.pytorch", "pytorch_lightning")
    + """

def fit(module, **options):
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, **options)
    trainer.fit(module, MyData())
    return trainer
"""
)
ONE = """
import sys
import lightning.pytorch.callbacks as callbacks
import lightning.pytorch as real
before = dict(real.__spec__.__dict__), real.__loader__, real.__name__
import trainwright.pytorch_lightning_alias
import trainwright.pytorch_lightning_alias
import pytorch_lightning as pl
import pytorch_lightning.loggers.wandb as wandb
import lightning_fabric.utilities.seed
import lightning.pytorch.loggers.wandb, lightning.fabric.utilities.seed
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning import Trainer

assert pl is real and Trainer is real.Trainer and wandb is real.loggers.wandb
assert ModelCheckpoint is callbacks.ModelCheckpoint and sys.modules["pytorch_lightning.callbacks"] is callbacks
assert lightning_fabric.utilities.seed is sys.modules["lightning.fabric.utilities.seed"]
assert before == (dict(real.__spec__.__dict__), real.__loader__, real.__name__)

import pickle
from lightning.pytorch.utilities.parsing import AttributeDict
written = pickle.dumps(AttributeDict(lr=1), 0).replace(b"lightning.pytorch", b"pytorch_lightning")
assert b"pytorch_lightning.utilities.parsing" in written and type(pickle.loads(written)) is AttributeDict
try:
    import pytorch_lightning.callbacks.nothing
except ModuleNotFoundError as error:
    assert "pytorch_lightning.callbacks.nothing" in str(error)
else:
    raise AssertionError

import torch
from my_module import MyData, MyModule, fit
import trainwright
trainer = fit(MyModule(), strategy="auto")
trainer.save_checkpoint("theirs.ckpt")
assert type(trainer) is real.Trainer
trainwright.pytorch_lightning_alias.use_trainer()
module = MyModule()
trainer = fit(module, strategy="zero3", devices=1, global_batch_size=8, callbacks=[pl.callbacks.Timer()])
assert type(trainer) is trainwright.Trainer and type(trainer.strategy) is trainwright.ZeroStrategy
trainer.save_checkpoint("ours.ckpt")
loaded = MyModule.load_from_checkpoint("ours.ckpt")
assert MyModule.load_from_checkpoint("theirs.ckpt").hparams == loaded.hparams
pickle.loads(pickle.dumps(loaded))
predicted, again = (trainer.predict(each, MyData()) for each in (module, loaded))
assert len(predicted) == 3 and all(map(torch.equal, predicted, again))
print("all well")
"""
LATE = """
import my_module
try:
    import trainwright.pytorch_lightning_alias
except ImportError as error:
    print(error)
import trainwright
try:
    my_module.fit(my_module.MyModule())
    trainwright.Trainer(accelerator="cpu", logger=False).fit(my_module.MyModule())
except TypeError as error:
    print(error)
"""


@pytest.fixture
def library(conf: Path, tmp_path: Path) -> Path:
    """The user's project, with a module of a library that imports ``pytorch_lightning``."""
    (tmp_path / "my_module.py").write_text(LIBRARY)
    return conf


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": {**environment(), "PYTHONPATH": path}}
    return warm_run([sys.executable, "-c", code], timeout=120, **options)


def test_one_package_for_libraries(library: Path, tmp_path: Path) -> None:
    done = python(ONE, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all well"), done.stdout


def test_imported_before(library: Path, tmp_path: Path) -> None:
    """Both the line and the Trainer say which module was first; Lightning's own package still works."""
    said = [
        line for line in python(LATE, tmp_path).stdout.splitlines() if " of the package " in line or "cannot" in line
    ]
    assert len(said) == 2, python(LATE, tmp_path).stdout
    for line in said:
        assert "pytorch_lightning has been imported by my_module; type `import trainwright.pytorch_light" in line, line
    assert "MyModule is of the package pytorch_lightning, whose classes are not those of lightning.pytorch" in said[1]


def other_version(folder: Path) -> None:
    metadata = folder / "pytorch_lightning-1.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pytorch-lightning\nVersion: 1.0.0\n")


def test_command_line(library: Path, tmp_path: Path) -> None:
    """Ranks train it without a line; another version of the package is refused by the command."""
    words = ("fit", "recipe=mine", f"--config-dir={library}", "accelerator=cpu", "report=false")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**environment(), "PYTHONPATH": path}
    done = run_command(*words, "strategy=zero3", "devices=2", "run_dir=both", env=env)
    assert done.returncode == 0, done.stdout
    other_version(tmp_path)
    done = run_command(*words, "run_dir=other", "devices=1", env=env)
    assert done.returncode == 2, done.stdout
    ours = lightning_alias.version("lightning")
    assert "my_module.MyModule cannot be built: MyModule is of the package pytorch_lightning" in done.stdout
    assert f"1.0.0 is installed beside lightning {ours}; type `pip install pytorch_lightning=={ours}`" in done.stdout
    assert not Path("other").exists()


def test_alias_needs_no_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "lightning":
            raise lightning_alias.PackageNotFoundError
        return "2.6.4"

    monkeypatch.setattr(lightning_alias, "version", version)
    assert lightning_alias._other_version.__wrapped__() is None
    found = lightning_alias._Alias().find_spec("pytorch_lightning.callbacks")
    assert found is not None
    assert found.origin == pl.callbacks.__file__
    assert lightning_alias._Alias().find_spec("pytorch_lightning.nothing") is None
    assert lightning_alias._Alias().find_spec("lightning.pytorch") is None


def test_targets_are_read_as_lightnings() -> None:
    assert problem_of_target("module", "pytorch_lightning.LightningModule") is None
    problem = problem_of_target("module", "pytorch_lightning.callbacks.ModelCheckpont")
    assert problem is not None
    assert "lightning.pytorch.callbacks" in problem
    paths = list(lineage("pytorch_lightning.demos.boring_classes.BoringModel"))
    assert paths[0] == "lightning.pytorch.demos.boring_classes.BoringModel"
    assert definition(paths[0])[0] is not None


def test_signature_shows_all_arguments() -> None:
    """Libraries pass those of their options that they find there."""
    names = inspect.signature(trainwright.Trainer.__init__).parameters
    assert {*inspect.signature(pl.Trainer.__init__).parameters, "global_batch_size"} <= names.keys()
    assert "kwargs" not in names


def test_a_trainer_can_be_pickled() -> None:
    """Libraries keep it, and pickle their models."""
    trainer = trainwright.Trainer(accelerator="cpu", devices=1, max_steps=2, enable_checkpointing=False, **QUIET)
    trainer.fit(BoringModel())
    assert pickle.loads(pickle.dumps(trainer)).global_step == 2

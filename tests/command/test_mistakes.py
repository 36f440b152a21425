"""Typical mistakes on the command line: one paragraph names what was given, what is allowed and what to type."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.command.project import RECIPE, command, environment
from trainwright.command.cli import main

# Typed -> parts of the answer: what was given, then what is allowed and what to type.
VERBS_AND_OPTIONS = {
    "train recipe=digits": ["train: there is no such verb", "did you mean fit?"],
    "run recipe=digits": ["run: there is no such verb", "did you mean fit?"],
    "evaluate recipe=digits": ["evaluate: there is no such verb", "did you mean validate?"],
    "max_epochs=3 recipe=digits": ["no verb", "type trainwright fit max_epochs=3 recipe=digits"],
    "fit": ["no recipe was given", "type recipe=<name>"],
    "fit digits": ["digits: this is not key=value", "type recipe=digits"],
    "fit recipe=digits --verbose": ["--verbose", "no key or group", "trainwright fit --help"],
    "fit --config my.yaml": ["--config", "did you mean --config-dir?"],
    "fit --max_epochs 3 recipe=digits": ["--max_epochs=3", "type max_epochs=3"],
    "fit --config-dir nowhere recipe=mine": ["--config-dir nowhere", "no such folder", "<group>/<choice>.yaml"],
    "report runs/digits": ["runs/digits", "does not exist", "type runs/<name>/<time>"],
    "checkpoint export runs/digits --format hf": ["runs/digits", "type another path"],
    "generate runs/digits prompt=hello": ["runs/digits", "no config.yaml", "type runs/<name>/<time>"],
}
RECIPES = {
    "fit recipe=resnet50": ["recipe=resnet50: unknown", "recipes: digits, diloco_gpt"],
    "fit recipe=digit": ["recipe=digit: unknown", "did you mean digits?"],
    "fit recipe=my_conf/recipe/mine.yaml": ["recipe=my_conf/", "type --config-dir my_conf recipe=mine;"],
    "fit recipe=conf/digits.yaml": ["recipe=conf/digits.yaml", "type recipe=digits;"],
    "fit --config-dir my_conf recipe=tab": ["tab.yaml", "line 4", "indent with spaces"],
    "fit --config-dir my_conf recipe=unclosed": ["unclosed.yaml", "line 4", "close brackets"],
    "fit --config-dir my_conf recipe=twice": ["twice.yaml", "max_steps", "each key once"],
    "fit --config-dir my_conf recipe=unpacked": ["recipe/unpacked.yaml", "'# @package _global_'"],
    "fit --config-dir my_conf recipe=switch": ["recipe/switch.yaml", "write such a key in quotes: 'on':"],
    "fit --config-dir my_conf recipe=misspelled": ["'max_step'", "did you mean max_steps?"],
    "fit --config-dir my_conf recipe=broken": ["'micro_batch_sizes' not found", "did you mean micro_batch_size?"],
    "fit --config-dir my_conf recipe=mine module._target_=my_modul.MyModule": ["no module 'my_modul'", "be installed"],
    "fit --config-dir my_conf recipe=mine module._target_=my_module.MyModul": ["did you mean my_module.MyModule?"],
    "fit --config-dir my_conf recipe=mine +callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStoping": [
        "has no 'EarlyStoping'", "did you mean lightning.pytorch.callbacks.EarlyStopping?",
    ],
    "test --config-dir my_conf recipe=mine module._target_=my_module.NoTest ckpt_path=initial": [
        "has no test_step", "define it, or type another class",
    ],
}  # fmt: skip
KEYS = {
    "max_epoch=3": ["max_epoch=3", "type max_epochs=3"],
    "+max_epoch=3": ["+max_epoch=3", "type max_epochs=3"],
    "+optimizer.lr=0.1": ["already at 'optimizer.lr'", "Either remove + prefix: 'optimizer.lr=0.1'"],
    "~scheduler": ["~scheduler: there is no key", "did you mean schedule?"],
    "größe=3": ["größe=3: there is no key or group 'größe'", "keys and groups:"],
    "trainer.gradient_clip_value=1": ["trainer has no key 'gradient_clip_value'", "did you mean gradient_clip_val?"],
    "optimizer.weight_decy=0.1": ["optimizer has no key 'weight_decy'", "keys of optimizer: betas, lr, weight_decay "],
    "optimizer=sgd optimizer.betas=[0.9,0.99]": ["has no key 'betas'", "keys of optimizer: lr, momentum"],
    "module.chanels=16": ["module has no key 'chanels'", "did you mean channels?"],
    "optimiser=adamw": ["no key or group 'optimiser'", "did you mean optimizer?"],
    "strategy=ddp devices=2 strategy.sync_every=5": ["strategy.sync_every=5", "type strategy=local_sgd or diloco"],
    "max_epochs: 3": ["max_epochs: 3: a key", "type max_epochs=3"],
    "max_epochs:3": ["max_epochs:3: a key", "type max_epochs=3"],
    "max_epochs = 3": ["max_epochs = 3: a key", "type max_epochs=3"],
    "-m optimizer.lr=0.1, 0.2": ["optimizer.lr=0.1, 0.2: a key", "type optimizer.lr=0.1,0.2"],
}
VALUES = {
    "max_epochs=three": ["'three' is not a whole number", "type for example max_epochs=2"],
    "devices=-1.5": ["'-1.5' is not a whole number or auto;", "type for example devices=2"],
    "devices=[0,1]": ["'[0,1]' is not a whole number or auto;", "type for example devices=2"],
    "devices=two": ["devices=two", "at least 1 and at most 4096 or auto"],
    "optimizer.lr=fast": ["optimizer.lr=fast", "a finite number", "type optimizer.lr=0.001"],
    "optimizer.betas=0.9,0.99": ["optimizer.betas=0.9,0.99", "a list is 'optimizer.betas=[0.9,0.99]'"],
    "module.channels=[16,32": ["module.channels=[16,32: this is not key=value", "type for example max_steps=100"],
    "micro_batch_size=0": ["micro_batch_size=0", "at least 1 or auto, or null"],
    "global_batch_size=33": ["global_batch_size=33", "global_batch_size=32 or 40"],
    "optimizer=adam": ["optimizer=adam: unknown", "did you mean adamw?"],
    "schedule=cosine schedule.warmup=-5": ["schedule.warmup=-5", "at least 0"],
    "logger=comet": ["logger=comet: unknown", "loggers: csv"],
    "precision=64": ["precision=64: unknown", "precisions: 16-mixed, 32"],
    "accelerator=gpu": ["accelerator=gpu", "type accelerator=cpu"],
    "strategy=single devices=2": ["strategy=single", "type devices=1 or strategy=ddp"],
    "strategy=tensor strategy.tensor=3 devices=4": ["tensor=3", "(1, 2, 4)"],
    "ckpt_path=nothing.ckpt": ["ckpt_path=nothing.ckpt", "no such file", "type another path, or leave"],
    "ckpt_path=damaged": ["ckpt_path=damaged", "not JSON", "use another"],
    "init_from=nothing.safetensors": ["init_from=nothing.safetensors", "type another path, or leave"],
    "run_dir=my_module.py": ["run_dir=my_module.py", "is a file; type another run_dir="],
    "run_dir=${oc.env:NOPE}/x": ["'NOPE' not found", "type export NOPE=..."],
    "recipe=gpt data.path=nothing.txt": ["data.path=nothing.txt does not exist", "Type a text file"],
}
MISTAKES = {
    **VERBS_AND_OPTIONS,
    **RECIPES,
    **{f"fit {typed}" if "recipe=" in typed else f"fit recipe=digits {typed}": KEYS[typed] for typed in KEYS},
    **{f"fit {typed}" if "recipe=" in typed else f"fit recipe=digits {typed}": VALUES[typed] for typed in VALUES},
}


@pytest.fixture
def project(conf: Path) -> Path:
    """Write recipes with mistakes, and a damaged checkpoint, beside those of the user's project; return its folder."""
    faulty = {
        "tab": "# @package _global_\nname: mine\nmodule:\n\t_target_: my_module.MyModule\n",
        "unclosed": "# @package _global_\nname: mine\ninject: [\n",
        "twice": f"{RECIPE}max_steps: 8\n",
        "unpacked": RECIPE.removeprefix("# @package _global_\n"),
        "switch": f"{RECIPE}on: 1\n",
        "misspelled": RECIPE.replace("max_steps", "max_step"),
        "broken": RECIPE.replace("${micro_batch_size}", "${micro_batch_sizes}"),
    }
    for name, text in faulty.items():
        (conf / f"recipe/{name}.yaml").write_text(text)
    with (conf.parent / "my_module.py").open("a") as file:
        file.write("\n\nclass NoTest(pl.LightningModule):\n    pass\n")
    (conf.parent / "damaged").mkdir()
    (conf.parent / "damaged/manifest.json").write_text("{")
    return conf.parent


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _check(parts: list[str], out: str, err: str) -> None:
    assert [part for part in parts if part not in err] == [], err
    assert out == ""
    assert "Traceback" not in err
    assert "\n\n" not in err.strip()
    assert err.count("trainwright: ") == 1
    assert "problems:\n" not in err, "a mistake is answered once"


def test_number_of_mistakes() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.sample(20)
@pytest.mark.parametrize(("typed", "parts"), MISTAKES.items())
def test_mistake_is_answered_in_one_paragraph(
    typed: str, parts: list[str], project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = _files(project)
    assert main(shlex.split(typed)) == 2
    _check(parts, *capfd.readouterr())
    assert _files(project) == before


@pytest.mark.parametrize("typed", [
    "train recipe=digits", "fit --config-dir my_conf recipe=tab", "report runs/digits",
    "fit recipe=digits max_epochs = 3", "fit recipe=digits devices=-1.5",
])  # fmt: skip
def test_mistake_in_a_command_of_its_own(typed: str, project: Path) -> None:
    before = _files(project)
    words = command(*shlex.split(typed))
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    _check(MISTAKES[typed], done.stdout, done.stderr)
    assert _files(project) == before

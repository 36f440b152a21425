"""Runs, checkpoints and models that the pages take for granted, made before the command that needs them.

Runs are those of the same command line, in few steps. Checkpoints of others are written by torch, Lightning and
transformers, DeepSpeed's in its form (`tests/checkpoint/foreign/deepspeed_files.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.command.project import environment
from tests.docs.blocks import ROOT
from tests.docs.project import MODEL, RUN, write_language_model
from tests.docs.smaller import as_processes, small

_STAMPED = re.compile(r"runs/(\w+)/(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)((?:/[\w.=-]+)*)")
# What a recipe needs besides its name.
_NEEDED = {"finetune": ("adapter=lora", f"module.pretrained={MODEL}", "data.path=my_texts")}
# The model of recipe mine, trained for a step by plain Lightning; its weights in the forms that others save.
_PLAIN_LIGHTNING = """
import functools
import lightning.pytorch as pl
import torch
from my_package import MyData, MyModule
module = MyModule(functools.partial(torch.optim.AdamW, lr=0.01), layers=4)
trainer = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(module, MyData())
"""


def make_before(words: Sequence[str], folder: Path) -> list[str]:
    """Make what a command needs and is not there.

    Args:
        words: program and arguments.
        folder: that it is typed in.

    Returns:
        The words, in which a run of the page's own, known by its date, is the one that was made here.
    """
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    recipe = keys.get("recipe", "")
    saved = [
        *(folder / "runs" / recipe).glob("*/checkpoints/*"),
        *(folder / keys.get("run_dir", "-")).glob("checkpoints/*"),
    ]
    if keys.get("ckpt_path") == "last" and not saved:
        _make_run(recipe, folder)
    if "list" in words and not (folder / words[-1]).exists():
        _make_run(Path(words[-1]).name, folder)
    if "--out" in words and "import-deepspeed" in words:
        (folder / words[words.index("--out") + 1]).unlink(missing_ok=True)  # who follows that page has none yet
    for name in [name for name in _MAKERS if any(_names(word, name) for word in words[1:])]:
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _MAKERS[name](name, folder)
    return [_with_runs(word, folder) for word in words]


def _names(word: str, path: str) -> bool:
    """Return whether a word is a path, a key with that value, or lines of Python that contain it."""
    return word == path or word.endswith(f"={path}") or f'"{path}"' in word


def _with_runs(word: str, folder: Path) -> str:
    for found in list(_STAMPED.finditer(word)):
        recipe, stamp, rest = found.groups()
        if (folder / found[0]).exists():
            continue
        if not any((folder / "runs" / recipe).glob("*/config.yaml")):
            _make_run(recipe, folder)
        word = word.replace(f"{recipe}/{stamp}{rest}", _own_run(recipe, stamp, rest, folder))
    return word


def _own_run(recipe: str, stamp: str, rest: str, folder: Path) -> str:
    """Return the run used for a date of the page: the first unused run that has the named files."""
    named = folder / ".dates" / f"{recipe}.json"
    known: dict[str, str] = json.loads(named.read_text()) if named.exists() else {}
    rest = re.sub(r"step=\d+$", "step=*", rest)
    if stamp not in known:
        runs = sorted(folder.glob(f"runs/{recipe}/*{rest}"))
        names = [path.relative_to(folder / "runs" / recipe).parts[0] for path in runs]
        known[stamp] = next(name for name in names if name not in known.values())
        named.parent.mkdir(exist_ok=True)
        named.write_text(json.dumps(known))
    [path, *_] = sorted(folder.glob(f"runs/{recipe}/{known[stamp]}{rest}"))
    return str(path.relative_to(folder / "runs"))


def _make_run(recipe: str, folder: Path) -> None:
    own = ["--config-dir", "my_conf"] if (folder / "my_conf" / "recipe" / f"{recipe}.yaml").exists() else []
    needed = _NEEDED.get(recipe, ())
    make_before(["trainwright", *needed], folder)
    _run(small(["trainwright", "fit", *own, f"recipe={recipe}", *needed, f"run_dir=runs/{recipe}/{RUN}"]), folder)


def _run(words: Sequence[str], folder: Path) -> None:
    [command] = as_processes(words)
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def _run_python(text: str, folder: Path) -> None:
    _run(["python", "-c", text], folder)


def _checkpoint_of_hugging_face(name: str, folder: Path) -> None:
    """Of a small model of transformers, so that it exports as `hf`."""
    _run(small(["trainwright", "fit", "recipe=hf_causal_lm", "run_dir=runs/made_before"]), folder)
    [made] = (folder / "runs" / "made_before" / "checkpoints").glob("step=*")
    (folder / name).symlink_to(made)


def _hugging_face_folder(name: str, folder: Path) -> None:
    write_language_model(folder / name, folder / "my_texts" / "one.txt")


def _lightning_file(name: str, folder: Path) -> None:
    _run_python(f"{_PLAIN_LIGHTNING}trainer.save_checkpoint({name!r})", folder)


def _folder_of_weights(name: str, folder: Path) -> None:
    """As `save_model` of Accelerate writes them."""
    (folder / name).mkdir()
    text = f"from safetensors.torch import save_file\nsave_file(module.state_dict(), '{name}/model.safetensors')"
    _run_python(f"{_PLAIN_LIGHTNING}{text}", folder)


def _folder_of_dcp(name: str, folder: Path) -> None:
    """As torchtitan saves: weights beside the optimizer."""
    text = f"""
import torch.distributed.checkpoint as dcp
dcp.save({{**module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}}, checkpoint_id={name!r})
"""
    _run_python(f"{_PLAIN_LIGHTNING}{text}", folder)


def _folder_of_deepspeed(name: str, folder: Path) -> None:
    """Of two ranks under ZeRO-2."""
    text = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.checkpoint.foreign.deepspeed_files import Trained, write_deepspeed
weights = {{name: weight.detach() for name, weight in module.named_parameters()}}
states = trainer.optimizers[0].state
moments = {{name: {{key: states[weight][key] for key in ("exp_avg", "exp_avg_sq")}}
           for name, weight in module.named_parameters()}}
write_deepspeed(Path({name!r}), Trained([weights], moments, {{}}, {{}}, {{}}), stage=2, ranks=2)
"""
    _run_python(f"{_PLAIN_LIGHTNING}{text}", folder)


_MAKERS: dict[str, Callable[[str, Path], None]] = {
    "PATH": _checkpoint_of_hugging_face,
    "SOURCE": _hugging_face_folder,
    MODEL: _hugging_face_folder,
    "weights": _folder_of_weights,
    "old.ckpt": _lightning_file,
    "checkpoints": _folder_of_deepspeed,
    "outputs/checkpoint/step-1000": _folder_of_dcp,
}

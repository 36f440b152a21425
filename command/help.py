"""Texts of `trainwright --help` and `trainwright <verb> --help`."""

import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault
from omegaconf import MISSING, OmegaConf

from trainwright.command.schema.compose import choices_of, config_loader, group_names
from trainwright.command.verify_options import VerifyOptions
from trainwright.launch.schema import RunConfig

_WIDTH = 100
_VERBS = {
    "new": "create a project with a module, data, a recipe, a test and CI: `trainwright new --help`",
    "fit": "train a module",
    "validate": "evaluate a module on its validation data",
    "test": "evaluate a module on its test data",
    "predict": "write a module's predictions to predictions.pt in the run directory",
    "generate": "continue prompts with the model of a run, on any layout: `trainwright generate --help`",
    "verify": "compare a few training steps of a layout with one process",
    "layout": "show the work and memory of each rank; no process is started",
    "import-deepspeed": "translate a DeepSpeed JSON into native configuration: `trainwright import-deepspeed --help`",
    "plan": "rank all layouts by predicted step time, with their memory; no process is started",
    "report": "show a run, or several side by side, as one HTML page: `trainwright report --help`",
    "watch": "show a running job in the terminal: `trainwright watch --help`",
    "checkpoint": "verify, inspect, list, export or import a checkpoint: `trainwright checkpoint --help`",
    "schema": "print the JSON Schema of recipes, for editors: `trainwright schema --help`",
    "doctor": "check machines, GPUs, versions, network and disks: `trainwright doctor --help`",
    "profile": "measure devices and links, for device=<name> of a plan: `trainwright profile --help`",
}
_TYPE_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
# Comments at the start of a yaml that Hydra and editors read.
_DIRECTIVE = re.compile(r"# *(@|yaml-language-server:)")
# Plain keys that are set by the recipe and by a group.
_NOT_BY_HAND = ("name", "precision")
_GROUP_ORDER = ("recipe", "size", "strategy", "precision", "accumulation", "optimizer", "trainer", "checkpoint")


def overview() -> str:
    """Return the text of `trainwright --help`."""
    verbs = "\n".join(f"  {verb:<18}{text}" for verb, text in _VERBS.items())
    return f"""trainwright: train one LightningModule on any layout of devices, chosen by configuration alone.

usage: trainwright <verb> [key=value ...] [options]

verbs:
{verbs}

examples:
  trainwright fit recipe=digits
  trainwright fit recipe=gpt strategy=zero3 devices=2 precision=bf16-mixed
  trainwright fit recipe=gpt ckpt_path=last
  trainwright fit recipe=gpt run_dir=runs/mine resume=auto
  trainwright checkpoint list runs/gpt
  trainwright report runs/gpt/2026-01-31_14-05-09

`trainwright fit --help` lists every recipe, group and key. Options: --version, --help.
"""


def help_of_verb(verb: str, config_dir: str | Path | None = None) -> str:
    """Return the text of `trainwright <verb> --help`.

    Args:
        verb: fit, validate, test, predict, verify, layout or plan.
        config_dir: folder whose groups and recipes are listed too.
    """
    loader = config_loader(config_dir)
    groups = group_names(loader)
    parts = [
        f"trainwright {verb}: {_VERBS[verb]}.",
        f"usage: trainwright {verb} recipe=<name> [key=value ...] [options]",
        _options(verb),
        "groups (type group=choice; the default has a *):",
        *(_group(loader, name) for name in in_order(groups)),
        "keys (type key=value):",
        *_keys_of(RunConfig),
        *(("keys of verify alone:", *_keys_of(VerifyOptions, "verify.")) if verb == "verify" else ()),
        "the keys of a group are set as group.key=value (strategy.shard=2, trainer.gradient_clip_val=1.0); arguments\n"
        "of the recipe's classes as module.key=value and data.key=value. --print-config shows them all.",
        _examples(verb),
    ]
    return "\n\n".join(parts) + "\n"


def in_order(groups: Sequence[str]) -> list[str]:
    """Sort groups for listing: those that most runs set come first."""
    return [*(name for name in _GROUP_ORDER if name in groups), *(name for name in groups if name not in _GROUP_ORDER)]


def field_comments(schema: type) -> dict[str, str]:
    """Return the comment above each field of a configuration dataclass by field name, inherited fields included."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        comment: list[str] = []
        for line in inspect.getsource(cls).splitlines():
            stripped = line.strip()
            if stripped.startswith(("def ", "@property", "@classmethod")):
                break  # methods follow
            match = re.match(r"(\w+): ", stripped)
            if stripped.startswith("#"):
                comment.append(stripped.lstrip("# "))
            elif match and comment:
                found[match[1]] = " ".join(comment)
            if not stripped.startswith("#"):
                comment = []
    return found


def description_of(loader: ConfigLoaderImpl, group: str, choice: str) -> str:
    """Return the comment at the start of a choice's yaml; empty without one."""
    for source in loader.get_sources():
        if not source.is_config(f"{group}/{choice}"):
            continue
        if source.scheme() == "structured":  # a strategy of another package, without a yaml
            schema = OmegaConf.get_type(ConfigStore.instance().load(f"{group}/{choice}.yaml").node)
            return (schema.__doc__ or "").partition("\n")[0]
        lines = (line for line in _read(source, f"{group}/{choice}.yaml") if not _DIRECTIVE.match(line))
        head = itertools.takewhile(lambda line: line.startswith("#"), lines)
        comment = " ".join(line.lstrip("# ").strip() for line in head)
        if comment:
            return comment
    return ""


def _read(source: Any, name: str) -> Iterator[str]:
    if source.scheme() == "file":
        yield from (Path(source.path) / name).read_text(encoding="utf-8").splitlines()
    elif source.scheme() == "pkg":
        from importlib.resources import files

        yield from files(source.path.split("://")[-1]).joinpath(name).read_text(encoding="utf-8").splitlines()


_OPTIONS = {
    "verify": (
        "--json              print the report as one JSON document on standard output",
        "--report FILE       also write the report as one HTML page",
        "-m, --multirun      compare every combination of the given values: strategy=ddp,zero3",
    ),
    "layout": (),
    "plan": (
        "--json              print the plan as one JSON document on standard output",
        "--html FILE         also write the plan as one HTML page with charts",
    ),
}
_OF_RUNS = ("-m, --multirun      run every combination of the given values, one after the other: strategy=ddp,zero3",)
_OF_ALL = (
    "--config-dir DIR    also search DIR for <group>/<choice>.yaml: your own recipes and groups",
    "--print-config      print the resolved configuration and exit",
    "--help, --version",
)


def _options(verb: str) -> str:
    return "\n  ".join(("options:", *_OPTIONS.get(verb, _OF_RUNS), *_OF_ALL))


def _group(loader: ConfigLoaderImpl, name: str) -> str:
    choices = choices_of(loader, name)
    default = default_choice(loader, name)
    width = max((len(choice) for choice in choices), default=0) + 3
    lines = [f"  {name}"]
    for choice in choices:
        mark = "*" if choice == default else " "
        text = textwrap.wrap(description_of(loader, name, choice), _WIDTH - width - 4) or [""]
        lines.append(f"  {mark} {choice:<{width}}{text[0]}".rstrip())
        lines += [" " * (width + 4) + more for more in text[1:]]
    return "\n".join(lines)


def default_choice(loader: ConfigLoaderImpl, group: str) -> str | None:
    """Return the default choice of a group; None without one."""
    primary = loader.repository.load_config("config")
    assert primary is not None
    items = primary.defaults_list or []
    return next((str(item.value) for item in items if isinstance(item, GroupDefault) and item.group == group), None)


def _keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    comments = field_comments(schema)
    hints = get_type_hints(schema)
    lines = []
    for item in fields(schema):
        options = get_args(hints[item.name]) or (hints[item.name],)
        if item.name in _NOT_BY_HAND or not all(option in _TYPE_NAMES for option in options):
            continue
        kind = " or ".join(_TYPE_NAMES[option] for option in options)
        lines.append(f"  {prefix}{item.name} ({kind}{_default(item)})")
        lines += textwrap.wrap(comments[item.name], _WIDTH, initial_indent="      ", subsequent_indent="      ")
    yield "\n".join(lines)


def _default(item: "Field[Any]") -> str:
    if item.default is NO_DEFAULT or item.default == MISSING:
        return ""
    return f", default {'null' if item.default is None else item.default}"


_EXAMPLES = {
    "fit": (
        "fit recipe=digits",
        "fit recipe=gpt strategy=ddp devices=2 max_steps=200",
        "fit recipe=gpt strategy=zero3 devices=2 precision=bf16-mixed global_batch_size=64",
        "fit recipe=gpt ckpt_path=last max_steps=2000",
        "fit -m recipe=digits strategy=ddp,zero3 devices=2",
        "fit --config-dir my_conf recipe=mine",
    ),
    "verify": (
        "verify recipe=gpt strategy=zero3 devices=4",
        "verify recipe=digits strategy=ddp devices=2 verify.steps=8 --json",
        "verify --config-dir my_conf recipe=mine -m strategy=ddp,zero3,pipeline devices=2 --report layouts.html",
    ),
    "layout": (
        "layout recipe=gpt strategy=zero3 devices=4",
        "layout recipe=gpt devices=8 strategy=hybrid strategy.pipeline=2 strategy.tensor=2",
        "layout --config-dir my_conf recipe=mine strategy=tensor devices=2",
    ),
    "plan": (
        "plan recipe=llama_3d size=70b precision=bf16-mixed devices=1024 device=h100",
        "plan recipe=gpt devices=4",
        "plan recipe=gpt size=7b devices=64 device=a100_80 --html plan.html",
    ),
}
_OF_EVALUATION = (
    "recipe=digits ckpt_path=last",
    "recipe=digits ckpt_path=runs/digits/2026-01-31_14-05-09/checkpoints/step=500",
    "recipe=gpt strategy=ddp devices=2 ckpt_path=last",
    "--config-dir my_conf recipe=mine ckpt_path=last",
)


def _examples(verb: str) -> str:
    words = _EXAMPLES.get(verb, tuple(f"{verb} {each}" for each in _OF_EVALUATION))
    lines = [f"trainwright {each}" for each in words]
    if verb == "fit":
        lines.append("torchrun --nproc-per-node=2 -m trainwright fit recipe=gpt strategy=ddp devices=2")
    return "\n  ".join(("examples:", *lines))

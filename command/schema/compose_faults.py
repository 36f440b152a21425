"""Composition errors as sentences: the given value, what is allowed, what to type; also for what was removed."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from trainwright.core.config.synonyms import Vocabulary, names_for
from trainwright.core.failures.error_text import first_line
from trainwright.core.problems import did_you_mean
from trainwright.launch.schema import RunConfig
from trainwright.strategies.averaging.compression import options as compression_options
from trainwright.strategies.contract.registry import all_options

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null (off)"}
_EXAMPLES = {int: "2", float: "0.5", bool: "true", str: "auto", list: "[]"}
_YAML = "; correct that line: indent with spaces, close brackets and quotes, and write each key once"
_BOOLEAN_KEY = "YAML reads the keys on, off, yes and no as true and false; write such a key in quotes: 'on':"


@dataclass
class ComposeFault:
    """A faulty override, rendered once the rest is composed and the valid names are known.

    Args:
        text: the override, or the file.
        key: of the override.
        kind: ``"unknown key"``, ``"absent group"``, ``"wrong value"``, ``"file"`` or ``"other"``.
        detail: Hydra's message.
    """

    text: str
    key: str
    kind: str
    detail: str = ""


def fault_of(error: Exception, overrides: Sequence[str]) -> tuple[ComposeFault, str | None]:
    """Return the fault that Hydra reports, and the override that causes it (None if it is in a file)."""
    message = str(error)
    unknown = re.search(r"Could not override '([^']+)'", message)
    wrong = re.search(r"Error merging override (.+)", message)
    in_file = re.search(r"In '([^']+)': \w+ raised while composing config:\s*(.*)", message, re.DOTALL)
    if unknown:
        culprit = next((text for text in overrides if key_of(text) == unknown[1]), None)
        kind = "absent group" if "No match in the defaults list" in message else "unknown key"
        return ComposeFault(culprit or unknown[1], unknown[1], kind), culprit
    if wrong:
        culprit = next((text for text in overrides if text == wrong[1].strip()), None)
        key = key_of(culprit or wrong[1])
        return ComposeFault(culprit or wrong[1], key, "wrong value", first_line(error.__cause__ or error)), culprit
    if in_file:
        return ComposeFault(in_file[1], in_file[1], "file", in_file[2]), None
    return ComposeFault("", "", "other", message + _YAML * isinstance(error, YAMLError)), None


def render_fault(fault: ComposeFault, cfg: DictConfig | None, words: Vocabulary) -> str:
    """Return a fault as a sentence.

    Args:
        fault: to render.
        cfg: composed without the override, for the valid names; None = nothing was composed.
        words: all that can be typed.
    """
    match fault.kind:
        case "unknown key":
            return _render_unknown_key(fault, cfg, words)
        case "absent group":
            used = f"the recipe {cfg.get('name', '?')!r}" if cfg is not None else "the recipe"
            return f"{fault.text}: {used} has no group {fault.key!r}; leave it out, or choose a recipe that has it"
        case "wrong value":
            given = fault.text.split("=", 1)[1]
            if _schema_at(fault.key) is None:  # a key of a group, whose type depends on the choice
                return f"{fault.text}: {fault.detail}"
            return f"{fault.text}: {given!r} is not {_expected(fault.key)}; type for example {_example(fault.key)}"
        case "file":
            return _render_file_fault(fault)
    missing = re.search(r"Could not find '([^']+)/([^'/]+)'", fault.detail)
    choice = f"{missing[1]}={missing[2]}" if missing else ""
    if choice in REMOVED_CHOICES:
        return f"{choice} {REMOVED_CHOICES[choice]}"
    return f"the configuration cannot be composed: {_without_search_path(fault.detail)}"


def _render_unknown_key(fault: ComposeFault, cfg: DictConfig | None, words: Vocabulary) -> str:
    if fault.key in REMOVED_KEYS:
        return f"{fault.text} {REMOVED_KEYS[fault.key]}"
    parent, _, last = fault.key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if cfg is not None and parent else None
    names = [str(name) for name in node if not str(name).startswith("_")] if isinstance(node, DictConfig) else []
    beside = [f"{parent}.{name}" for name in names_for(last, names)]
    options = dict(all_options()) if parent == "strategy" and not beside else {}
    having = {name: found[0] for name, each in options.items() if (found := names_for(last, each.__dataclass_fields__))}
    value = fault.text.partition("=")[2]
    if having:
        typed = f"strategy={' or '.join(having)} with strategy.{next(iter(having.values()))}={value}"
        return f"{fault.text}: the chosen strategy has no key {last!r}; type {typed}"
    if meaning := words._replace(names=beside or words.names).meaning(fault.key, value):
        return f"{fault.text}: {meaning}"
    if not isinstance(node, DictConfig):
        hint = did_you_mean(re.split("[./]", fault.key)[0], words.names, "keys and groups")
        text = f"{fault.text}: there is no key or group {fault.key!r}; {hint}"
        return f"{text} (arguments of your own classes go under module. and data.)"
    hint = did_you_mean(last, names, f"keys of {parent}", "`--print-config`")
    text = f"{fault.text}: {parent} has no key {last!r}; {hint}"
    if OmegaConf.get_type(node) is dict:
        text += f" (to add it: +{fault.text.lstrip('+')})"
    return text


def _render_file_fault(fault: ComposeFault) -> str:
    if re.search(r"Key '?(True|False)\b", fault.detail):
        return f"in {fault.text}.yaml: {_BOOLEAN_KEY}"
    unknown = re.search(r"Key '([^']+)' (?:not in '(\w+)'|is not in struct)", fault.detail)
    if not unknown:
        return f"in {fault.text}.yaml: {_without_search_path(fault.detail)}"
    full_key = re.search(r"full_key: (\S+)", fault.detail)
    if full_key and full_key[1] in REMOVED_KEYS:
        return f"in {fault.text}.yaml: {full_key[1]} {REMOVED_KEYS[full_key[1]]}"
    if unknown[1] == fault.text.partition("/")[0]:  # Hydra puts the keys of the file below its group
        return f"in {fault.text}.yaml: its keys lie under {unknown[1]}; begin the file with '# @package _global_'"
    parent = full_key[1].rpartition(".")[0] if full_key else ""
    schema = _schema_at(parent)
    names = [item.name for item in fields(schema)] if is_dataclass(schema) else []
    where = f"keys of {parent}" if parent else "keys"
    return f"in {fault.text}.yaml: there is no key {unknown[1]!r}; {did_you_mean(unknown[1], names, where)}"


def extra_keys(node: DictConfig, words: Callable[[], Vocabulary], path: str = "") -> Iterator[str]:
    """Yield keys that `+` added to a typed part, where nothing reads them; `words` returns all that can be typed."""
    schema = OmegaConf.get_type(node)
    allowed = [item.name for item in fields(schema)] if is_dataclass(schema) else None
    for key in list(node):
        full = f"{path}.{key}" if path else str(key)
        if isinstance(key, bool):
            yield f"{full}: {_BOOLEAN_KEY}"
            continue
        if allowed is not None and key not in allowed:
            where = f"keys of {path}" if path else "keys"
            names = [name for name in allowed if name != "_target_"]
            hint = words().meaning(full, node[key]) or did_you_mean(str(key), names, where, "`--print-config`")
            yield f"+{full}: there is no key {str(key)!r}; {hint}"
            continue
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        child = node[key]
        if isinstance(child, DictConfig):
            yield from extra_keys(child, words, full)


def _schema_at(path: str) -> Any:
    """Return the declared type at a dotted path of RunConfig; None in free-form parts."""
    schema: Any = RunConfig
    for part in filter(None, path.split(".")):
        if not is_dataclass(schema):
            return None
        schema = get_type_hints(schema).get(part)
    return schema


def _expected(path: str) -> str:
    """Return the types of a key in words: "a whole number or null (off)"."""
    declared = _schema_at(path)
    options = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    rule = next((dict(item.metadata) for item in fields(RunConfig) if item.name == path), dict[str, Any]())
    words = {**_WORDS, str: " or ".join(rule.get("words", ())) or _WORDS[str]}
    return " or ".join(words.get(option, f"a {getattr(option, '__name__', option)}") for option in options)


def _example(path: str) -> str:
    declared = _schema_at(path)
    if get_origin(declared) is dict:
        return f"{path}.name=value"
    options = get_args(declared) if get_origin(declared) in (Union, UnionType) else (get_origin(declared) or declared,)
    return f"{path}={next((_EXAMPLES[option] for option in options if option in _EXAMPLES), 'null')}"


def key_of(override: str) -> str:
    """Return the key, or the group, of an override."""
    return override.lstrip("+~").split("=", 1)[0]


def choice_in_file(name: str, group: str, choices: Sequence[str]) -> str | None:
    """Return what to type for a choice given as its file; None if `name` is no file."""
    file = Path(name)
    place = "" if file.stem in choices else f"--config-dir {file.parents[1] if file.parent.name == group else 'DIR'} "
    typed = f"a choice is typed without folder and ending; type {place}{group}={file.stem}"
    return typed if file.suffix in (".yaml", ".yml") else None


def _without_search_path(message: str) -> str:
    return " ".join(message.split("Config search path:")[0].split())


_OF_THE_RUNTIME = (
    "was removed: it is a setting of a TrainJob's training runtime; leave it out, and set it in the runtime that "
    "launch.runtime=... names"
)

REMOVED_CHOICES = {
    "launch=multinode": (
        "was removed; start torchrun on each host, with the same TRAINWRIGHT_RUN_TOKEN exported on all: torchrun "
        "--nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=<first host>:29400 -m trainwright fit ... "
        "nodes=2 devices=8, or type launch=slurm, launch=ray or launch=kubernetes (docs/launching.md)"
    ),
    **{f"compression={name}": text for name, text in compression_options.REMOVED.items()},
}
"""Override -> the rest of the sentence."""

REMOVED_KEYS = {
    "launch.job": (
        "was removed: every job is a TrainJob of Kubeflow Trainer; leave it out, and install Kubeflow Trainer 2.2 or "
        "later in clusters that have the Training Operator (pytorchjob) or JobSet alone"
    ),
    "launch.min_nodes": (
        "was removed: a TrainJob has no elastic policy; leave it out, and let the training runtime restart pods that "
        "fail"
    ),
    "launch.rdzv_port": "was removed: Kubeflow Trainer chooses the port of the rendezvous; leave it out",
    "launch.backoff_limit": _OF_THE_RUNTIME,
    "launch.image_pull_policy": _OF_THE_RUNTIME,
    "launch.restart_policy": _OF_THE_RUNTIME,
    "launch.ttl_seconds": _OF_THE_RUNTIME,
}
"""Key -> the rest of the sentence."""

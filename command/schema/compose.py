"""Composition of a recipe and overrides into one typed configuration.

Hydra composes; this module calls it in one place (`compose`), turns its errors into sentences with the given value,
what is allowed and what to type, and refuses what Hydra would accept: keys added with `+` to a typed part, typed keys
deleted with `~`, and a user's file that one of the package would shadow.
"""

import logging
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from trainwright.callbacks.inject.sentences import split_inject
from trainwright.callbacks.monitor.trace.profile_option import expand_profile
from trainwright.command.schema.compose_faults import (
    REMOVED_CHOICES,
    ComposeFault,
    choice_in_file,
    extra_keys,
    fault_of,
    key_of,
    render_fault,
)
from trainwright.command.schema.expansion import Expansion, ImportReport, asks_for_file
from trainwright.command.schema.moved_keys import move_keys
from trainwright.command.schema.quoting import as_text, quote_values
from trainwright.command.schema.sources import Repository
from trainwright.core.config.synonyms import Vocabulary
from trainwright.core.failures.error_text import first_line
from trainwright.core.failures.refusal import refused_as
from trainwright.core.problems import ConfigError, did_you_mean, nearest
from trainwright.core.tools import tool
from trainwright.launch.auto_options import AUTO_TARGET
from trainwright.launch.schema import RunConfig, register_schema

_log = logging.getLogger(__name__)

_CONF = "pkg://trainwright.conf"
_PLAIN_KEYS = tuple(item.name for item in fields(RunConfig))
# Groups without a default value for their key.
_NEEDED = tuple(item.name for item in fields(RunConfig) if item.default == MISSING and item.name != "name")
# Groups whose choice has an effect only where the recipe refers to it.
_REFERRED = {
    "optimizer": "`optimizer: ${optimizer}` under module",
    "micro_batch_size": "`batch_size: ${micro_batch_size}` under data",
}
# Plain keys that strategy=auto keeps if they were typed.
_NOT_CHOSEN = ("micro_batch_size",)
# Groups whose choices have names in other libraries, which are also typed as keys (fp16=true).
_ANSWERED = ("strategy", "precision", "recipe", "launch", "checkpoint", "monitor")
# Typed keys that are mappings with the user's names.
_OPEN_MAPPINGS = re.compile(
    r"(strategy\.(plan|batch_dims)|preemption\.url_headers|launch\.(env|sbatch|resources|ranks|runtime_env|volumes"
    r"|secret_env|labels|annotations|node_selector))[.=]"
)
# Keys that other checks depend on; with a guess for one of them, other problems would be misleading.
_DECISIVE = {
    "recipe", "module", "data", "strategy", "devices", "nodes", "global_batch_size", "micro_batch_size", "accumulation",
}  # fmt: skip


@dataclass
class Composition:
    """The result of composing.

    Attributes:
        cfg: the configuration; None if it could not be composed at all.
        problems: one text each; empty if there are none.
        import_report: status of each key of the DeepSpeed JSON of `strategy=deepspeed_json`; None without one.
        guessed: whether `cfg` has plausible corrections in place of faulty overrides, so that further checks of it make
            sense.
    """

    cfg: DictConfig | None = None
    problems: list[str] = field(default_factory=list)
    guessed: bool = True
    import_report: ImportReport | None = None


def compose(
    recipe: str | None = None, overrides: Sequence[str] = (), config_dir: str | Path | None = None
) -> DictConfig:
    """Compose the configuration of one run.

    Args:
        recipe: name of the recipe; None = `overrides` has `recipe=...`.
        overrides: Hydra overrides, as on the command line: `["strategy=ddp", "devices=2"]`.
        config_dir: folder with your own groups and recipes; None = only those of the package.

    Returns:
        A DictConfig typed by `trainwright.launch.schema.RunConfig`, interpolations not yet resolved.

    Raises:
        ConfigError: naming every unknown group, choice and key and every value of the wrong type.
    """
    given = [*([f"recipe={recipe}"] if recipe is not None else []), *overrides]
    result = compose_checked(given, config_dir)
    if result.problems or result.cfg is None:
        raise ConfigError(result.problems)
    if result.import_report is not None:
        _log.warning("%s", result.import_report.summary())
    return result.cfg


def compose_checked(overrides: Sequence[str], config_dir: str | Path | None = None) -> Composition:
    """Compose as `compose` does, but return the problems instead of raising them.

    Raises:
        ConfigError: if the faulty override cannot be determined, or `config_dir` cannot be searched.
    """
    recipe = next((text for text in overrides if key_of(text) == "recipe"), "these overrides")
    with refused_as(f"the configuration of {recipe} cannot be composed"):
        return _composed(overrides, config_dir)


def _composed(overrides: Sequence[str], config_dir: str | Path | None) -> Composition:
    faults = split_inject(overrides)
    loader = config_loader(config_dir)
    expansion: Expansion[ImportReport] | None = None
    typed = _sizes_of_models(loader, quote_values(faults.rest))
    if asks_for_file(typed):
        expansion = tool("expand")(typed, lambda without: _Composer(loader).compose(without).cfg)
        typed = expansion.overrides
    result = _Composer(loader).compose(typed)
    if expansion is not None:
        _add_expansion(result, expansion)
    result.problems += faults.problems
    if result.cfg is not None:
        faults.apply_to(result.cfg)
        result.problems += expand_profile(result.cfg)
        move_keys(result.cfg)
    return result


def _add_expansion(result: Composition, expansion: Expansion[ImportReport]) -> None:
    result.problems[:0] = expansion.problems
    result.import_report = expansion.report
    if expansion.problems:
        result.guessed = False  # the file determines the rest
    if result.cfg is not None and expansion.report is not None:
        result.cfg.deepspeed_json = expansion.report.file


def _sizes_of_models(loader: ConfigLoaderImpl, overrides: Sequence[str]) -> list[str]:
    """Replace `model=70b` by `size=70b`: users name a model by its size."""
    models, sizes = choices_of(loader, "model"), choices_of(loader, "size")

    def meant(text: str) -> str:
        group, _, name = text.partition("=")
        return f"size={name}" if group == "model" and name in sizes and name not in models else text

    return [meant(text) for text in overrides]


def config_loader(config_dir: str | Path | None = None) -> ConfigLoaderImpl:
    """Return a Hydra loader that searches the package, then `config_dir`.

    It is built directly, because Hydra's entry points share one global instance with programs that use Hydra
    themselves.

    Raises:
        ConfigError: if `config_dir` is no folder, or has files with the names of the package's.
    """
    if problems := _problems_of_config_dir(config_dir):
        raise ConfigError(problems)
    register_schema()
    Plugins.instance()  # registers the kinds of config sources
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("trainwright", _CONF)
    if config_dir is not None:
        path.append("--config-dir", f"file://{Path(config_dir).expanduser().resolve()}")
    path.append("schema", "structured://")
    loader = ConfigLoaderImpl(path)
    loader.repository = Repository(path)
    return loader


def group_names(loader: ConfigLoaderImpl) -> list[str]:
    """Return all groups, nested ones as `group/subgroup`."""
    found: list[str] = []

    def walk(parent: str) -> None:
        # The loader's own methods for this copy the whole repository each time.
        for name in loader.repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            if group != "hydra":
                found.append(group)
                walk(group)

    walk("")
    return sorted(set(found))


def choices_of(loader: ConfigLoaderImpl, group: str) -> list[str]:
    """Return the choices of a group; names with a leading underscore are base types, not choices."""
    names = loader.repository.get_group_options(group, ObjectType.CONFIG)
    return [name for name in names if not name.startswith("_")]


class _Composer:
    """Composition that finds all problems by omitting one faulty override after the other."""

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        self.loader = loader
        self.groups = group_names(loader)
        self.parser = OverridesParser.create(config_loader=loader)
        self.result = Composition()
        self.faults: list[ComposeFault] = []

    def compose(self, overrides: Sequence[str]) -> Composition:
        good = self._examine(overrides)
        if not any(re.match(r"\+{0,2}recipe=.", text) for text in (*overrides, *good)):
            recipes = ", ".join(choices_of(self.loader, "recipe"))
            self._add(f"no recipe was given; type recipe=<name>, recipes: {recipes}")
            self.result.guessed = False
            self._render_faults()
            return self.result
        self._load_without_faults(good)
        self._render_faults()
        if self.result.cfg is not None:
            _remember_typed(self.result.cfg, overrides)
            self.result.problems += list(extra_keys(self.result.cfg, self._words))
            self.result.problems += _choices_without_effect(overrides, self.result.cfg)
        return self.result

    def _add(self, problem: str) -> None:
        self.result.problems.append(problem)

    def _examine(self, overrides: Sequence[str]) -> list[str]:
        """Check names before composing; return the overrides to compose, with guesses in place of misspelt ones."""
        good: list[str] = []
        removed = [f"{key_of(text)}." for text in overrides if text in REMOVED_CHOICES]
        for text in overrides:
            if key_of(text).startswith(tuple(removed)):
                continue  # an option of a choice that is refused as a whole
            kept = self._examine_one(text)
            if kept is not None:
                good.append(kept)
        return good

    def _examine_one(self, text: str) -> str | None:
        if text.startswith("--"):
            return self._examine_dashed(text)
        try:
            override = self.parser.parse_override(text)
        except HydraException as error:
            return self._examine_unparsable(text, first_line(error))
        if override.is_sweep_override():
            several = "several values need several runs; add -m (--multirun), or type one; a list is"
            self._add(f"{text}: {several} {shlex.quote(text.replace('=', '=[', 1) + ']')}{as_text(text)}")
            self.result.guessed = False
            return None
        key = override.get_key_element().lstrip("+~").split("@")[0]
        head = re.split(r"[./]", key)[0]
        if head == "hydra":
            known = self._words().meaning(key, text.partition("=")[2]) or "set the run directory by run_dir=..."
            self._add(f"{text}: settings of Hydra have no effect; {known}")
            return None
        if override.type == OverrideType.DEL:
            return self._examine_deletion(key, text)
        if key in self.groups and not (key in _PLAIN_KEYS and isinstance(override.value(), dict)):
            return self._examine_choice(override, key, text)
        if head not in _PLAIN_KEYS and head not in self.groups:
            return self._unknown(text, key, head)
        # Hydra adds keys to a mapping only with a plus; in these mappings the user names every key.
        return f"++{text}" if _OPEN_MAPPINGS.match(text) else text

    def _examine_unparsable(self, text: str, why: str) -> str | None:
        """Refuse what is not key=value; return what it probably means."""
        key, equals, _ = text.partition("=")
        if equals and not key.isascii():
            return self._unknown(text, key, key)
        found = [f"{each}={text}" for each in self.groups if text in choices_of(self.loader, each)]
        meant = " or ".join(found) or f"for example max_steps=100{as_text(text)}"
        self._add(f"{text}: this is not key=value{f' ({why})' if equals else ''}; type {meant}")
        self.result.guessed &= bool(found)
        return found[0] if found else None

    def _examine_dashed(self, text: str) -> str | None:
        """Refuse a key typed like an option; return the override to compose."""
        before, typed = len(self.result.problems) + len(self.faults), text.lstrip("-")
        kept = self._examine_one(typed)
        for fault in self.faults:
            fault.text = text if fault.text == typed else fault.text
        if before == len(self.result.problems) + len(self.faults):
            self._add(f"{text}: keys are typed without dashes; type {typed}")
        return kept

    def _give_up_on(self, head: str) -> None:
        """Omit an override; if much depends on it, skip the other checks."""
        if head in _DECISIVE:
            self.result.guessed = False

    def _examine_deletion(self, key: str, text: str) -> str | None:
        free = {"module", "data", "callbacks", "checkpoint", "monitor", "guard", "logger", "optimizer"}
        if key in _NEEDED:
            self._add(
                f"{text}: every run needs a choice of {key}; {_plural(key)}: {', '.join(choices_of(self.loader, key))}"
            )
            self._give_up_on(key)
            return None
        if key.split(".")[0] in free or key in self.groups:
            return text
        if key.split(".")[0] not in _PLAIN_KEYS:
            self.faults.append(ComposeFault(text, key, "unknown key"))
        else:
            self._add(f"{text}: {key} is a key of every run and cannot be removed; type {key}=null to turn it off")
        return None

    def _examine_choice(self, override: Override, group: str, text: str) -> str | None:
        value = override.value()
        choices = choices_of(self.loader, group)
        if value is None:
            there = f"{_plural(group)}: {', '.join(choices)}"
            self._add(f"{text}: a group needs a choice, or is left out with ~{group}; {there}")
            self._give_up_on(group)
            return None
        values = value if isinstance(value, list) else [value]
        names = [str(name) for name in values]
        unknown = [name for name in names if name not in choices]
        if not unknown:
            # Hydra takes only strings as a choice, and its parser reads `precision=32` as a number.
            is_number = not isinstance(value, (str, list))
            return f"{text.split('=', 1)[0]}={_quoted(names[0])}" if is_number else text
        removed = REMOVED_CHOICES.get(f"{group}={unknown[0]}")
        if removed is not None:
            self._add(f"{group}={unknown[0]} {removed}")
            self.result.guessed = False
            return None
        for name in unknown:
            meant = choice_in_file(name, group, choices) or Vocabulary((), {group: choices}, str).meaning(name)
            listed = f"{meant}; {_plural(group)}: {', '.join(choices)}" if meant else None
            allowed = listed or self._choice_of_another(name, group) or did_you_mean(name, choices, _plural(group))
            self._add(f"{group}={name}: unknown choice; {allowed}")
        guess = nearest(unknown[0], choices)
        if guess is None or len(values) > 1:
            self._give_up_on(group)
            return f"{group}={_quoted(choices[0])}" if group == "recipe" and choices else None
        return f"{group}={_quoted(guess)}"

    def _choice_of_another(self, name: str, group: str) -> str:
        """Return what to type if `name` is a choice of another group, like model=70b for size=70b; else ""."""
        found = [other for other in self.groups if other != group and name in choices_of(self.loader, other)]
        if not found:
            return ""
        own = f"{_plural(group)}: {', '.join(choices_of(self.loader, group))}"
        return (
            f"{name} is a choice of {' and of '.join(found)}, type {' or '.join(f'{o}={name}' for o in found)}; {own}"
        )

    def _unknown(self, text: str, key: str, head: str) -> str | None:
        self.faults.append(ComposeFault(text, key, "unknown key"))  # rendered once the keys of the recipe are known
        guess = nearest(head, sorted({*_PLAIN_KEYS, *self.groups}))
        if guess is None:
            return None
        repaired = guess + key[len(head) :] + "=" + text.split("=", 1)[1]
        problems_before = len(self.result.problems)
        kept = self._examine_one(repaired)
        del self.result.problems[problems_before:]  # problems of a guess do not concern the user
        return kept

    def _words(self) -> Vocabulary:
        """Return what can be typed, with the keys of the recipe if it was composed."""
        cfg = self.result.cfg
        names = dict.fromkeys([*_PLAIN_KEYS, *self.groups, *(_paths_of(cfg) if cfg is not None else ())])
        return Vocabulary(names, {group: choices_of(self.loader, group) for group in _ANSWERED}, str)

    def _render_faults(self) -> None:
        self.result.problems += [render_fault(each, self.result.cfg, self._words()) for each in self.faults]

    def _load_without_faults(self, overrides: list[str]) -> None:
        remaining = list(overrides)
        while True:
            try:
                cfg = self.loader.load_configuration("config", remaining, RunMode.RUN, from_shell=False)
                break
            except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
                fault, culprit = fault_of(error, remaining)
                self.faults.append(fault)
                if culprit is None:
                    self.result.guessed = False
                    return
                remaining.remove(culprit)
                self._give_up_on(re.split(r"[.@/]", key_of(culprit))[0])
        with open_dict(cfg):
            cfg.pop("hydra", None)
        self.result.cfg = cfg


def _paths_of(cfg: DictConfig) -> Iterator[str]:
    """Yield the dotted keys of values, without those that refer to others and those that nothing reads."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    unread = _unread_keys(cfg)
    values = [(str(key), value) for key, value in plain.items() if key not in unread]
    for path, value in values:  # grows
        if isinstance(value, dict):
            values += [(f"{path}.{key}", each) for key, each in value.items()]
        elif "${" not in str(value) and not path.endswith("._target_"):
            yield path


def _unread_keys(cfg: DictConfig) -> list[str]:
    """Return the keys among `_REFERRED` to which the recipe does not refer."""
    parts = {key: cfg.get(key) for key in ("module", "data", "callbacks") if key in cfg}
    readers = str(OmegaConf.to_container(OmegaConf.create(parts), resolve=False))
    return [name for name in _REFERRED if f"${{{name}" not in readers]


def _choices_without_effect(overrides: Sequence[str], cfg: DictConfig) -> list[str]:
    """Return overrides that the recipe never reads, and that would be ignored silently."""
    typed = [text for text in overrides if key_of(text).startswith("schedule.")] if cfg.schedule.shape == "none" else []
    problems = [
        f"{text}: has no effect with schedule=none, which leaves the learning rate to the module; type "
        "schedule=constant, linear, cosine or wsd, or leave it out"
        for text in typed
    ]
    for name in _unread_keys(cfg):
        given = next((text for text in overrides if re.split(r"[.=]", text.lstrip("+~"))[0] == name), None)
        if given is not None:
            problems.append(
                f"{given}: has no effect, the recipe {cfg.get('name', '?')!r} does not use {name}; leave it out, or "
                f"write {_REFERRED[name]} in the recipe"
            )
    return problems


def _remember_typed(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Record typed keys in `strategy.keep`; the planner may change the others, which are defaults of the recipe."""
    if isinstance(cfg.strategy, DictConfig) and cfg.strategy.get("_target_") == AUTO_TARGET:
        typed = [key for key in _NOT_CHOSEN if any(key_of(text) == key for text in overrides)]
        cfg.strategy.keep = sorted({*cfg.strategy.keep, *typed})


def _problems_of_config_dir(config_dir: str | Path | None) -> list[str]:
    if config_dir is None:
        return []
    folder = Path(config_dir).expanduser()
    if not folder.is_dir():
        return [f"--config-dir {config_dir}: there is no such folder; it needs your files as <group>/<choice>.yaml"]
    import trainwright.conf

    ours = Path(next(iter(trainwright.conf.__path__)))
    # Each of ours is looked for, since a walk through the user's folder would not enter links. Files beside the groups,
    # such as another program's config.yaml, are no choices.
    names = sorted(path.relative_to(ours) for path in ours.glob("*/*.yaml"))
    taken = [name for name in names if (folder / name).is_file()]
    if folder.resolve() == ours.resolve() or not taken:
        return []
    return [
        f"--config-dir {config_dir}: {', '.join(map(str, taken))}: a file of trainwright has the same name, and only "
        f"one of the two can be chosen; rename yours{_how_to_link(folder, {name.parts[0] for name in taken})}"
    ]


def _how_to_link(folder: Path, without: set[str]) -> str:
    """Return what to type for a configuration directory that has the other groups of `folder` alone; "" if none."""
    others = {path.parent.name for path in folder.glob("*/*.yaml")} - {*without, "hydra"}
    if not others:
        return ""
    own = folder / "trainwright"
    links = " ".join(f"../{name}" for name in sorted(others))
    return f", or use a folder without these groups: mkdir {own} && ln -s {links} {own}/, then --config-dir {own}"


def _quoted(name: str) -> str:
    return "'" + name.replace("'", r"\'") + "'"


def _plural(group: str) -> str:
    last = group.rsplit("/", 1)[-1]
    return {"strategy": "strategies", "accumulation": "choices", "launch": "choices", "precision": "precisions"}.get(
        last, f"{last}s"
    )

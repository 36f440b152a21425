"""Parsing of `+inject='kill(rank=1, at_step=7)'`, without executing what is typed.

A sentence is a call of a function of :mod:`trainwright.callbacks.inject` in Python syntax, with literal arguments;
several are given as a list. Hydra's grammar has no such calls, so these overrides are removed before it composes.
"""

import ast
import builtins
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trainwright.callbacks import inject
from trainwright.callbacks.inject.rules import problems_of, ranks_named, step_named
from trainwright.core.problems import did_you_mean

if TYPE_CHECKING:
    from trainwright.callbacks.inject.fault import Fault

KEY = "inject"
EXAMPLE = "+inject='kill(rank=1, at_step=7)'"
_WORD = re.compile(rf"(?P<plus>\+{{0,2}}){KEY}=(?P<text>.*)", re.DOTALL)
_PART = re.compile(rf"[+~]*{KEY}[.\[]")
_OFF = ("", "null", "[]")


class SentenceError(ValueError):
    """An invalid sentence; the message says what is allowed."""


@dataclass(frozen=True)
class Sentence:
    """One parsed fault.

    Attributes:
        kind: name of the function.
        arguments: all of its arguments, by name.
    """

    kind: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return inject.sentence_of(self.kind, self.arguments)

    def make(self) -> "Fault":
        """Create the callback."""
        fault: Fault = getattr(inject, self.kind)(**self.arguments)
        return fault


@dataclass
class InjectOverrides:
    """Overrides split by `split_inject`.

    Attributes:
        rest: the overrides for Hydra.
        sentences: faults to inject.
        replaces: whether they replace those of the recipe (`inject=`), or are added (`+inject=`).
        problems: what is wrong with them.
    """

    rest: list[str]
    sentences: list[str] = field(default_factory=list)
    replaces: bool = False
    problems: list[str] = field(default_factory=list)

    def add(self, override: str, match: re.Match[str]) -> None:
        """Parse one override that injects."""
        self.replaces = self.replaces or not match["plus"]
        try:
            self.sentences += [str(each) for each in parse(match["text"])]
        except SentenceError as error:
            self.problems.append(f"{override}: {error}")

    def apply_to(self, cfg: DictConfig) -> None:
        """Write the sentences into a composed configuration."""
        kept = [] if self.replaces else list(cfg[KEY])
        cfg[KEY] = [*kept, *self.sentences]


def is_inject(override: str) -> bool:
    """Return whether an override injects faults."""
    return _WORD.fullmatch(override) is not None


def split_inject(overrides: Sequence[str]) -> InjectOverrides:
    """Split off the overrides that inject faults; those of a recipe are validated by `inject_problems`."""
    split = InjectOverrides([])
    for text in overrides:
        match = _WORD.fullmatch(text)
        if _PART.match(text):
            split.problems.append(f"{text}: inject takes whole sentences; type for example {EXAMPLE}")
        elif match is None:
            split.rest.append(text)
        else:
            split.add(text, match)
    return split


def parse(text: str) -> list[Sentence]:
    """Parse one sentence, a list of them, or none.

    Raises:
        SentenceError: if the text is no sentence, or an argument is invalid.
    """
    if text.strip() in _OFF:
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SentenceError(f"this is no sentence ({error}); type for example {EXAMPLE}") from None
    return _sentences(tree.body)


def make_faults(sentences: Sequence[str]) -> "list[Fault]":
    """Create the callbacks of a configuration's sentences."""
    return [sentence.make() for text in sentences for sentence in parse(text)]


def inject_problems(cfg: DictConfig, verb: str, world_size: int | None, server_ranks: int) -> list[str]:
    """Return what is wrong with injecting a configuration's faults into its run.

    Args:
        cfg: the configuration; its sentences are under `inject`.
        verb: fit, validate, test or predict.
        world_size: ranks of the run; None if unknown.
        server_ranks: how many of them, the last ones, are servers only.
    """
    problems: list[str] = []
    found: list[Sentence] = []
    for text in cfg[KEY]:
        try:
            found += parse(str(text))
        except SentenceError as error:
            problems.append(f"inject: {text}: {error}")
    if found and verb != "fit":
        problems.append(f"inject with {verb}: faults strike at training steps only; leave inject out")
    for sentence in found:
        problems += _run_problems(sentence, cfg, world_size)
        problems += _server_problems(sentence, world_size, server_ranks)
    return problems


def _server_problems(sentence: Sentence, world_size: int | None, server_ranks: int) -> list[str]:
    if world_size is None or not server_ranks:
        return []
    ranks = range(world_size - server_ranks, world_size)
    struck = [rank for rank in ranks_named(sentence.kind, sentence.arguments) if rank in ranks]
    return [
        f"inject: {sentence}: rank {rank} only serves (strategy.server_ranks=own); type one below {ranks[0]}"
        for rank in struck
    ]


def _run_problems(sentence: Sentence, cfg: DictConfig, world_size: int | None) -> list[str]:
    problems = []
    beyond = [rank for rank in ranks_named(sentence.kind, sentence.arguments) if world_size and rank >= world_size]
    if beyond:
        problems.append(
            f"inject: {sentence}: this run has {world_size} rank(s), so there is no rank "
            f"{', '.join(map(str, beyond))}; type one below {world_size}, or devices={max(beyond) + 1}"
        )
    if world_size == 1 and "partition" in (sentence.kind, *sentence.arguments.get("kinds", ())):
        problems.append(f"inject: {sentence}: one rank has no connections to others; type devices=2")
    step = step_named(sentence.arguments)
    is_last_save = sentence.kind == "corrupt_checkpoint" and step == cfg.max_steps
    if step is not None and cfg.max_steps is not None and step >= cfg.max_steps and not is_last_save:
        problems.append(
            f"inject: {sentence}: the last step is {cfg.max_steps - 1} (max_steps={cfg.max_steps}); type an earlier one"
        )
    if sentence.kind in ("full_disk", "corrupt_checkpoint") and not cfg.checkpoint:
        problems.append(f"inject: {sentence}: this run writes no checkpoint; type checkpoint=last")
    return problems


def _sentences(node: ast.expr) -> list[Sentence]:
    match node:
        case ast.List(elts=several) | ast.Tuple(elts=several):
            return [sentence for each in several for sentence in _sentences(each)]
        case ast.Constant(value=str(text)):  # quoted once more, like Hydra's values
            return parse(text)
        case ast.Call():
            return [_sentence(node)]
    raise SentenceError(f"{ast.unparse(node)} is no sentence; type for example {EXAMPLE}")


def _sentence(call: ast.Call) -> Sentence:
    name = ast.unparse(call.func).removeprefix(f"{KEY}.")
    if name not in inject.KINDS:
        raise SentenceError(f"there is no fault {name!r}; {did_you_mean(name, inject.KINDS, 'faults')}")
    signature = inspect.signature(getattr(inject, name))
    names = [keyword.arg for keyword in call.keywords]
    for given in names:
        if given not in signature.parameters:
            allowed = list(signature.parameters)
            raise SentenceError(f"{name} takes no {given or '**'}; {did_you_mean(given or '', allowed, 'it takes')}")
    positional = [_value(each) for each in call.args]
    try:
        bound = signature.bind(*positional, **{str(each.arg): _value(each.value) for each in call.keywords})
    except TypeError as error:
        raise SentenceError(f"{name}: {error}; it is typed as {name}{_shape(signature)}") from None
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    problems = problems_of(name, arguments)
    if problems:
        raise SentenceError("; ".join(problems))
    return Sentence(name, arguments)


def _shape(signature: inspect.Signature) -> str:
    """Return a signature like `(rank, at_step, how='sleep')`."""
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    shown = (name if value is signature.empty else f"{name}={value!r}" for name, value in defaults.items())
    return f"({', '.join(shown)})"


def _value(node: ast.expr) -> Any:
    """Evaluate a literal, in Python's or YAML's notation, or an exception with literals like `ValueError('why')`."""
    if isinstance(node, ast.Name) and node.id in _YAML:
        return _YAML[node.id]
    if isinstance(node, ast.Call):
        return _exception(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise SentenceError(
            f"{ast.unparse(node)} is no value; allowed are numbers, 'text', None, True, False, lists of them, and "
            "built-in exceptions like ValueError('why')"
        ) from None


def _exception(call: ast.Call) -> Exception:
    name = ast.unparse(call.func)
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or call.keywords:
        raise SentenceError(f"{ast.unparse(call)} is no built-in exception; type for example ValueError('why')")
    try:
        made: Exception = kind(*map(_value, call.args))
    except (TypeError, ValueError) as error:
        raise SentenceError(f"{ast.unparse(call)}: {error}") from None
    return made


_YAML = {"null": None, "true": True, "false": False}

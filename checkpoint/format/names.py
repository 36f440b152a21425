"""Matching of tensor names between a file and a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from trainwright.checkpoint.format.source import TensorSource
from trainwright.core.errors import CheckpointError

Shape = tuple[int, ...]

# Name parts added by wrappers.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"})
# Name parts that peft adds to the base weights.
ADAPTED = frozenset({"base_layer", "original_module"})
# Names sampled to guess prefixes, and most prefixes tried on all names.
_SAMPLE = 64
_TRIED = 16
# Names shown of each kind of mismatch; the rest is counted.
_SHOWN = 8


def match_names(
    module_names: Mapping[str, Shape],
    source: TensorSource,
    *,
    tied: Iterable[Collection[str]] = (),
    adapters: Mapping[str, str] = MappingProxyType({}),
    strict: bool = True,
    where: str = "the file",
    say: Callable[[str], object] | None = None,
) -> dict[str, str]:
    """Return, for each tensor of a module, the key in ``source`` to load it from.

    Names match exactly, or after removing one common prefix on either side: ``model.`` in Hugging Face files,
    ``module.`` in files of other tools. Name parts added by compilers and wrappers (``_orig_mod.`` and the like) are
    ignored, and with adapters those added by peft.

    Args:
        module_names: name -> shape of each tensor of the module.
        source: of the tensors.
        tied: groups of names of one tensor. A group is complete when the source has any of its names.
        adapters: adapter tensors of the module -> the tensor that they copy if the source lacks them, or an empty text:
            they keep their values if the source has no adapter.
        strict: every tensor must match. ``False`` skips mismatches.
        where: name of the source, for messages.
        say: called with a list of what ``strict=False`` skipped; ``None``: not reported.

    Returns:
        Name in the module -> key in the source; in the order of ``module_names``.

    Raises:
        CheckpointError: if two prefixes fit equally well, if two keys fit one name, if no name fits at all, or
            (``strict``) if something is missing, unexpected or of another shape.
    """
    pairs = _Match.best(module_names, source, where, _WRAPPERS | (ADAPTED if adapters else set())).pairs()
    added = set() if any(name in pairs for name in adapters) else {name for name, of in adapters.items() if not of}
    _add_tied(pairs, module_names, [*tied, *((name, of) for name, of in adapters.items() if of)])
    found = {name: pairs[name] for name in module_names if name in pairs}
    wrong = [name for name, key in found.items() if tuple(source.shape(key)) != tuple(module_names[name])]
    missing = [name for name in module_names if name not in found and name not in added]
    unexpected = [key for key in source.keys() if key not in set(found.values())]  # noqa: SIM118 - a source is no dict
    shapes = [f"{n}: {tuple(module_names[n])}, in the file {tuple(source.shape(found[n]))}" for n in wrong]
    left = _leftovers(missing, unexpected, shapes)
    fits_some = len(wrong) < len(found)
    if not fits_some or (strict and left):
        raise CheckpointError(_refusal(where, left, fits_some))
    if left and say is not None:
        say(f"{where} was partially loaded; not loaded:{left}")
    return {name: key for name, key in found.items() if name not in set(wrong)}


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of names in ``module.state_dict()`` that share one parameter or buffer, the first name first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # get_extra_state may return anything
            groups.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


@dataclass(frozen=True)
class _Match:
    """A pairing of names that are equal without their prefixes.

    Args:
        names: unwrapped name -> name in the module.
        keys: unwrapped name -> key in the source.
        name_prefix: prefix of names in the module.
        key_prefix: prefix of keys in the source.
    """

    names: Mapping[str, str]
    keys: Mapping[str, str]
    name_prefix: str
    key_prefix: str

    @classmethod
    def best(
        cls, module_names: Mapping[str, Shape], source: TensorSource, where: str, wrappers: Collection[str]
    ) -> _Match:
        names, keys = _plain(module_names, "the module", wrappers), _plain(source.keys(), where, wrappers)
        candidates = [cls(names, keys, *prefixes) for prefixes in _prefixes(list(names), list(keys))]
        ranked = [(match._rank(module_names, source), match) for match in candidates if match.is_plausible]
        if not ranked:
            return cls(names, keys, "", "")
        least = min(rank for rank, _ in ranked)
        best, *others = (match for rank, match in ranked if rank == least)
        if others:
            raise CheckpointError(
                f"The tensors of {where} match the module in more than one way: {best} or {others[0]}. Give a source "
                "with the module's own names, as in state_dict()."
            )
        return best

    def __str__(self) -> str:
        return f"{self.key_prefix or ''}* as {self.name_prefix or ''}*"

    @property
    def is_plausible(self) -> bool:
        """True if it pairs any names; with prefixes on both sides, if it pairs all names of one side."""
        pairs = self.pairs()
        if not (self.name_prefix and self.key_prefix):
            return bool(pairs)
        return len(pairs) in (len(self.names), len(self.keys))

    def pairs(self) -> dict[str, str]:
        """Return name in the module -> key in the source."""
        return {
            name: self.keys[self.key_prefix + plain[len(self.name_prefix) :]]
            for plain, name in self.names.items()
            if plain.startswith(self.name_prefix) and self.key_prefix + plain[len(self.name_prefix) :] in self.keys
        }

    def _rank(self, module_names: Mapping[str, Shape], source: TensorSource) -> tuple[int, int]:
        """Return a sort key, best first: most pairs of equal shape, then fewest prefixes."""
        pairs = self.pairs().items()
        fitting = sum(tuple(source.shape(key)) == tuple(module_names[name]) for name, key in pairs)
        return -fitting, bool(self.name_prefix) + bool(self.key_prefix)


def _plain(names: Iterable[str], where: str, wrappers: Collection[str]) -> dict[str, str]:
    """Return unwrapped name -> name."""
    plain: dict[str, str] = {}
    for name in names:
        short = ".".join(part for part in name.split(".") if part not in wrappers)
        if short in plain:
            raise CheckpointError(f"{plain[short]} and {name} of {where} differ by wrapper names only; keep one.")
        plain[short] = name
    return plain


def _prefixes(names: Sequence[str], keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes worth trying, starting with none."""
    yield "", ""
    by_ending: dict[str, list[str]] = {}
    for name in names:
        for ending in _endings(name):
            by_ending.setdefault(ending, []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for key in keys[:: max(1, len(keys) // _SAMPLE)]:
        shared = next((ending for ending in _endings(key) if ending in by_ending), None)
        if shared is not None:
            votes.update((name.removesuffix(shared), key.removesuffix(shared)) for name in by_ending[shared])
    yield from (pair for pair, _ in votes.most_common(_TRIED) if pair != ("", ""))


def _endings(name: str) -> Iterator[str]:
    """Return suffixes of a dotted name, longest first."""
    parts = name.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _add_tied(pairs: dict[str, str], module_names: Mapping[str, Shape], tied: Iterable[Collection[str]]) -> None:
    for group in tied:
        found = next((pairs[name] for name in group if name in pairs), None)
        if found is not None:
            pairs.update({name: found for name in group if name not in pairs and name in module_names})


def _leftovers(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> str:
    """Return one line per kind of mismatch, shortened; empty if there are none."""
    text = ""
    for title, items in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong)):
        if items:
            text += f"\n  {title} ({len(items)}): " + "; ".join(items[:_SHOWN])
            text += f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return text


def _refusal(where: str, left: str, some_fit: bool) -> str:
    text = f"The tensors of {where} do not match the module:{left}"
    if not some_fit:
        return text + "\nNo tensor fits: give weights of this module's architecture."
    return text + "\nTo load what fits and keep the module's initial values for the rest, type strict=false."

"""Lists that user code fills during an evaluation: those of one process while the evaluation ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.format.tree import UnsupportedValueError
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.collectives.ranks import ranks_of

_OURS = ("trainwright", "lightning", "pytorch_lightning", "lightning_fabric")
_GATHERS = {"all_gather", "all_gather_object", "all_gather_into_tensor", "gather_all_tensors", "all_reduce"}
_Path = tuple[Any, ...]  # owner, attribute, and key in it unless the attribute is the list


class CollectedOutputs:
    """Lists to which the batches of an evaluation add entries, such as ``self.outputs.append(...)``.

    They are found in attributes of the module and of the user's callbacks, and in dictionaries and lists there. In
    :meth:`whole` they hold the entries of all data ranks in the order of batches in one process, afterwards this rank's
    own again, unless user code has emptied them. Classes that call collectives themselves are left alone: they expect
    their rank's entries.

    Args:
        trainer: at the start of an evaluation.
        is_on: whether ranks run different batches.
    """

    def __init__(self, trainer: Any, is_on: bool) -> None:
        owners = [trainer.lightning_module, *(each for each in trainer.callbacks if not _is_ours(type(each)))]
        self._owners = [each for each in owners if is_on and not _gathers(type(each))]
        self._strategy = trainer.strategy
        self._lengths = {path: len(found) for path, found in self._lists()}
        # Entries by loader, batch and list.
        self._added: dict[tuple[int, int], dict[_Path, list[Any]]] = {}

    def _lists(self) -> Iterator[tuple[_Path, list[Any]]]:
        for owner, holder in enumerate(self._owners):
            for name, value in list(vars(holder).items()):
                if type(value) is list:
                    yield (owner, name), value
                if isinstance(value, dict | list):
                    items = list(value.items() if isinstance(value, dict) else enumerate(value))
                    yield from (((owner, name, key), each) for key, each in items if type(each) is list)

    def note(self, loader: int, index: int) -> None:
        """Note what the ``index``-th batch of a loader, just run, has added."""
        added = self._added[loader, index] = {}
        for path, found in self._lists():
            before = self._lengths.get(path, 0)
            self._lengths[path] = len(found)
            if len(found) > before:
                added[path] = found[before:]
            elif len(found) < before:  # emptied by user code; the batches of what remains are unknown
                for earlier in self._added.values():
                    earlier.pop(path, None)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Complete the lists in a ``with`` block. A collective of the data ranks."""
        merged: dict[_Path, list[Any]] = defaultdict(list)
        for _, path, entries in sorted(self._gathered(), key=lambda part: part[0]) if self._owners else ():
            merged[path] += entries
        shown = []
        for path, entries in merged.items():
            there = self._at(path)
            begin = len(there) - sum(len(added.get(path, ())) for added in self._added.values())
            mine = there[begin:]
            leaf = next((leaf for leaf in pytree.tree_leaves(mine) if isinstance(leaf, Tensor)), None)
            device = self._strategy.root_device if leaf is None else leaf.device
            there[begin:] = move_data_to_device(entries, device)
            shown.append((there, begin, len(there), mine))
        try:
            yield
        finally:
            for there, begin, end, mine in shown:
                if len(there) >= end:
                    there[begin:end] = mine

    def _gathered(self) -> Iterator[tuple[tuple[int, int], _Path, list[Any]]]:
        """Yield the entries that each batch of each data rank has added. A collective."""
        ranks = ranks_of(self._strategy)
        sent = [[batch, path, entries] for batch, added in self._added.items() for path, entries in added.items()]
        try:
            octets = pack(sent)
        except UnsupportedValueError as error:
            octets = pack([])
            rank_zero_warn(
                "Lists filled during the evaluation hold only the entries of this rank when it ends, since one cannot "
                f"be sent to others: {error} Collect tensors, numbers or texts."
            )
        for rank, data in enumerate(all_gather_values(octets, ranks.data_group, self._strategy.root_device)):
            for batch, path, entries in sent if rank == ranks.data_rank else unpack(data):
                yield tuple(batch), tuple(path), entries  # type: ignore[misc]

    def _at(self, path: _Path) -> list[Any]:
        """Return the list at a path, a new one if only other ranks have it."""
        owner, *outer, place = path
        values: Any = vars(self._owners[owner])
        for name in outer:
            values = values.setdefault(name, {})
        found: list[Any] = values[place] if isinstance(values, list) else values.setdefault(place, [])
        return found


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OURS


def _gathers(kind: type) -> bool:
    """Return whether methods of a class, or of its bases that are not Lightning's, call collectives."""
    methods = (method for each in kind.__mro__ if not _is_ours(each) for method in vars(each).values())
    return any(_GATHERS.intersection(method.__code__.co_names) for method in methods if hasattr(method, "__code__"))

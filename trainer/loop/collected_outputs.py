"""Lists that user code fills during an evaluation: those of one process while the evaluation ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
_Path = tuple[int, str, Any]  # owner, attribute, and key in it (None: the attribute is the list)


@dataclass
class _Added:
    """Entries that batches have added to a list: ``(loader, index of the batch, number)``, and the entries."""

    batches: list[tuple[int, int, int]]
    entries: list[Any]

    def by_batch(self) -> Iterator[tuple[tuple[int, int], list[Any]]]:
        begin = 0
        for loader, index, count in self.batches:
            yield (loader, index), self.entries[begin : begin + count]
            begin += count


class CollectedOutputs:
    """Lists to which the batches of an evaluation add entries, such as ``self.outputs.append(...)``.

    They are found in attributes of the module and of the user's callbacks, and in dictionaries and lists there. In
    :meth:`whole` they hold the entries of all data ranks in the order of batches in one process, afterwards this rank's
    own again, unless user code has changed them.

    Args:
        trainer: at the start of an evaluation.
    """

    def __init__(self, trainer: Any) -> None:
        callbacks = [each for each in trainer.callbacks if type(each).__module__.partition(".")[0] not in _OURS]
        self._strategy, self._owners = trainer.strategy, [trainer.lightning_module, *callbacks]
        self._lengths = {path: len(found) for path, found in self._lists()}
        self._batches: dict[_Path, list[tuple[int, int, int]]] = defaultdict(list)

    def _lists(self) -> Iterator[tuple[_Path, list[Any]]]:
        for owner, holder in enumerate(self._owners):
            for name, value in list(vars(holder).items()):
                if type(value) is list:
                    yield (owner, name, None), value
                if isinstance(value, dict | list):
                    items = list(value.items() if isinstance(value, dict) else enumerate(value))
                    yield from (((owner, name, key), each) for key, each in items if type(each) is list)

    def note(self, loader: int, index: int) -> None:
        """Note what the ``index``-th batch of a loader, just run, has added."""
        for path, found in self._lists():
            count = len(found) - self._lengths.get(path, 0)
            self._lengths[path] = len(found)
            if count > 0:
                self._batches[path].append((loader, index, count))
            elif count < 0:  # emptied by user code; the batches of what remains are unknown
                self._batches.pop(path, None)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Complete the lists in a ``with`` block. A collective of the data ranks."""
        own = self._own()
        shown: list[tuple[list[Any], int, list[Any]]] = []
        for path, parts in self._gathered(own).items():
            there, mine = self._at(path), own[path].entries if path in own else []
            begin = len(there) - len(mine)
            there[begin:] = [entry for _, each in sorted(parts, key=lambda part: part[0]) for entry in each]
            shown.append((there, begin, mine))
        lengths = [len(there) for there, *_ in shown]
        try:
            yield
        finally:
            for (there, begin, mine), length in zip(shown, lengths, strict=True):
                if len(there) >= length:  # else emptied by user code, as usual
                    there[begin:length] = mine

    def _own(self) -> dict[_Path, _Added]:
        lists, found = dict(self._lists()), {}
        for path, batches in self._batches.items():
            entries = lists.get(path, [])[-sum(count for *_, count in batches) :]
            found[path] = _Added(batches, entries)
        return found

    def _gathered(self, own: dict[_Path, _Added]) -> dict[_Path, list[tuple[tuple[int, int], list[Any]]]]:
        """Return the entries of all data ranks by batch. A collective of them."""
        ranks, device = ranks_of(self._strategy), self._strategy.root_device
        sent = [[list(path), added.batches, *packed] for path, added in own.items() if (packed := _packed(path, added))]
        found: dict[_Path, list[Any]] = defaultdict(list)
        for rank, parts in enumerate(all_gather_values(sent, ranks.data_group, device)):
            for (owner, name, key), batches, on_device, octets in parts:
                path = (owner, name, key)
                if rank == ranks.data_rank:
                    added = own[path]
                else:
                    entries = unpack(octets)
                    added = _Added(batches, move_data_to_device(entries, device) if on_device else entries)
                found[path] += added.by_batch()
        return found

    def _at(self, path: _Path) -> list[Any]:
        """Return the list at a path, a new one if only other ranks have it."""
        owner, name, key = path
        values: dict[str, Any] = vars(self._owners[owner])
        if key is not None:
            values, name = values.setdefault(name, {}), key
        found: list[Any] = values[name] if isinstance(values, list) else values.setdefault(name, [])
        return found


def _packed(path: _Path, added: _Added) -> tuple[bool, bytes] | None:
    try:
        octets = pack(added.entries)
    except UnsupportedValueError as error:
        rank_zero_warn(
            f"The list {path[1]!r}, filled during the evaluation, holds only the entries of this rank when it ends, "
            f"since they cannot be sent to others: {error} Collect tensors, numbers or texts."
        )
        return None
    leaves = (leaf for leaf in pytree.tree_leaves(added.entries) if isinstance(leaf, Tensor))
    return any(leaf.device.type != "cpu" for leaf in leaves), octets

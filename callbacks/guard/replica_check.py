"""Silent corruption: ranks that must hold the same bytes, and do not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from trainwright.callbacks.steps import require_strategy, require_window
from trainwright.checkpoint.exchange.distinct import all_gather_values

# Bytes of a CUDA tensor that are brought to the host at a time.
_CHUNK = 64 << 20
# A box of the whole: its key, and where in the whole it lies.
Box = tuple[str, tuple[int, ...], tuple[int, ...]]
Policy = Literal["repair", "stop"]

# Names that a message shows of one rank.
_SHOWN = 8
# Numbers that a digest is sent as.
_WORDS = 2
# What a rank says of what it does not hold.
_LEAST = -(2**63)


class ReplicaDifferenceError(RuntimeError):
    """Ranks that must hold the same do not, and it is not repaired; raised on every rank.

    Args:
        text: what differs, and what to do.
        differences: what differs.
    """

    def __init__(self, text: str, differences: Sequence[Difference]) -> None:
        super().__init__(text)
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Difference:
    """A box that its holders do not agree on.

    Args:
        key: such as ``weights/blocks.0.weight`` or ``optimizer/0/blocks.0.weight/exp_avg``.
        holders: global ranks that hold it.
        wrong: those that differ from more than half of them; empty if there is no such majority.
    """

    key: str
    holders: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def name(self) -> str:
        """The parameter and what of it differs."""
        section, _, rest = self.key.partition("/")
        if section == "weights":
            return rest
        parameter, _, value = rest.partition("/")[2].rpartition("/")
        return f"{parameter} ({value} of the optimizer)"


@dataclass(eq=False, repr=False)
class ReplicaCheck(Callback):
    """Compare what several ranks hold alike, parameters and optimizer states, and repair or stop where they differ.

    Hardware that computes or keeps wrong numbers without an error shows nowhere else until the loss goes wrong. Every
    rank hashes what it holds (xxh3, 126 bits of 128 count), and one small all-reduce per check finds out whether the
    hashes are equal. Ranks are compared box by box of the whole tensors, under any layout: replicas of DDP, copies of
    hybrid sharding, weights that tensor or pipeline ranks have in common. What only one rank holds cannot be compared.

    A check is made before the optimizer steps, every ``every_n_steps`` steps, and before a state is saved: so a
    checkpoint never holds what replicas do not agree on. Where more than half of those that hold a box agree, the
    others get it from them; the gradient that the wrong numbers have given in that one step is not undone. Of two
    replicas it cannot be known which is right: then, as with ``on_difference="stop"``, training stops on every rank
    with :class:`ReplicaDifferenceError`, and goes on from the newest checkpoint.

    A check costs one pass over what a rank holds: about 0.1 s per GiB on a CPU, and on CUDA what it takes to copy it to
    the host, 64 MiB at a time.

    Args:
        every_n_steps: optimizer steps between two checks.
        on_difference: ``"repair"`` from the majority, or ``"stop"``.
        before_saves: check too whenever the state is taken for saving, copies in memory included; ``False``: off.
        most_repairs: a rank that had to be repaired so often is broken: the next time training stops and names it.

    Raises:
        ValueError: if an argument is impossible.
    """

    needs_collective_steps = True
    """Whether it needs all ranks at the same optimizer step."""

    every_n_steps: int = 1000
    on_difference: Policy = "repair"
    before_saves: bool = True
    most_repairs: int = 3

    def __post_init__(self) -> None:
        require_window(self.every_n_steps, self)
        if self.on_difference not in ("repair", "stop"):
            raise ValueError(f"ReplicaCheck(on_difference={self.on_difference!r}) (allowed: 'repair', 'stop')")
        if self.most_repairs < 0:
            raise ValueError(f"ReplicaCheck(most_repairs={self.most_repairs}) (allowed: 0 or more)")
        self.found: list[tuple[int, Difference]] = []
        """What has differed so far, each with its optimizer step."""
        self.equal_at: int | None = None
        """The last optimizer step at which all replicas were equal; ``None`` before the first check."""
        self._repairs: Counter[int] = Counter()
        self._warned = False
        self._holders = _Holders()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy whose ranks do not tell what they hold.

        Raises:
            ValueError: if it is not one of this project's.
        """
        if stage == "fit":
            require_strategy(self, trainer, "trained_boxes")
        self._holders = _Holders()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Check, if it is time. A collective then."""
        step = trainer.global_step  # of several optimizers each step counts, so each number comes by once
        if step and step % self.every_n_steps == 0:
            self.check(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check what is about to be saved. A collective."""
        # After a validation the best are saved; once training has ended, ranks do not hold what they held.
        fits = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        if self.before_saves and fits:
            self.check(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was equal at a later step has not been reached yet."""
        if self.equal_at is not None:
            self.equal_at = min(self.equal_at, trainer.global_step)

    def check(self, trainer: Trainer) -> list[Difference]:
        """Compare now, and do what the policy says. A collective of all ranks.

        Returns:
            What differed, and has been repaired.

        Raises:
            ReplicaDifferenceError: on every rank, if something differs that is not repaired.
        """
        if trainer.world_size == 1:
            return []
        strategy: Any = trainer.strategy
        boxes = _boxes_of(strategy.trained_boxes())
        step = trainer.global_step
        digests = {box: digest_of(tensor) for box, tensor in boxes.items()}
        differences = self._holders.differences(digests, strategy.root_device)
        self.found += [(step, each) for each in differences]
        self._warn_once_if_nothing_is_shared(trainer)
        if not differences:
            self.equal_at = step
            return []
        self._refuse_what_cannot_be_repaired(differences, step)
        self._repair(boxes, strategy.root_device)
        rank_zero_warn(f"Step {step}: {_text(differences)}; repaired from the others.")
        return differences

    def _warn_once_if_nothing_is_shared(self, trainer: Trainer) -> None:
        if not self._holders.compares_something and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"ReplicaCheck compares nothing: under {trainer.strategy.layout} no two ranks hold the same part of "  # type: ignore[attr-defined]
                "the state. Leave it out, or hold copies (strategy.replicate=2, or 3 so that one can be repaired)."
            )

    def _refuse_what_cannot_be_repaired(self, differences: Sequence[Difference], step: int) -> None:
        never = "they were not compared before"
        since = never if self.equal_at is None else f"they were equal at step {self.equal_at}"
        text = f"Step {step}: {_text(differences)}; {since}."
        again = "Go on from the newest checkpoint (resume=auto), which was written while they were equal"
        if not self.before_saves:
            again = "Go on from a checkpoint that is not newer than that (ckpt_path=...)"
        if any(not each.wrong for each in differences):
            raise ReplicaDifferenceError(
                f"{text} Which of them is right cannot be known, since no more than half of those that hold it agree. "
                f"{again}, and look at the memory of these machines.",
                differences,
            )
        wrong = {rank for each in differences for rank in each.wrong}
        if self.on_difference == "stop":
            raise ReplicaDifferenceError(
                f"{text} {again}, and look at the memory of the machine of rank {_listed(wrong)}.", differences
            )
        self._repairs.update(wrong)
        broken = [rank for rank in sorted(wrong) if self._repairs[rank] > self.most_repairs]
        if broken:
            raise ReplicaDifferenceError(
                f"{text} Rank {_listed(broken)} had to be repaired {self.most_repairs} time(s) before: take its "
                f"machine out. {again} without it.",
                differences,
            )

    def _repair(self, boxes: Mapping[Box, Tensor], device: torch.device) -> None:
        """Send what the majority holds to those that differ. Every rank knows of every repair."""
        own = dist.get_rank()
        for box, source, wrong in self._holders.repairs:
            for rank in wrong:
                if own == source:
                    send(boxes[box], rank, device)
                elif own == rank:
                    receive(boxes[box], source, device)


class _Holders:
    """Knows which ranks hold which boxes, and compares digests of many boxes as one.

    Boxes that the same ranks hold make one digest together; only when such a digest differs are those of single boxes
    exchanged.
    """

    def __init__(self) -> None:
        self.repairs: list[tuple[Box, int, tuple[int, ...]]] = []
        """Of the last comparison: box, a rank that holds it right, and those that hold it wrong; in one order."""
        self._boxes: list[Box] | None = None  # of this rank, when the plan was made
        self._sets: list[tuple[int, ...]] = []  # ranks that hold something alike, the same list on every rank
        self._members: dict[tuple[int, ...], list[Box]] = {}  # boxes of this rank that they hold

    @property
    def compares_something(self) -> bool:
        """Whether any two ranks held something alike at the last comparison."""
        return bool(self._sets)

    def differences(self, digests: Mapping[Box, bytes], device: torch.device) -> list[Difference]:
        """What the ranks do not agree on, the same on every rank. A collective."""
        has_changed, differing = self._compare(digests, device)
        if has_changed:
            self._plan(digests, device)  # the first time, or an optimizer has got states since
            _, differing = self._compare(digests, device)
        self.repairs = []
        return self._look_closely(digests, differing, device) if differing else []

    def _compare(self, digests: Mapping[Box, bytes], device: torch.device) -> tuple[bool, list[tuple[int, ...]]]:
        """Whether any rank holds other boxes than before, and the sets of ranks that do not agree.

        One all-reduce: the greatest and the least digest of each set, of those that are in it. So what is sent grows
        with the sets, not with the ranks.
        """
        extremes = [int(sorted(digests) != self._boxes)]
        for ranks in self._sets:
            boxes = self._members.get(ranks)
            if boxes is None:
                extremes += [_LEAST] * (2 * _WORDS)
                continue
            together = xxhash.xxh3_128()
            for box in boxes:
                together.update(digests.get(box, b""))
            words = _numbers(together.digest())
            extremes += [*words, *(-word for word in words)]
        found = torch.tensor(extremes, dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        has_changed, rows = bool(found[0].item()), found[1:].cpu().view(-1, 2, _WORDS)
        disagree = (rows[:, 0] != -rows[:, 1]).any(dim=1).tolist()
        return has_changed, [ranks for ranks, differs in zip(self._sets, disagree, strict=True) if differs]

    def _plan(self, digests: Mapping[Box, bytes], device: torch.device) -> None:
        own = self._boxes = sorted(digests)
        known = all_gather_values(own, device=device)
        alike: dict[int, list[int]] = {}  # by the list that ranks said, which they share
        for rank, boxes in enumerate(known):
            alike.setdefault(id(boxes), []).append(rank)
        kins = [(ranks, known[ranks[0]]) for ranks in alike.values()]
        holders: dict[Box, list[int]] = defaultdict(list)
        for number, (_, boxes) in enumerate(kins):
            for box in boxes:
                holders[box].append(number)
        sets = {
            numbers: tuple(sorted(rank for number in numbers for rank in kins[number][0]))
            for numbers in {tuple(each) for each in holders.values()}
        }
        self._sets = sorted(ranks for ranks in sets.values() if len(ranks) > 1)
        self._members = defaultdict(list)
        for box in own:
            ranks = sets[tuple(holders[box])]
            if len(ranks) > 1:
                self._members[ranks].append(box)

    def _look_closely(
        self, digests: Mapping[Box, bytes], differing: Iterable[tuple[int, ...]], device: torch.device
    ) -> list[Difference]:
        doubtful = {box: digests[box] for ranks in differing for box in self._members.get(ranks, ())}
        known = all_gather_values(doubtful, device=device)
        found = []
        for box in sorted({box for each in known for box in each}):
            votes = {rank: each[box] for rank, each in enumerate(known) if box in each}
            digest, count = Counter(votes.values()).most_common(1)[0]
            if count == len(votes):
                continue
            right = [rank for rank, vote in votes.items() if vote == digest]
            is_majority = 2 * count > len(votes)
            wrong = tuple(rank for rank in votes if rank not in right) if is_majority else ()
            found.append(Difference(box[0], tuple(votes), wrong))
            self.repairs.append((box, right[0], wrong))
        return found


def _boxes_of(held: Mapping[str, Any]) -> dict[Box, Tensor]:
    """Every box that this rank holds, and its tensor."""
    return {
        (key, tuple(offsets), tuple(tensor.shape)): tensor
        for key, parts in held.items()
        for offsets, tensor in parts.parts
        if tensor.numel()
    }


def _numbers(octets: bytes) -> list[int]:
    """A digest of 128 bits as two numbers of 63 bits each, which have a negative."""
    return [int.from_bytes(half, "little") >> 1 for half in (octets[:8], octets[8:])]


def _text(differences: Sequence[Difference]) -> str:
    """Who differs from whom in what."""
    names: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for each in differences:
        names[each.wrong, each.holders].append(each.name)
    texts = []
    for (wrong, holders), several in names.items():
        unique = list(dict.fromkeys(several))
        shown = ", ".join(unique[:_SHOWN]) + (f" and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else "")
        if wrong:
            others = [rank for rank in holders if rank not in wrong]
            texts.append(f"rank {_listed(wrong)} holds other bytes than rank {_listed(others)} of {shown}")
        else:
            texts.append(f"ranks {_listed(holders)} hold different bytes of {shown}")
    return "; ".join(texts)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def digest_of(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes in the order of its elements (xxh3, 128 bits).

    Args:
        tensor: of any type, on any device; a CUDA tensor is waited for and copied to the host piece by piece.
    """
    octets = octets_of(tensor)
    found = xxhash.xxh3_128()
    for piece in [octets] if octets.device.type == "cpu" else _on_host(octets):
        found.update(piece.numpy().data)
    return found.digest()


def send(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Send a tensor's bytes to a global rank, which calls :func:`receive`.

    Args:
        tensor: on any device.
        rank: of the default process group.
        device: that the backend of the group works on.
    """
    dist.send(octets_of(tensor).to(device), rank)


@torch.no_grad()
def receive(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Overwrite a tensor in place with the bytes that a global rank sends by :func:`send`."""
    arrived = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=device)
    dist.recv(arrived, rank)
    tensor.copy_(arrived.view(tensor.dtype).view(tensor.shape))


def octets_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 ``(bytes,)``; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _on_host(octets: Tensor) -> Iterator[Tensor]:
    """Pieces of a CUDA tensor in host memory; while one is hashed, the next one is on its way."""
    room = min(_CHUNK, octets.numel())
    buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    waiting: Tensor | None = None
    reached = torch.cuda.Event()
    for number, piece in enumerate(octets.split(_CHUNK)):
        target = buffers[number % 2][: piece.numel()]
        if waiting is not None:
            reached.synchronize()
        target.copy_(piece, non_blocking=True)
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(octets.device))
        if waiting is not None:
            yield waiting
        waiting = target
    reached.synchronize()
    if waiting is not None:
        yield waiting

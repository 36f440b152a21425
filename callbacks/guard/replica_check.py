"""Detection of silent corruption: replicas whose bytes differ."""

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

from trainwright.callbacks.steps import require_strategy
from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.config.options import number, refuse, value_problems

# Bytes of a CUDA tensor copied to the host at a time.
_CHUNK = 64 << 20
# A part of a whole tensor: its key, offsets and shape.
Box = tuple[str, tuple[int, ...], tuple[int, ...]]

# Names shown per rank in a message.
_SHOWN = 8
# Integers per digest.
_WORDS = 2
# Sent for parts that a rank does not hold.
_LEAST = -(2**63)


class ReplicaDifferenceError(RuntimeError):
    """Raised on every rank if replicas differ and are not repaired.

    Args:
        text: message.
        differences: the differences found.
    """

    def __init__(self, text: str, differences: Sequence[Difference]) -> None:
        super().__init__(text)
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Difference:
    """A part that its holders do not agree on.

    Args:
        key: such as ``weights/blocks.0.weight`` or ``optimizer/0/blocks.0.weight/exp_avg``.
        holders: global ranks that hold it.
        wrong: those that differ from the majority; empty without a majority.
    """

    key: str
    holders: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the parameter, and of its optimizer state."""
        section, _, rest = self.key.partition("/")
        if section == "weights":
            return rest
        parameter, _, value = rest.partition("/")[2].rpartition("/")
        return f"{parameter} ({value} of the optimizer)"


@dataclass(eq=False, repr=False)
class ReplicaCheck(Callback):
    """Compare replicated parameters and optimizer states across ranks, and repair or stop on a difference.

    Hardware that computes or stores wrong numbers silently is otherwise noticed only when the loss goes wrong. Every
    rank hashes its parts (xxh3, 126 of 128 bits), and one small all-reduce per check compares the hashes, under any
    layout: replicas of DDP, copies of hybrid sharding, weights shared by tensor or pipeline ranks. What only one rank
    holds is not compared.

    A check precedes the optimizer step every ``every_n_steps`` steps, and every save, so that a checkpoint never holds
    differing replicas. A majority repairs the others; the gradient that wrong numbers gave in that step is not undone.
    Without a majority, or with ``on_difference="stop"``, :class:`ReplicaDifferenceError` is raised on every rank, and
    the run can resume from the newest checkpoint.

    Cost: one pass over the state of a rank, about 0.1 s per GiB on a CPU; on CUDA a copy to the host in 64 MiB chunks.

    Args:
        every_n_steps: optimizer steps between checks.
        on_difference: ``"repair"`` from the majority, or ``"stop"``.
        before_saves: check before every save too, in-memory copies included; ``False``: off.
        most_repairs: repairs per rank; one more stops training and names the rank.

    Attributes:
        found: all differences so far, each with its optimizer step.
        equal_at: the last optimizer step with equal replicas; ``None`` before the first check.

    Raises:
        ValueError: if an argument is invalid.
    """

    needs_collective_steps = True
    """All ranks must be at the same optimizer step."""

    every_n_steps: int = number(1000, least=1, unit="optimizer steps")
    on_difference: Literal["repair", "stop"] = "repair"
    before_saves: bool = True
    most_repairs: int = 3

    def __post_init__(self) -> None:
        refuse(value_problems(ReplicaCheck, vars(self)), "ReplicaCheck")
        self.found: list[tuple[int, Difference]] = []
        self.equal_at: int | None = None
        self._repairs: Counter[int] = Counter()
        self._warned = False
        self._holders = _ReplicaMap()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` for a strategy that does not report its parts."""
        if stage == "fit":
            require_strategy(self, trainer, "trained_boxes")
        self._holders = _ReplicaMap()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Check if due. A collective then."""
        step = trainer.global_step  # each optimizer's step counts, so every number occurs once
        if step and step % self.every_n_steps == 0:
            self.check(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check before a save. A collective."""
        # The best are saved after a validation; after training, ranks hold no comparable state.
        fits = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        if self.before_saves and fits:
            self.check(trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset :attr:`equal_at` to a step that has been reached."""
        if self.equal_at is not None:
            self.equal_at = min(self.equal_at, trainer.global_step)

    def check(self, trainer: Trainer) -> list[Difference]:
        """Compare now, and apply the policy. A collective of all ranks.

        Returns:
            The differences, which have been repaired.

        Raises:
            ReplicaDifferenceError: on every rank, if a difference is not repaired.
        """
        if trainer.world_size == 1:
            return []
        strategy: Any = trainer.strategy
        boxes = _boxes_of(strategy.trained_boxes())
        step = trainer.global_step
        digests = {box: digest_of(tensor) for box, tensor in boxes.items()}
        differences = self._holders.differences(digests, strategy.root_device)
        self.found += [(step, each) for each in differences]
        if not self._holders.sets and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"ReplicaCheck compares nothing: under {strategy.layout} no two ranks hold the same part of the state. "
                "Leave it out, or replicate (strategy.replicate=2, or 3 so that a difference can be repaired)."
            )
        if not differences:
            self.equal_at = step
            return []
        self._raise_if_unrepairable(differences, step)
        self._repair(boxes, strategy.root_device)
        rank_zero_warn(f"Step {step}: {_text(differences)}; repaired from the majority.")
        return differences

    def _raise_if_unrepairable(self, differences: Sequence[Difference], step: int) -> None:
        since = "they were not compared before" if self.equal_at is None else f"they were equal at step {self.equal_at}"
        text = f"Step {step}: {_text(differences)}; {since}."
        again = (
            "Resume the newest checkpoint (resume=auto), which was saved while they were equal"
            if self.before_saves
            else "Resume a checkpoint that is not newer than that (ckpt_path=...)"
        )
        wrong = {rank for each in differences for rank in each.wrong}
        if any(not each.wrong for each in differences):
            unknown = "There is no majority, so it is unknown which of them is right"
            raise ReplicaDifferenceError(f"{text} {unknown}. {again}, and check their memory.", differences)
        if self.on_difference == "stop":
            check = f"check the memory of the machine of rank {_listed(wrong)}"
            raise ReplicaDifferenceError(f"{text} {again}, and {check}.", differences)
        self._repairs.update(wrong)
        broken = [rank for rank in wrong if self._repairs[rank] > self.most_repairs]
        if broken:
            before = f"Rank {_listed(broken)} had been repaired {self.most_repairs} time(s) before"
            raise ReplicaDifferenceError(f"{text} {before}: remove its machine. {again} without it.", differences)

    def _repair(self, boxes: Mapping[Box, Tensor], device: torch.device) -> None:
        """Send the majority's bytes to the ranks that differ. Every rank knows all repairs."""
        own = dist.get_rank()
        for box, source, wrong in self._holders.repairs:
            for rank in wrong:
                if own == source:
                    send(boxes[box], rank, device)
                elif own == rank:
                    receive(boxes[box], source, device)


class _ReplicaMap:
    """Which ranks hold which parts. Parts with the same holders share one digest; only if that differs are single
    digests exchanged.

    Attributes:
        repairs: of the last comparison: part, a rank that has it right, and ranks that have it wrong; in equal order.
        sets: sets of ranks with a common part, equal on every rank.
    """

    def __init__(self) -> None:
        self.repairs: list[tuple[Box, int, tuple[int, ...]]] = []
        self._boxes: list[Box] | None = None  # of this rank, when the map was made
        self.sets: list[tuple[int, ...]] = []
        self._members: dict[tuple[int, ...], list[Box]] = {}  # parts of this rank by their holders

    def differences(self, digests: Mapping[Box, bytes], device: torch.device) -> list[Difference]:
        """Return the differences, equal on every rank. A collective."""
        has_changed, differing = self._compare(digests, device)
        if has_changed:
            self._update(digests, device)  # the first time, or an optimizer has created states
            _, differing = self._compare(digests, device)
        self.repairs = []
        return self._find(digests, differing, device) if differing else []

    def _compare(self, digests: Mapping[Box, bytes], device: torch.device) -> tuple[bool, list[tuple[int, ...]]]:
        """Return whether any rank's parts have changed, and the sets of ranks that differ.

        One all-reduce of the maximum and minimum digest per set, so traffic grows with sets, not with ranks.
        """
        extremes = [int(sorted(digests) != self._boxes)]
        for ranks in self.sets:
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
        return has_changed, [ranks for ranks, differs in zip(self.sets, disagree, strict=True) if differs]

    def _update(self, digests: Mapping[Box, bytes], device: torch.device) -> None:
        own = self._boxes = sorted(digests)
        known = all_gather_values(own, device=device)
        alike: dict[int, list[int]] = {}  # ranks by identity of their list, which equal ranks share
        for rank, boxes in enumerate(known):
            alike.setdefault(id(boxes), []).append(rank)
        groups = [(ranks, known[ranks[0]]) for ranks in alike.values()]
        holders: dict[Box, list[int]] = defaultdict(list)
        for index, (_, boxes) in enumerate(groups):
            for box in boxes:
                holders[box].append(index)
        sets = {
            numbers: tuple(sorted(rank for number in numbers for rank in groups[number][0]))
            for numbers in {tuple(each) for each in holders.values()}
        }
        self.sets = sorted(ranks for ranks in sets.values() if len(ranks) > 1)
        self._members = defaultdict(list)
        for box in own:
            ranks = sets[tuple(holders[box])]
            if len(ranks) > 1:
                self._members[ranks].append(box)

    def _find(
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
    """Return this rank's parts and their tensors."""
    return {
        (key, tuple(offsets), tuple(tensor.shape)): tensor
        for key, parts in held.items()
        for offsets, tensor in parts.parts
        if tensor.numel()
    }


def _numbers(octets: bytes) -> list[int]:
    """Return a 128-bit digest as two 63-bit integers, which can be negated."""
    return [int.from_bytes(half, "little") >> 1 for half in (octets[:8], octets[8:])]


def _text(differences: Sequence[Difference]) -> str:
    """Describe which ranks differ in what."""
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
    """Return the hash of a tensor's bytes in element order (xxh3, 128 bits).

    Args:
        tensor: of any type, on any device; a CUDA tensor is synchronized and copied to the host in chunks.
    """
    octets = octets_of(tensor)
    found = xxhash.xxh3_128()
    for piece in [octets] if octets.device.type == "cpu" else _on_host(octets):
        found.update(piece.numpy().data)
    return found.digest()


def send(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Send a tensor's bytes to a global rank, which calls :func:`receive`; ``device`` is that of the backend."""
    dist.send(octets_of(tensor).to(device), rank)


@torch.no_grad()
def receive(tensor: Tensor, rank: int, device: torch.device) -> None:
    """Overwrite a tensor in place with the bytes that a global rank sends by :func:`send`."""
    arrived = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=device)
    dist.recv(arrived, rank)
    tensor.copy_(arrived.view(tensor.dtype).view(tensor.shape))


def octets_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 ``(bytes,)``; a view if contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _on_host(octets: Tensor) -> Iterator[Tensor]:
    """Yield chunks of a CUDA tensor in host memory; the next chunk is copied while one is hashed."""
    room = min(_CHUNK, octets.numel())
    buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    waiting: Tensor | None = None
    reached = torch.cuda.Event()
    for index, piece in enumerate(octets.split(_CHUNK)):
        target = buffers[index % 2][: piece.numel()]
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

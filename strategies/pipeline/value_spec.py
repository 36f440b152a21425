"""Structures of tensors and plain values that are exchanged between stages."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.groups import default_store
from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.core.torch_internals import _pytree as pytree

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and whether a gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """Structure without its tensors.

    Attributes:
        spec: nesting, as a pytree spec.
        plain: leaves that are not tensors, in order; ``None`` for tensors.
        is_tensor: whether each leaf is a tensor.
        tensors: specs of the tensors, in order.
    """

    spec: pytree.TreeSpec
    plain: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    tensors: tuple[TensorSpec, ...]

    def build(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with these values for its tensors."""
        rest, pairs = iter(tensors), zip(self.plain, self.is_tensor, strict=True)
        return pytree.tree_unflatten([next(rest) if is_tensor else value for value, is_tensor in pairs], self.spec)

    def dump(self) -> bytes:
        """Serialize for another rank of this job."""
        return pack((self.build([_SLOT] * len(self.tensors)), self.tensors))

    @staticmethod
    def load(data: bytes) -> ValueSpec:
        """Deserialize from another rank of this job."""
        skeleton, tensors = unpack(data)
        leaves, spec = _flatten(skeleton)
        is_tensor = tuple(leaf == _SLOT for leaf in leaves)
        plain = tuple(None if leaf == _SLOT else leaf for leaf in leaves)
        return ValueSpec(spec, plain, is_tensor, tensors)


# Marks a tensor: no plain leaf is a device.
_SLOT = torch.device("meta")


def to_spec(value: Any, source: str) -> tuple[ValueSpec, tuple[Tensor, ...]]:
    """Return the spec of a structure, and its tensors.

    Args:
        value: tuples, lists, dicts, dataclasses and Hugging Face outputs of tensors and plain values.
        source: description for the message.

    Raises:
        TypeError: if it holds other objects.
    """
    leaves, spec = _flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(
                f"{source} returns a {type(leaf).__name__}, which cannot be sent to the next stage of the pipeline. "
                "Blocks may return tensors and plain values in tuples, lists, dicts and dataclasses"
                + ("; set use_cache=False." if "cache" in type(leaf).__name__.lower() else ".")
            )
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    forms = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return ValueSpec(spec, plain, is_tensor, forms), tensors


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    while True:
        leaves, spec = pytree.tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            pytree.register_dataclass(kind)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) not in (tuple, list, dict):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    found: list[Tensor] = []  # without pytree, which takes several times as long
    for each in value.values() if type(value) is dict else value:
        if not isinstance(each, PLAIN):
            found += [each] if isinstance(each, Tensor) else tensors_in(each)
    return found


class ValueChannel:
    """Exchanges structures of tensors between the ranks of a pipeline; shapes may change.

    Header and tensors are one message, sized by the last spec. A new spec is announced in the header and follows, then
    the tensors.

    Args:
        group: ranks of the pipeline.
        device: of received tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._forms: dict[tuple[str, int], ValueSpec] = {}

    def send(self, value: Any, rank: int, source: str) -> None:
        """Send to a rank of the group."""
        self._put(value, source, ("to", rank), lambda tensor: dist.send(tensor, group=self._group, group_dst=rank))

    def receive(self, rank: int) -> Any:
        """Receive from a rank of the group."""
        return self._get(("from", rank), lambda tensor: dist.recv(tensor, group=self._group, group_src=rank))

    def broadcast(self, rank: int, value: Any = None, source: str = "") -> Any:
        """Broadcast from a rank of the group. A collective."""

        def move(tensor: Tensor) -> None:
            dist.broadcast(tensor, group=self._group, group_src=rank)

        if dist.get_rank(self._group) != rank:
            return self._get(("all", rank), move)
        self._put(value, source, ("all", rank), move)
        return value

    def _put(self, value: Any, source: str, channel: tuple[str, int], move: Callable[[Tensor], Any]) -> None:
        form, tensors = to_spec(value, source)
        last = self._forms.get(channel)
        data = b"" if form == last else form.dump()
        self._forms[channel] = form
        header = _bytes(torch.tensor([len(data)], device=self._device))
        if not data:
            move(torch.cat([header, _packed(tensors, self._device)]))
            return
        move(torch.cat([header, header.new_zeros(_size(last))]))
        move(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))
        if _size(form):
            move(_packed(tensors, self._device))

    def _get(self, channel: tuple[str, int], move: Callable[[Tensor], Any]) -> Any:
        last = self._forms.get(channel)
        buffer = self._moved(_HEADER + _size(last), move)
        length = int(buffer[:8].view(torch.int64).item())
        packed = buffer[_HEADER:]
        if length:
            data = self._moved(length, move)
            self._forms[channel] = last = ValueSpec.load(data.cpu().numpy().tobytes())
            packed = self._moved(_size(last), move)
        assert last is not None
        return last.build(list(_unpacked(packed, last)))

    def _moved(self, size: int, move: Callable[[Tensor], Any]) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            move(buffer)
        return buffer


# Alignment of tensors in a message, for views of other dtypes.
_HEADER = 16


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, zero-padded to the alignment."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _HEADER))


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *map(_bytes, tensors)])


def _sizes(form: ValueSpec) -> list[int]:
    return [math.prod(each.shape) * each.dtype.itemsize for each in form.tensors]


def _size(form: ValueSpec | None) -> int:
    """Return the bytes of a :func:`_packed` message of this spec."""
    return 0 if form is None else sum(size + -size % _HEADER for size in _sizes(form))


def _unpacked(packed: Tensor, form: ValueSpec) -> Iterator[Tensor]:
    begin = 0
    for each, size in zip(form.tensors, _sizes(form), strict=True):
        yield packed[begin : begin + size].view(each.dtype).view(each.shape)
        begin += size + -size % _HEADER


class SpecRegistry:
    """Specs of what each stage sends, by the shapes of the micro-batch.

    A stage publishes a spec in the job's store at the first micro-batch of such shapes; the next stage looks it up
    once. Later only tensors are sent.

    Args:
        prefix: unique to this pipeline.
    """

    def __init__(self, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, default_store())
        self._known: dict[tuple[int, Any], ValueSpec] = {}
        self._published: list[str] = []
        self._generation = 0

    def refresh(self) -> None:
        """Forget all specs; stages publish them again. Call it on all ranks between the same steps."""
        self._generation += 1
        self._known.clear()
        for key in self._published:  # all readers have used it, or the last step would not have ended
            self._store.delete_key(key)
        self._published.clear()

    def publish(self, stage: int, signature: Any, form: ValueSpec, source: str) -> None:
        """Publish, or check, what ``stage`` sends for micro-batches of this signature.

        Raises:
            RuntimeError: if it differs from before.
        """
        known = self._known.get((stage, signature))
        if known is None:
            self._known[stage, signature] = form
            self._published.append(key := self._key(stage, signature))
            self._store.set(key, form.dump())  # type: ignore[arg-type]
        elif known != form:
            raise RuntimeError(
                f"{source} returned another structure than before for a micro-batch of the same shapes, so the next "
                f"stage cannot receive it. Before: {known.tensors} {known.plain}; now: {form.tensors} {form.plain}. If "
                "you change requires_grad of parameters, do so at the start of an epoch (on_train_epoch_start)."
            )

    def look_up(self, stage: int, signature: Any) -> ValueSpec:
        """Return what ``stage`` sends for micro-batches of this signature; waits until it is published."""
        if (stage, signature) not in self._known:
            self._known[stage, signature] = ValueSpec.load(self._store.get(self._key(stage, signature)))
        return self._known[stage, signature]

    def _key(self, stage: int, signature: Any) -> str:
        return f"{self._generation}/{stage}/{hashlib.sha256(repr(signature).encode()).hexdigest()}"

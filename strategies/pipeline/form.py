"""What passes between stages: its tensors, a description of the rest, and where that is published."""

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
class TensorForm:
    """Shape, dtype and whether a gradient flows back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class Form:
    """A structure without its tensors.

    Attributes:
        spec: nesting, as torch's pytree describes it.
        plain: leaves that are no tensors, in order; ``None`` stands for a tensor.
        is_tensor: for each leaf, whether it is a tensor.
        tensors: forms of the tensors, in order.
    """

    spec: pytree.TreeSpec
    plain: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    tensors: tuple[TensorForm, ...]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The structure around these tensors."""
        rest = iter(tensors)
        leaves = [
            next(rest) if is_tensor else value for value, is_tensor in zip(self.plain, self.is_tensor, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def dump(self) -> bytes:
        """As bytes, for another rank of this job."""
        skeleton = pytree.tree_unflatten(
            [_SLOT if tensor else value for value, tensor in zip(self.plain, self.is_tensor, strict=True)], self.spec
        )
        return pack((skeleton, self.tensors))

    @staticmethod
    def load(data: bytes) -> Form:
        """From bytes of another rank of this job."""
        skeleton, tensors = unpack(data)
        leaves, spec = _flatten(skeleton)
        is_tensor = tuple(leaf == _SLOT for leaf in leaves)
        plain = tuple(None if leaf == _SLOT else leaf for leaf in leaves)
        return Form(spec, plain, is_tensor, tensors)


# Stands for a tensor: no plain leaf is one.
_SLOT = torch.device("meta")


def take_apart(value: Any, source: str) -> tuple[Form, tuple[Tensor, ...]]:
    """A structure's form and its tensors.

    Args:
        value: tuples, lists, dicts, dataclasses and Hugging Face outputs of tensors and plain values.
        source: what it comes from, for the message.

    Raises:
        TypeError: if it holds something else.
    """
    leaves, spec = _flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(
                f"{source} returns a {type(leaf).__name__}, which cannot be passed on to the next stage of the "
                f"pipeline. Blocks may return tensors and plain values in tuples, lists, dicts and dataclasses"
                + ("; set use_cache=False." if "cache" in type(leaf).__name__.lower() else ".")
            )
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    forms = tuple(TensorForm(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return Form(spec, plain, is_tensor, forms), tensors


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    while True:
        leaves, spec = pytree.tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            pytree.register_dataclass(kind)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nesting of containers."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class Carrier:
    """Moves structures of tensors between the ranks of a pipeline; shapes may change from time to time.

    Header and tensors are one message, as long as the last description says. A header that tells of another description
    is followed by that one, and by the tensors.

    Args:
        group: ranks of the pipeline.
        device: where to receive.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._forms: dict[tuple[str, int], Form] = {}

    def send(self, value: Any, rank: int, source: str) -> None:
        """Send to a rank of the group."""
        self._put(value, source, ("to", rank), lambda tensor: dist.send(tensor, group=self._group, group_dst=rank))

    def receive(self, rank: int) -> Any:
        """Receive from a rank of the group."""
        return self._get(("from", rank), lambda tensor: dist.recv(tensor, group=self._group, group_src=rank))

    def broadcast(self, rank: int, value: Any = None, source: str = "") -> Any:
        """From a rank of the group to all. A collective."""

        def move(tensor: Tensor) -> None:
            dist.broadcast(tensor, group=self._group, group_src=rank)

        if dist.get_rank(self._group) != rank:
            return self._get(("all", rank), move)
        self._put(value, source, ("all", rank), move)
        return value

    def _put(self, value: Any, source: str, channel: tuple[str, int], move: Callable[[Tensor], Any]) -> None:
        form, tensors = take_apart(value, source)
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
            self._forms[channel] = last = Form.load(data.cpu().numpy().tobytes())
            packed = self._moved(_size(last), move)
        assert last is not None
        return last.build(list(_unpacked(packed, last)))

    def _moved(self, size: int, move: Callable[[Tensor], Any]) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            move(buffer)
        return buffer


# Tensors lie in a message at multiples of this: a view of another dtype must be aligned.
_HEADER = 16


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, and zeros up to where the next tensor may begin."""
    # Not every backend has every dtype.
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _HEADER))


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *map(_bytes, tensors)])


def _sizes(form: Form) -> list[int]:
    return [math.prod(each.shape) * each.dtype.itemsize for each in form.tensors]


def _size(form: Form | None) -> int:
    """Return the bytes of the message that :func:`_packed` makes of tensors of this form."""
    return 0 if form is None else sum(size + -size % _HEADER for size in _sizes(form))


def _unpacked(packed: Tensor, form: Form) -> Iterator[Tensor]:
    begin = 0
    for each, size in zip(form.tensors, _sizes(form), strict=True):
        yield packed[begin : begin + size].view(each.dtype).view(each.shape)
        begin += size + -size % _HEADER


class FormBook:
    """Forms of what each stage sends, by the shapes of the micro-batch it was computed from.

    A stage publishes a form in the job's store the first time that a micro-batch of such shapes comes along; the stage
    after it looks it up once. Later there is no traffic but the tensors.

    Args:
        prefix: text that no other pipeline of this job uses.
    """

    def __init__(self, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, default_store())
        self._known: dict[str, Form] = {}
        self._published: list[str] = []
        self._generation = 0

    def refresh(self) -> None:
        """Forget all forms: stages say again what they send. To be called on all ranks between the same steps."""
        self._generation += 1
        self._known.clear()
        for key in self._published:  # whoever needed it has received by it, or the last step would not have ended
            self._store.delete_key(key)
        self._published.clear()

    def publish(self, stage: int, signature: Any, form: Form, source: str) -> None:
        """Say, or check, what ``stage`` sends for micro-batches of this signature.

        Raises:
            RuntimeError: if it said something else before.
        """
        key = self._key(stage, signature)
        known = self._known.get(key)
        if known is None:
            self._known[key] = form
            self._published.append(key)
            self._store.set(key, form.dump())  # type: ignore[arg-type]
        elif known != form:
            raise RuntimeError(
                f"{source} returned another form than before for a micro-batch of the same shapes, so the next stage "
                f"cannot know what to receive. Before: {known.tensors} {known.plain}; now: {form.tensors} "
                f"{form.plain}. "
                "If requires_grad of parameters was changed: do so at the beginning of an epoch (on_train_epoch_start)."
            )

    def look_up(self, stage: int, signature: Any) -> Form:
        """What ``stage`` sends for micro-batches of this signature; waits until it said so."""
        key = self._key(stage, signature)
        if key not in self._known:
            self._known[key] = Form.load(self._store.get(key))
        return self._known[key]

    def _key(self, stage: int, signature: Any) -> str:
        return f"{self._generation}/{stage}/{hashlib.sha256(repr(signature).encode()).hexdigest()}"

"""Common parameters of replicas, stepped by an outer optimizer (DiLoCo, arXiv:2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.averaging.background import Background
from trainwright.strategies.averaging.compression.compressor import GradientCompressor, State
from trainwright.strategies.local_updates.mean import Bucket, ReplicaMean
from trainwright.strategies.local_updates.options import DiLoCoOptions


@dataclass
class _Fragment:
    """Parameters that are averaged together."""

    optimizer: torch.optim.SGD
    buckets: list[Bucket] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # of the compressor, one per bucket


@dataclass
class _Flight:
    """Outer gradients in flight, one per bucket of the fragment at its launch."""

    buckets: list[Bucket]
    gradients: list[Tensor]
    done: Future[None] | None


class OuterParameters:
    """Common parameters of all replicas, this rank's part, in fragments.

    A round of a fragment: :meth:`launch` averages the differences from the common parameters (the outer gradient),
    :meth:`land` runs the outer optimizer, :meth:`merge` writes the result to the replica.

    Args:
        parts: this rank's part of each parameter, by name; equal on all replicas.
        fragment_of: name -> index of its fragment.
        mean: over replicas.
        options: of the strategy.
        compressor: of outer gradients; ``None``: exact averages.
        background: runs averages during training; ``None``: training waits.
        group: exclusive group of ``background``, of the same ranks as ``mean``'s.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        fragment_of: Callable[[str], int],
        mean: ReplicaMean,
        options: DiLoCoOptions,
        compressor: GradientCompressor | None = None,
        background: Background | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._fragment_of = fragment_of
        self._mean = mean
        self._options = options
        self._compressor = compressor
        self._background = background
        self._group = mean.group if background is None else group
        self._fragments: dict[int, _Fragment] = {}
        self._flights: dict[int, _Flight] = {}
        self._common: dict[str, nn.Parameter] = {}
        self._add(parts)

    # ---- a round ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, fragment: int, parts: Mapping[str, Tensor]) -> None:
        """Start averaging the outer gradient. A collective, possibly in the background.

        Args:
            fragment: its index.
            parts: this rank's part of each trainable parameter. A newly trainable one has no common value yet and gets
                the plain mean.
        """
        self._add_new(parts)
        it = self._fragments.get(fragment)
        if it is None:
            return  # no parameters of this rank
        # Copies: parameters that become trainable during the flight add buckets.
        buckets, states = list(it.buckets), list(it.states)
        device = self._mean.device
        gradients = [bucket.join(self._common, device) - bucket.join(parts, device) for bucket in buckets]

        def average() -> None:
            for bucket, state, flat in zip(buckets, states, gradients, strict=True):
                self._average(bucket, state, flat)

        done = None if self._background is None else self._background.submit(average)
        if done is None:
            average()
        self._flights[fragment] = _Flight(buckets, gradients, done)

    @torch.no_grad()
    def land(self, fragment: int | None = None) -> None:
        """Wait for averages in flight and step the outer optimizer.

        Args:
            fragment: its index; ``None``: all. Does nothing without a flight.
        """
        for index in sorted(self._flights) if fragment is None else [fragment]:
            flight = self._flights.pop(index, None)
            if flight is None:
                continue
            if flight.done is not None:
                flight.done.result()
            self._step(self._fragments[index].optimizer, flight)

    @torch.no_grad()
    def merge(self, fragment: int, parts: Mapping[str, Tensor], mixing: float = 0.0) -> None:
        """Write the common parameters of a fragment to this replica.

        Args:
            fragment: its index.
            parts: this rank's part of each trainable parameter; changed in place.
            mixing: fraction of its own that the replica keeps.
        """
        for name in self._names(fragment):
            own, common = parts[name], self._common[name].detach()
            common = common.to(own.device)
            own.copy_(common if mixing == 0 else mixing * own.to(common.dtype) + (1 - mixing) * common)

    def discard_flights(self) -> None:
        """Discard averages in flight."""
        for flight in self._flights.values():
            if flight.done is not None:
                flight.done.result()
        self._flights.clear()

    @torch.no_grad()
    def reset_common(self, parts: Mapping[str, Tensor]) -> None:
        """Set the common parameters to this replica's, which equal those of all replicas."""
        for name, common in self._common.items():
            common.copy_(parts[name])

    # ---- state -------------------------------------------------------------------------------------------------------

    def common(self) -> dict[str, Tensor]:
        """Return this rank's common parameters by name; no copies."""
        return {name: parameter.detach() for name, parameter in self._common.items()}

    def momentum(self) -> dict[str, Tensor]:
        """Return momentum buffers by parameter name, where present; no copies."""
        return {
            name: buffer
            for name, parameter in self._common.items()
            if (buffer := self._optimizer_of(name).state.get(parameter, {}).get("momentum_buffer")) is not None
        }

    def make_momentum(self, name: str) -> None:
        """Create the momentum buffer of a common parameter."""
        parameter = self._common[name]
        self._optimizer_of(name).state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def forget_momentum(self) -> None:
        """Clear momentum."""
        for fragment in self._fragments.values():
            fragment.optimizer.state.clear()

    def compression(self) -> dict[str, Tensor]:
        """Return this rank's compressor state by fragment, bucket and key; no copies."""
        return {
            f"{index}/{number}/{key}": value
            for index, fragment in sorted(self._fragments.items())
            for number, state in enumerate(fragment.states)
            for key, value in state.items()
        }

    def num_bytes(self) -> int:
        """Return the bytes of common parameters, momentum and compressor state."""
        tensors = (*self._common.values(), *self.momentum().values(), *self.compression().values())
        return sum(tensor.nbytes for tensor in tensors)

    # ---- internals ---------------------------------------------------------------------------------------------------

    def _add(self, parts: Mapping[str, Tensor]) -> None:
        by_fragment: dict[int, dict[str, Tensor]] = {}
        for name, part in parts.items():
            dtype = torch.promote_types(part.dtype, torch.float32)
            device = torch.device("cpu") if self._options.offload_outer else part.device
            common = nn.Parameter(part.detach().to(device, dtype, copy=True))
            self._common[name] = common
            by_fragment.setdefault(self._fragment_of(name), {})[name] = part
        for index, of_fragment in by_fragment.items():
            parameters = [self._common[name] for name in of_fragment]
            if index not in self._fragments:
                o = self._options
                self._fragments[index] = _Fragment(
                    torch.optim.SGD(parameters, lr=o.outer_lr, momentum=o.outer_momentum, nesterov=o.outer_nesterov)
                )
            else:
                self._fragments[index].optimizer.add_param_group({"params": parameters})
            buckets = self._mean.buckets(of_fragment)
            self._fragments[index].buckets += buckets
            self._fragments[index].states += [self._new_state(bucket) for bucket in buckets]

    def _new_state(self, bucket: Bucket) -> State:
        if self._compressor is None or self._group is None:
            return {}
        return self._compressor.new_state(bucket.shapes, dist.get_world_size(self._group), self._mean.device)

    def _add_new(self, parts: Mapping[str, Tensor]) -> None:
        new = {name: part for name, part in parts.items() if name not in self._common}
        if new:
            self._mean.average(new)
            self._add(new)

    def _average(self, bucket: Bucket, state: State, flat: Tensor) -> None:
        if self._group is None:
            return
        if self._compressor is None:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._group)
            return
        exact = flat.float()  # shares memory if float32
        self._compressor.average(exact, bucket.shapes, self._group, state)
        if exact is not flat:
            flat.copy_(exact)

    def _step(self, optimizer: torch.optim.SGD, flight: _Flight) -> None:
        for bucket, flat in zip(flight.buckets, flight.gradients, strict=True):
            for name, piece in bucket.split(flat):
                common = self._common[name]
                common.grad = piece.to(common.device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _names(self, fragment: int) -> Iterator[str]:
        return (name for name in self._common if self._fragment_of(name) == fragment)

    def _optimizer_of(self, name: str) -> torch.optim.SGD:
        return self._fragments[self._fragment_of(name)].optimizer

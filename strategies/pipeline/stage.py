"""Pipeline stage for torch's schedules with buffers per micro-batch, for dynamic shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from trainwright.core.torch_internals import _PipelineStageBase, stage_backward_input, stage_backward_weight
from trainwright.strategies.pipeline.value_spec import SpecRegistry, TensorSpec, ValueSpec, to_spec

# Short name of a torch schedule action, stage, micro-batch.
Place = tuple[str, int, int]

# Kind of a computation -> the kind of its receive, and the kind and relative stage of the matching send.
_RECEIVES = {"F": ("RECV_F", "SEND_F", -1), "B": ("RECV_B", "SEND_B", 1), "I": ("RECV_B", "SEND_B", 1)}
# Kind of a send -> the kind and relative stage of its receive.
_TAKEN = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


def releasable_sends(orders: Mapping[int, Sequence[Place]], rank: int) -> dict[Place, list[Place]]:
    """Return, for each computation of a rank, the sends whose receivers have started by then.

    Each send is listed at the first such computation, or not at all.

    Args:
        orders: actions of every rank, in order.
        rank: of the pipeline.
    """
    where = {place: (holder, at) for holder, order in orders.items() for at, place in enumerate(order)}
    # Of each other rank: own computations in order, and its position when it sent their input.
    heard: dict[int, list[tuple[int, Place, int]]] = {}
    for at, place in enumerate(orders[rank]):
        kind, stage, part = place
        receive, send, step = _RECEIVES.get(kind, ("", "", 0))
        if (receive, stage, part) in where:
            sender, sent_at = where[send, stage + step, part]
            heard.setdefault(sender, []).append((at, place, sent_at))
    found: dict[Place, list[Place]] = {}
    for at, place in enumerate(orders[rank]):
        kind, stage, part = place
        if kind in _TAKEN:
            receive, step = _TAKEN[kind]
            receiver, taken_at = where[receive, stage + step, part]
            known = (then for later, then, sent_at in heard.get(receiver, ()) if later > at and sent_at > taken_at)
            first = next(known, None)
            if first is not None:
                found.setdefault(first, []).append(place)
    return found


class Sends:
    """Sends of one rank in one step.

    Args:
        taken: from :func:`releasable_sends`.
    """

    def __init__(self, taken: Mapping[Place, Sequence[Place]]) -> None:
        self._taken = taken
        self._works: dict[Place, list[Any]] = {}

    def begin(self, place: Place, ops: Sequence[dist.P2POp]) -> None:
        """Start sending; the handles hold the tensors."""
        self._works[place] = [op.op(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops]

    def computes(self, place: Place) -> None:
        """Release sends known to be received when a computation starts."""
        for sent in self._taken.get(place, ()):
            self._wait(sent)

    def finish(self) -> None:
        """Wait for all other sends, at the end of the step."""
        for sent in list(self._works):
            self._wait(sent)

    def _wait(self, sent: Place) -> None:
        for work in self._works.pop(sent, ()):
            work.wait()


# forward(stage, micro-batch, received structure) -> output structure, or the loss (or None) on the last stage.
Forward = Callable[[int, int, Any], Any]


class Activation(NamedTuple):
    """Output of a stage, except the last, for one micro-batch."""

    form: ValueSpec
    tensors: tuple[Tensor, ...]


class _Enter(torch.autograd.Function):
    """View of a received leaf that may be changed in place, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class UserStepStage(_PipelineStageBase):
    """Stage driven by torch's schedules.

    Overrides the data plane of torch's stage: received values are described by a :class:`SpecRegistry`, so shapes may
    vary between micro-batches and steps, and any structure can be sent.

    Args:
        submodule: registers exactly the stage's parameters.
        index: of the stage.
        count: number of stages.
        device: of received tensors.
        group: ranks of the pipeline.
        ranks: rank in the group of each stage.
        registry: specs of what stages send.
        source: description of the output, for messages.
        sent_as: dtype in which fp32 tensors of at least two dims (hidden states), and their gradients, are sent to
            another rank; ``None``: their own.

    Attributes:
        signatures: of the micro-batches of this step, keys of their specs.
        run_step: runs the user's step.
        sends: of this step; ``None``: left to torch's schedule.
        run_tail: runs the code after the last stage's blocks on the outputs of all micro-batches, and returns their
            gradients; ``None``: it runs within each.
    """

    def __init__(
        self,
        submodule: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        registry: SpecRegistry,
        source: str,
        sent_as: torch.dtype | None = None,
    ) -> None:
        super().__init__(submodule, index, count, device, group)
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        self.signatures: list[Any] = []
        self._registry, self._source, self._sent_as = registry, source, sent_as
        self._inputs: dict[int, Activation] = {}
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._deferred: dict[int, Any] = {}
        self.run_step: Forward
        self.sends: Sends | None = None
        self.run_tail: Callable[[UserStepStage, list[Activation]], list[tuple[Tensor | None, ...]]] | None = None
        self._ended: dict[int, Activation] = {}

    # Set-up: nothing needs to be known in advance

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}
        return None

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """Clear all state of the last step, also after an error."""
        kept: tuple[Any, ...] = (
            self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner, self.output_chunks,
            self._inputs, self._gradients, self._deferred, self._ended,
        )  # fmt: skip
        for cache in kept:
            cache.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the strategy reduces gradients."""

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive from the previous stage."""
        if self.is_first:
            return []
        form = self._registry.look_up(self.stage_index - 1, self.signatures[fwd_chunk_id])
        tensors = tuple(self._buffer(tensor, self.device) for tensor in form.tensors)
        self._inputs[fwd_chunk_id] = Activation(form, tensors)
        return self._ops(dist.irecv, tensors, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of a previous stage on the same rank."""
        form, tensors = prev_stage_outputs
        self._inputs[mb_index] = Activation(form, tuple(t.detach() for t in tensors))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = False
    ) -> Any:
        """Run the user's step on one micro-batch."""
        self._computes("F", fwd_chunk_id)
        received: Any = None
        leaves: tuple[Tensor, ...] = ()
        if not self.is_first:
            received, leaves = self._enter(fwd_chunk_id)
        output = self.run_step(self.stage_index, fwd_chunk_id, received)
        if self.is_last and self.run_tail is None:
            loss = output if output is not None else torch.zeros((), device=self.device)
            self.fwd_cache[fwd_chunk_id] = (None, cast("list[Tensor]", leaves))
            return loss
        form, tensors = to_spec(output, self._source)
        if self.is_last:
            self.fwd_cache[fwd_chunk_id] = (tensors, cast("list[Tensor]", leaves))
            self._end(fwd_chunk_id, Activation(form, tensors))
            return torch.zeros((), device=self.device)
        if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self._registry.publish(self.stage_index, self.signatures[fwd_chunk_id], form, self._source)
        self.fwd_cache[fwd_chunk_id] = (tensors, cast("list[Tensor]", leaves))
        return Activation(form, tensors)

    def _end(self, chunk: int, output: Activation) -> None:
        """Run the code after the blocks once all micro-batches are there."""
        assert self.run_tail is not None
        self._ended[chunk] = output
        if len(self._ended) == len(self.signatures):
            outputs = [self._ended[each] for each in sorted(self._ended)]
            self._ended.clear()
            self._gradients.update(enumerate(self.run_tail(self, outputs)))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send this stage's output to the next one."""
        if self.is_last:
            return []
        tensors = [self._to_send(t.detach()) for t in self.fwd_cache[fwd_chunk_id][0]]
        return self._sent("SEND_F", fwd_chunk_id, self._ops(dist.isend, tensors, self.stage_index + 1))

    def _enter(self, chunk: int) -> tuple[Any, tuple[Tensor, ...]]:
        form, received = self._inputs.pop(chunk)
        tensors = [tensor.to(spec.dtype) for tensor, spec in zip(received, form.tensors, strict=True)]
        leaves = leaves_of(form, tensors, self.has_backward and torch.is_grad_enabled())
        return form.build([_Enter.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]), leaves

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of this stage's outputs."""
        if not self.has_backward or self.is_last:
            return []
        gradients = tuple(
            self._buffer(t, t.device) if t.requires_grad else None for t in self.fwd_cache[bwd_chunk_id][0]
        )
        self._gradients[bwd_chunk_id] = gradients
        return self._ops(dist.irecv, [g for g in gradients if g is not None], self.stage_index + 1)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of a next stage on the same rank."""
        self._gradients[mb_index] = next_stage_bwd_outputs

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of this stage's inputs; ``None`` where there is none."""
        return self.bwd_cache.pop(mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of this stage's inputs to the previous stage."""
        if not self.has_backward or self.is_first:
            return []
        gradients = [self._to_send(g) for g in self.bwd_cache.pop(bwd_chunk_id) if g is not None]
        return self._sent("SEND_B", bwd_chunk_id, self._ops(dist.isend, gradients, self.stage_index - 1))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward of one micro-batch; without ``full_backward`` only for the inputs."""
        if not self.has_backward:
            return
        self._computes("B" if full_backward else "I", bwd_chunk_id)
        outputs, leaves = self.fwd_cache.pop(bwd_chunk_id)
        gradients: Sequence[Tensor | None]
        is_loss = self.is_last and self.run_tail is None
        if is_loss:
            outputs, gradients = (loss,), (None,)
        else:
            gradients = self._gradients.pop(bwd_chunk_id)
        pairs = [
            (output, None if gradient is None else gradient.to(output.dtype))
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and (gradient is not None or is_loss)
        ]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        if full_backward:
            self._backward(pairs)
        elif inputs and pairs:
            self._deferred[bwd_chunk_id] = ("weights", self._input_backward(pairs, inputs))
        else:
            self._deferred[bwd_chunk_id] = ("all", pairs)
        self.bwd_cache[bwd_chunk_id] = tuple(_pop_gradient(leaf) for leaf in leaves)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the weight gradients of a backward that was not full."""
        if not self.has_backward:
            return
        kind, state = self._deferred.pop(bwd_chunk_id)
        if kind == "all":
            self._backward(state)
            return
        # Groups of weights may share parts of the graph, which is freed with the state right after.
        stage_backward_weight(self.submod.parameters(), state, retain_graph=True)

    def _backward(self, pairs: list[tuple[Tensor, Tensor | None]]) -> None:
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for output, _ in pairs:
            # Torch's schedules keep losses, and this rank's next stage may keep outputs, until the end of the step.
            if output.grad_fn is not None and not output._is_view():
                output.detach_()

    def _input_backward(self, pairs: list[tuple[Tensor, Tensor | None]], inputs: list[Tensor]) -> Any:
        leaves = {get_gradient_edge(leaf).node for leaf in inputs}
        separable = all(_depends(output, leaves) for output, _ in pairs)
        # Torch detaches outputs in place to free memory, which views do not support.
        outputs = [output if not output._is_view() else output.clone() for output, _ in pairs]
        gradients = [torch.ones_like(o) if g is None else g for o, (_, g) in zip(outputs, pairs, strict=True)]
        edges = [get_gradient_edge(output) for output in outputs]
        _, groups = stage_backward_input(outputs, gradients, cast("list[Any]", inputs), self.submod.parameters())
        if separable and _are_disjoint(groups):
            return groups
        self._weight_backward(edges, gradients)
        return []

    def _weight_backward(self, edges: list[GradientEdge], gradients: list[Tensor]) -> None:
        """Compute all weight gradients at once, where torch's groups would double-count or miss some."""
        parameters = list(self.submod.parameters())
        found = torch.autograd.grad(edges, parameters, gradients, retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _dtype_sent(self, value: Tensor | TensorSpec) -> torch.dtype:
        is_hidden = value.dtype == torch.float32 and len(value.shape) > 1
        return self._sent_as if is_hidden and self._sent_as is not None else value.dtype

    def _buffer(self, value: Tensor | TensorSpec, device: torch.device) -> Tensor:
        return torch.empty(value.shape, dtype=self._dtype_sent(value), device=device)

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype_sent(tensor)).contiguous()

    def _computes(self, kind: str, chunk: int) -> None:
        if self.sends is not None:
            self.sends.computes((kind, self.stage_index, chunk))

    def _sent(self, kind: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return the sends left to torch's schedule: none if they are made here."""
        if self.sends is None:
            return ops
        self.sends.begin((kind, self.stage_index, chunk), ops)
        return []

    def _ops(self, op: Any, tensors: Iterable[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        return [dist.P2POp(op, tensor, group=self.group, group_peer=peer) for tensor in tensors]


def leaves_of(form: ValueSpec, tensors: Iterable[Tensor], with_gradients: bool = True) -> tuple[Tensor, ...]:
    """Return the leaves of the graph of a stage that gets these tensors.

    Args:
        form: spec of the previous stage's output.
        tensors: in its order.
        with_gradients: whether a backward follows.
    """
    pairs = zip(tensors, form.tensors, strict=True)
    return tuple(tensor.detach().requires_grad_(each.requires_grad and with_gradients) for tensor, each in pairs)


def _depends(output: Tensor, leaves: set[Node]) -> bool:
    waiting, seen = [get_gradient_edge(output).node], set()
    while waiting:
        node = waiting.pop()
        if node in leaves:
            return True
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False


def _are_disjoint(groups: list[dict[str, Any]]) -> bool:
    """Return whether weights, and the places where their paths meet the inputs' paths, are in one torch group each.

    Weights that meet in several places (a repeatedly used part of the graph that only weights lead to) count as shared:
    torch's clamping of such places is exact only if none lies behind another.
    """
    weights = [weight for group in groups for weight in group["params"]]
    places = [place for group in groups for place in group["intermediates"]]
    several = any(len(group["params"]) > 1 and len(group["intermediates"]) > 1 for group in groups)
    return len(set(weights)) == len(weights) and len(set(places)) == len(places) and not several


def _pop_gradient(leaf: Tensor) -> Tensor | None:
    if not leaf.requires_grad:
        return None
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else gradient

"""``loss_weighting="tokens"``: every valid token of the global batch has the same weight.

A loss that is a mean over tokens is divided by the number of tokens of its micro-batch. If micro-batches differ in that
number (padding, ``ignore_index``), the mean of such means over micro-batches and ranks is not the mean over the global
batch, and depends on the layout. Here the loss of micro-batch k of rank r is differentiated as ``n_kr / reference``
times its mean, and once the counts of all ranks have been summed, gradients are multiplied by ``reference x ranks /
N``, which gives the gradient of the mean over all N tokens.

The reference keeps weights near 1, so that scaled losses stay in the range of fp16. It is a power of two, so that it
does not affect rounding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn

from trainwright.core.config.targets import function_at
from trainwright.core.torch_internals import FakeTensor, legacy_get_string
from trainwright.strategies.base.strategy import LayoutStrategy
from trainwright.strategies.contract.gradients import local_tensor, widest
from trainwright.strategies.contract.registry import strategy_names
from trainwright.strategies.pipeline.tracing.sample_functions import valid_targets

LossWeighting = Literal["micro_batch", "tokens"]
TokenCount = Callable[[Any], Any]

LOSS_WEIGHTINGS = ("micro_batch", "tokens")

# Functions of torch.nn.functional that average over the targets that are not ignore_index.
_OBSERVED = ("cross_entropy", "nll_loss", "linear_cross_entropy")

_ADVICE = (
    "Give the number of valid tokens with token_count='package.module:function', a function of the batch, or use "
    "loss_weighting='micro_batch', Lightning's mean over micro-batches."
)


class Observation:
    """The valid tokens of one forward pass.

    Attributes:
        count: scalar (of the ``widest`` dtype) on the device of the targets, ``None`` before a loss. With class
            weights, the sum of the weights of valid targets.
    """

    def __init__(self) -> None:
        self.count: Tensor | None = None


class TokenWeights:
    """Weights micro-batches by their valid tokens; one object per run.

    For every optimizer step::

        weights.begin()
        for batch in micro_batches:
            with weights.observe(batch) as seen:
                loss = module.training_step(batch)  # a mean over valid tokens
            weights.weight(loss, seen).backward()   # gradients are averaged over data ranks as usual
        weights.start()                             # may precede the last backward, to overlap with it
        weights.finish()                            # gradients are now those of the mean over all tokens

    A rank without a loss (a pipeline stage that is not the last) calls only ``begin``, ``start`` and ``finish``.
    ``start`` is one all-reduce of four numbers over all ranks.

    Args:
        strategy: whose optimizers' gradients are scaled, and which knows the data ranks.
        token_count: batch -> number of tokens over which ``training_step`` averages (int, float or scalar tensor);
            ``None`` observes ``cross_entropy``, ``nll_loss`` and ``linear_cross_entropy`` of ``torch.nn.functional``
            (also as ``nn.CrossEntropyLoss``, or imported by name) and counts the class indices that are not
            ``ignore_index``. Calls without gradient do not count.

    Attributes:
        step_loss: mean over all valid tokens of the last optimizer step, fp32 scalar, equal on every rank; 0 without
            any.
        step_tokens: valid tokens of the last optimizer step over all data ranks, float64 scalar.
    """

    def __init__(self, strategy: LayoutStrategy, token_count: TokenCount | None = None) -> None:
        self.strategy = strategy
        self.step_loss: Tensor | None = None
        self.step_tokens: Tensor | None = None
        self._token_count = token_count
        self._seen: Observation | None = None
        self._open: Observation | None = None
        self._reference: Tensor | None = None
        self._sums: list[Tensor] = []
        self._pending: tuple[Tensor, Any] | None = None
        self._places: list[tuple[dict[str, Any], str, Any, Any]] | None = None

    # ---- per micro-batch ------------------------------------------------------------------------------------------

    @contextmanager
    def observe(self, batch: Any = None) -> Iterator[Observation]:
        """Count the valid tokens of the forward pass inside.

        Args:
            batch: for ``token_count``.

        Raises:
            RuntimeError: inside, at a second loss or one that is not a mean over class indices.
        """
        seen = self._seen = Observation()
        if self._token_count is not None:
            seen.count = self._as_count(self._token_count(batch))
            yield seen
            return
        before = self._watch(seen)
        try:
            yield seen
        finally:
            self._watch(before)

    def _watch(self, seen: Observation | None) -> Observation | None:
        """Count calls for ``seen`` (``None``: not at all) from now on, and return the previous one."""
        before, self._open = self._open, seen
        if self._places is None:
            self._places = self._find_places()
        for namespace, key, original, replacement in self._places:
            namespace[key] = original if seen is None else replacement
        return before

    def _find_places(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """Return the locations of the functions to observe: in torch, and in modules that imported them by name.

        Each gets one replacement for the whole run, since torch.compile guards by the identity of what it calls.
        """
        functions = [getattr(F, name) for name in _OBSERVED if hasattr(F, name)]
        by_id = {id(function): (function, self._replacement(function)) for function in functions}
        namespaces = [module.__dict__ for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        return [
            (namespace, key, *by_id[id(value)])
            for namespace in namespaces
            for key, value in list(namespace.items())
            if id(value) in by_id
        ]

    def weight(
        self, loss: Tensor, seen: Observation | None = None, padding: bool = False, share: float = 1.0
    ) -> Tensor:
        """Return what to differentiate instead of ``loss``, the mean over the valid tokens of one micro-batch.

        The first call of a run is a collective of the data ranks.

        Args:
            loss: scalar.
            seen: of the micro-batch; default the latest.
            padding: the batch only matches collectives and has no weight.
            share: of the samples of the batch that ``seen`` is of; ``loss`` is its contribution to that batch's.

        Raises:
            RuntimeError: if no loss was observed.
        """
        seen = seen or self._seen
        if seen is None or seen.count is None:
            raise RuntimeError(
                "loss_weighting='tokens' found no call of cross_entropy or nll_loss of torch.nn.functional (with a "
                "gradient) in training_step, so it cannot count valid tokens. " + _ADVICE
            )
        count = torch.zeros_like(seen.count) if padding else seen.count * share
        if self._is_alone:
            self._reference = count.clamp(min=1)
        elif self._reference is None:
            self._reference = self._first_reference(count)
        one = torch.ones_like(count)
        self._sums.append(torch.stack((count, count * loss.detach().to(count.dtype).reshape(()), one, self._reference)))
        return loss * (count / self._reference).to(torch.promote_types(loss.dtype, torch.float32))

    def apply(self, result: ClosureResult, output: Any, padding: bool) -> None:
        """Replace the loss that ``result`` is differentiated by; the reported loss stays."""
        if result.closure_loss is not None:
            loss = output if isinstance(output, Tensor) else output["loss"]
            result.closure_loss = self.weight(loss, padding=padding)

    @property
    def _is_alone(self) -> bool:
        """True if a step is one micro-batch of one rank, whose loss has its final weight before backward."""
        module, traits = self.strategy.lightning_module, self.strategy.traits
        assert module is not None
        return not _several_ranks() and not traits.backward_in_step and module.trainer.accumulate_grad_batches == 1

    # ---- per optimizer step ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Drop the micro-batches so far, as gradients are zeroed."""
        self._sums, self._pending = [], None

    @torch.no_grad()
    def start(self) -> None:
        """Start to sum over all ranks the counts and losses of this step; a collective."""
        if self._sums:
            parts = torch.stack(self._sums)
            vector = parts.sum(0)
            # Flags and references are not summed over micro-batches.
            vector[2:] = parts[-1, 2:]
        else:
            device = self.strategy.root_device
            vector = torch.zeros(4, dtype=widest(device), device=device)
        self._pending = vector, dist.all_reduce(vector, async_op=True) if _several_ranks() else None

    @torch.no_grad()
    def finish(self) -> None:
        """Scale the gradients to those of the mean over all valid tokens of the step."""
        if self._pending is None:
            self.start()
        assert self._pending is not None
        vector, work = self._pending
        if work is not None:
            work.wait()
        self.begin()
        tokens, loss, observers, references = vector.unbind()
        ranks = self.strategy.ranks.num_data_ranks
        # Ranks along other axes hold copies of a data rank's numbers, or none.
        copies, reference = observers / ranks, references / observers
        nothing = tokens == 0
        self.step_tokens = torch.where(nothing, tokens, tokens / copies)
        self.step_loss = torch.where(nothing, tokens, loss / tokens).float()
        scale = torch.where(nothing, torch.ones_like(tokens), reference * ranks / self.step_tokens)
        if not self._is_alone:
            self._scale_gradients(scale.float())
        self._reference = torch.where(nothing, torch.ones_like(tokens), _power_of_two(self.step_tokens / ranks))

    def _scale_gradients(self, scale: Tensor) -> None:
        module = self.strategy.lightning_module
        assert module is not None
        found: dict[int, Tensor] = {}
        for parameter in (*module.parameters(), *self.strategy._optimized_parameters()):
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                found[id(gradient)] = gradient
        dense = [gradient for gradient in found.values() if gradient.layout == torch.strided]
        for device in dict.fromkeys(gradient.device for gradient in dense):
            torch._foreach_mul_([gradient for gradient in dense if gradient.device == device], scale.to(device))
        for gradient in found.values():
            if gradient.layout != torch.strided:
                gradient.mul_(scale.to(gradient.device))

    def _first_reference(self, count: Tensor) -> Tensor:
        """Return the reference for the first step: about the tokens of a step per rank, agreed between data ranks."""
        module = self.strategy.lightning_module
        assert module is not None
        total = self.strategy.reduce(count.clone(), reduce_op="sum")
        each = total * module.trainer.accumulate_grad_batches / self.strategy.ranks.num_data_ranks
        return torch.where(total > 0, _power_of_two(each), torch.ones_like(each))

    # ---- counting -------------------------------------------------------------------------------------------------

    def _as_count(self, given: Any) -> Tensor:
        device = self.strategy.root_device
        count = torch.as_tensor(given, dtype=widest(device), device=device)
        if count.numel() != 1:
            raise ValueError(
                f"token_count returned a tensor of shape {tuple(count.shape)}; it must return one number, the valid "
                "tokens of the batch, for example int((batch['labels'] != -100).sum())."
            )
        return count.reshape(())

    def _replacement(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        signature = inspect.signature(function)

        @torch.compiler.disable
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            return self._counted(function, signature, args, kwargs)

        return counted  # type: ignore[no-any-return]

    def _counted(
        self, original: Callable[..., Tensor], signature: inspect.Signature, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return ``original(*args, **kwargs)`` and count its valid targets."""
        if self._open is None:  # bound by name while another step ran
            return original(*args, **kwargs)
        # Nested calls do not count and need the original, as torch's functions pass themselves to tensor subclasses by
        # their global name.
        seen = self._watch(None)
        assert seen is not None
        try:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            if not torch.is_grad_enabled() or not call.arguments["input"].requires_grad:
                return original(*args, **kwargs)
            _refuse_uncountable(original.__name__, seen, call.arguments)
            seen.count = count = valid_targets(call.arguments)
            return _mean(original, call, count)
        finally:
            self._watch(seen)


def _refuse_uncountable(name: str, seen: Observation, arguments: dict[str, Any]) -> None:
    if seen.count is not None:
        raise RuntimeError(
            f"loss_weighting='tokens' met a second loss in one training_step, torch.nn.functional.{name}, maybe over "
            "other tokens. Compute what is not part of the loss under torch.no_grad(). " + _ADVICE
        )
    reduction = arguments["reduction"]
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        reduction = legacy_get_string(arguments["size_average"], arguments["reduce"], emit_warning=False)
    if reduction != "mean":
        raise RuntimeError(
            f"loss_weighting='tokens' met torch.nn.functional.{name}(reduction={reduction!r}), but supports only means "
            "(reduction='mean'), whose divisor is known. " + _ADVICE
        )
    if arguments["target"].is_floating_point():
        raise RuntimeError(
            f"loss_weighting='tokens' met torch.nn.functional.{name} with probabilities as targets; it counts class "
            "indices (integers). " + _ADVICE
        )


_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def _mean(original: Callable[..., Tensor], call: inspect.BoundArguments, count: Tensor) -> Tensor:
    """Return the mean, 0 without valid targets."""
    if original.__name__ != "linear_cross_entropy" and type(call.arguments["input"]) in _PLAIN:
        mean: Tensor = original(*call.args, **call.kwargs)
        return torch.where(count > 0, mean, torch.zeros_like(mean))
    # For other kinds of logits, backward through an empty mean may turn zero gradients into NaN.
    call.arguments.update(reduction="sum", **dict.fromkeys({"size_average", "reduce"} & call.arguments.keys()))
    total: Tensor = original(*call.args, **call.kwargs)
    return total / torch.where(count > 0, count, torch.ones_like(count)).to(total.dtype)


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _power_of_two(value: Tensor) -> Tensor:
    """Return the least power of two above a positive scalar, exactly."""
    mantissa, _ = torch.frexp(value)
    return value / mantissa


def make_token_weights(
    strategy: object, loss_weighting: str, token_count: str | TokenCount | None
) -> TokenWeights | None:
    """Return the :class:`TokenWeights` for the arguments of a Trainer; ``None`` for ``"micro_batch"``.

    Raises:
        ValueError: if they are invalid.
    """
    if loss_weighting not in LOSS_WEIGHTINGS:
        raise ValueError(f"loss_weighting={loss_weighting!r} (allowed: 'micro_batch', 'tokens')")
    if loss_weighting == "micro_batch":
        if token_count is not None:
            raise ValueError(
                f"token_count={token_count!r} is used only with loss_weighting='tokens'. Set that too, or remove it."
            )
        return None
    if not isinstance(strategy, LayoutStrategy):
        raise ValueError(
            f"loss_weighting='tokens' is not supported with {type(strategy).__name__}, whose gradients cannot be "
            f"rescaled. Use one of the strategies {', '.join(strategy_names())}."
        )
    if not strategy.traits.steps_are_collective:
        raise ValueError(
            f"loss_weighting='tokens' needs synchronous steps, which {type(strategy).__name__} with these options does "
            "not make. Use loss_weighting='micro_batch', or a synchronous strategy."
        )
    what = "a function of the batch that returns its valid tokens"
    count = function_at("token_count", token_count, what) if isinstance(token_count, str) else token_count
    return TokenWeights(strategy, count)


def refuse_impossible(weights: TokenWeights, module: LightningModule) -> None:
    """Raise if the losses of ``module`` cannot be weighted, once the strategy is set up.

    Raises:
        ValueError: with manual optimization, or if the strategy runs backward itself without weighting (trait
            ``weighs_micro_batches``).
    """
    strategy = weights.strategy
    if not module.automatic_optimization:
        raise ValueError(
            f"loss_weighting='tokens' needs automatic optimization, but {type(module).__name__} sets "
            "automatic_optimization=False. Weight its losses in training_step, or set loss_weighting='micro_batch'."
        )
    if strategy.traits.backward_in_step and not strategy.traits.weighs_micro_batches:
        raise ValueError(
            f"loss_weighting='tokens' is not supported by {type(strategy).__name__} with the layout {strategy.layout}. "
            "Use a layout with pipeline=1, or set loss_weighting='micro_batch'."
        )

"""Results and logs of the last stage, merged over micro-batches and sent to every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.checkpoint.exchange.plain_bytes import pack, unpack
from trainwright.checkpoint.format.tree import UnsupportedValueError
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.pipeline.tracing.whole_batch import Logged
from trainwright.strategies.pipeline.value_spec import ValueChannel

_REDUCTIONS: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}


class StepVerdict(NamedTuple):
    """What the last stage found in a step.

    Attributes:
        problem: why its micro-batches do not add up to the whole batch; ``""``: they do.
        is_redone: whether the step is repeated another way.
        draws: whether the step draws random numbers outside of the blocks.
    """

    problem: str = ""
    is_redone: bool = False
    draws: bool = False


@dataclass
class _Logged:
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: list[Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    batch_size: int | None = None

    def mean(self) -> Tensor:
        """Return the mean of values over samples."""
        weights = torch.tensor(self.weights, dtype=torch.float64, device=self.values[0].device)
        return (torch.stack(self.values) * weights).sum() / weights.sum()


class LogRecorder:
    """Results of one step on the rank of the last stage.

    Args:
        sizes: samples of each micro-batch.
        device: of the results.
        module: the user's.
        known: what the whole batch logs; empty if there is one micro-batch.
    """

    def __init__(self, sizes: list[int], device: torch.device, module: nn.Module, known: Mapping[str, Logged]) -> None:
        self._known = known
        self.sizes, self.device, self.module = sizes, device, module
        self.metrics: dict[str, tuple[str, dict[str, Any]]] = {}
        self.current: int | None = None
        self.logs: dict[str, _Logged] = {}
        self._outputs: dict[int, Any] = {}

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        """Record a log of the current micro-batch; ignored in passes of other stages.

        Raises:
            TypeError: if the value is not a number, a one-element tensor or a metric logged per epoch.
        """
        if self.current is None:
            return
        if isinstance(value, Metric) and kwargs.get("on_step") is False:
            where = self._name_of(value)
            if where is not None:
                self.metrics[name] = (where, {key: each for key, each in kwargs.items() if key != "batch_size"})
                return
        if not isinstance(value, (int, float, Tensor)) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError(
                f"self.log({name!r}, ...) was given a {type(value).__name__}. In the micro-batches of a pipeline, log "
                f"a number or a tensor of one element; of a metric object, its epoch value (self.log({name!r}, "
                "self.metric, on_step=False, on_epoch=True), the metric an attribute of the module) or its batch value "
                f"(self.log({name!r}, self.metric(prediction, target)))."
            )
        size = kwargs.pop("batch_size", None)
        whole = self._known.get(name, Logged(None, size))
        logged = self.logs.setdefault(name, _Logged())
        logged.kwargs, logged.batch_size = kwargs, whole.batch_size
        logged.values.append(_number(value if whole.value is None else whole.value, self.device))
        logged.weights.append(self.sizes[self.current])

    def _name_of(self, metric: Metric) -> str | None:
        # Lightning fills this at the first log of a metric.
        known: dict[int, str] = getattr(self.module, "_metric_attributes", None) or {}
        if id(metric) in known:
            return known[id(metric)]
        return next((name for name, part in self.module.named_modules() if part is metric), None)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Record a micro-batch's output without gradient; returns its loss.

        Raises:
            TypeError: if it is not a tensor, a dict with a ``loss``, or ``None``.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if output is not None and not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step returned {type(output).__name__}"
                + (f" with the keys {list(output)}" if isinstance(output, Mapping) else "")
                + ". Return a tensor (the loss), a dict with a tensor 'loss', or None."
            )
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise TypeError(
                f"training_step returned a loss of shape {tuple(loss.shape)}. Return one number: loss.mean()."
            )
        kept = dict(output) if isinstance(output, Mapping) else output
        self._outputs[micro_batch] = pytree.tree_map_only(Tensor, Tensor.detach, kept)
        return loss

    def merged_output(self) -> Any:
        """Return the output of the whole batch."""
        outputs = [self._outputs.get(part) for part in range(len(self.sizes))]
        if all(output is None for output in outputs):
            return None
        if not any(isinstance(output, dict) for output in outputs):
            return self._mean(outputs)
        keys = dict.fromkeys(key for output in outputs if output is not None for key in output)
        return {key: self._merged_entry([(output or {}).get(key) for output in outputs]) for key in keys}

    def _merged_entry(self, values: list[Any]) -> Any:
        if all(_is_scalar(value) for value in values):
            mean = self._mean(values)
            return mean if any(isinstance(value, Tensor) for value in values) else float(mean)
        if all(
            isinstance(value, Tensor) and value.ndim and len(value) == size
            for value, size in zip(values, self.sizes, strict=True)
        ):
            return torch.cat(values)
        return values if len(values) > 1 else values[0]

    def _mean(self, values: list[Any]) -> Tensor:
        dtype = next((value.dtype for value in values if isinstance(value, Tensor)), torch.float64)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        parts = [
            _number(value, self.device) * size
            for value, size in zip(values, self.sizes, strict=True)
            if value is not None
        ]
        return (torch.stack(parts).sum() / sum(self.sizes)).to(dtype)


class Publisher:
    """Sends the results of a step from the last stage to all ranks of the pipeline.

    Names, keyword arguments and plain values are sent only when they change.

    Args:
        group: ranks of the pipeline.
        source: rank in the group of the last stage.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._source, self._device = source, device
        self._is_source = dist.get_rank(group) == source
        self._channel = ValueChannel(group, device)
        self._known: tuple[bytes, Any] = (b"", None)

    def publish(self, recorder: LogRecorder, log: Callable[..., Any], verdict: StepVerdict) -> tuple[Any, StepVerdict]:
        """Return output and verdict of the last stage, and log recorded values, on every rank. A collective.

        Args:
            recorder: of the step; empty on other ranks.
            log: called as ``log(name, value, **kwargs)``, unless there is a problem.
            verdict: of this rank.

        Raises:
            TypeError: on every rank, if a result cannot be sent.
        """
        received = self._channel.broadcast(
            self._source, self._describe(recorder, verdict) if self._is_source else None, "training_step"
        )
        if isinstance(received, str):
            raise TypeError(received)
        description, sent, found = received
        verdict = StepVerdict(*found)
        if verdict.problem or verdict.is_redone:
            return None, verdict
        if description != self._known[0]:
            self._known = description, unpack(description)
        is_dict, entries, logs, metrics = self._known[1]
        values = iter(sent)
        for name, where, kwargs in metrics:
            log(name, recorder.module.get_submodule(where), **kwargs)
        output = {key: self._entry(how, plain, values) for key, how, plain in entries}
        for name, kwargs, is_sized in logs:
            value = next(values).to(torch.get_default_dtype())
            log(name, value, **kwargs, **({"batch_size": round(next(values).item())} if is_sized else {}))
        return (output if is_dict else output.get("loss")), verdict

    def _entry(self, how: str, plain: Any, values: Iterator[Tensor]) -> Any:
        if how == "plain":
            return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), plain)
        return next(values).item() if how == "float" else next(values)

    def _describe(self, recorder: LogRecorder, verdict: StepVerdict) -> tuple[Any, ...] | str:
        """Return description, values and verdict; or why they cannot be sent."""
        if verdict.problem or verdict.is_redone:
            return b"", [], tuple(verdict)
        output, logs = recorder.merged_output(), recorder.logs
        entries = output if isinstance(output, dict) else {} if output is None else {"loss": output}
        values = [value for value in entries.values() if _how(value) != "plain"]
        for each in logs.values():
            values += [each.mean(), *([] if each.batch_size is None else [each.batch_size])]
        hows = [(k, _how(value), value if _how(value) == "plain" else None) for k, value in entries.items()]
        logged = [(name, _named(each.kwargs), each.batch_size is not None) for name, each in logs.items()]
        metrics = [(name, where, _named(kwargs)) for name, (where, kwargs) in recorder.metrics.items()]
        try:
            description = pack((isinstance(output, dict), hows, logged, metrics))
        except UnsupportedValueError as error:
            return (
                f"What training_step returned or logged cannot be sent to the other stages of the pipeline: {error} "
                "Return and log numbers, tensors and plain values."
            )
        sent = [v.to(self._device) if isinstance(v, Tensor) else _number(v, self._device) for v in values]
        return description, sent, tuple(verdict)


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``log`` with reduction functions replaced by names."""
    reduction = kwargs.get("reduce_fx")
    return (
        {**kwargs, "reduce_fx": _REDUCTIONS[reduction]}
        if callable(reduction) and reduction in _REDUCTIONS
        else dict(kwargs)
    )


def _how(value: Any) -> str:
    """Return how an output entry is sent: as a tensor, a number, or in the description."""
    return "tensor" if isinstance(value, Tensor) else "float" if isinstance(value, float) else "plain"


def _number(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def no_log(name: str, value: Any, **kwargs: Any) -> None:
    """Ignore logs of a module without ``log``."""


@contextmanager
def redirected_log(module: nn.Module, record: Callable[..., None]) -> Iterator[None]:
    """Redirect the module's ``log``, if any, to ``record(name, value, **kwargs)`` inside."""
    log = getattr(module, "log", None)
    if log is None:
        yield
        return

    def stand_in(*args: Any, **kwargs: Any) -> None:
        if len(args) <= 2:
            record(*args, **kwargs)
            return
        signature = inspect.signature(log)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        extra = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        arguments.update(arguments.pop(extra, {}))
        record(**arguments)

    with with_attributes(module, log=stand_in):
        yield

"""Brings what the last stage returned and logged, micro-batch by micro-batch, to every rank as if of one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.checkpoint.exchange.distinct import from_rank
from trainwright.core.errors import CheckpointError
from trainwright.core.torch_internals import _pytree as pytree

_REDUCTIONS: dict[Any, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}


@dataclass
class _Logged:
    kwargs: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Layout:
    """What is sent besides numbers; it seldom changes.

    Attributes:
        kind: ``none``, ``loss`` or ``dict``.
        entries: ``(key, how)`` with ``how`` = ``("scalar", dtype or None)``, ``("tensor", dtype, shape)`` or
            ``("object", value)``. The loss has the key ``loss``.
        logs: ``(name, dtype, keyword arguments, whether a batch size was given)``.
        metrics: ``(name, name of the metric in the module, keyword arguments)`` of metric objects that were logged.
    """

    kind: str = "none"
    entries: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    logs: tuple[tuple[str, torch.dtype | None, dict[str, Any], bool], ...] = ()
    metrics: tuple[tuple[str, str, dict[str, Any]], ...] = ()

    @property
    def scalars(self) -> int:
        numbers = sum(1 for _, how in self.entries if how[0] == "scalar")
        return numbers + len(self.logs) + sum(1 for log in self.logs if log[3])


class LogRecorder:
    """Results of one step on the rank of the last stage.

    Args:
        sizes: samples of each micro-batch.
        device: of the results.
        module: the user's.
    """

    def __init__(self, sizes: list[int], device: torch.device, module: nn.Module) -> None:
        self.sizes, self.device, self.module = sizes, device, module
        self.metrics: dict[str, tuple[str, dict[str, Any]]] = {}
        self.current: int | None = None
        self._logs: dict[str, _Logged] = {}
        self._outputs: dict[int, Any] = {}

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        """Keep what was logged in the current micro-batch; without one (another stage's pass), nothing.

        Raises:
            TypeError: if the value is no number, no tensor of one element and no metric that is logged for the epoch.
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
                f"self.log({name!r}, ...) was given a {type(value).__name__}. In a step that a pipeline runs in "
                f"micro-batches, log a number or a tensor of one element; of a metric object, its value for the epoch "
                f"(self.log({name!r}, self.metric, on_step=False, on_epoch=True), the metric an attribute of the "
                f"module) or for the batch (self.log({name!r}, self.metric(prediction, target)))."
            )
        size = kwargs.pop("batch_size", None)
        logged = self._logs.setdefault(name, _Logged(kwargs))
        logged.kwargs = kwargs
        logged.values.append(_number(value, self.device))
        logged.weights.append(float(self.sizes[self.current] if size is None else size))
        if size is not None:
            logged.batch_sizes.append(float(size))

    def _name_of(self, metric: Metric) -> str | None:
        # Lightning finds these once, when a metric is logged for the first time.
        known: dict[int, str] = getattr(self.module, "_metric_attributes", None) or {}
        if id(metric) in known:
            return known[id(metric)]
        return next((name for name, part in self.module.named_modules() if part is metric), None)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Keep, without gradient, what the step returned, and give the loss in it.

        Raises:
            TypeError: if it is no tensor, no dict with a ``loss`` and not ``None``.
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

    def merged(self) -> tuple[Any, dict[str, _Logged]]:
        """Output of the whole batch, and the log entries, not yet reduced."""
        return self._merged_output(), self._logs

    def _merged_output(self) -> Any:
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
        return values

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
    """Sends the results of a step from the last stage's rank to all ranks of the pipeline.

    Numbers travel as one tensor per step; names and keyword arguments only when they change.

    Args:
        group: ranks of the pipeline.
        source: rank in the group of the last stage.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._is_source = dist.get_rank(group) == source
        self._layout = _Layout()

    def publish(self, recorder: LogRecorder, log: Callable[..., Any]) -> Any:
        """The output of the whole batch, on every rank; and ``log`` called with what was logged. A collective.

        Args:
            recorder: the step's results; empty on the other ranks.
            log: called as ``log(name, value, **kwargs)``.
        """
        output, logs = recorder.merged()
        layout = _layout_of(output, logs, recorder.metrics) if self._is_source else self._layout
        changed = self._is_source and not _same(layout, self._layout)
        scalars = torch.zeros(1 + self._layout.scalars, dtype=torch.float64, device=self._device)
        if changed:
            scalars[0] = 1.0
        elif self._is_source:
            scalars[1:] = _scalars(output, logs, layout, self._device)
        self._broadcast(scalars)
        # The source knows already: it need not wait for the device.
        if changed or (not self._is_source and scalars[0].item()):
            self._layout = self._sent_layout(layout)
            scalars = torch.zeros(1 + self._layout.scalars, dtype=torch.float64, device=self._device)
            if self._is_source:
                scalars[1:] = _scalars(output, logs, layout, self._device)
            self._broadcast(scalars)
        for name, where, kwargs in self._layout.metrics:
            log(name, recorder.module.get_submodule(where), **kwargs)
        return self._unpacked(scalars[1:], output, log)

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=self._source)

    def _sent_layout(self, layout: _Layout) -> _Layout:
        try:
            sent: _Layout = from_rank(layout, self._source, self._group, self._device)
        except CheckpointError as error:
            raise TypeError(
                f"What training_step returned or logged cannot be sent to the other stages of the pipeline: {error} "
                f"Return and log numbers, tensors and plain values."
            ) from error
        return sent

    def _unpacked(self, scalars: Tensor, output: Any, log: Callable[..., Any]) -> Any:
        layout, numbers = self._layout, iter(scalars.unbind())
        entries = {}
        for key, how in layout.entries:
            if how[0] == "scalar":
                number = next(numbers)
                entries[key] = number.item() if how[1] is None else number.to(how[1])
            elif how[0] == "tensor":
                entries[key] = self._sent_tensor(how, output[key] if self._is_source else None)
            else:
                entries[key] = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), how[1])
        for name, dtype, kwargs, sized in layout.logs:
            value = next(numbers)
            extra = {"batch_size": round(next(numbers).item())} if sized else {}
            log(name, value.item() if dtype is None else value.to(dtype), **kwargs, **extra)
        return {"none": None, "loss": entries.get("loss"), "dict": entries}[layout.kind]

    def _sent_tensor(self, how: tuple[Any, ...], tensor: Tensor | None) -> Tensor:
        if tensor is None:
            tensor = torch.empty(how[2], dtype=how[1], device=self._device)
        tensor = tensor.contiguous().to(self._device)
        if tensor.numel():
            self._broadcast(tensor.view(-1).view(torch.uint8))
        return tensor


def _layout_of(output: Any, logs: Mapping[str, _Logged], metrics: Mapping[str, tuple[str, dict[str, Any]]]) -> _Layout:
    entries = output if isinstance(output, dict) else {} if output is None else {"loss": output}
    return _Layout(
        kind="none" if output is None else "dict" if isinstance(output, dict) else "loss",
        entries=tuple((key, _how(value)) for key, value in entries.items()),
        logs=tuple(
            (name, torch.get_default_dtype(), _named(logged.kwargs), bool(logged.batch_sizes))
            for name, logged in logs.items()
        ),
        metrics=tuple((name, where, _named(kwargs)) for name, (where, kwargs) in metrics.items()),
    )


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``log`` with the name of the reduction in place of the function."""
    reduction = kwargs.get("reduce_fx")
    return (
        {**kwargs, "reduce_fx": _REDUCTIONS[reduction]}
        if callable(reduction) and reduction in _REDUCTIONS
        else dict(kwargs)
    )


def _how(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape)) if value.ndim else ("scalar", value.dtype)
    if isinstance(value, float):
        return ("scalar", None)
    return ("object", pytree.tree_map_only(Tensor, Tensor.cpu, value))


def _scalars(output: Any, logs: Mapping[str, _Logged], layout: _Layout, device: torch.device) -> Tensor:
    entries = output if isinstance(output, dict) else {"loss": output}
    numbers = [_number(entries[key], device) for key, how in layout.entries if how[0] == "scalar"]
    for name, _, _, sized in layout.logs:
        numbers.append(_reduced(logs[name]))
        if sized:
            numbers.append(_number(sum(logs[name].batch_sizes), device))
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64, device=device)


def _reduced(logged: _Logged) -> Tensor:
    how = logged.kwargs.get("reduce_fx", "mean")
    how = how if isinstance(how, str) else _REDUCTIONS.get(how, "mean")
    values = torch.stack(logged.values)
    if how in ("sum", "max", "min"):
        reduced: Tensor = getattr(values, how)()
        return reduced
    weights = torch.tensor(logged.weights, dtype=torch.float64, device=values.device)
    return (values * weights).sum() / weights.sum()


def _number(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors or arrays in an object
        return False


def bound_log(log: Callable[..., Any], record: Callable[..., None]) -> Callable[..., None]:
    """A stand-in for a module's ``log`` that takes its arguments by position too.

    Args:
        log: what it stands for.
        record: called as ``record(name, value, **kwargs)``.
    """

    def stand_in(*args: Any, **kwargs: Any) -> None:
        if len(args) <= 2:
            record(*args, **kwargs)
            return
        signature = inspect.signature(log)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        extra = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        arguments.update(arguments.pop(extra, {}))
        record(**arguments)

    return stand_in

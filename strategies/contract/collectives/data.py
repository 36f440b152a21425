"""What user code asks of all ranks, asked of the data ranks: gathers, reductions, barriers, metrics.

Ranks that share samples (along the pipeline, context and tensor axes) hold copies of the same values. User code is
written for data parallelism, where every rank has samples of its own: a gather over all ranks would see the copies as
further samples.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torchmetrics.utilities.distributed
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.strategies.contract.batch_digest import batch_digest
from trainwright.strategies.contract.collectives.differentiable import gather
from trainwright.strategies.contract.collectives.flat import gather_parts
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.part import Host

_MOST_DIMS = 16
_GROUP = "_trainwright_data_group"
_WORLDLY = (
    *("get_rank", "get_world_size", "barrier", "all_reduce", "reduce", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "scatter", "scatter_object_list", "all_gather", "all_gather_object", "all_gather_into_tensor"),
    *("all_gather_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all"),
    "all_to_all_single",
)
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def _reduced(tensor: Tensor, group: dist.ProcessGroup | None, reduce_op: Any) -> Tensor:
    name = reduce_op.upper() if isinstance(reduce_op, str) else None
    is_mean = name in ("MEAN", "AVG")
    op = dist.ReduceOp.SUM if is_mean or reduce_op is None else getattr(dist.ReduceOp, name) if name else reduce_op
    dist.all_reduce(tensor, op=op, group=group)
    if not is_mean:
        return tensor
    return tensor.copy_(tensor / dist.get_world_size(group))  # not div_, which refuses integers


def gather_stacked(tensor: Tensor, group: dist.ProcessGroup | None, sync_grads: bool, is_even: bool) -> Tensor:
    """Return the tensors of all ranks of a group, stacked. A collective.

    Args:
        tensor: any shape, the same on every rank.
        group: ``None``: all ranks.
        sync_grads: whether gradients flow back: each rank's tensor gets the sum of what all ranks' losses give it.
        is_even: whether shapes are known to be equal; else they are compared first.

    Returns:
        ``(ranks, *tensor.shape)``, in the order of the ranks.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group.size() == 1:
        return (tensor if sync_grads else tensor.detach()).clone().unsqueeze(0)
    if not is_even:
        _refuse_unequal(tensor, group)
    with nullcontext() if sync_grads else torch.no_grad():
        return gather(tensor.unsqueeze(0), 0, group)


def _refuse_unequal(tensor: Tensor, group: dist.ProcessGroup) -> None:
    form = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape[:_MOST_DIMS]]
    header = torch.tensor(form + [0] * (_MOST_DIMS + 2 - len(form)), device=tensor.device)
    forms = gather_parts(header, group).tolist()
    if all(other == forms[0] for other in forms):
        return
    shapes = [
        f"{tuple(dims[:count])} ({_DTYPES[kind]}) on rank {rank}" for rank, (kind, count, *dims) in enumerate(forms)
    ]
    shown = ", ".join(shapes[:8]) + (f", and {len(shapes) - 8} more" if len(shapes) > 8 else "")
    raise ValueError(
        f"all_gather was given tensors of different shapes: {shown} of the data ranks. It needs one shape on all, "
        "but data ranks may read different numbers of samples, since each sample is read once. Use "
        "torchmetrics.utilities.distributed.gather_all_tensors(x), which takes unequal shapes and returns a list with "
        "the tensor of each data rank, a metric of torchmetrics (CatMetric, MeanMetric, ...), or pad to one shape."
    )


class MetricSync:
    """Metrics of torchmetrics that are synchronized over the data ranks, wherever they are and whenever they are made.

    While it is installed, ``Metric.sync`` and ``gather_all_tensors`` take ``group`` where they would take all ranks.

    Args:
        group: the data ranks.
        complete: called with a metric before it is synchronized, on every rank; ``None`` is off.
    """

    def __init__(self, group: dist.ProcessGroup, complete: Callable[[Metric], None] | None = None) -> None:
        self._group, self._complete = group, complete
        self._replaced: list[tuple[Any, str, Any]] = []
        self._uncached: list[Metric] = []

    def install(self) -> None:
        """Begin; does nothing if it has begun already."""
        if self._replaced:
            return
        self._replace(Metric, "sync", self._synced(Metric.sync))
        usual = torchmetrics.utilities.distributed.gather_all_tensors

        def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
            return usual(result, self._group if _is_world(group) else group)

        for module in list(sys.modules.values()):  # also where it was imported by name
            if getattr(module, "__dict__", {}).get("gather_all_tensors") is usual:
                self._replace(module, "gather_all_tensors", gather_all_tensors)

    def remove(self, module: nn.Module) -> None:
        """End it and put back what was there before; metrics of ``module`` are computed over the data ranks yet."""
        if self._complete is None:
            for metric in _metrics_of(module):
                if _is_world(metric.process_group):
                    metric.process_group = metric.__dict__[_GROUP] = self._group
        for owner, name, usual in reversed(self._replaced):
            setattr(owner, name, usual)
        for metric in self._uncached:
            metric.compute_with_cache = True
        self._replaced.clear()
        self._uncached.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _synced(self, usual: Callable[..., None]) -> Callable[..., None]:
        def sync(
            metric: Metric,
            dist_sync_fn: Callable[..., Any] | None = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Callable[[], bool] | None = None,
        ) -> None:
            group = metric.process_group if process_group is None else process_group
            if _is_world(group):
                group = self._group
                if should_sync and self._complete is not None:
                    if metric.compute_with_cache:  # a rank that updates no metric would not come here again
                        metric.compute_with_cache = False
                        self._uncached.append(metric)
                    self._complete(metric)
            usual(metric, dist_sync_fn, group, should_sync, distributed_available)

        return sync


def forget_groups(module: nn.Module) -> None:
    """Have metrics of ``module`` leave the data ranks of the run before."""
    for metric in _metrics_of(module):
        if metric.__dict__.pop(_GROUP, None) is metric.process_group:
            metric.process_group = None


def _metrics_of(module: nn.Module) -> Iterator[Metric]:
    return (sub for sub in module.modules() if isinstance(sub, Metric))


class DataWorld:
    """Functions of ``torch.distributed`` that take the data ranks for the world, where user code calls them.

    For code that one rank of those that share samples runs: the others would never come to a collective of all ranks.
    Calls that name another group, and those of torch and of this package, stay as they are.

    Args:
        group: the data ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._functions = {name: self._mapped(getattr(dist, name)) for name in _WORLDLY if hasattr(dist, name)}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around such code."""
        functions = vars(dist)
        usual = {name: functions[name] for name in self._functions}
        functions.update(self._functions)
        try:
            yield
        finally:
            functions.update(usual)

    def _mapped(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(usual)
        root = next((name for name in ("src", "dst") if name in signature.parameters), None)

        @wraps(usual)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_library(sys._getframe(1).f_globals["__name__"]):
                return usual(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            if not _is_world(given.arguments.get("group")):
                return usual(*args, **kwargs)
            given.arguments["group"] = self._group
            if root is not None and f"group_{root}" in signature.parameters:
                place = given.arguments.pop(root, None)
                given.arguments.setdefault(f"group_{root}", 0 if place is None else place)
            return usual(*given.args, **given.kwargs)

        return call


def _is_library(module: str) -> bool:
    # Users call those of torch.distributed.nn, which differentiate.
    return module.startswith(("torch.", "trainwright.")) and not module.startswith("torch.distributed.nn.")


def metric_states(metric: Metric) -> dict[str, Any]:
    """Return what a metric has collected, with the number of its updates."""
    return {"_update_count": metric._update_count, **{name: getattr(metric, name) for name in metric._defaults}}


def set_metric_states(metric: Metric, states: dict[str, Any]) -> None:
    """Put back what :meth:`metric_states` returned."""
    for name, value in states.items():
        setattr(metric, name, value)
    metric._computed = None


def _is_world(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


class Sharing(Host, Protocol):
    """A strategy under which ranks share samples."""

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class DataCollectives(Ranks):
    """The ranks of a strategy under which several share samples; what user code asks of all ranks, data ranks do.

    Args:
        strategy: under which ranks share samples.

    Attributes:
        groups: of the layout, once the processes have met.
    """

    _strategy: Sharing

    def __init__(self, strategy: Sharing) -> None:
        super().__init__(strategy)
        self.groups: LayoutGroups | None = None
        self.is_apart = False
        """Whether user code runs that one rank of those that share samples comes by."""
        self.compared: frozenset[str] = frozenset()
        """Kinds of batches of which the first was compared."""
        self._metrics: MetricSync | None = None
        self._world: DataWorld | None = None

    @property
    def data_rank(self) -> int:
        """See the base class; ranks of other axes than replicate and shard share one."""
        return self._strategy.layout.data_rank(self._strategy.global_rank)

    @property
    def num_data_ranks(self) -> int:
        """See the base class."""
        return self._strategy.layout.data_ranks

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different samples and else do the same as this one."""
        layout = self._strategy.layout
        if self.groups is None or layout.data_ranks == self._strategy.world_size:
            return None
        return self.groups.of(layout.groups("replicate", "shard"))

    @property
    def leads_data_rank(self) -> bool:
        """Whether this rank is the first along the pipeline, context and tensor axes."""
        place = self._strategy.layout.coordinates(self._strategy.global_rank)
        return not (place["pipeline"] or place["context"] or place["tensor"])

    @contextmanager
    def among_data_ranks(self) -> Iterator[None]:
        """Have barriers and broadcasts inside wait for the data ranks alone, since others do not come by."""
        before, self.is_apart = self.is_apart, True
        if self._world is None and self.data_group is not None:
            self._world = DataWorld(self.data_group)
        try:
            with nullcontext() if self._world is None or before else self._world.shown():
                yield
        finally:
            self.is_apart = before

    def sync_metrics(self, complete: Callable[[Metric], None] | None) -> None:
        """Have metrics synchronized over data ranks; a collective."""
        group = self.data_group
        if group is not None and self._metrics is None:
            self._metrics = MetricSync(group, complete)
            self._metrics.install()

    def leave(self, module: nn.Module | None) -> None:
        """Let go of the metrics of ``module``, and compare first batches anew."""
        if self._metrics is not None and module is not None:
            self._metrics.remove(module)
        self._metrics = self._world = None
        self.compared = frozenset()

    def compare_first(self, what: str, batch: Any) -> None:
        """Compare the first batch of a kind between the ranks that share samples. A collective of all ranks, once.

        Raises:
            RuntimeError: on every rank, if some that share samples have read different ones.
        """
        self.compared |= {what}
        layout = self._strategy.layout
        if self.data_group is None:
            return
        digest = torch.tensor([batch_digest(batch)], device=self._strategy.root_device)
        digests = gather_parts(digest, None).flatten().tolist()
        groups = layout.groups("pipeline", "context", "tensor")
        apart = next((ranks for ranks in groups if len({digests[rank] for rank in ranks}) > 1), None)
        if apart is not None:
            raise RuntimeError(
                f"Ranks {apart} of the layout {layout} share their samples, but their first {what} batches "
                f"differ. The layout has {layout.data_ranks} data rank(s). What splits itself must do so by "
                "trainer.strategy.ranks.data_rank and trainer.strategy.ranks.num_data_ranks, not by global_rank and "
                "world_size (or leave it to the Trainer: no DistributedSampler, or trainwright.DealtStream around a "
                "stream); one that draws at random must draw the same on these ranks (lightning.seed_everything(seed))."
            )

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce over the data ranks, unless ``group`` is another than all ranks.

        In place, as Lightning's, but without the barrier that Lightning puts before.
        """
        if isinstance(tensor, Tensor) and dist.is_available() and dist.is_initialized():
            return _reduced(tensor, self.of_users(group), reduce_op)
        return tensor

    def of_users(self, group: Any) -> Any:
        """The group that is meant by ``group``: ``LightningModule.all_gather`` names that of all ranks for none."""
        return self.data_group if _is_world(group) else group

    @property
    def present(self) -> dist.ProcessGroup | None:
        """The ranks that come by here; ``None``: all."""
        return self.data_group if self.is_apart else None

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait for the ranks of ``group``."""
        device = self._strategy.root_device
        if group.size() > 1:
            dist.barrier(
                group, device_ids=[device.index] if device.type == "cuda" and device.index is not None else None
            )

    def source(self, src: int) -> int:
        """The first rank of a data rank.

        Raises:
            ValueError: if there is no such data rank.
        """
        layout = self._strategy.layout
        if not 0 <= src < layout.data_ranks:
            raise ValueError(
                f"broadcast was given src={src}, but this layout ({layout}) has {layout.data_ranks} data "
                f"rank(s). Ranks that share samples count as one: use src=0 to {layout.data_ranks - 1}."
            )
        return layout.first_of_data_rank(src)

    def decide(self, decision: bool, all: bool) -> bool:
        """Whether all ranks that come by (or any) decided so."""
        flag = torch.tensor(int(decision), device=self._strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self.present)
        return bool(flag.item())

"""Collectives of user code, restricted to data-parallel ranks: gathers, reductions, barriers, metrics.

User code is written for data parallelism, where every rank has its own samples. Ranks that share samples (along the
pipeline, context and tensor axes) hold the same values, which a gather over all ranks would count repeatedly.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchmetrics.utilities.distributed
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.batch_digest import batch_digest
from trainwright.strategies.contract.collectives.differentiable import gather
from trainwright.strategies.contract.collectives.flat import gather_parts
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.part import Host

_MOST_DIMS = 16
_GROUP = "_trainwright_data_group"
_COLLECTIVES = (
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
    """Gather the tensors of all ranks of a group, stacked. A collective.

    Args:
        tensor: any shape, the same on every rank.
        group: ``None``: all ranks.
        sync_grads: whether gradients flow back: each rank's tensor gets the sum of the gradients of all ranks' losses.
        is_even: whether shapes are known to be equal; otherwise they are compared first.

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
    """Synchronization of torchmetrics over the data ranks.

    While installed, ``Metric.sync`` and ``gather_all_tensors`` use ``group`` instead of the world.

    Args:
        group: the data ranks.
        complete: called with a metric before synchronization, on every rank; ``None``: off.
    """

    def __init__(self, group: dist.ProcessGroup, complete: Callable[[Metric], None] | None = None) -> None:
        self._group, self._complete = group, complete
        self._patches = ExitStack()
        self._uncached: list[Metric] = []

    def install(self) -> None:
        """Patch torchmetrics."""
        self._patches.enter_context(patch.object(Metric, "sync", self._synced(Metric.sync)))
        original = torchmetrics.utilities.distributed.gather_all_tensors

        def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
            return original(result, self._group if _is_world(group) else group)

        for module in list(sys.modules.values()):  # includes modules that imported it by name
            if getattr(module, "__dict__", {}).get("gather_all_tensors") is original:
                self._patches.enter_context(patch.object(module, "gather_all_tensors", gather_all_tensors))

    def remove(self, module: nn.Module) -> None:
        """Undo :meth:`install`; metrics of ``module`` keep synchronizing over the data ranks."""
        if self._complete is None:
            for metric in _metrics_of(module):
                if _is_world(metric.process_group):
                    metric.process_group = metric.__dict__[_GROUP] = self._group
        self._patches.close()
        for metric in self._uncached:
            metric.compute_with_cache = True
        self._uncached.clear()

    def _synced(self, original: Callable[..., None]) -> Callable[..., None]:
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
                    if metric.compute_with_cache:  # a cached result would skip the synchronization on some ranks
                        metric.compute_with_cache = False
                        self._uncached.append(metric)
                    self._complete(metric)
            original(metric, dist_sync_fn, group, should_sync, distributed_available)

        return sync


def forget_groups(module: nn.Module) -> None:
    """Reset the process groups that an earlier run set on metrics of ``module``."""
    for metric in _metrics_of(module):
        if metric.__dict__.pop(_GROUP, None) is metric.process_group:
            metric.process_group = None


def _metrics_of(module: nn.Module) -> Iterator[Metric]:
    return (sub for sub in module.modules() if isinstance(sub, Metric))


class DataWorld:
    """Functions of ``torch.distributed`` that default to the data ranks instead of the world, for user code.

    For code that only one of the ranks that share samples runs, where a collective of all ranks would hang. Calls with
    an explicit group, and those from torch and this package, are unaffected.

    Args:
        group: the data ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._functions = {name: self._mapped(getattr(dist, name)) for name in _COLLECTIVES if hasattr(dist, name)}

    def patched(self) -> AbstractContextManager[None]:
        """Patch ``torch.distributed`` for a ``with`` block."""
        return with_attributes(dist, **self._functions)

    def _mapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        root = next((name for name in ("src", "dst") if name in signature.parameters), None)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_library(sys._getframe(1).f_globals["__name__"]):
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            if not _is_world(given.arguments.get("group")):
                return original(*args, **kwargs)
            given.arguments["group"] = self._group
            if root is not None and f"group_{root}" in signature.parameters:
                place = given.arguments.pop(root, None)
                given.arguments.setdefault(f"group_{root}", 0 if place is None else place)
            return original(*given.args, **given.kwargs)

        return call


def _is_library(module: str) -> bool:
    # Users call torch.distributed.nn for differentiable collectives.
    return module.startswith(("torch.", "trainwright.")) and not module.startswith("torch.distributed.nn.")


def metric_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric and its update count."""
    return {"_update_count": metric._update_count, **{name: getattr(metric, name) for name in metric._defaults}}


def set_metric_states(metric: Metric, states: dict[str, Any]) -> None:
    """Restore the result of :func:`metric_states`."""
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
    """Ranks of a strategy under which several share samples; user code's collectives run over the data ranks.

    Args:
        strategy: under which ranks share samples.

    Attributes:
        groups: of the layout, once processes are connected.
    """

    _strategy: Sharing

    def __init__(self, strategy: Sharing) -> None:
        super().__init__(strategy)
        self.groups: LayoutGroups | None = None
        self.leaders_only = False
        """True if only one of the ranks that share samples runs the current user code."""
        self.compared: frozenset[str] = frozenset()
        """Kinds of batches whose first was compared."""
        self._metrics: MetricSync | None = None
        self._world: DataWorld | None = None

    @property
    def data_rank(self) -> int:
        """Index along the replicate and shard axes."""
        return self._strategy.layout.data_rank(self._strategy.global_rank)

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks."""
        return self._strategy.layout.data_ranks

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that differ from this one only in their samples; ``None``: all ranks."""
        layout = self._strategy.layout
        if self.groups is None or layout.data_ranks == self._strategy.world_size:
            return None
        return self.groups.of(layout.groups("replicate", "shard"))

    @property
    def leads_data_rank(self) -> bool:
        """True if this rank is first along the pipeline, context and tensor axes."""
        place = self._strategy.layout.coordinates(self._strategy.global_rank)
        return not (place["pipeline"] or place["context"] or place["tensor"])

    @contextmanager
    def among_data_ranks(self) -> Iterator[None]:
        """Restrict collectives in a ``with`` block to the data ranks, since no others run it."""
        before, self.leaders_only = self.leaders_only, True
        if self._world is None and self.data_group is not None:
            self._world = DataWorld(self.data_group)
        try:
            with nullcontext() if self._world is None or before else self._world.patched():
                yield
        finally:
            self.leaders_only = before

    def sync_metrics(self, complete: Callable[[Metric], None] | None) -> None:
        """Synchronize metrics over the data ranks from now on. A collective."""
        group = self.data_group
        if group is not None and self._metrics is None:
            self._metrics = MetricSync(group, complete)
            self._metrics.install()

    def leave(self, module: nn.Module | None) -> None:
        """Release the metrics of ``module``, and compare first batches again in the next run."""
        if self._metrics is not None and module is not None:
            self._metrics.remove(module)
        self._metrics = self._world = None
        self.compared = frozenset()

    def compare_first(self, what: str, batch: Any) -> None:
        """Compare the first batch of a kind across ranks that share samples. A collective of all ranks.

        Raises:
            RuntimeError: on every rank, if ranks that share samples read different ones.
        """
        self.compared |= {what}
        layout = self._strategy.layout
        if self.data_group is None:
            return
        digest = torch.tensor([batch_digest(batch)], device=self._strategy.root_device)
        digests = gather_parts(digest, None).flatten().tolist()
        groups = layout.groups("pipeline", "context", "tensor")
        unequal = next((ranks for ranks in groups if len({digests[rank] for rank in ranks}) > 1), None)
        if unequal is not None:
            raise RuntimeError(
                f"Ranks {unequal} of the layout {layout} share their samples, but their first {what} batches "
                f"differ. The layout has {layout.data_ranks} data rank(s). A dataset that shards itself must use "
                "trainer.strategy.ranks.data_rank and trainer.strategy.ranks.num_data_ranks, not global_rank and "
                "world_size (or leave it to the Trainer: no DistributedSampler, or trainwright.DealtStream around a "
                "stream); a random one must use the same seed on these ranks (lightning.seed_everything(seed))."
            )

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce in place over the data ranks, unless ``group`` is a subgroup; without Lightning's extra barrier."""
        if isinstance(tensor, Tensor) and dist.is_available() and dist.is_initialized():
            return _reduced(tensor, self.resolve_group(group), reduce_op)
        return tensor

    def resolve_group(self, group: Any) -> Any:
        """Map the world (which ``LightningModule.all_gather`` passes by default) to the data ranks."""
        return self.data_group if _is_world(group) else group

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that run the current user code; ``None``: all."""
        return self.data_group if self.leaders_only else None

    def wait(self, group: dist.ProcessGroup) -> None:
        """Run a barrier of ``group``."""
        device = self._strategy.root_device
        if group.size() > 1:
            dist.barrier(
                group, device_ids=[device.index] if device.type == "cuda" and device.index is not None else None
            )

    def source(self, src: int) -> int:
        """Return the first global rank of data rank ``src``.

        Raises:
            ValueError: if ``src`` is out of range.
        """
        layout = self._strategy.layout
        if not 0 <= src < layout.data_ranks:
            raise ValueError(
                f"broadcast was given src={src}, but this layout ({layout}) has {layout.data_ranks} data "
                f"rank(s). Ranks that share samples count as one: use src=0 to {layout.data_ranks - 1}."
            )
        return layout.first_of_data_rank(src)

    def decide(self, decision: bool, all: bool) -> bool:
        """Return whether all ranks (or any) that run the current user code decided so."""
        flag = torch.tensor(int(decision), device=self._strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self.active_group)
        return bool(flag.item())

"""What ``self.log`` has collected of an epoch that is not over: saved with the run and put back when it goes on.

Without it the mean of an epoch would be that of the batches after the resume, and who watches such a mean (a scheduler
on a plateau, early stopping, a checkpoint by ``monitor``) would decide differently, or find nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.lightning_internals import _ResultCollection, _ResultMetric

Entry = dict[str, Any]
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "max": max,
    "min": min,
}


def collected(results: _ResultCollection, to_save: bool = True) -> list[Entry]:
    """Values of this rank that are to be reduced at the end of the epoch, as plain values.

    Of ``torchmetrics`` objects it is only told that they were logged: the module saves those that are persistent. Left
    out are values with a ``sync_dist_group`` of their own, which means nothing to another process.

    Args:
        results: of the training loop.
        to_save: leave out the ``torchmetrics`` objects that are not persistent, too.
    """
    return [_entry(metric) for metric in results.values() if _is_collected(metric, to_save)]


def _is_collected(metric: _ResultMetric, to_save: bool) -> bool:
    meta = metric.meta
    if not meta.on_epoch or metric.has_reset or meta.sync.group is not None:
        return False
    if metric.is_tensor:
        return True
    return meta.metric_attribute is not None and (not to_save or any(metric.value._persistent.values()))


def _entry(metric: _ResultMetric) -> Entry:
    meta = metric.meta
    entry = {
        "fx": meta.fx,
        "name": meta.name,
        "prog_bar": meta.prog_bar,
        "logger": meta.logger,
        "on_step": meta.on_step,
        "reduce": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "metric": meta.metric_attribute,
        "count": None,
    }
    if not metric.is_tensor:
        return entry
    return {
        **entry,
        "dtype": str(metric.value.dtype).removeprefix("torch."),
        "value": metric.value.item(),
        "count": float(metric.cumulated_batch_size) if meta.is_mean_reduction else None,
    }


def reset_metrics(entries: Sequence[Entry], module: nn.Module) -> None:
    """Saved at the end of an epoch, ``torchmetrics`` objects hold its values, which the next one must not count.

    Args:
        entries: what was collected in that epoch.
        module: which has the objects.
    """
    for entry in entries:
        metric = _metric_of(entry, module)
        if metric is not None:
            metric.reset()


def summed_up(entries: Sequence[Entry], counts: bool, group: dist.ProcessGroup) -> list[Entry]:
    """What all data ranks have collected, as if one had: what :func:`shared_out` deals out again. A collective.

    Each rank sends some numbers for each value, however many ranks there are. Means and sums are those of float64.

    Args:
        entries: of this rank.
        counts: whether this rank speaks for its data rank, which others may share with it.
        group: a gloo group of all ranks.
    """
    told = all_gather_values([_form(entry) for entry in entries] if counts else None, group)
    forms: dict[tuple[str, str], Entry] = {}
    for form in (form for each in {id(each): each for each in told}.values() for form in each or ()):
        forms.setdefault((form["fx"], form["name"]), form)
    own = {(entry["fx"], entry["name"]): entry for entry in entries} if counts else {}
    sums = torch.zeros(len(forms), 2, dtype=torch.float64)
    peaks = torch.full((len(forms),), -torch.inf, dtype=torch.float64)
    for row, key in enumerate(forms):
        entry = own.get(key)
        if entry is None or entry["metric"] is not None:
            continue
        sums[row] = torch.tensor([float(entry["value"]), entry["count"] or 0.0], dtype=torch.float64)
        peaks[row] = -float(entry["value"]) if entry["reduce"] == "min" else float(entry["value"])
    dist.all_reduce(sums, group=group)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
    rows = zip(sums.tolist(), peaks.tolist(), strict=True)
    numbers = zip(forms.values(), rows, strict=True)
    return [_filled(form, total, count, peak) for form, ((total, count), peak) in numbers]


def _form(entry: Entry) -> Entry:
    """An entry without its numbers, the same on ranks that log the same."""
    return {**entry, "value": None, "count": None if entry["count"] is None else 0.0}


def _filled(form: Entry, total: float, count: float, peak: float) -> Entry:
    if form["metric"] is not None:
        return {name: value for name, value in form.items() if name != "value"}
    value = {"max": peak, "min": -peak}.get(form["reduce"], total)
    is_whole = "int" in form["dtype"] or form["dtype"] == "bool"
    return {**form, "value": round(value) if is_whole else value, "count": None if form["count"] is None else count}


def shared_out(by_rank: Sequence[Sequence[Entry]], rank: int, ranks: int) -> list[Entry]:
    """The part of a data rank: its own where there were as many, else so that all together are what all were.

    Args:
        by_rank: what each data rank of the saved run had collected.
        rank: this data rank.
        ranks: number of data ranks now.
    """
    if len(by_rank) == ranks:
        return list(by_rank[rank])
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in (entry for entries in by_rank for entry in entries):
        groups.setdefault((entry["fx"], entry["name"]), []).append(entry)
    shares = (_share(entries, rank, ranks) for entries in groups.values())
    return [share for share in shares if share is not None]


def _share(entries: Sequence[Entry], rank: int, ranks: int) -> Entry | None:
    first = entries[0]
    if first["metric"] is not None:
        return dict(first)
    if first["rank_zero_only"]:
        return dict(first) if rank == 0 else None
    whole = dict(first)
    for entry in entries[1:]:
        whole = combined(whole, entry)
    if first["reduce"] in ("mean", "sum"):
        whole["value"] /= ranks
    if whole["count"] is not None:
        whole["count"] /= ranks
    return whole


def without_weight(entries: Sequence[Entry]) -> list[Entry]:
    """What another rank has logged, as a rank logs it that takes part in its reductions but counts for nothing."""
    return [_without_weight(entry) for entry in entries if not entry["rank_zero_only"]]


def _without_weight(entry: Entry) -> Entry:
    if entry["metric"] is not None or entry["reduce"] in ("max", "min"):
        return entry  # the value of another rank changes no maximum
    return {**entry, "value": 0, "count": None if entry["count"] is None else 0.0}


def combined(entry: Entry, other: Entry) -> Entry:
    """Both values as one under their reduction."""
    value = _COMBINE[entry["reduce"]](entry["value"], other["value"])
    count = None if entry["count"] is None else entry["count"] + other["count"]
    return {**entry, "value": value, "count": count}


class RememberedLogs:
    """Adds what was collected before a resume to what is collected after it.

    Args:
        entries: see :func:`shared_out`.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = {(entry["fx"], entry["name"]): entry for entry in entries}
        self._put_back: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add_to(self, metric: _ResultMetric) -> None:
        """Add what is remembered of ``metric``, once; nothing if it is reduced in another way now."""
        entry = self._entries.pop((metric.meta.fx, metric.meta.name), None)
        if entry is None or not metric.is_tensor or metric.meta.reduce_fx.__name__ != entry["reduce"]:
            return
        dtype = getattr(torch, entry["dtype"])
        value = torch.tensor(entry["value"], dtype=dtype, device=metric.value.device)
        reduce = metric.meta.reduce_fx
        metric.value = metric.value + value if entry["reduce"] in ("mean", "sum") else reduce(metric.value, value)
        if entry["count"] is not None:
            metric.cumulated_batch_size = metric.cumulated_batch_size + entry["count"]

    def put_back(self, results: _ResultCollection, module: nn.Module, sync: Callable[..., Any]) -> None:
        """At the end of the epoch: what was not logged again since is logged with the value that it had.

        Args:
            results: of the training loop.
            module: which has the ``torchmetrics`` objects.
            sync: reduces a value over ranks, as ``Strategy.reduce``.
        """
        for entry in list(self._entries.values()):
            value = _value_to_log(entry, module)
            if value is None:
                continue
            results.log(
                entry["fx"],
                entry["name"],
                value,
                prog_bar=entry["prog_bar"],
                logger=entry["logger"],
                on_step=entry["on_step"],
                reduce_fx=entry["reduce"],
                sync_dist=entry["sync_dist"],
                sync_dist_fn=sync,
                batch_size=0,
                metric_attribute=entry["metric"],
                rank_zero_only=entry["rank_zero_only"],
            )
            self._put_back.append(f"{entry['fx']}.{entry['name']}")

    def forget(self, results: _ResultCollection) -> None:
        """After the end of the epoch: what was put back might be logged in another way in the next one."""
        for key in self._put_back:
            results.pop(key, None)
        self._put_back.clear()


def _value_to_log(entry: Entry, module: nn.Module) -> Tensor | Metric | None:
    """What is logged to put a value back; it must not count twice, as that of a maximum may."""
    if entry["metric"] is not None:
        return _metric_of(entry, module)
    value = torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]))
    return torch.zeros_like(value) if entry["reduce"] in ("mean", "sum") else value


def _metric_of(entry: Entry, module: nn.Module) -> Metric | None:
    metric = dict(module.named_modules()).get(entry["metric"])
    return metric if isinstance(metric, Metric) else None

"""Values that ``self.log`` has collected of an unfinished epoch: saved with the run and restored on resume.

Without them the mean of an epoch would cover only the batches after the resume, and plateau schedulers, early stopping
and checkpoints by ``monitor`` would decide differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.lightning_internals import _ResultCollection, _ResultMetric
from trainwright.core.run.peers import peers_of
from trainwright.strategies.contract.collectives.ranks import ranks_of

Entry = dict[str, Any]


def collect_entries(results: _ResultCollection, to_save: bool = True) -> list[Entry]:
    """Return this rank's values that are reduced at the end of the epoch, as plain values.

    For ``torchmetrics`` objects only the fact is recorded: the module saves persistent ones. Values with their own
    ``sync_dist_group`` are left out, since it means nothing to another process.

    Args:
        results: of the training loop.
        to_save: leave out ``torchmetrics`` objects that are not persistent, too.
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
    """Reset ``torchmetrics`` objects that were saved at the end of an epoch, for the next one.

    Args:
        entries: collected in that epoch.
        module: owner of the objects.
    """
    for entry in entries:
        metric = _metric_of(entry, module)
        if metric is not None:
            metric.reset()


def reduce_entries(entries: Sequence[Entry], counts: bool, group: dist.ProcessGroup) -> list[Entry]:
    """Return the entries of all data ranks reduced to one list, for :func:`redistribute`. A collective.

    Traffic per rank is some numbers for each value. Means and sums are computed in float64.

    Args:
        entries: of this rank.
        counts: whether this rank represents its data rank, which others may share.
        group: a gloo group of all ranks.
    """
    known = all_gather_values([_form(entry) for entry in entries] if counts else None, group)
    forms: dict[tuple[str, str], Entry] = {}
    for form in (form for each in {id(each): each for each in known}.values() for form in each or ()):
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
    """Return an entry without its numbers, equal on ranks that log the same."""
    return {**entry, "value": None, "count": None if entry["count"] is None else 0.0}


def _filled(form: Entry, total: float, count: float, peak: float) -> Entry:
    if form["metric"] is not None:
        return {name: value for name, value in form.items() if name != "value"}
    value = {"max": peak, "min": -peak}.get(form["reduce"], total)
    is_whole = "int" in form["dtype"] or form["dtype"] == "bool"
    return {**form, "value": round(value) if is_whole else value, "count": None if form["count"] is None else count}


def redistribute(by_rank: Sequence[Sequence[Entry]], rank: int, ranks: int) -> list[Entry]:
    """Return the part of a data rank: its own, or with another number of ranks an equal share of the whole.

    Args:
        by_rank: entries of each data rank of the saved run.
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
    combine = {"max": max, "min": min}.get(first["reduce"], operator.add)
    whole = dict(first)
    for entry in entries[1:]:
        count = None if whole["count"] is None else whole["count"] + entry["count"]
        whole |= {"value": combine(whole["value"], entry["value"]), "count": count}
    if first["reduce"] in ("mean", "sum"):
        whole["value"] /= ranks
    if whole["count"] is not None:
        whole["count"] /= ranks
    return whole


def without_weight(entries: Sequence[Entry]) -> list[Entry]:
    """Return another rank's entries with zero weight, for a rank that only takes part in their reduction."""
    return [
        # The value of another rank does not change a maximum.
        entry
        if entry["metric"] is not None or entry["reduce"] in ("max", "min")
        else {**entry, "value": 0, "count": None if entry["count"] is None else 0.0}
        for entry in entries
        if not entry["rank_zero_only"]
    ]


class RememberedLogs:
    """Values collected before a resume, added to those collected after it.

    Args:
        entries: see :func:`redistribute`.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = {(entry["fx"], entry["name"]): entry for entry in entries}
        self._restored: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add_to(self, metric: _ResultMetric) -> None:
        """Add the remembered value of ``metric``, once; ignored if its reduction has changed."""
        entry = self._entries.pop((metric.meta.fx, metric.meta.name), None)
        if entry is None or not metric.is_tensor or metric.meta.reduce_fx.__name__ != entry["reduce"]:
            return
        dtype = getattr(torch, entry["dtype"])
        value = torch.tensor(entry["value"], dtype=dtype, device=metric.value.device)
        reduce = metric.meta.reduce_fx
        metric.value = metric.value + value if entry["reduce"] in ("mean", "sum") else reduce(metric.value, value)
        if entry["count"] is not None:
            metric.cumulated_batch_size = metric.cumulated_batch_size + entry["count"]

    def restore(self, results: _ResultCollection, module: nn.Module, sync: Callable[..., Any]) -> None:
        """At the end of the epoch, log values that were not logged again since the resume.

        Args:
            results: of the training loop.
            module: owner of ``torchmetrics`` objects.
            sync: reduces a value over ranks, like ``Strategy.reduce``.
        """
        for entry in list(self._entries.values()):
            value = _value_to_log(entry, module)
            if value is None:
                continue
            names = ("prog_bar", "logger", "on_step", "sync_dist", "rank_zero_only", "add_dataloader_idx")
            options = {name: entry[name] for name in names if name in entry}
            options |= {"reduce_fx": entry["reduce"], "metric_attribute": entry["metric"], "sync_dist_fn": sync}
            results.log(entry["fx"], entry["name"], value, batch_size=0, **options)
            self._restored.append(f"{entry['fx']}.{entry['name']}")

    def remove(self, results: _ResultCollection) -> None:
        """Remove restored values after the end of the epoch, as the next one may log them differently."""
        for key in self._restored:
            results.pop(key, None)
        self._restored.clear()


def match_logged(
    results: _ResultCollection, gather: Callable[[Any], list[Any]], module: nn.Module, sync: Callable[..., Any]
) -> None:
    """Log without weight what only other data ranks have logged in an evaluation, in one order. A collective.

    Ranks may log different values, as each runs other batches; their reductions must match.

    Args:
        results: of the evaluation.
        gather: returns the values of all data ranks.
        module: owner of ``torchmetrics`` objects.
        sync: see :meth:`RememberedLogs.restore`.
    """
    own = {
        key: {**_form(_entry(metric)), "add_dataloader_idx": metric.meta.add_dataloader_idx}
        for key, metric in results.valid_items()
        if _is_collected(metric, to_save=False) and not metric.meta.sync.rank_zero_only
    }
    by_rank: list[dict[str, Entry]] = gather(own)
    forms = {key: form for each in by_rank for key, form in each.items()}
    if all(list(each) == list(forms) for each in by_rank):
        return
    for key, form in forms.items():
        if key not in own:
            neutral = {"max": -torch.inf, "min": torch.inf}.get(form["reduce"], 0.0)
            entry = {"fx": form["fx"].removesuffix(f".{results.dataloader_idx}"), "value": neutral}
            RememberedLogs([form | entry]).restore(results, module, sync)
    results.update({key: results.pop(key) for key in forms})


def _value_to_log(entry: Entry, module: nn.Module) -> Tensor | Metric | None:
    """Return what to log for a restored value, so that it does not count twice (a maximum may)."""
    if entry["metric"] is not None:
        return _metric_of(entry, module)
    value = torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]))
    return torch.zeros_like(value) if entry["reduce"] in ("mean", "sum") else value


def _metric_of(entry: Entry, module: nn.Module) -> Metric | None:
    metric = dict(module.named_modules()).get(entry["metric"])
    return metric if isinstance(metric, Metric) else None


MOST_LOGGED = 256
"""Most data ranks whose logged values a checkpoint holds one by one; with more, it holds sum, maximum or minimum."""


class DataRanks:
    """Exchanges states and logs between data ranks.

    Args:
        strategy: of the run; with Lightning's own, each rank is a data rank.
        rank: global rank.
        group: returns the process group of agreements; ``None`` for a single process.

    Attributes:
        is_apart: true if steps are asynchronous, so that no rank waits for another.
    """

    def __init__(self, strategy: Any, rank: int, group: Callable[[], Any]) -> None:
        ranks = ranks_of(strategy)
        self.count, self.rank = ranks.num_data_ranks, ranks.data_rank
        self.is_apart = peers_of(strategy).is_apart
        self._layout, self._global_rank, self._group = getattr(strategy, "layout", None), rank, group

    def gather(self, state: Any) -> list[Any]:
        """Return the values of all data ranks in order; a collective unless steps are asynchronous."""
        if self.count == 1 or self.is_apart:
            return [state] * self.count
        by_rank = dict(all_gather_values((self.rank, state), self._group()))
        return [by_rank[rank] for rank in range(self.count)]

    def gather_logged(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the logged values of each data rank; with many, their reduction, as for other data ranks."""
        if self.count <= MOST_LOGGED or self.is_apart:
            return self.gather(mine)
        group, rank, layout = self._group(), self._global_rank, self._layout
        counts = layout is None or rank == layout.group_of(rank, "pipeline", "context", "tensor")[-1]
        known = all_gather_values(mine["metrics"] if counts and self.rank == 0 else None, group)
        metrics = next(each for each in known if each is not None)
        # A value of rank 0 only is like any other's.
        entries = [entry for entry in mine["collected"] if self.rank == 0 or not entry["rank_zero_only"]]
        return [{"metrics": metrics, "collected": reduce_entries(entries, counts, group)}]

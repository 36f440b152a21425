"""Validation of unequal shares before a process starts."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.options import class_of
from trainwright.core.layout import Layout
from trainwright.strategies.contract.options import StrategyOptions
from trainwright.trainer.balance.options import FIXED, NONE, balance_option_problems


def balance_problems(
    cfg: DictConfig, options: StrategyOptions | None, layout: Layout | None, least_samples: int
) -> list[str]:
    """Return what is wrong with `balance`.

    Args:
        cfg: the resolved configuration.
        options: of the strategy; None = not one of this project.
        layout: closed; None = unknown, or invalid.
        least_samples: minimum samples of a data rank at a time: 1, or the micro-batches of a pipeline.
    """
    given: Any = OmegaConf.to_container(cfg.balance)
    problems = balance_option_problems(given)
    if problems or given["kind"] == NONE:
        return problems
    is_asynchronous = options is not None and not options.averages_every_step
    problems += strategy_problems(given["kind"], class_of(cfg.strategy), is_asynchronous)
    if layout is not None:
        problems += layout_problems(layout, given["kind"], given["shares"])
    problems += data_problems(cfg.trainer.data_partition, cfg.trainer.use_distributed_sampler, "trainer.")
    if cfg.micro_batch_size is not None:
        problems += micro_batch_problems(cfg.micro_batch_size, least_samples)
    return [*problems, *_changing_ranks(cfg, given["kind"])]


def strategy_problems(kind: str, strategy: str, is_asynchronous: bool) -> list[str]:
    """Return what is wrong with unequal shares under a strategy, given by the name of its class."""
    if not is_asynchronous:
        return []
    return [
        f"balance={kind} with {strategy}, whose ranks do not make every step together: there is no global batch to "
        "share, and no rank waits for another at every step; type balance=none"
    ]


def layout_problems(layout: Layout, kind: str, shares: Any) -> list[str]:
    """Return what is wrong with unequal shares under a closed layout."""
    if layout.data_ranks == 1:
        return [
            f"balance={kind} with the layout {layout}, in which one data rank computes every sample: nothing can be "
            "moved; type balance=none, or a layout with several data ranks (replicate, shard)"
        ]
    problems = []
    if layout.expert > 1:
        problems.append(
            f"balance={kind} with expert={layout.expert}: the work of an expert depends on the tokens of all ranks, "
            "not on the samples of its own; type balance=none, or expert=1"
        )
    if kind == FIXED and len(shares) != layout.data_ranks:
        problems.append(
            f"balance.shares has {len(shares)} number(s), but the layout {layout} has {layout.data_ranks} data ranks; "
            "give one each"
        )
    return problems


def data_problems(partition: str, deals_samples: bool, prefix: str) -> list[str]:
    """Return what is wrong with unequal shares, given how samples are read.

    Args:
        partition: ``data_partition``.
        deals_samples: ``use_distributed_sampler``.
        prefix: of these names where they are typed.
    """
    problems = []
    if partition != "interleave":
        problems.append(
            f"balance with {prefix}data_partition={partition}, which fixes the rank of each sample, so that none can "
            f"be moved; type balance=none, or {prefix}data_partition=interleave"
        )
    if not deals_samples:
        problems.append(
            f"balance with {prefix}use_distributed_sampler=false: samples that are not distributed cannot be moved; "
            "type balance=none, or leave it out"
        )
    return problems


def micro_batch_problems(micro_batch_size: int, least_samples: int) -> list[str]:
    """Return what is wrong with unequal shares of micro-batches of this size."""
    if micro_batch_size > least_samples:
        return []
    if least_samples == 1:
        why = "one sample at a time"
    else:
        why = f"{least_samples} samples at a time (one for each micro-batch of a pipeline, two for BatchNorm)"
    return [
        f"balance with micro_batch_size={micro_batch_size}: every data rank needs {why}, so that none can be moved; "
        f"type micro_batch_size={least_samples + 1} or more (and fewer accumulated), or balance=none"
    ]


def _changing_ranks(cfg: DictConfig, kind: str) -> Iterator[str]:
    launch = cfg.launch
    if kind == FIXED and (launch.min_devices is not None or launch.recovery != "restart"):
        what = "launch.recovery=" + launch.recovery if launch.min_devices is None else "launch.min_devices"
        yield f"balance=fixed with {what}: ranks may come and go, with unknown shares; type balance=auto"

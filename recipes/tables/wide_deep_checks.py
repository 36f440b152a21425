"""Checks of a configuration of the ``wide_deep`` recipe; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright import options_of

_TAKE_SPARSE = ("torch.optim.Adagrad", "torch.optim.SGD")


def check_sparse(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of ``module.sparse=true``, whose gradients some optimizers and strategies do not accept.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    if not config["module"].get("sparse"):
        return []
    problems, optimizer = [], config["optimizer"]
    target = str(optimizer.get("_target_"))
    if target not in _TAKE_SPARSE or optimizer.get("weight_decay"):
        given = f"{target} with weight_decay={optimizer.get('weight_decay', 0)}"
        problems.append(
            f"module.sparse=true gives sparse and dense gradients, which {given} does not accept. Type "
            "optimizer=adagrad, or optimizer=sgd without weight decay, or module.sparse=false."
        )
    strategy = options_of(config["strategy"])
    if strategy is None or not strategy.takes_sparse_gradients:
        target = config["strategy"]["_target_"]
        problems.append(
            f"module.sparse=true gives sparse gradients, which {target} does not accept. Type module.sparse=false, or "
            "strategy=single, ddp or parameter_server, or put the tables on servers with strategy.placement."
        )
    return problems

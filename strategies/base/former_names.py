"""Names that parts of a strategy had on the strategy itself; they can still be read there."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

_MOVED = {
    "averaging": ("compression", "average_by", "communication", "ranks_per_node"),
    "measures": (
        *("held_bytes", "measure_waits", "measure_communication", "pipeline_timeline", "listen_to_stages"),
        "routing_balance",
    ),
    "peers": ("fit_store", "heard_of_end", "is_apart", "meet", "tell_of_end"),
    "ranks": ("among_data_ranks", "data_group", "data_rank", "leads_data_rank", "num_data_ranks"),
    "replicas": ("outer",),
    "service": ("serve", "server_bytes", "server_traffic", "serves"),
    "state": ("init_from", "load_weights"),
    "traits": (
        *("averages_every_step", "backward_in_step", "forward_is_collective", "gradients_agree"),
        *("holds_step_gradients", "joins", "leases_samples", "steps_are_collective", "weighs_micro_batches"),
    ),
}
FORMER_NAMES = {
    **{name: f"{part}.{name}" for part, names in _MOVED.items() for name in names},
    "advise_communication": "averaging.advise",
    "compressed_bytes": "averaging.sent_bytes",
    "certificate_key": "certificate.key",
    "certificate_remedy": "certified.remedy",
    "certified_parts": "certified.parts",
    "certified_shares": "certified.shares",
    "held_parameter": "certified.held",
    "splits_module": "certified.is_split",
    "checkpoint_group": "state.group",
    "open_run_state": "state.open",
    "restore_rank_state": "state.restore",
}
"""Former name -> where it is now."""


def read_former_name(strategy: Any, name: str) -> Any:
    """Return what a strategy had under a former name.

    Raises:
        AttributeError: if it never had the name.
    """
    if name not in FORMER_NAMES:
        return object.__getattribute__(strategy, name)  # raises what has kept it from being found
    new = FORMER_NAMES[name]
    warnings.warn(f"strategy.{name} is strategy.{new} now; type that.", DeprecationWarning, stacklevel=3)
    return attrgetter(new)(strategy)


def refuse_former_names(cls: type) -> None:
    """Refuse a class that overrides what is asked of a part now.

    Raises:
        TypeError: naming the part.
    """
    for name in FORMER_NAMES.keys() & vars(cls).keys():
        part, _, own = FORMER_NAMES[name].partition(".")
        raise TypeError(
            f"{cls.__name__}.{name} has no effect: it is {own} of the strategy's {part} now. Set self.{part} in "
            "__init__ (docs/add_a_strategy.md), or rename the attribute."
        )

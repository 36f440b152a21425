"""Deprecated attributes of strategies, which have moved to their parts and can still be read."""

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
DEPRECATED_NAMES = {
    **{name: f"{part}.{name}" for part, names in _MOVED.items() for name in names},
    "advise_communication": "averaging.advise",
    "compressed_bytes": "averaging.sent_bytes",
    "certificate_key": "certificate.key",
    "certificate_remedy": "certified.remedy",
    "certified_parts": "certified.parts",
    "held_parameter": "certified.held",
    "splits_module": "certified.is_split",
    "checkpoint_group": "state.group",
    "open_run_state": "state.open",
    "restore_rank_state": "state.restore",
}
"""Deprecated name -> its replacement."""


def read_deprecated_name(strategy: Any, name: str) -> Any:
    """Return the replacement of a deprecated attribute, with a warning.

    Raises:
        AttributeError: if there is no such attribute.
    """
    if name not in DEPRECATED_NAMES:
        return object.__getattribute__(strategy, name)  # raises the original error
    new = DEPRECATED_NAMES[name]
    warnings.warn(f"strategy.{name} is deprecated; use strategy.{new}.", DeprecationWarning, stacklevel=3)
    return attrgetter(new)(strategy)


def refuse_deprecated_names(cls: type) -> None:
    """Raise a ``TypeError`` if a class overrides a deprecated attribute."""
    for name in DEPRECATED_NAMES.keys() & vars(cls).keys():
        part, _, own = DEPRECATED_NAMES[name].partition(".")
        raise TypeError(
            f"{cls.__name__}.{name} has no effect: it is {own} of the strategy's {part} now. Set self.{part} in "
            "__init__ (docs/add_a_strategy.md), or rename the attribute."
        )

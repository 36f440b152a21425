"""Entries of Lightning's checkpoint dict that are no plain values, such as classes and modules of a library."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from trainwright.checkpoint.format.tree import UnsupportedValueError, encode, with_types
from trainwright.core.errors import CheckpointError

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Entries that any checkpoint may lack items of: resuming needs none."""
SECTIONS = ("callbacks", *HYPER_PARAMETERS)
"""Entries whose items are kept or left out one by one; of others, the whole entry."""


def refuse_objects(objects: Mapping[str, Any]) -> None:
    """Raise if a checkpoint would lack objects that hooks have added; warn of hyper-parameters that it lacks.

    Args:
        objects: of a checkpoint that holds none, see ``Content``.

    Raises:
        CheckpointError: if some are no hyper-parameters.
    """
    try:
        encode({key: value for key, value in objects.items() if key not in HYPER_PARAMETERS}, lambda path, _: path)
    except UnsupportedValueError as error:
        raise CheckpointError(
            f"{error} Or save one file, which pickles it: with ModelCheckpoint or trainer.save_checkpoint, to a path "
            "that ends in .ckpt, and with one_file=True of the strategy (strategy.one_file=true) if it is large."
        ) from None
    if left_out := {name: value for key in HYPER_PARAMETERS for name, value in objects.get(key, {}).items()}:
        warnings.warn(
            f"The hyper-parameters {with_types(left_out)} are left out of checkpoints: only one file (.ckpt) holds "
            "objects, if they can be pickled. Pass them to load_from_checkpoint(path, name=value) again, or exclude "
            "them with self.save_hyperparameters(ignore=[...]).",
            stacklevel=2,
        )

"""Dtypes by name, without looking up arbitrary names from files in torch."""

from __future__ import annotations

import torch

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.printable import shortened

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""By torch's names without ``torch.``."""


def dtype_named(name: object) -> torch.dtype:
    """Return the dtype of a name such as ``float32``.

    Raises:
        ContentError: if torch has no such dtype.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ContentError(f"{shortened(repr(name))} is not a dtype")
    return DTYPES[name]

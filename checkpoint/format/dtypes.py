"""Dtypes by their names, without asking torch for whatever a file names."""

from __future__ import annotations

import torch

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.printable import shortened

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""By torch's names without ``torch.``."""


def dtype_named(name: object) -> torch.dtype:
    """The dtype of a name such as ``float32``.

    Raises:
        ContentError: if torch has none of that name.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ContentError(f"{shortened(repr(name))} is no dtype")
    return DTYPES[name]

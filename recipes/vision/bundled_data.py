"""Data sets included in scikit-learn; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.recipes.extras import MISSING


def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits, float32 ``(1797, 1, 8, 8)`` in [0, 1], and int64 classes ``(1797,)``.

    Raises:
        ImportError: if scikit-learn is missing; the message has the command to install it.
    """
    images, classes = _datasets("digits").load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes, dtype=torch.int64)


def diabetes() -> tuple[Tensor, Tensor]:
    """Return ten measurements of 442 patients, float64 ``(442, 10)``, and disease progression, float64 ``(442, 1)``.

    All columns are standardized (mean 0, standard deviation 1).

    Raises:
        ImportError: if scikit-learn is missing; the message has the command to install it.
    """
    inputs, targets = _datasets("linear_regression").load_diabetes(return_X_y=True, scaled=False)
    return _standardized(torch.tensor(inputs)), _standardized(torch.tensor(targets).unsqueeze(1))


def _standardized(columns: Tensor) -> Tensor:
    return (columns - columns.mean(dim=0)) / columns.std(dim=0, correction=0)


def _datasets(recipe: str) -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(MISSING.format(recipe=recipe)) from error
    return datasets

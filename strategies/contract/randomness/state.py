"""State of all random number generators of a rank, as tensors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.torch_internals import _disable_current_modes

# Odd multiplier of the rank, so that seeds of neighbouring ranks share no low bits.
RANK_STRIDE = 0x9E3779B97F4A7C15
# Draws so far of a comparison that draws the same numbers for every sample, by operator and shape.
draw_counts: Counter[Any] = Counter()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the default generators of torch (CPU and ``device``), numpy and python, by name."""
    kind, words, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    _, python, gauss = random.getstate()
    return {
        **torch_state(device),
        "numpy": torch.from_numpy(np.array([*words, position, has_gauss], dtype=np.int64)),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "python": torch.from_numpy(np.array(python, dtype=np.int64)),  # torch.tensor takes ten times as long
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of :func:`random_state`."""
    set_torch_state(state, device)
    *words, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, cached))
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the state of all generators after a ``with`` block, whose draws user code must not notice."""
    with _disable_current_modes():  # a planner's tensors have no values
        before, counts = random_state(device), draw_counts.copy()
    try:
        yield
    finally:
        with _disable_current_modes():
            set_random_state(before, device)
            restore_draw_counts(counts)


def torch_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's default generators of the CPU and of ``device``, by name."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        found["mps"] = torch.mps.get_rng_state()
    return found


def set_torch_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of :func:`torch_state`; the generator of ``device`` is left alone if none was saved."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def restore_draw_counts(counts: Mapping[Any, int]) -> None:
    """Restore a copy of :data:`draw_counts`."""
    draw_counts.clear()
    draw_counts.update(counts)


def seed_all(seed: int) -> None:
    """Seed the default generators of torch, numpy and python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

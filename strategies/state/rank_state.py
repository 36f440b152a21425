"""Per-rank state in a run state: random number generators, buffers, compression residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from trainwright.checkpoint.format.directory import OF_RANK
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.memory.transfer import TRANSFERRED
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.layout import Layout
from trainwright.strategies.contract.randomness.state import (
    RANK_STRIDE,
    kept_random_state,
    random_state,
    seed_all,
    set_random_state,
)

# Key of compression state, and key prefix of each replica's residuals.
COMPRESSION, OF_REPLICA = "compression", "compression/"
# Key prefix of buffers in per-rank state.
BUFFERS = "buffers/"


@dataclass(frozen=True)
class KeptBack:
    """Compression residuals of gradients, for a run state.

    Args:
        tensors: key -> boxes of the whole, of this rank's replica.
        of_rank: per-rank state.
        about: plain values, equal on all ranks.
    """

    tensors: Mapping[str, TensorParts]
    of_rank: Mapping[str, Tensor]
    about: Mapping[str, Any]


NOTHING_KEPT = KeptBack({}, {}, {})


def drop_kept_back(of_run: Mapping[str, Any]) -> None:
    """Log that compression residuals of the resumed run are dropped, if compression is off now."""
    saved = of_run.get(COMPRESSION)
    if saved is not None and saved["kinds"]:
        rank_zero_info(
            f"The gradient residuals of compression={saved['name']} are dropped, since compression is off now."
        )


def saved_rank_state(
    state: RunState | SnapshotReader,
    of_run: Mapping[str, Any],
    layout: Layout,
    rank: int,
    data_rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the state to resume a rank from: its own under the same layout, else the generators of its data rank.

    Args:
        state: to resume.
        of_run: its facts about the saved run.
        layout, rank, data_rank, device: of this rank.
    """
    if isinstance(state, SnapshotReader):
        source, is_new = rank_of(state), is_transferred(state)
        is_own = not is_new
    else:
        saved = Layout(**of_run["layout"])
        is_own, is_new = saved == layout, data_rank >= saved.data_ranks
        source = rank if is_own else saved.first_of_data_rank(data_rank % saved.data_ranks)
    found = of_rank(state, source)
    if is_own:
        return found
    found = {key: value for key, value in found.items() if not key.startswith(BUFFERS)}
    return _seeded(found, data_rank, device) if is_new else found


def of_rank(state: RunState | SnapshotReader, rank: int, prefix: str = "") -> dict[str, Tensor]:
    """Return the per-rank state of a rank whose names start with ``prefix``, without the prefix."""
    prefix = f"{OF_RANK}{rank}/{prefix}"
    return {key.removeprefix(prefix): state.read(key) for key in state.keys_under(prefix)}


def rank_of(state: SnapshotReader) -> int:
    """Return the rank that took the snapshot, whose number may have changed."""
    return next(int(key.split("/")[1]) for key in state.keys_under(OF_RANK))


def is_transferred(state: SnapshotReader) -> bool:
    """Return whether another rank sent the state to this one, which joins."""
    return bool(state.about.get(TRANSFERRED))


def _seeded(state: Mapping[str, Tensor], data_rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return generator states for a new data rank, seeded from another's so that no numbers repeat."""
    with kept_random_state(device):
        set_random_state(state, device)
        seed_all((int(torch.randint(2**62, ())) + data_rank * RANK_STRIDE) % 2**63)
        return random_state(device)

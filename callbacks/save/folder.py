"""The folder that a run saves its checkpoints into, before the first one."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store.storage import clean_up
from trainwright.checkpoint.store.write_errors import refuse_unwritable
from trainwright.core.errors import CheckpointError


def prepare_folder(folder: str) -> None:
    """See that checkpoints can be saved there, and remove what killed writers left.

    Raises:
        CheckpointError: if this user may not write there.
    """
    refuse_unwritable(folder)
    clean_up(folder)


def warn_of_later_ones(folder: str, step: int) -> None:
    """Warn if a folder holds checkpoints of later steps than the run begins with."""
    try:
        later = [found for found in list_checkpoints(folder) if found.step > step]
    except CheckpointError:
        return  # saving will say more
    if later:
        rank_zero_warn(
            f"{folder} holds checkpoints of later steps than {step}, with which this run begins: {later[0].path} is "
            "the latest, and ckpt_path=last goes on from the latest good one. Delete them, or save into another folder "
            "(dirpath)."
        )

"""Settings that silence Lightning, whose hints would mix with the output of a benchmark."""

from __future__ import annotations

import logging
import warnings


def silence_lightning() -> None:
    """Hide what Lightning logs below an error, and all warnings."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


# What a Trainer must not do beside training.
PLAIN_TRAINER = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

"""Inputs of the peers in a folder: the model, the initial adapter and the packed rows in order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

FOLDER = Path(sys.argv[1])


def build_model() -> Any:
    """The pretrained model, with the adapter if the second argument is ``lora``."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "base")
    if sys.argv[2] != "lora":
        return model
    from peft import PeftModel  # which would take memory in training all weights

    return PeftModel.from_pretrained(model, FOLDER / "adapter", is_trainable=True)


def rows() -> list[dict[str, Tensor]]:
    """The rows of all steps, each with the labels already shifted, as a collator for packed rows gives them."""
    found: list[dict[str, Tensor]] = torch.load(FOLDER / "rows.pt", weights_only=True)
    return found

"""Tiny checkpoints, and functions that damage them."""

from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.save import Content, write

RANK_FILE = "rank_00000.safetensors"


def write_checkpoint(path: Path | str, step: int = 1, tensors: int = 2, **about: Any) -> str:
    """Write a checkpoint of one rank.

    Args:
        path: of its folder.
        step: of its manifest.
        tensors: number of tensors with four elements.
        **about: other fields of its manifest.
    """
    names = [f"layer.{i}" for i in range(tensors)]
    content = Content(
        tree={"global_step": step, "state_dict": {name: {"~": "tensor", "key": f"weights/{name}"} for name in names}},
        tensors={
            f"weights/{name}": TensorParts.whole(torch.full((2, 2), float(i + step))) for i, name in enumerate(names)
        },
        about={"kind": "run state", "step": step, "epoch": 0, "world_size": 1, "data_ranks": 1, **about},
    )
    write(content, str(path))
    return str(path)


def flip_bit(path: Path | str, file: str = RANK_FILE, at: int = -1) -> None:
    """Flip one bit of a file."""
    target = Path(path) / file
    data = bytearray(target.read_bytes())
    data[at] ^= 1
    target.write_bytes(data)


def cut_short(path: Path | str, file: str = RANK_FILE) -> None:
    """Remove the last byte of a file."""
    target = Path(path) / file
    target.write_bytes(target.read_bytes()[:-1])

"""Texts for a language model to go on from, as batches of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Prompt(NamedTuple):
    """A text to go on from; collated, every field gets a first dimension B (``text`` becomes a list)."""

    ids_T: Tensor  # noqa: N815
    """The last T ids of the text, int64 ``(T,)``, with zeros behind a shorter one."""
    length: Tensor
    """Number of ids that are text, int64 ``()``."""
    new: Tensor
    """Number of ids to add, int64 ``()``, the same for all prompts."""
    text: str
    """The whole text."""


class PromptSet(Dataset[Prompt]):
    """``prompts`` in order.

    Args:
        prompts: texts of at least one id.
        window: T, ids that the model sees at once.
        new: ids to add, at least 1.
        encode: from a text to its ids.
    """

    def __init__(self, prompts: Sequence[str], window: int, new: int, encode: Callable[[str], list[int]]) -> None:
        self.prompts = list(prompts)
        self.window = window
        self.new = new
        self.encode = encode

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        """The prompt number ``index``."""
        text = self.prompts[index]
        seen = self.encode(text)[-self.window :]
        ids = torch.zeros(self.window, dtype=torch.int64)
        ids[: len(seen)] = torch.tensor(seen)
        return Prompt(ids, torch.tensor(len(seen)), torch.tensor(self.new), text)


def continue_greedily(logits_of: Callable[[Tensor], Tensor], prompts: Prompt) -> Tensor:
    """The most likely ids after each prompt, one after the other, int64 ``(B, new)``.

    Every pass has the shape ``(B, T)``, so no rank of a layout falls out of step, nothing is compiled twice and no
    cache of keys and values has to follow the model over its ranks. Zeros behind a text change nothing for a causal
    model. A text that fills the window loses its first id for each new one.

    Args:
        logits_of: from ids ``(B, T)`` to logits ``(B, T, V)`` of the next id.
        prompts: a collated batch.
    """
    seen_BT, lengths_B = prompts.ids_T.clone(), prompts.length.clone()  # noqa: N806
    window = seen_BT.size(1)
    rows = torch.arange(len(seen_BT), device=seen_BT.device)
    new = []
    for _ in range(int(prompts.new[0])):
        next_B = logits_of(seen_BT)[rows, lengths_B - 1].argmax(dim=-1)  # noqa: N806
        is_full = lengths_B == window
        seen_BT = torch.where(is_full[:, None], seen_BT.roll(-1, dims=1), seen_BT)  # noqa: N806
        lengths_B = torch.where(is_full, lengths_B, lengths_B + 1)  # noqa: N806
        seen_BT[rows, lengths_B - 1] = next_B
        new.append(next_B)
    return torch.stack(new, dim=1)


def decode_bytes(ids: Sequence[int]) -> str:
    """UTF-8 text of ids that are bytes; what is not UTF-8 becomes ``\\xff`` and the like."""
    return bytes(ids).decode(errors="backslashreplace")

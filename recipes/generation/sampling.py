"""Options of sampling next tokens; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Sampling(NamedTuple):
    """Options of continuing a text.

    Attributes:
        max_new_tokens: tokens to add, at least 1; fewer if the model ends the text (its ``eos_token_id``).
        temperature: divisor of the logits; 0 always takes the most likely token (greedy decoding).
        top_p: sample from the most likely tokens with this total probability, more than 0, at most 1 (all).
        seed: of sampling. Each prompt has its own generator, so results do not depend on layout and batch size.
    """

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        """Return values out of range, each with a remedy."""
        found = []
        if not _is_count(self.max_new_tokens):
            found.append(
                f"max_new_tokens={self.max_new_tokens} (allowed: a whole number of at least 1). Type max_new_tokens=100"
            )
        if not _is_number(self.temperature) or self.temperature < 0:
            found.append(f"temperature={self.temperature} (allowed: 0 or more). Type temperature=0.8, or 0 for greedy")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            found.append(f"top_p={self.top_p} (allowed: more than 0, at most 1). Type top_p=0.9, or 1 for off")
        elif self.top_p < 1 and self.temperature == 0:
            found.append(f"top_p={self.top_p} with temperature=0, which does not sample. Type temperature=1 as well")
        return found


def check(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of a configuration whose data is ``PromptData``.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    data = config["data"]
    values = {key: value for key, value in data["sampling"].items() if key != "_target_"}
    problems = Sampling(**values).problems()
    if not data["prompts"] or not all(isinstance(each, str) and each for each in data["prompts"]):
        problems.append(
            f"prompt={list(data['prompts'])} (allowed: texts of at least one character). Type prompt='Once'"
        )
    if not _is_count(data["batch_size"]):
        problems.append(f"batch_size={data['batch_size']} (allowed: a whole number of at least 1). Type batch_size=8")
    return problems


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value

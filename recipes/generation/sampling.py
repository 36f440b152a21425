"""Options of sampling next tokens; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainwright import number, value_problems


@dataclass(frozen=True)
class Sampling:
    """Options of continuing a text.

    Attributes:
        max_new_tokens: tokens to add, at least 1; fewer if the model ends the text (its ``eos_token_id``).
        temperature: divisor of the logits; 0 always takes the most likely token (greedy decoding).
        top_p: sample from the most likely tokens with this total probability, more than 0, at most 1 (all).
        seed: of sampling. Each prompt has its own generator, so results do not depend on layout and batch size.
    """

    max_new_tokens: int = number(100, least=1)
    temperature: float = number(0.0, most=float("inf"), unit="0 for greedy")
    top_p: float = number(1.0, above=0, most=1, unit="1 for off")
    seed: int = 0

    def problems(self) -> list[str]:
        """Return values out of range, each with a remedy."""
        found = list(value_problems(Sampling, vars(self)))
        if not found and self.top_p < 1 and self.temperature == 0:
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
    if type(data["batch_size"]) is not int or data["batch_size"] < 1:
        problems.append(f"batch_size={data['batch_size']} (allowed: a whole number of at least 1). Type batch_size=8")
    return problems

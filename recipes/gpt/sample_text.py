"""Text sample generated at the end of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from trainwright import checked, number, value_problems
from trainwright.recipes.generation.generate import continued
from trainwright.recipes.generation.sampling import Sampling
from trainwright.recipes.language_model import LanguageModule


@dataclass(eq=False, repr=False)
class SampleText(Callback):
    """Print a sample when training ends, write it to ``sample.txt`` in the run directory and to TensorBoard.

    For :class:`~trainwright.recipes.language_model.LanguageModule`. Uses ``encode`` and ``decode`` of the data module;
    without them an id is a byte.

    A sharded model needs all ranks in each forward pass, so every rank generates the text, and rank 0 publishes it.
    Sampling has its own generator, so the run's random numbers do not change.

    Args:
        length: tokens to generate; 0 is off.
        temperature: divisor of the logits; less than 1 prefers likely tokens, 0 takes the most likely.
        prompt: text to continue, at least one character; ``None``: ``sample_prompt()`` of the data module.
        seed: of sampling.

    Raises:
        ValueError: if an argument is out of its range.
    """

    length: int = number(400, unit="tokens")
    temperature: float = number(0.8)
    prompt: str | None = checked("\n", lambda prompt: prompt != "", "at least one character")
    seed: int = 0

    def __post_init__(self) -> None:
        problems = list(value_problems(SampleText, vars(self)))
        if problems:
            raise ValueError(f"Impossible sample: {'; '.join(problems)}.")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that is not a ``LanguageModule``.

        Raises:
            TypeError: if it is not.
        """
        if self.length and not isinstance(pl_module, LanguageModule):
            raise TypeError(
                f"SampleText needs a LanguageModule, not a {type(pl_module).__name__}. "
                "Type callbacks.sample=null to leave it out"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate the sample."""
        if self.length == 0:
            return
        assert isinstance(pl_module, LanguageModule)
        data: Any = getattr(trainer, "datamodule", None)
        encode, decode = getattr(data, "encode", _as_bytes), getattr(data, "decode", _as_text)
        ids = data.sample_prompt() if self.prompt is None else encode(self.prompt)
        (new,) = continued(trainer, pl_module, [ids], Sampling(self.length, self.temperature, seed=self.seed))
        text = decode([*ids, *new])
        # Terminals interpret control characters.
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
        if trainer.is_global_zero:
            self._publish(trainer, text)

    def _publish(self, trainer: Trainer, text: str) -> None:
        trainer.print(f"Sample after {trainer.global_step} steps:\n{text}\n")
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sample.txt").write_text(f"{text}\n", encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Indented by four spaces, a code block in TensorBoard's Markdown.
                logger.experiment.add_text(
                    "sample", "".join(f"    {line}\n" for line in text.split("\n")), trainer.global_step
                )


def _as_bytes(text: str) -> list[int]:
    return list(text.encode())


def _as_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")

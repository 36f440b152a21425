"""Text that the model has written, at the end of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from trainwright.recipes.language_model import LanguageModule, Prefix

# The name of the phase before and after training.
_IDLE = "idle"


class SampleText(Callback):
    """Print a sample when training ends, write it to ``sample.txt`` in the run directory and to TensorBoard.

    For :class:`~trainwright.recipes.language_model.LanguageModule` on bytes, which looks back on ``seq_len`` of them.

    A sharded model needs all ranks in each forward pass, so every rank writes the text, and rank 0's is kept. Every
    pass has the same shape, ``(1, seq_len)``: no rank can fall out of step and nothing is compiled twice. Bytes drawn
    come from a generator of its own, so the run's random numbers stay as they are.

    Args:
        length: bytes to write; 0 is off.
        temperature: divisor of the logits, more than 0; less than 1 prefers likely bytes.
        prompt: text to go on from, at least one byte.
        seed: seed of the draws.

    Raises:
        ValueError: if an argument is out of its range.
    """

    def __init__(self, length: int = 400, temperature: float = 0.8, prompt: str = "\n", seed: int = 0) -> None:
        problems = []
        if length < 0:
            problems.append(f"length={length} (allowed: 0 or more bytes)")
        if temperature <= 0:
            problems.append(f"temperature={temperature} (allowed: more than 0)")
        if not prompt:
            problems.append("prompt='' (allowed: at least one character)")
        if problems:
            raise ValueError(f"Impossible sample: {'; '.join(problems)}.")
        self.length = length
        self.temperature = temperature
        self.prompt = prompt
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that cannot write.

        Raises:
            TypeError: if it is no ``LanguageModule``.
        """
        if self.length and not isinstance(pl_module, LanguageModule):
            raise TypeError(
                f"SampleText writes with a LanguageModule or a subclass of it, not with a {type(pl_module).__name__}. "
                "Leave the callback out: callbacks.sample=null"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the sample."""
        if self.length == 0:
            return
        assert isinstance(pl_module, LanguageModule)
        was_training = pl_module.training
        pl_module.eval()
        # no_grad rather than inference_mode: sharded parameters are gathered into buffers that training uses again.
        with torch.no_grad():
            text = self._write(trainer, pl_module)
        pl_module.train(was_training)
        if trainer.is_global_zero:
            self._publish(trainer, text)

    def _write(self, trainer: Trainer, pl_module: LanguageModule) -> str:
        phases: Any = getattr(trainer, "phases", None)  # of a Trainer of this project

        def next_logits(prefix: Prefix, batch_idx: int) -> Tensor:
            if phases is not None:
                phases.begin(_IDLE)  # each byte is progress: all together may take longer than a hang
            # Through the strategy, which alone knows how to bring a sharded model's weights together.
            on_device = Prefix(prefix.ids_BT.to(trainer.strategy.root_device))
            logits: Tensor = trainer.strategy.predict_step(on_device, batch_idx)
            return logits

        window = pl_module.seq_len
        return generate(next_logits, self.prompt, self.length, window, self.temperature, self.seed)

    def _publish(self, trainer: Trainer, text: str) -> None:
        heading = f"Sample after {trainer.global_step} steps:"
        trainer.print(f"{heading}\n{text}\n")
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sample.txt").write_text(f"{text}\n", encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # Four spaces: TensorBoard shows text as Markdown, and this is code.
                logger.experiment.add_text(
                    "sample", "".join(f"    {line}\n" for line in text.split("\n")), trainer.global_step
                )


def generate(
    next_logits: Callable[[Prefix, int], Tensor], prompt: str, length: int, window: int, temperature: float, seed: int
) -> str:
    """Go on from ``prompt``.

    Args:
        next_logits: a ``predict_step`` that answers a :class:`Prefix` ``(1, window)`` with logits ``(1, window, 256)``.
        prompt: text before; its last ``window`` bytes are read.
        length: bytes to draw.
        window: bytes that each forward pass sees.
        temperature: divisor of the logits.
        seed: seed of the draws.

    Returns:
        The prompt and what was drawn; what is not UTF-8 and control characters (a terminal would obey them) become
        U+FFFD.
    """
    ids = list(prompt.encode())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        seen = ids[-window:]
        # Zeros behind the text fill the window; a causal model does not see them.
        padded = torch.tensor([seen + [0] * (window - len(seen))])
        logits_V = next_logits(Prefix(padded), 0)[0, len(seen) - 1].float().cpu()  # noqa: N806
        chances = torch.softmax(logits_V / temperature, dim=0)
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    text = bytes(ids).decode(errors="replace")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)

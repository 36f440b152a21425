"""One optimizer step of the gpt recipe's module in Lightning's own Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl

from benchmarks.peers.first_step import FirstStep
from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.gpt.module import GPTModule


def main(devices: int, save: str | None, resume: str | None) -> None:
    """Train one step (more); with several devices Lightning starts the other ranks itself."""
    silence_lightning()
    steps = 2 if resume else 1
    options: dict[str, Any] = {**PLAIN_TRAINER, "accelerator": "cpu", "devices": devices, "max_steps": steps}
    trainer = pl.Trainer(
        strategy="ddp" if devices > 1 else "auto",
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[FirstStep()],
        **options,
    )
    trainer.fit(GPTModule(), datamodule=TextCorpus(batch_size=4), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", type=int)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    options = parser.parse_args()
    main(options.devices, options.save, options.resume)

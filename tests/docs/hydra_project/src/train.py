"""Train what configs/train.yaml names: `python src/train.py [experiment=wide] [trainer=ddp]`."""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PROJECT_ROOT"] = str(ROOT)


def instantiate_each(group: DictConfig | None) -> list[Any]:
    """Return the objects that a group of callbacks or loggers names."""
    return [hydra.utils.instantiate(each) for each in (group or {}).values() if "_target_" in each]


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed, workers=True)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks, logger = instantiate_each(cfg.get("callbacks")), instantiate_each(cfg.get("logger"))
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    if cfg.train:
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    if cfg.test:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") or None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=best)
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()

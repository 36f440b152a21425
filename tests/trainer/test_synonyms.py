"""Arguments in Python: words of other libraries are answered, and lists and mappings of Hydra are taken."""

from pathlib import Path
from typing import Any

import hydra
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from trainwright import DDPStrategy, HybridStrategy, PipelineStrategy, Trainer, ZeroStrategy

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 2}
WORDS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "fsdp2"}, "type strategy='zero3'"),
    ({"strategy": "full_shard"}, "type strategy='zero3'"),
    ({"strategy": "tp"}, "type strategy='tensor'"),
    ({"strategy": "PP"}, "type strategy='pipeline'"),
    ({"strategy": "cp"}, "type strategy='context'"),
    ({"strategy": "ep"}, "type strategy='expert'"),
    ({"strategy": "ps"}, "type strategy='parameter_server'"),
    ({"strategy": "model_parallel"}, "type strategy='hybrid' or strategy='tensor' or strategy='pipeline'"),
    ({"strategy": "hybrid_3d"}, "type strategy='hybrid'"),
    ({"precision": "fp16"}, "type precision='16-mixed'"),
    ({"precision": "half"}, "type precision='16-mixed'"),
    ({"precision": "bfloat16"}, "type precision='bf16-mixed'"),
    ({"precision": "fp32"}, "type precision='32-true'"),
    ({"precision": "amp"}, "type precision='16-mixed' or precision='bf16-mixed'"),
    ({"max_epoch": 3}, "type max_epochs=3"),
    ({"epochs": 3}, "type max_epochs=3"),
    ({"gpus": 2}, "type devices=2"),
    ({"num_gpus": 2}, "type devices=2"),
    ({"nodes": 2}, "type num_nodes=2"),
    ({"fp16": True}, "type precision='16-mixed'"),
    ({"mixed_precision": "fp16"}, "type precision='16-mixed'"),
    ({"run_dir": "x"}, "type default_root_dir='x'"),
    ({"gradient_accumulation_steps": 4}, "type accumulate_grad_batches=4"),
    ({"max_grad_norm": 1.0}, "type gradient_clip_val=1.0"),
    ({"resume_from_checkpoint": "x"}, "type trainer.fit(module, ckpt_path=...)"),
    ({"gradient_clip_vall": 1.0}, "did you mean gradient_clip_val?"),
]


@pytest.mark.parametrize(("given", "answer"), WORDS)
def test_word_is_answered_with_what_to_type(given: dict[str, Any], answer: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Trainer(**{**QUIET, "devices": 1, **given})
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("strategy", "given", "answer"), [
    (ZeroStrategy, {"shrad": 2}, "ZeroStrategy: shrad=2: there is no such argument; did you mean shard?"),
    (HybridStrategy, {"tp": 2}, "type tensor=2"),
    (PipelineStrategy, {"pipeline_parallel_size": 2}, "type pipeline=2"),
    (DDPStrategy, {"find_unused_parameter": True}, "did you mean find_unused_parameters?"),
])  # fmt: skip
def test_unknown_argument_of_a_strategy(strategy: type, given: dict[str, Any], answer: str) -> None:
    with pytest.raises(TypeError) as caught:
        strategy(**given)
    assert answer in str(caught.value)


def test_arguments_of_torch_are_passed_on() -> None:
    assert DDPStrategy(static_graph=True)._ddp_kwargs["static_graph"] is True


def test_strategy_of_lightning_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), pytest.raises(ValueError, match="requires a GPU"):
        Trainer(**QUIET, strategy="fsdp")
    assert "that of Trainwright is 'zero3'" in caplog.text


def test_arguments_of_hydra(tmp_path: Path) -> None:
    """Hydra wraps lists and mappings that it passes in its own kinds, also inside of others."""
    stop, logger, environment = EarlyStopping("loss"), CSVLogger(tmp_path), LightningEnvironment()
    cfg = OmegaConf.create({
        "_target_": "trainwright.Trainer", **QUIET, "devices": 2, "global_batch_size": 4, "precision": "16-mixed",
        "balance": {"kind": "fixed", "shares": [3, 1]}, "loss_scale": {"initial": 4.0},
        "strategy": {"_target_": "trainwright.DDPStrategy", "checkpoint_modules": ["layer"],
                     "activation_checkpointing": "selective"},
    })  # fmt: skip
    trainer = hydra.utils.instantiate(cfg, callbacks=[stop], logger=[logger], plugins=[environment])
    assert stop in trainer.callbacks
    assert trainer.loggers == [logger]
    assert trainer.strategy.cluster_environment is environment
    assert trainer.balance.options.shares == [3.0, 1.0]
    assert type(trainer.strategy.options.checkpoint_modules) is list


def test_loaders_of_hydra(tmp_path: Path) -> None:
    """A list of loaders is evaluated loader by loader."""
    loaders = OmegaConf.create([DataLoader(RandomDataset(32, 4)) for _ in range(2)], flags={"allow_objects": True})
    trainer = Trainer(**QUIET, devices=1, logger=False, enable_checkpointing=False)
    assert len(trainer.predict(BoringModel(), dataloaders=loaders)) == 2

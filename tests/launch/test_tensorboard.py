"""TensorBoard event files of a run."""

from pathlib import Path

import torch
from hydra.utils import instantiate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainwright.command.schema.compose import compose
from trainwright.launch.worker import build_trainer
from trainwright.trainer.loggers.tensorboard import TensorBoard, grouped, hyper_parameters

WORDS = ["strategy=single", "devices=1", "accelerator=cpu", "max_steps=3", "max_epochs=null"]


def test_layout_and_hyperparameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = compose(
        "linear_regression", [*WORDS, "trainer.log_every_n_steps=1", f"run_dir={tmp_path}", "checkpoint=none"]
    )
    module, data = (instantiate(part, _convert_="all") for part in (cfg.module, cfg.data))
    build_trainer(cfg).fit(module, datamodule=data)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    [layout] = events.Tensors("run/layout/text_summary")
    assert b"| strategy | SingleDeviceStrategy on 1 rank (cpu) |" in layout.tensor_proto.string_val[0]
    content = events.PluginTagToContent("hparams")
    asked = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert asked["max_steps"].number_value == 3
    assert asked["precision"].string_value == "32"
    assert not any(key.startswith(("monitor.", "launch.")) for key in asked)
    scalars = set(events.Tags()["scalars"])
    assert {"rate/samples_per_second", "time/step", "loss"} <= scalars
    assert not scalars & {"samples_per_second", "hp_metric"}
    assert "samples_per_second" in (tmp_path / "metrics.csv").read_text().split("\n")[0].split(",")


def test_one_event_per_step(tmp_path: Path) -> None:
    logger = TensorBoard(str(tmp_path))
    logger.log_metrics({"loss": 1.5, "samples_per_second": 2.0}, 3)
    logger.log_metrics({"val": torch.tensor(4.0)}, 4)
    logger.log_metrics({}, 5)
    logger.finalize("success")
    [file] = tmp_path.glob("events*")
    told = [each for each in EventFileLoader(str(file)).Load() if each.step]
    assert [(each.step, [value.tag for value in each.summary.value]) for each in told] == [
        (3, ["loss", "rate/samples_per_second"]),
        (4, ["val"]),
    ]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [events.Scalars(name)[0].value for name in ("loss", "rate/samples_per_second", "val")] == [1.5, 2.0, 4.0]


def test_metric_groups() -> None:
    names = ("tokens_per_second", "mfu", "step_seconds", "time/step", "val_loss", "mine/images_per_second")
    expected = ["rate/tokens_per_second", "rate/mfu", "rate/step_seconds", *names[3:]]
    assert [grouped(name) for name in names] == expected


def test_default_logger() -> None:
    cfg = compose("digits", ["strategy.blocks=[a,b]", "run_dir=there"])
    assert cfg.logger.tensorboard._target_ == f"{TensorBoard.__module__}.TensorBoard"
    assert hyper_parameters(cfg)["strategy.blocks"] == "['a', 'b']"

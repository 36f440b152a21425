"""Compressed averages under strategies: equal replicas, and dense results at ratio 1."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.parity.harness import Record, Recorder, differences, make_loader, make_trainer, world_size
from tests.parity.modules import LanguageModel
from trainwright.strategies.averaging.compression.options import compressor_names

# Name, ranks and options of each strategy.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 4, {"replicate": 2, "shard": 2}),
    "zero2": ("zero2", 4, {"replicate": 2, "shard": 2}),
    "zero3": ("zero3", 4, {"replicate": 2, "shard": 2}),
}
GLOBAL_BATCH, SAMPLES = 24, 48
# Small enough to compress this module, with warm-ups shorter than the runs.
OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 1, "warmup_steps": 0},
    "onebit": {"warmup_steps": 2},
    "topk": {"ratio": 0.1, "warmup_steps": 1},
}
ALL = {"name": "topk", "ratio": 1.0, "warmup_steps": 0}


class Grouped(LanguageModel):
    """Two groups of parameters and a learning-rate schedule."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Replicas(pl.Callback):
    """Asserts equal replicas at the end of training."""

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        strategy = trainer.strategy
        boxes = strategy.trained_boxes().items()
        held = torch.cat([box.reshape(-1).float() for _, parts in boxes for _, box in parts.parts])
        place = strategy.layout.coordinates(dist.get_rank())
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (held, {**place, "replicate": 0}))
        for other, where in gathered:
            assert where != {**place, "replicate": 0} or torch.equal(other, held), "replicas drifted apart"


def trained(strategy: str, options: dict[str, Any], compression: Any, steps: int, accumulation: int, **trainer: Any):
    torch.manual_seed(11)
    module, recorder = Grouped(), Recorder()
    made = make_trainer(
        strategy,
        {**options, "compression": compression},
        global_batch_size=GLOBAL_BATCH,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[recorder, Replicas()],
        **trainer,
    )
    made.fit(module, make_loader(SAMPLES, GLOBAL_BATCH // (world_size() * accumulation)))
    assert (made.strategy.averaging.sent_bytes > 0) == (compression is not None)
    return recorder.record


def every_name(strategy: str, options: dict[str, Any]) -> dict[str, Record]:
    """Train with each compressor, accumulation and clipping, and without compression."""
    results = {}
    for name in compressor_names():
        choice = {"name": name, **OPTIONS.get(name, {})}
        results[name] = trained(strategy, options, choice, 3, 2, gradient_clip_val=1.0)
    results["dense"] = trained(strategy, options, None, 3, 2, gradient_clip_val=1.0)
    results["all"] = trained(strategy, options, ALL, 3, 2, gradient_clip_val=1.0)
    mixed = {"precision": "bf16-mixed"}
    results["dense, mixed"] = trained(strategy, options, None, 2, 1, **mixed)
    results["all, mixed"] = trained(strategy, options, ALL, 2, 1, **mixed)
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_every_compressor(ranks: Any, layout: str) -> None:
    strategy, count, options = LAYOUTS[layout]
    results = ranks(every_name, count, strategy, options)
    for found in results:
        assert differences(found["all"], found["dense"], 1e-6) == []
        assert differences(found["all, mixed"], found["dense, mixed"], 1e-5) == []
        for name in compressor_names():
            assert differences(found[name], found["dense"], 1e-7) != [], "something was compressed"
            assert found[name].losses == results[0][name].losses


def some_and_all(layouts: list[str]) -> dict[str, tuple[Record, ...]]:
    some = {"name": "onebit", **OPTIONS["onebit"]}
    results = {}
    for layout in layouts:
        strategy, _, options = LAYOUTS[layout]
        results[layout] = tuple(
            trained(strategy, options, choice, 3, 1, gradient_clip_val=1.0) for choice in (None, ALL, some)
        )
    return results


@pytest.mark.thorough
def test_zero1_and_zero2(ranks: Any) -> None:
    """Replicas with slices of a flat gradient, as stage 3 has shards."""
    results = ranks(some_and_all, 4, ["zero1", "zero2"])
    for found in results:
        for layout, (dense, everything, some) in found.items():
            assert differences(everything, dense, 1e-6) == []
            assert differences(some, dense, 1e-7) != [], layout
            assert some.losses == results[0][layout][2].losses


def warming_up() -> tuple[list[float], Record, Record]:
    """Return losses of dense steps, and records with a long and a short warm-up."""
    options = {"name": "topk", "ratio": 0.1}
    dense = trained("ddp", {}, None, 4, 2, gradient_clip_val=1.0)
    long, short = (trained("ddp", {}, {**options, "warmup_steps": n}, 4, 2, gradient_clip_val=1.0) for n in (4, 2))
    return dense.losses, long, short


def test_warmup_is_uncompressed(ranks: Any) -> None:
    for dense, long, short in ranks(warming_up, 2):
        assert long.losses == pytest.approx(dense, rel=1e-6)
        # The third step is the first compressed one, so the fourth loss is the first to differ.
        micro_batches = len(dense) // 4
        assert short.losses[: 3 * micro_batches] == pytest.approx(dense[: 3 * micro_batches], rel=1e-6)
        assert short.losses[3 * micro_batches :] != pytest.approx(dense[3 * micro_batches :], rel=1e-5)


def interrupted(
    strategy: str, options: dict[str, Any], compression: Any, steps: int, save_to: str | None, resume: str | None
) -> dict[str, Any]:
    torch.manual_seed(11)
    module, recorder = LanguageModel("adamw"), Recorder()
    begun: dict[str, Any] = {}
    callbacks: list[Any] = [recorder, _Begins(begun)]
    if save_to is not None:
        callbacks.append(ModelCheckpoint(save_to, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1))
    trainer = make_trainer(
        strategy,
        {**options, "compression": compression},
        global_batch_size=GLOBAL_BATCH,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        enable_checkpointing=save_to is not None,
    )
    loader = make_loader(SAMPLES, GLOBAL_BATCH // world_size(), shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume)
    return {"record": recorder.record, "kept": kept_back(trainer.strategy), "begun": begun}


class _Begins(pl.Callback):
    """Records the residuals at the start of a resumed run."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if not self.found:
            self.found.update(kept_back(trainer.strategy))


def kept_back(strategy: Any) -> dict[str, Any]:
    """Return the mean residual over replicas of each whole parameter."""
    if not strategy.averaging.runs:
        return {}
    found: dict[str, Any] = {}
    gathered: list[Any] = [None] * world_size()
    tensors = strategy.averaging.kept_back(complete=True).tensors
    own = {key: (parts.shape, [(at, box.clone()) for at, box in parts.parts]) for key, parts in tensors.items()}
    dist.all_gather_object(gathered, own)
    whole: dict[str, torch.Tensor] = {}
    for rank in gathered:
        for key, (shape, boxes) in rank.items():
            target = whole.setdefault(key, torch.zeros(shape))
            for at, box in boxes:
                target[tuple(slice(o, o + n) for o, n in zip(at, box.shape, strict=True))] = box
    replicas = strategy.layout.replicate
    for key, value in whole.items():
        _, _, kind, name = key.split("/", 3)
        share = value / replicas if kind == "residual" else value
        found[name] = found.get(name, 0) + share
    return found


SAVED_AT, END = 4, 6
# Saved within its warm-up.
WARM = {"warmup_steps": SAVED_AT + 1}


def resumed(
    strategy: str, options: dict[str, Any], choice: dict[str, Any], folder: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = interrupted(strategy, options, choice, END, folder, None)
    return whole, interrupted(strategy, options, choice, END, None, f"{folder}/step={SAVED_AT}.ckpt")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "name", "more"), [
    ("ddp", "topk", WARM),
    ("ddp", "onebit", {}),
    ("zero3", "powersgd", {}),
    ("zero1", "onebit", {}),
])  # fmt: skip
def test_resume_under_the_same_layout_is_bit_exact(ranks, tmp_path, layout, name, more):
    strategy, count, options = LAYOUTS[layout]
    choice = {"name": name, **OPTIONS.get(name, {}), **more}
    for expected, found in ranks(resumed, count, strategy, options, choice, str(tmp_path)):
        assert found["record"].losses == expected["record"].losses[SAVED_AT:]
        for parameter, value in expected["record"].parameters.items():
            assert torch.equal(found["record"].parameters[parameter], value), parameter
        assert found["kept"].keys() == expected["kept"].keys() != set()
        for parameter, value in expected["kept"].items():
            assert torch.equal(found["kept"][parameter], value), parameter


FOLDS = [
    (("ddp", 2, {}), ("ddp", 3, {}), "onebit"),
    (("ddp", 3, {}), ("zero3", 4, {"replicate": 2, "shard": 2}), "topk"),
    (("zero2", 4, {"replicate": 2, "shard": 2}), ("ddp", 2, {}), "onebit"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("written", "read", "name"), FOLDS, ids=["ddp-2-3", "ddp-zero3", "zero2-ddp"])
def test_folded_under_another_layout(ranks: Any, tmp_path: Any, written: Any, read: Any, name: str) -> None:
    """The mean residual over replicas, which determines training, is preserved."""
    choice = {"name": name, **OPTIONS.get(name, {})}
    saved = ranks(interrupted, written[1], written[0], written[2], choice, SAVED_AT, str(tmp_path), None)[0]["kept"]
    path = str(tmp_path / f"step={SAVED_AT}.ckpt")
    results = ranks(interrupted, read[1], read[0], read[2], choice, SAVED_AT + 1, None, path)
    assert any(value.any() for value in saved.values())
    for result in results:
        assert result["begun"].keys() == saved.keys()
        for parameter, value in saved.items():
            torch.testing.assert_close(result["begun"][parameter], value, rtol=1e-5, atol=1e-7)

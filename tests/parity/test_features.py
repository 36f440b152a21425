"""Manual optimization, schedulers, averaging and Lightning's callbacks under every strategy."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, default_collate

from tests.parity import modules
from tests.parity.harness import (
    Case,
    Record,
    data_parallel_names,
    differences,
    global_batches,
    make_loader,
    make_trainer,
    train,
    whole,
    world_size,
)
from tests.parity.modules import LanguageModel, Plain, Tokens, make_module

STRATEGIES = data_parallel_names()
GLOBAL_BATCH = 12


def ranks_for(strategy: str, wanted: int = 2) -> int:
    return 1 if strategy == "single" else wanted


def loader() -> DataLoader:
    return make_loader(48, GLOBAL_BATCH // world_size())


def parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert differences(Record(parameters=found), Record(parameters=expected), tolerance) == []


# ---- The module is not changed --------------------------------------------------------------------------------------


def fit_and_look(strategy: str) -> dict[str, Any]:
    def source() -> str:
        return hashlib.sha256(Path(inspect.getfile(modules)).read_bytes()).hexdigest()

    module = make_module("decoder-sgd")
    names = [name for name, _ in module.named_parameters()]
    contents = {cls: dict(vars(cls)) for cls in (LanguageModel, modules.Decoder, modules.Block, modules.Attention)}
    before = source()
    make_trainer(strategy, max_steps=2, global_batch_size=GLOBAL_BATCH).fit(module, loader())
    return {
        "source": source() == before,
        "class": type(module) is LanguageModel,
        "contents": all(dict(vars(cls)) == members for cls, members in contents.items()),
        "names": [name for name, _ in module.named_parameters()] == names,
        "state": list(module.state_dict()) == names,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_module_is_not_touched(ranks, strategy):
    for found in ranks(fit_and_look, ranks_for(strategy), strategy):
        assert all(found.values()), found


class CallsItself(LanguageModel):
    """Calls itself outside of a step, as modules do to show a sample."""

    def show(self, *args: Any) -> None:
        self.shown = self(Tokens(2).tokens[:, :-1]).argmax(-1)

    on_train_start = on_train_batch_end = on_train_epoch_end = on_validation_epoch_end = on_train_end = show


def fit_and_call(strategy: str) -> list[int]:
    torch.manual_seed(11)
    module = CallsItself()
    trainer = make_trainer(strategy, max_epochs=1, global_batch_size=GLOBAL_BATCH, num_sanity_val_steps=1)
    trainer.fit(module, loader(), make_loader(8, 2))
    shown = module.shown.tolist()
    module.show()
    assert module.shown.tolist() == shown
    return shown


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_module_can_be_called_between_steps_and_after(ranks, reference, strategy):
    expected = reference(fit_and_call, "single")
    assert ranks(fit_and_call, ranks_for(strategy), strategy) == [expected] * ranks_for(strategy)


class Fails(LanguageModel):
    """Raises where many tensors are alive: after the forward pass of the second batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            raise ArithmeticError("the user's own mistake")
        return loss


def fit_and_fail(strategy: str) -> str:
    trainer = make_trainer(strategy, max_epochs=1)
    with pytest.raises(Exception) as error:  # noqa: PT011 - which one is the question
        trainer.fit(Fails(), loader())
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_users_error_is_raised(ranks, strategy):
    messages = ranks(fit_and_fail, ranks_for(strategy), strategy)
    assert set(messages) == {"ArithmeticError: the user's own mistake"}


# ---- Manual optimization --------------------------------------------------------------------------------------------


class Adversaries(pl.LightningModule):
    """Two optimizers that take turns: a generator of features and a judge, each with its own loss."""

    def __init__(self, toggle: bool, clip: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.clip = toggle, clip
        self.generator = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))
        self.judge = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        made = self.generator(batch["tokens"].float() / modules.VOCABULARY)
        return self.judge(made).mean() + made.square().mean(), -self.judge(made.detach() + 1).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = self.losses(batch)[index]
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.judge.parameters(), lr=0.01),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in optimizers]


def fit_all_adversaries(strategy: str) -> list[tuple[bool, dict[str, Tensor]]]:
    return [(clip, fit_adversaries(strategy, toggle, clip)) for toggle in (False, True) for clip in (False, True)]


def fit_adversaries(strategy: str, toggle: bool, clip: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = Adversaries(toggle, clip)
    options = {} if strategy in ("single", "zero3") else {"find_unused_parameters": True}
    make_trainer(strategy, options, max_epochs=2).fit(module, loader())
    return parameters(module)


@cache
def bare_adversaries(clip: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = Adversaries(False, clip)
    optimizers, schedulers = module.configure_optimizers()
    for batch in global_batches(Tokens(48), GLOBAL_BATCH, 8):
        for index, (optimizer, part) in enumerate(zip(optimizers, (module.generator, module.judge), strict=True)):
            optimizer.zero_grad()
            module.losses(batch)[index].backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(part.parameters(), 0.05)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return parameters(module)


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_manual_optimization_with_two_optimizers(ranks, strategy):
    """With and without toggling, with and without clipping."""
    for results in ranks(fit_all_adversaries, ranks_for(strategy), strategy):
        for clip, found in results:
            assert_close(found, bare_adversaries(clip))


class ManualAccumulation(Plain):
    """Accumulates two batches manually; the first does not synchronize."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
            if last:
                optimizer.step()
                optimizer.zero_grad()


def fit_manual_accumulation(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(11)
    module = ManualAccumulation()
    make_trainer(strategy, max_epochs=2).fit(module, loader())
    return parameters(module)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_manual_accumulation(ranks, strategy):
    module = make_module("plain-sgd")
    optimizer: Any = module.configure_optimizers()
    for step, batch in enumerate(global_batches(Tokens(48), GLOBAL_BATCH, 8)):
        (module.training_step(batch, 0) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(fit_manual_accumulation, ranks_for(strategy), strategy):
        assert_close(found, parameters(module))


# ---- Parameter groups, closures, schedulers, averaging --------------------------------------------------------------


class Scheduled(LanguageModel):
    """Two parameter groups and a scheduler."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if self.kind == "step":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=10)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        if self.kind == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def fit_scheduled(strategy: str, kind: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    torch.manual_seed(11)
    module, rates = Scheduled(kind), Rates()
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[rates])
    trainer.fit(module, loader(), make_loader(10, 2))
    return rates.rates, parameters(module)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["step", "epoch", "plateau"])
def test_schedulers_and_parameter_groups(ranks, kind):
    rates, expected = ranks(fit_scheduled, 1, "single", kind)[0]
    assert len({tuple(rate) for rate in rates}) > 1, "the scheduler did something"
    for strategy in STRATEGIES:
        for found_rates, found in ranks(fit_scheduled, ranks_for(strategy), strategy, kind):
            assert found_rates == rates
            assert_close(found, expected)


def fit_averaged(strategy: str) -> dict[str, Tensor]:
    module = make_module("decoder-sgd")
    averaging = EMAWeightAveraging(decay=0.8)
    make_trainer(strategy, max_epochs=2, callbacks=[averaging]).fit(module, loader(), make_loader(8, 2))
    return parameters(module)


@cache
def bare_average() -> dict[str, Tensor]:
    module = make_module("decoder-sgd")
    optimizer: Any = module.configure_optimizers()
    average = torch.optim.swa_utils.AveragedModel(module, avg_fn=get_ema_avg_fn(decay=0.8))
    for batch in global_batches(Tokens(48), GLOBAL_BATCH, 8):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
        average.update_parameters(module)
    return parameters(average.module)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_average_of_weights(ranks, strategy):
    """After the fit the module holds the averaged weights."""
    expected = bare_average()
    for found in ranks(fit_averaged, ranks_for(strategy), strategy):
        assert_close(found, expected)


# ---- Lightning's callbacks ------------------------------------------------------------------------------------------


def fit_with_callbacks(strategy: str, folder: str) -> dict[str, Any]:
    module = make_module("decoder-sgd")
    checkpoint = ModelCheckpoint(folder, "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(
        strategy,
        max_epochs=12,
        callbacks=[checkpoint, stopping, LearningRateMonitor()],
        enable_checkpointing=True,
        logger=logger,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader(), make_loader(10, 2))
    return {
        "epochs": trainer.current_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "score": checkpoint.best_model_score.item(),
        "stopped": stopping.stopped_epoch,
    }


def test_callbacks_decide_the_same_everywhere(ranks, tmp_path):
    expected = ranks(fit_with_callbacks, 1, "single", str(tmp_path / "single-1"))[0]
    assert 0 < expected["stopped"] < 11
    for strategy in STRATEGIES:
        folder = tmp_path / strategy
        for found in ranks(fit_with_callbacks, ranks_for(strategy), strategy, str(folder)):
            assert found["score"] == pytest.approx(expected["score"], rel=1e-5)
            assert {**found, "score": 0} == {**expected, "score": 0}
        files = {file.name for file in folder.iterdir() if file.suffix == ".ckpt"}
        assert expected["best"] in files
        assert "last.ckpt" in files
        assert len(files) == 3
        assert "lr-SGD" in (folder / "metrics.csv").read_text().splitlines()[0]


# ---- Bit-equal to hand-written DDP ----------------------------------------------------------------------------------


def by_hand(accumulation: int, clip: bool) -> Record:
    """Train with torch alone."""
    module, data, record = make_module("decoder-adamw"), Tokens(), Record()
    wrapped = DistributedDataParallel(_Step(module), gradient_as_bucket_view=True)
    optimizer: Any = module.configure_optimizers()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    micro = GLOBAL_BATCH // (ranks * accumulation)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(accumulation):
            first = step * GLOBAL_BATCH + (part * ranks + rank) * micro
            batch = default_collate([data[i] for i in range(first, first + micro)])
            wrapped.require_backward_grad_sync = part == accumulation - 1
            loss = wrapped(batch) / accumulation
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)
        optimizer.step()
    record.parameters = parameters(module)
    return record


class _Step(torch.nn.Module):
    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.module.training_step(batch, 0)


def compare_with_hand_written() -> list[tuple[int, bool, str]]:
    found = []
    for accumulation, clip in product((1, 3), (False, True)):
        case = Case("decoder-adamw", "norm" if clip else "off", accumulation, GLOBAL_BATCH, steps=4)
        ours, theirs = train(case, "ddp", {}).parameters, by_hand(accumulation, clip).parameters
        found += [(accumulation, clip, name) for name in theirs if not torch.equal(theirs[name], ours[name])]
    return found


def test_ddp_is_bit_equal_to_hand_written_ddp(ranks):
    assert ranks(compare_with_hand_written, 4) == [[]] * 4

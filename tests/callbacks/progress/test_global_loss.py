import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, IterableDataset

from tests.callbacks.modules import Paper, Regression, loader, train
from trainwright import Trainer
from trainwright.callbacks.progress import global_loss
from trainwright.callbacks.progress.global_loss import Divergence, GlobalLoss
from trainwright.callbacks.progress.run_summary import RunSummary
from trainwright.strategies.contract.registry import make_strategy


@pytest.mark.parametrize("every_n_steps", [1, 3, None, 100])
def test_single_process_logs_exact_loss(every_n_steps: int | None) -> None:
    watched = GlobalLoss(every_n_steps)
    module, written = train(watched, heard := Heard(), max_steps=10, log_every_n_steps=4)
    assert written.column("loss") == dict(enumerate(module.losses))
    assert watched.latest == module.losses[-1]
    assert watched.diverged is None
    assert heard.events == []


@pytest.mark.parametrize("kind", [pl.Trainer, Trainer])
@pytest.mark.parametrize("cut", ["limit", "end", "stream"])
def test_accumulation(kind: Any, cut: str) -> None:
    """Including a last step of an epoch with one micro-batch, whose weights are those of Lightning."""
    data = loader(28 if cut == "end" else 40, 4)
    options: Any = {"limit_train_batches": 7} if cut != "end" else {}
    if cut == "stream":
        data = DataLoader(Streamed(data.dataset), batch_size=4)
    module, written = train(GlobalLoss(2), kind=kind, max_epochs=2, accumulate_grad_batches=3, data=data, **options)
    losses = torch.tensor(module.losses).view(2, 7)
    wanted = torch.cat((losses[:, :6].reshape(2, 2, 3).mean(dim=2), losses[:, 6:]), dim=1)
    assert list(written.column("loss")) == list(range(6))
    assert list(written.column("loss").values()) == pytest.approx(wanted.flatten().tolist())
    alone, _ = train(kind=pl.Trainer, max_epochs=2, accumulate_grad_batches=3, data=data, **options)
    for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Streamed(IterableDataset):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def test_resumed_run_continues_steps(tmp_path: Path) -> None:
    first, logged = train(GlobalLoss(3), max_steps=5)
    first.trainer.save_checkpoint(tmp_path / "five.ckpt")
    second, resumed = train(GlobalLoss(3), max_steps=9, ckpt_path=tmp_path / "five.ckpt")
    assert logged.column("loss") | resumed.column("loss") == dict(enumerate([*first.losses, *second.losses]))


def test_off_without_logging() -> None:
    _, written = train(watched := GlobalLoss(), max_steps=4, log_every_n_steps=0)
    assert written.rows == []
    assert watched.latest is None


def test_flushed_before_validation() -> None:
    class Look(GlobalLoss):
        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(len(trainer.logger.column("loss")))

    seen: list[int] = []
    train(Look(100), max_epochs=2, data=loader(24, 4), val_data=loader())
    assert seen == [6, 12]


class Manual(LightningModule):
    """Manual optimization with two optimizers."""

    automatic_optimization = False

    def __init__(self, returns_loss: bool) -> None:
        super().__init__()
        self.inner, self.returns_loss = Regression(), returns_loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.inner.training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss if self.returns_loss else None

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.inner.blocks, self.inner.head)]


def test_manual_optimization() -> None:
    module, written = train(GlobalLoss(2), module=Manual(returns_loss=True), max_epochs=1)
    assert written.column("loss") == dict(enumerate(module.inner.losses))


def test_steps_without_loss() -> None:
    _, written = train(watched := GlobalLoss(2), module=Manual(returns_loss=False), max_epochs=1)
    assert written.column("loss") == {}
    assert watched.latest is None


def ranks_log(strategy: str) -> tuple[dict[Any, float], int]:
    """Return the logged losses, and the number of all-reduces of the callback."""
    reduces = 0
    made = make_strategy(strategy)
    reduce = made.reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal reduces
        reduces += getattr(tensor, "ndim", 0)  # the Trainer's own reductions are scalars
        return reduce(tensor, *args, **kwargs)

    made.reduce = counted
    options: Any = {"kind": Trainer, "strategy": made, "max_steps": 6, "global_batch_size": 12}
    _, written = train(GlobalLoss(4), data=loader(31, batch_size=2), **options)
    return written.column("loss"), reduces


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_loss_of_global_batch(ranks: Callable[..., list[Any]], strategy: str) -> None:
    """Including an uneven last batch of an epoch."""
    module, _ = train(kind=Trainer, max_steps=6, logger=False, data=loader(31, batch_size=12))
    for losses, reduces in ranks(ranks_log, 2, strategy):
        assert list(losses) == list(range(6))
        assert list(losses.values()) == pytest.approx(module.losses, rel=1e-5)
        assert reduces == 2  # one per four steps, one at the end


def test_all_loggers_get_all_steps(tmp_path: Path) -> None:
    loggers = [
        TensorBoardLogger(tmp_path, name="", version="", sub_dir="tb"),
        CSVLogger(tmp_path, name="", version=""),
    ]
    module, _ = train(GlobalLoss(3), max_steps=7, logger=loggers)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    written = events.Scalars("loss")
    assert [event.step for event in written] == list(range(7))
    assert [event.value for event in written] == pytest.approx(module.losses, rel=1e-6)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("loss")
    assert [float(row.split(",")[column]) for row in rows if row.split(",")[column]] == module.losses


class Diverging(Regression):
    """Its loss is NaN on one rank from micro-batch ``since`` on."""

    def __init__(self, since: int, rank: int = 0) -> None:
        super().__init__()
        self.since, self.rank = since, rank

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        bad = len(self.losses) > self.since and self.global_rank == self.rank
        return loss * float("nan") if bad else loss


class Heard(Callback):
    """Records events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def on_record(self, trainer: Any, record: dict[str, Any]) -> None:
        if record["kind"] == "event":
            self.events.append(record)


def test_first_nonfinite_loss_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = global_loss.first_nonfinite
    monkeypatch.setattr(global_loss, "first_nonfinite", lambda values: looks.append(len(values)) or look(values))
    watched, heard = GlobalLoss(5), Heard()
    with pytest.warns(UserWarning, match="the first that is not finite") as warned:
        train(watched, heard, module=Diverging(7), max_steps=20)
    [text] = [str(each.message) for each in warned if "not finite" in str(each.message)]
    assert "the loss is nan at step 7 (rank 0)" in text
    assert "guard=skip" in text
    assert watched.diverged == Divergence(7, pytest.approx(float("nan"), nan_ok=True), (0,))
    assert [(event["what"], event["step"]) for event in heard.events] == [("diverged", 7)]
    assert looks == [5, 5], "windows are looked at, no step is, and none once it was reported"


def rank_that_diverged(strategy: str) -> tuple[int, tuple[int, ...]]:
    watched = GlobalLoss(4)
    train(watched, module=Diverging(5, rank=1), kind=Trainer, strategy=strategy, max_steps=8, data=loader(32, 2))
    assert watched.diverged is not None
    return watched.diverged.step, watched.diverged.ranks


@pytest.mark.filterwarnings("ignore:GlobalLoss")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_all_ranks_know_diverged_rank(ranks: Callable[..., list[Any]], strategy: str) -> None:
    assert ranks(rank_that_diverged, 2, strategy) == [(5, (1,))] * 2


def test_run_summary(tmp_path: Path) -> None:
    def ended(module: LightningModule, folder: str) -> tuple[dict[str, Any], str]:
        console = Paper()
        (tmp_path / folder).mkdir()
        with suppress(ZeroDivisionError):
            train(GlobalLoss(2), RunSummary(console), module=module, max_steps=4, default_root_dir=tmp_path / folder)
        return json.loads((tmp_path / folder / "summary.json").read_text()), console.text

    class Fails(Regression):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            running.append(json.loads((tmp_path / "failed" / "summary.json").read_text())["status"])
            raise ZeroDivisionError("why\nand where")

    running: list[str] = []
    module = Regression()
    document, said = ended(module, "finished")
    assert document == {"status": "finished", "steps": 4, "loss": module.losses[-1], "diverged": None, "error": None}
    assert said == ""
    document, _ = ended(Fails(), "failed")
    assert running == ["running"]
    assert (document["status"], document["error"]) == ("failed", "ZeroDivisionError: why")
    with pytest.warns(UserWarning, match="GlobalLoss"):
        document, said = ended(Diverging(1), "diverged")
    assert (document["status"], document["loss"]) == ("diverged", None)
    assert document["diverged"] == {"step": 1, "loss": "nan", "ranks": [0]}
    assert said == "Diverged:      the loss is nan at step 1 (rank 0), the first that is not finite\n"

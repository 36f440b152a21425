"""Module state after pipeline steps matches one process; other batches are refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer

Ranks = Callable[..., list[Any]]
WIDTH = 6


class Net(pl.LightningModule):
    """Four blocks between two layers, on rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch["x"]) - batch["x"].sum(-1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Counting(Net):
    """State independent of samples: a counter, a schedule, power iterations, in blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0] = spectral_norm(self.blocks[0][0])
        self.out = spectral_norm(self.out)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.rate = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = super().training_step(batch, batch_idx) * self.rate
        self.rate *= 0.9
        return loss


class Constants(Net):
    """A batch with a list of numbers, and weights that are not samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * batch["weights"].sum() * sum(batch["numbers"])


class TimeFirst(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch["x"])[-1] - batch["x"].sum((0, 2))[:, None]).square().mean()


class FirstUse(nn.Module):
    """Creates a buffer and an attribute in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.linspace(0.5, 1, WIDTH), persistent=False)
            self.shift = torch.linspace(-1, 1, WIDTH)
        return x * self.scale.clone() + self.shift


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.append(FirstUse())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "count"):
            self.count = 0
        self.count += 1
        return super().training_step(batch, batch_idx) * self.count


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Counting, Constants, TimeFirst, Lazy)}
OPTIONS: dict[str, Any] = {"Constants": {"weights": None}, "TimeFirst": {"x": 1}}


def collate(name: str) -> Callable[[list[Tensor]], dict[str, Any]]:
    def made(rows: list[Tensor]) -> dict[str, Any]:
        x = torch.stack(rows)
        if name == "TimeFirst":
            return {"x": x.unsqueeze(0).repeat(3, 1, 1) * torch.arange(1.0, 4.0)[:, None, None]}
        constants = {"weights": torch.tensor([0.5, 0.7, 1.1]), "numbers": [0.5, 0.25, 0.1]}
        return {"x": x, **(constants if name == "Constants" else {})}

    return made


def fitted(name: str, pipeline: int, dims: bool = True) -> dict[str, Any]:
    """Return state, parameters and learning rate after three steps."""
    module = KINDS[name]()
    rows = list(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)))
    strategy, options = ("hybrid", {"pipeline": pipeline, "shard": 1, "micro_batches": 4})
    if pipeline == 1:
        strategy, options = "single", {}
    elif dims and name in OPTIONS:
        options["batch_dims"] = OPTIONS[name]
    trainer = make_trainer(strategy, options, max_steps=3, max_epochs=-1)
    trainer.fit(module, DataLoader(rows, batch_size=8, collate_fn=collate(name)))
    found = (
        {key: value.clone() for key, value in trainer.strategy.whole_parameters()}
        if pipeline > 1
        else {key: value.detach().clone() for key, value in module.named_parameters()}
    )
    if name == "Counting":
        found |= {"steps": module.steps.clone(), "rate": torch.tensor(module.rate)}
        found |= {"u": module.out.parametrizations.weight[0]._u.clone()}
    found["lr"] = torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", [*KINDS])
def test_module_state_matches_one_process(ranks: Ranks, name: str) -> None:
    (alone,) = ranks(fitted, 1, name, 1, init_group=False)
    for found in ranks(fitted, 2, name, 2, timeout=60):
        assert found.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


class Saved(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.blocks[0][0].register_buffer("scale", torch.ones(WIDTH))
        return super().training_step(batch, batch_idx)


def refused_buffer() -> None:
    loader = DataLoader(list(torch.ones(8, WIDTH)), batch_size=8, collate_fn=collate("Saved"))
    with pytest.raises(RuntimeError, match=r"creates the buffer 'blocks.0.0.scale'.*persistent=False"):
        make_trainer("pipeline", {}, max_steps=1).fit(Saved(), loader)


def test_buffers_that_checkpoints_would_lack_are_refused(ranks: Ranks) -> None:
    ranks(refused_buffer, 2, timeout=60)


class DecayingBlock(nn.Module):
    decays = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.decays:
            self.scale.mul_(0.9)
        return self.linear(x) * self.scale


class Decaying(Net):
    """A buffer of each block that changes from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecayingBlock() for _ in range(4))

    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.blocks:
            block.decays = True


def late_buffer() -> str:
    loader = DataLoader(list(torch.ones(16, WIDTH)), batch_size=8, collate_fn=collate("Decaying"))
    with pytest.raises(RuntimeError) as raised:
        make_trainer("pipeline", {"micro_batches": 4}, max_steps=2).fit(Decaying(), loader)
    return str(raised.value)


def test_buffers_that_change_first_in_a_later_step_are_refused(ranks: Ranks) -> None:
    assert "changes the buffer 'blocks.0.scale', which the first step did not" in ranks(late_buffer, 2, timeout=60)[0]


def refused() -> list[str]:
    found = []
    for name in ("Constants", "TimeFirst"):
        with pytest.raises(ValueError, match="batch_dims=") as raised:
            fitted(name, 2, dims=False)
        found.append(str(raised.value))
    return found


def test_batch_dims_errors(ranks: Ranks) -> None:
    for constants, times in ranks(refused, 2, timeout=60):
        assert "batch_dims={'weights': null}" in constants
        assert "length 3 along the dim of samples" in times
        assert "strategy.batch_dims={'x': 1}" in times

"""Servers on dedicated ranks: results of the workers do not change."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import QUIET, Case
from tests.parity.harness import differences as all_differences
from tests.strategies.parameter_server.test_strategy import fit, train
from trainwright.core.layout import Layout
from trainwright.planning.layout_report import StateRules, bytes_of_ranks
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy
from trainwright.trainer.trainer import Trainer

OWN = {"server_ranks": "own"}


def test_dedicated_servers_match_ddp_on_the_workers(ranks):
    case = Case(module="decoder-adamw", clipping="norm", accumulation=2)
    ours = ranks(train, 4, case, "parameter_server", {"servers": 2, **OWN})
    theirs = ranks(train, 2, case, "ddp", {})
    assert [all_differences(each, theirs[0]) for each in ours[:2]] == [[], []]
    assert [each.losses for each in ours[2:]] == [[], []]


SAMPLES = 37


class Reader(pl.LightningModule):
    """Records the samples that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
        self.trained: list[int] = []
        self.validated: list[int] = []

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return self.last(torch.tanh(self.first(batch[1]))).pow(2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained += batch[0].tolist()
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated += batch[0].tolist()
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Also known on ranks that read nothing.
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Probe(ParameterServerStrategy):
    """Measures this rank when training ends."""

    def _serve(self) -> None:
        super()._serve()
        self.held, self.spread = self.measures.held_bytes(), self.server.services.largest_spread

    def on_train_end(self) -> None:
        self.held, self.traffic = self.measures.held_bytes(), self.service.server_traffic()
        super().on_train_end()


def read(options: dict[str, Any]) -> Any:
    """Train two epochs; returns what this rank has read and holds."""
    pl.seed_everything(3, verbose=False)
    ranks, module = dist.get_world_size(), Reader()
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES), inputs), 4, shuffle=True)
    strategy = Probe(**options, **OWN)
    trainer = Trainer(strategy=strategy, devices=ranks, max_epochs=2, check_val_every_n_epoch=2, **QUIET)
    trainer.fit(module, loader, DataLoader(loader.dataset, 4))
    tested = trainer.validate(module, DataLoader(loader.dataset, 4), verbose=False)
    return {
        "world": (trainer.world_size, strategy.ranks.num_data_ranks, strategy.service.serves),
        "trained": module.trained,
        "validated": module.validated,
        "held": strategy.held,
        "spread": getattr(strategy, "spread", None),
        "traffic": getattr(strategy, "traffic", None),
        "parameters": [p.detach() for p in module.parameters()] if not strategy.service.serves else None,
        "memory": {p.device.type for p in module.parameters()},
        "tested": tested,
    }


@pytest.mark.parametrize("options", [
    {"consistency": "ssp", "staleness": 1, "servers": 2}, {"consistency": "async", "leases": "at_least_once"},
], ids=["ssp", "leases"])  # fmt: skip
def test_workers_read_each_sample_once(ranks, options):
    servers = options.get("servers", 1)
    found = ranks(read, 2 + servers, options)
    workers, own = found[:2], found[2:]
    assert [each["world"] for each in found] == [(2, 2, False)] * 2 + [(2, 2, True)] * servers
    assert sorted(sum((each["trained"] for each in workers), [])) == sorted([*range(SAMPLES)] * 2)  # two epochs
    # In fit, and after it.
    assert sorted(sum((each["validated"] for each in workers), [])) == sorted([*range(SAMPLES)] * 2)
    for each in own:
        assert (each["trained"], each["validated"], each["tested"]) == ([], [], None)
        assert each["memory"] == {"meta"}
    assert all(torch.equal(a, b) for a, b in zip(*(each["parameters"] for each in workers), strict=True))
    if servers == 2:
        assert max(each["spread"] for each in own) <= 1
    # Bytes match the plan, and a server sends each worker the parameters once per step.
    rules = StateRules(servers=servers, server_ranks=servers)
    module = Reader()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 0.01)
    planned = bytes_of_ranks(module, Layout(replicate=2), EngineOptions(), rules)
    held = [(each["held"].parameters, each["held"].optimizer) for each in found]
    assert held == [(each.parameters, each.optimizer) for each in planned]
    steps = sum(-(-len(each["trained"]) // 4) for each in workers)
    for rank, (_, sent) in workers[0]["traffic"].items():
        assert sent >= steps * planned[rank].parameters
        assert sent < 1.7 * steps * planned[rank].parameters + steps * 400


def state(path: str | None, options: dict[str, Any], steps: int, save: str | None) -> Any:
    """Resume from a state, if any, and save another."""
    strategy = options.pop("strategy", "parameter_server")
    module, trainer = fit(strategy, options, steps, ckpt=path)
    if trainer.strategy.service.serves:
        return None
    if save is not None:
        trainer.save_checkpoint(save)
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.thorough
def test_run_states_move_to_and_from_other_strategies(ranks):
    own, beside, ddp = {"servers": 1, **OWN}, {"servers": 2}, {"strategy": "ddp"}
    whole = ranks(state, 2, None, ddp, 8, None)[0]
    ranks(state, 3, None, own, 4, "of_own")
    ranks(state, 2, None, ddp, 4, "of_ddp")
    ends = [
        ranks(state, 2, "of_own", ddp, 8, None)[0],
        ranks(state, 2, "of_own", beside, 8, None)[0],
        ranks(state, 3, "of_ddp", own, 8, None)[0],
        ranks(state, 3, "of_own", own, 8, None)[0],
    ]
    for parameters in ends:
        torch.testing.assert_close(parameters, whole, rtol=1e-5, atol=1e-6)


class Failing(Reader):
    """Fails at its second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ValueError("no such sample")
        return super().training_step(batch, batch_idx)


class Mute(ParameterServerStrategy):
    """Ends without a signal, like a killed process."""

    def on_exception(self, exception: BaseException) -> None:
        self._fit = self._fit if self.service.serves else None
        super().on_exception(exception)


def refused(module: type[Reader], strategy: type[ParameterServerStrategy], options: dict[str, Any]) -> str:
    """Return the error of a failing fit on this rank."""
    trainer = Trainer(strategy=strategy(**options), devices=dist.get_world_size(), max_epochs=1, **QUIET)
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.fit(module(), DataLoader(TensorDataset(torch.arange(8), torch.zeros(8, 4)), 2))
    return str(error.value)


def test_servers_end_like_their_workers(ranks):
    failed = ranks(refused, 3, Failing, ParameterServerStrategy, OWN)
    assert failed == ["no such sample"] * 2 + [
        "The workers of this parameter server failed: ValueError: no such sample"
    ]
    gone = ranks(refused, 3, Failing, Mute, OWN)
    assert gone == ["no such sample"] * 2 + ["All workers of this parameter server are gone without ending the fit."]


def test_at_least_one_rank_must_train(ranks):
    for text in ranks(refused, 2, Reader, ParameterServerStrategy, {"servers": 2, **OWN}):
        assert "servers=2 with strategy.server_ranks=own on 2 rank(s)" in text
        assert "devices=3" in text
    with pytest.raises(ValueError, match="server_ranks=apart: unknown; allowed: beside, own"):
        ParameterServerStrategy(server_ranks="apart")

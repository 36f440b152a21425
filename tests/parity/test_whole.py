"""User code in hooks reads and writes whole parameters under every layout, or is refused."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, prune, vector_to_parameters
from torch.utils.data import DataLoader

from tests.parity.harness import Record, differences, make_trainer
from tests.parity.layout_modules import LanguageModel
from tests.parity.layouts import Texts, WholeRecorder
from trainwright.strategies.base.whole import view

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"stage": 1}),
    "zero3": (2, {"stage": 3}),
    "zero2, offload": (2, {"stage": 2, "offload": "optimizer"}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "expert": (2, {"expert": 2}),
    "context": (2, {"context": 2, "shard": 1}),
    "tensor x shard": (4, {"tensor": 2, "shard": 2}),
    "pipeline x shard": (4, {"pipeline": 2, "shard": 2}),
}


class InHooks(LanguageModel):
    """Does in hooks what people do with parameters and gradients."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.seen: list[float] = []

    def on_train_start(self) -> None:
        self.average = [parameter.detach().clone() for parameter in self.parameters()]

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.grad = None
            elif parameter.grad is not None:  # centralised
                parameter.grad = parameter.grad - parameter.grad.mean()
        penalty = sum((p.square().sum() for p in self.parameters() if p.dim() > 1), torch.zeros(()))
        (1e-2 * penalty).backward()
        clip_grad_value_(self.net.parameters(), 1e-2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = pl.utilities.grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen += [len(norms), float(norms["grad_2.0_norm_total"])]
        if self.global_step == 2:
            optimizer.param_groups[0]["params"][0].grad.mul_(2)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(float(clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)))
        self.clip_gradients(optimizer, gradient_clip_val=0.04, gradient_clip_algorithm="norm")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            torch.manual_seed(0)
            self.net.apply(_reset)
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.3)
        self.seen.append(float(parameters_to_vector(self.parameters()).detach().std()))
        self.seen += [float(value.norm()) for value in self.net.state_dict().values()][:3]
        next(self.parameters()).data.mul_(0.9)
        self.seen += [float(value.norm()) for _, value in self.trainer.strategy.whole_parameters()][:2]

    def on_train_epoch_end(self) -> None:
        vector_to_parameters(torch.cat([average.view(-1) for average in self.average]), self.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen += [float(value.norm()) for value in checkpoint["state_dict"].values()]
        name = next(iter(checkpoint["state_dict"]))
        checkpoint["state_dict"][name] = checkpoint["state_dict"][name] * 2


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)


def fit(layout: str, module: pl.LightningModule) -> tuple[Any, Record]:
    recorder, (_, options) = WholeRecorder(), LAYOUTS.get(layout, (1, {}))
    strategy = "hybrid" if layout in LAYOUTS else "single"
    trainer = make_trainer(strategy, options, global_batch_size=8, max_epochs=1, callbacks=[recorder])
    trainer.fit(module, loader(trainer))
    return trainer, recorder.record


def loader(trainer: Any) -> DataLoader:
    return DataLoader(Texts(16), batch_size=8 // trainer.strategy.ranks.num_data_ranks)


def use_hooks(layout: str, network: str) -> tuple[Record, list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    module = InHooks(network)
    trainer, record = fit(layout, module)
    path = f"saved-{layout}"  # under single a file, else a folder
    trainer.save_checkpoint(path)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(trainer), ckpt_path=path)
    return record, module.seen, state


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_hooks(ranks, reference, layout):
    network = "mixtral" if layout == "expert" else "gpt-small"
    expected, shown, state = reference(use_hooks, "single", network, timeout=200)
    for record, seen, after in ranks(use_hooks, LAYOUTS[layout][0], layout, network, timeout=200):
        assert differences(record, expected) == []
        assert seen == pytest.approx(shown, rel=1e-4)
        assert list(after) == list(state)
        assert all(torch.allclose(after[name], state[name], atol=1e-5) for name in state)


def read_and_drop(layout: str) -> bool:
    """Return whether a module that was read after ``fit`` is freed with its last reference."""
    module = LanguageModel("gpt-untied")
    fit(layout, module)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    reference = weakref.ref(module)
    del module
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("layout", ["zero3", "tensor"])
def test_module_is_freed_after_reading_it(ranks, layout):
    assert ranks(read_and_drop, LAYOUTS[layout][0], layout) == [True, True]


def use_after_fit(layout: str, network: str) -> dict[str, Any]:
    """Copy, pickle, move and convert the module after ``fit``, and go on with it; returns values of each."""
    torch.manual_seed(3)
    module = LanguageModel(network)
    trainer, _ = fit(layout, module)
    module.cpu().to("cpu").eval()
    buffer, batch, found = io.BytesIO(), next(iter(DataLoader(Texts(8), batch_size=8))), {}
    torch.save(module, buffer)
    buffer.seek(0)
    copies = {
        "copied": copy.deepcopy(module), "saved": torch.load(buffer, weights_only=False),
        "part": copy.deepcopy(module.net), "double": module.double(), "float": module.float(),
    }  # fmt: skip
    for name, each in copies.items():
        assert {type(p) for p in each.parameters()} == {nn.Parameter}
        assert not any(type(sub).__name__.startswith("FSDP") for sub in each.modules())
        loss = [] if name == "part" else [each.loss(batch)]
        found[name] = torch.stack([p.double().norm() for p in each.parameters()] + loss).detach()
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    module.note = 7
    trainer.save_checkpoint(f"after-{layout}")
    found["state"] = {name: value.clone() for name, value in module.state_dict().items()}
    found["validated"] = trainer.validate(module, loader(trainer), verbose=False)
    if layout != "single":
        module.double()
        with pytest.raises(ValueError, match=r"is torch.float64 .* was torch.float32"):
            trainer.validate(module, loader(trainer), verbose=False)
    return {**found, "note": module.note}


@pytest.mark.parametrize("layout", ["zero3", "tensor", "pipeline", "expert"])
def test_an_ordinary_module_after_fit(ranks, reference, layout):
    network = "mixtral" if layout == "expert" else "gpt-small"
    expected = reference(use_after_fit, "single", network, timeout=200)
    for found in ranks(use_after_fit, LAYOUTS[layout][0], layout, network, timeout=200):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def read_alone() -> float:
    """Return a sum of a parameter that each rank has whole, read by the first rank only."""
    module = LanguageModel("gpt-untied")
    trainer, _ = fit("tensor", module)
    with patch.object(view, "PATIENCE", timedelta(seconds=1)):
        return float(module.net.norm.weight.sum()) if trainer.is_global_zero else 0.0


def test_one_rank_may_read_what_it_has_whole(ranks):
    assert ranks(read_alone, 2)[0] != 0.0


# ---- In the step itself, and what is refused ------------------------------------------------------------------------


class Untied(LanguageModel):
    def __init__(self, network: str = "gpt-untied") -> None:
        super().__init__(network)


class Averages(Untied):
    """Averages the weights of the network into another one within the step, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for target, online in zip(self.other.parameters(), self.net.parameters(), strict=True):
                target.data.mul_(0.6).add_(online.data, alpha=0.4)
        return self.loss(batch)


class AveragesLists(Averages):
    """Averages by functions of lists."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            others, own = list(self.other.parameters()), list(self.net.parameters())
            torch._foreach_mul_(others, 0.6)
            torch._foreach_add_(others, own, alpha=0.4)
        return self.loss(batch)


class PenalisesByFactor(Untied):
    """Multiplies a weight by a trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (self.factor * self.net.blocks[0].attention.query.weight).square().sum()


class OptimizesByHand(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class NamesTwice(Untied):
    """Registers an embedding under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.net.embedding


class WritesElements(Untied):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net.blocks[0].attention.query.weight[0] = 0.1
        return self.loss(batch)


class Clamps(Untied):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.head.weight.data.clamp_(-0.03, 0.03)
        return self.loss(batch)


class ScalesByHook(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].attention.query.weight.register_hook(lambda gradient: 3 * gradient)
        self.net.norm.weight.register_hook(lambda gradient: 0 * gradient)


class Penalises(Untied):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 1e-2 * sum(p.square().sum() for p in self.parameters())


class Draws(Untied):
    """Draws random numbers in the step, from the first on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (torch.rand(()) + random.random() + np.random.rand())


class PenalisesExperts(Penalises):
    def __init__(self) -> None:
        super().__init__("mixtral")


class Prunes(Untied):
    def on_train_batch_end(self, *args: Any) -> None:
        prune.l1_unstructured(self.net.blocks[0].attention.query, "weight", 0.5)


class WritesOnOneRank(Untied):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net.blocks[0].attention.query.weight.add_(torch.distributed.get_rank())


class StepsInBackward(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.net.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)


# Others are in tests/zoo/weights.py.
EQUAL = [
    ("zero3", Averages),
    ("zero3", AveragesLists),
    ("context", AveragesLists),
    ("tensor x shard", Averages),
    ("tensor x shard", OptimizesByHand),
    ("tensor", NamesTwice),
    ("tensor", Clamps),
    ("tensor", PenalisesByFactor),
    ("tensor", Draws),
    ("expert", PenalisesExperts),
]
REFUSED = [
    ("pipeline", Penalises, "weight_decay"),
    ("pipeline x shard", Penalises, "weight_decay"),
    ("zero3", WritesElements, "on_after_backward"),
    ("tensor", WritesElements, "on_after_backward"),
    ("tensor", ScalesByHook, "on_after_backward"),
    ("zero3", Prunes, "pruning"),
    ("tensor", Prunes, "pruning"),
    ("zero3", WritesOnOneRank, "not the same on all ranks"),
    ("tensor", WritesOnOneRank, "not the same on all ranks"),
    ("zero2, offload", StepsInBackward, "register_post_accumulate_grad_hook"),
]


def run(layout: str, kind: type[LanguageModel]) -> Record:
    torch.manual_seed(3)
    module = kind()
    pl.seed_everything(3, verbose=False)
    return fit(layout, module)[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "kind"), EQUAL)
def test_in_the_step(ranks, reference, layout, kind):
    expected = reference(run, "single", kind)
    for found in ranks(run, LAYOUTS[layout][0], layout, kind):
        assert differences(found, expected) == []


def refusal(layout: str, kind: type[LanguageModel]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        run(layout, kind)
    return " ".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.sample(5)
@pytest.mark.parametrize(("layout", "kind", "words"), REFUSED)
def test_refused(ranks, layout, kind, words):
    messages = ranks(refusal, LAYOUTS[layout][0], layout, kind)
    assert any(words in message for message in messages)  # another stage may hear of it by a lost connection

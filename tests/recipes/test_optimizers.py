"""Every choice of ``optimizer=`` with every recipe: composed, trained, and equal under ZeRO to one process."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import QUIET
from trainwright import Trainer, compose
from trainwright.command.schema.compose import choices_of, config_loader
from trainwright.core.config import targets
from trainwright.core.config.targets import problem_of_target
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.muon import Muon, build_optimizer
from trainwright.recipes.vision.digits import DigitsModule

LOADER = config_loader()
# SGD and Adagrad have been choices before.
ONE_REPLICA = ("tensor", "pipeline")
NEW = ["adafactor", "adamw_fused", "adamw_8bit", "lion", "muon"]
SIZES = GPTConfig(layers=2, dim=64, heads=4, seq_len=8)
WINDOWS = torch.randint(256, (32, 9), generator=torch.Generator().manual_seed(3))


def factory(name: str, recipe: str = "digits", *typed: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "lion":
        pytest.importorskip("lion_pytorch")
    return instantiate(compose(recipe, [f"optimizer={name}", *typed]).optimizer, _convert_="all")  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _uncompiled() -> Any:
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for a minute
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("optimizer", choices_of(LOADER, "optimizer"))
@pytest.mark.parametrize("recipe", choices_of(LOADER, "recipe"))
def test_every_recipe_takes_every_optimizer(recipe: str, optimizer: str) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    made = factory(optimizer, recipe)([weight])
    weight.grad = torch.ones(4, 4)
    made.step()
    assert not torch.equal(weight.detach(), torch.ones(4, 4))


def train(module: Any, data: Any, strategy: str = "single", devices: int = 1, steps: int = 30) -> list[float]:
    """Return the loss of each step."""
    losses: list[float] = []
    module.optimizer_step = _recording(module.optimizer_step, losses)
    trainer = Trainer(strategy=strategy, devices=devices, max_steps=steps, global_batch_size=8, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=8 if strategy in ONE_REPLICA else 8 // devices))
    return losses


def _recording(step: Any, losses: list[float]) -> Any:
    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        step(epoch, batch_idx, optimizer, lambda: losses.append(float(loss := closure())) or loss)

    return optimizer_step


@pytest.mark.parametrize("optimizer", NEW)
def test_trains_digits(optimizer: str) -> None:
    images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    losses = train(DigitsModule(8, 1, factory(optimizer)), TensorDataset(images, torch.arange(8)))
    assert losses[-1] < 0.8 * losses[0]


def trained(optimizer: str, strategy: str, devices: int, steps: int = 3) -> dict[str, Tensor]:
    """Return whole weights of a small language model after some steps."""
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    module = GPTModule(SIZES, factory(optimizer, "gpt"), warmup_steps=0)
    train(module, WINDOWS, strategy, devices, steps)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# Shares of numbers that may differ by more than rounding: a sign, a bfloat16 or a quantized moment turns at once.
TURNED = {"lion": 2e-3, "muon": 1.0, "adamw_8bit": 1e-2}


@pytest.mark.parametrize("optimizer", NEW)
def test_equal_to_one_process(ranks: Callable[..., list[Any]], optimizer: str) -> None:
    """And to the bit under ZeRO and DDP, which round alike."""
    if optimizer == "lion":
        pytest.importorskip("lion_pytorch")
    [alone] = ranks(trained, 1, optimizer, "single", 1)
    ddp, shared = (ranks(trained, 2, optimizer, strategy, 2) for strategy in ("ddp", "zero3"))
    for name, value in alone.items():
        assert all(torch.equal(ddp[0][name], each[name]) for each in (ddp[1], *shared)), name
        far = (shared[0][name] - value).abs() > 1e-5 + 1e-4 * value.abs()
        assert far.float().mean() <= TURNED.get(optimizer, 0.0), name
        torch.testing.assert_close(shared[0][name], value, rtol=0, atol=6e-2 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("strategy", ONE_REPLICA)
def test_muon_finds_the_same_matrices_where_the_model_is_split(ranks: Callable[..., list[Any]], strategy: str) -> None:
    """Embeddings and the output layer stay AdamW's, whose steps are five times as large."""
    [alone] = ranks(trained, 1, "muon", "single", 1)
    for found in ranks(trained, 2, "muon", strategy, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=3e-3, msg=name)


# ---- Muon ------------------------------------------------------------------------------------------------------------


def test_muon_is_torch_s_for_hidden_matrices_and_adamw_for_the_rest() -> None:
    torch.manual_seed(0)
    module = GPTModule(SIZES)
    assert module.model is not None
    module.optimizer_factory, module.warmup_steps, module.final_lr_factor = factory("muon", "gpt"), None, None
    made: Any = module.configure_optimizers()
    names = {p: name for name, p in module.named_parameters()}
    by_muon = {names[p] for group in made.param_groups if group["muon"] for p in group["params"]}
    hidden = {name for name, p in module.named_parameters() if p.ndim == 2 and "blocks" in name}
    assert by_muon == hidden != set()
    assert len(names) == sum(len(group["params"]) for group in made.param_groups)
    assert {group["weight_decay"] for group in made.param_groups if not group["muon"]} == {0.0, 0.1}
    twins = {name: nn.Parameter(p.detach().clone()) for p, name in names.items()}
    options: dict[str, Any] = {"lr": 0.004, "weight_decay": 0.1}
    expected = [
        torch.optim.Muon(
            [twins[n] for n in sorted(hidden)], momentum=0.95, eps=1e-8, adjust_lr_fn="match_rms_adamw", **options
        ),
        torch.optim.AdamW(
            [p for n, p in twins.items() if n not in hidden and p.ndim > 1], betas=(0.9, 0.95), **options
        ),
        torch.optim.AdamW([p for p in twins.values() if p.ndim < 2], lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for _ in range(3):
        for p, name in names.items():
            p.grad = torch.randn_like(p)
            twins[name].grad = p.grad.clone()
        for each in (made, *expected):
            each.step()
    for p, name in names.items():
        assert torch.equal(p, twins[name]), name


def test_muon_resumes_from_its_state() -> None:
    def make() -> tuple[list[nn.Parameter], Muon]:
        held = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
        return held, Muon(held, lr=0.1)

    def step(held: list[nn.Parameter], optimizer: Muon, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in held:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    whole, optimizer = make()
    step(whole, optimizer, 0)
    rest, resumed = make()
    with torch.no_grad():
        for p, saved in zip(rest, whole, strict=True):
            p.copy_(saved)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for held, each in ((whole, optimizer), (rest, resumed)):
        step(held, each, 1)
    assert all(torch.equal(p, saved) for p, saved in zip(rest, whole, strict=True))


def test_muon_refuses_wrong_values_and_keeps_marked_groups() -> None:
    with pytest.raises(ValueError, match="momentum"):
        Muon([nn.Parameter(torch.ones(2, 2))], momentum=-1.0)
    layer = nn.Linear(2, 2)
    made = build_optimizer(layer, Muon, [{"params": list(layer.parameters()), "muon": False, "lr": 0.5}])
    assert [(group["muon"], group["lr"], len(group["params"])) for group in made.param_groups] == [(False, 0.5, 2)]


# ---- options and packages --------------------------------------------------------------------------------------------


def test_fused_adamw() -> None:
    made = factory("adamw_fused", "gpt")([nn.Parameter(torch.ones(2))])
    assert made.param_groups[0]["fused"] is True
    assert factory("adamw")([nn.Parameter(torch.ones(2))]).param_groups[0]["fused"] is None


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None if name == "torchao" else spec(name))
    problem = problem_of_target("optimizer", compose("digits", ["optimizer=adamw_8bit"]).optimizer._target_)
    assert problem is not None
    assert problem.endswith('Type: pip install "trainwright[torchao]"')
    other = problem_of_target("module", "my_missing_package.Module")
    assert other is not None
    assert "pip install" not in other

"""Learning rates per step of ``schedule=``, against closed formulas, on any recipe and any layout."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tests.parity.harness import QUIET
from trainwright import LearningRateSchedule, RunSchedule, Trainer, compose
from trainwright.callbacks.schedule.learning_rate_schedule import ScheduledRate
from trainwright.command.schema.compose import choices_of, compose_checked, config_loader
from trainwright.launch.worker import scheduled
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule

LOADER = config_loader()
STEPS = 12


def factors(schedule: RunSchedule, steps: int) -> list[float]:
    return [schedule.factor(step) for step in range(steps)]


def cosine(step: int, warmup: int, total: int, final: float) -> float:
    """Return the factor of the recipes' cosine as it has always been."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step >= total:
        return final
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * ((step - warmup) / max(1.0, total - warmup))))


@pytest.mark.parametrize(("schedule", "expected"), [
    (RunSchedule("constant"), [1.0] * 10),
    (RunSchedule("constant", warmup=3), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    (RunSchedule("constant", warmup=0.2), [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),
    (RunSchedule("linear", final_factor=0.0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]),
    (RunSchedule("linear", warmup=0.2, final_factor=0.2), [1 / 3, 2 / 3, *(1 - 0.1 * k for k in range(8)), 0.2, 0.2]),
    (RunSchedule("linear", decay=0.4, final_factor=0.2), [1, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    (RunSchedule("linear", warmup=1, decay=4, final_factor=0.2), [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    (RunSchedule("linear", warmup=8, decay=0.9, final_factor=0.5), [*(k / 9 for k in range(1, 9)), 1, 0.75, 0.5]),
    (RunSchedule("cosine", warmup=2, final_factor=0.1), [cosine(step, 2, 10, 0.1) for step in range(12)]),
    (RunSchedule("cosine", decay=5, final_factor=0.0), [*[1] * 5, *(cosine(k, 0, 5, 0.0) for k in range(7))]),
    (RunSchedule("cosine", warmup=20, final_factor=0.1), [cosine(step, 20, 10, 0.1) for step in range(25)]),
    (RunSchedule("cosine", final_factor=0.0, total_steps=4), [cosine(step, 0, 4, 0.0) for step in range(8)]),
], ids=str)  # fmt: skip
def test_factors_of_a_run_of_ten_steps(schedule: RunSchedule, expected: list[float]) -> None:
    assert factors(schedule.of_run(10), len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("steps", [math.inf, -1])
def test_a_run_of_unknown_length_has_no_decay(steps: float) -> None:
    assert RunSchedule("cosine", warmup=1).of_run(steps).factor(10**9) == 1.0
    with pytest.raises(ValueError, match=r"schedule\.warmup=0\.1 is a fraction .* Type schedule\.total_steps=1000"):
        RunSchedule("cosine", warmup=0.1).of_run(steps)


def test_refused_values() -> None:
    for given in ({"shape": "cubic"}, {"warmup": -1}, {"decay": 0}, {"final_factor": 1.5}, {"total_steps": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}="):
            RunSchedule(**given)


# ---- recipes ---------------------------------------------------------------------------------------------------------

RECIPES = choices_of(LOADER, "recipe")
# Peak rate, warm-up steps, steps and final factor of each recipe's measured results; no steps: constant.
DEFAULTS: dict[str, tuple[float, int, int, float]] = {
    "gpt": (0.004, 20, 500, 0.1), "moe": (0.004, 20, 500, 0.1), "diloco_gpt": (0.004, 20, 500, 0.1),
    "llama_3d": (0.004, 20, 500, 0.1), "long_context": (0.004, 20, 200, 0.1), "hf_causal_lm": (0.003, 20, 500, 0.1),
    "finetune": (0.0002, 20, 500, 0.1), "digits": (0.003, 0, 0, 1.0), "linear_regression": (0.9083, 0, 0, 1.0),
    "wide_deep": (0.05, 0, 0, 1.0),
}  # fmt: skip


class Rates(Callback):
    """Records the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class Module(pl.LightningModule):
    """One weight; its own schedule halves the rate at every step, if asked for."""

    def __init__(self, rate: float, halves: bool = False) -> None:
        super().__init__()
        self.layer, self.rate, self.halves = torch.nn.Linear(2, 1), rate, halves

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        half = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": half} if self.halves else optimizer


def stepped_rates(callbacks: list[Callback], base: float, steps: int) -> list[float]:
    """Return the rates of the steps of a run, without a Trainer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    schedulers = [ScheduledRate(optimizer, each.schedule.of_run(steps)) for each in callbacks]  # type: ignore[attr-defined]
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates


def seen_rates(callbacks: list[Callback], module: pl.LightningModule, steps: int, **options: Any) -> list[float]:
    rates = Rates()
    data = DataLoader(torch.ones(2 * steps, 2), batch_size=1)  # type: ignore[arg-type]
    trainer = Trainer(strategy="single", devices=1, max_steps=steps, callbacks=[*callbacks, rates], **QUIET)
    trainer.fit(module, data, **options)
    return rates.seen


def test_every_recipe_has_an_expectation() -> None:
    assert set(DEFAULTS) == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_default_rates_are_those_of_measured_results(recipe: str) -> None:
    cfg = compose(recipe)
    peak, warmup, steps, final = DEFAULTS[recipe]
    assert [cfg.module.get(key) for key in ("warmup_steps", "schedule_steps", "final_lr_factor")] == [None] * 3
    assert cfg.optimizer.lr == peak
    assert steps in (0, cfg.max_steps)
    expected = [peak * cosine(step, warmup, steps, final) if steps else peak for step in range(steps or 30)]
    assert stepped_rates(scheduled(cfg, []), peak, len(expected)) == expected
    if recipe in ("digits", "long_context"):
        assert seen_rates(scheduled(cfg, []), Module(peak), len(expected)) == expected


@pytest.mark.parametrize("schedule", choices_of(LOADER, "schedule"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_every_schedule(recipe: str, schedule: str) -> None:
    cfg = compose(recipe, [f"schedule={schedule}", *([] if schedule == "none" else ["schedule.warmup=0.25"])])
    found = scheduled(cfg, [])
    if schedule == "none":
        assert found == []
        return
    rates = stepped_rates(found, 1.0, STEPS)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    ending = {"constant": 1.0, "linear": 0.1 + 0.9 / 9, "cosine": cosine(STEPS - 1, 3, STEPS, 0.1), "wsd": 0.55}
    assert rates[-1] == pytest.approx(ending[schedule])


def test_the_module_s_own_schedule_is_replaced_or_kept() -> None:
    kept = seen_rates(scheduled(compose("digits"), []), Module(1.0, halves=True), 3)
    assert kept == [1.0, 0.5, 0.25]
    assert seen_rates(scheduled(compose("digits", ["schedule=constant"]), []), Module(1.0, halves=True), 3) == [1.0] * 3


def test_resumes_where_it_stopped(tmp_path) -> None:
    schedule = [LearningRateSchedule(RunSchedule("cosine", warmup=0.25, decay=0.5, total_steps=STEPS))]
    rates = Rates()
    whole = seen_rates(schedule, Module(0.1), STEPS)
    data = DataLoader(torch.ones(2 * STEPS, 2), batch_size=1)  # type: ignore[arg-type]
    first = Trainer(strategy="single", devices=1, max_steps=5, callbacks=[*schedule, rates], **QUIET)
    first.fit(Module(0.1), data)
    first.save_checkpoint(tmp_path / "saved")
    rest = seen_rates(schedule, Module(0.1), STEPS, ckpt_path=tmp_path / "saved")
    assert rates.seen + rest == whole


def test_resumes_a_checkpoint_of_the_module_s_own_schedule(tmp_path) -> None:
    """As the recipes had before there was a group ``schedule``."""

    def run(callbacks: list[Callback], steps: int, own: dict[str, Any], **options: Any) -> tuple[Trainer, list[float]]:
        rates, tokens = Rates(), torch.zeros(2 * STEPS, 9, dtype=torch.long)
        trainer = Trainer(strategy="single", devices=1, max_steps=steps, callbacks=[*callbacks, rates], **QUIET)
        sizes = GPTConfig(layers=1, dim=16, heads=2, seq_len=8)
        trainer.fit(GPTModule(sizes, **own), DataLoader(tokens, batch_size=1), **options)  # type: ignore[arg-type]
        return trainer, rates.seen

    old = {"warmup_steps": 3, "schedule_steps": STEPS, "final_lr_factor": 0.1}
    _, whole = run([], STEPS, old)
    assert whole == [4e-3 * cosine(step, 3, STEPS, 0.1) for step in range(STEPS)]
    first, begun = run([], 5, old)
    first.save_checkpoint(tmp_path / "saved")
    off = dict.fromkeys(old)
    schedule = LearningRateSchedule(RunSchedule("cosine", warmup=3))
    for callbacks, own in ([schedule], off), ([], old):
        _, rest = run(callbacks, STEPS, own, ckpt_path=tmp_path / "saved")
        assert begun + rest == whole
    assert run([], 3, off)[1] == [4e-3] * 3


@pytest.mark.parametrize(("typed", "expected"), [
    (["module.warmup_steps=0", "module.final_lr_factor=1.0"], {"warmup": 0, "final_factor": 1.0}),
    (["module.schedule_steps=${max_steps}", "max_steps=77"], {"total_steps": 77}),
    (["schedule=linear", "module.warmup_steps=5"], {"shape": "linear", "warmup": 5}),
])  # fmt: skip
def test_old_keys_still_work(typed: list[str], expected: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    old = compose("gpt", typed)
    assert {key: old.schedule[key] for key in expected} == expected
    assert [old.module[key] for key in ("warmup_steps", "schedule_steps", "final_lr_factor")] == [None] * 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len([key for key in typed if key.startswith("module.")])
    assert all("is deprecated. Type schedule." in text for text in said)


def test_without_a_schedule_old_keys_stay_the_module_s() -> None:
    cfg = compose("gpt", ["schedule=none", "module.warmup_steps=5"])
    assert (cfg.module.warmup_steps, cfg.schedule.warmup, scheduled(cfg, [])) == (5, 20.0, [])
    [problem] = compose_checked(["recipe=digits", "schedule.warmup=3"]).problems
    assert "schedule.warmup=3: has no effect with schedule=none" in problem


def test_wrong_values_are_refused_when_composed() -> None:
    composition = compose_checked(["recipe=gpt", "schedule=cosin", "schedule.warmup=soon", "schedule.warm=3"])
    assert "schedule=cosin: unknown choice" in composition.problems[0]
    assert "schedule.warmup" in str(composition.problems[1:])
    assert "warm" in str(composition.problems[1:])


def equal_under(ranks: Callable[..., list[Any]], strategy: str, options: dict[str, Any]) -> list[list[float]]:
    return ranks(_rates_under, 2, strategy, options, timeout=120)  # type: ignore[no-any-return]


def _rates_under(strategy: str, options: dict[str, Any]) -> list[float]:
    from tests.parity.harness import make_trainer
    from tests.parity.layout_modules import make_module
    from tests.parity.layouts import Texts

    rates = Rates()
    schedule = LearningRateSchedule(RunSchedule("linear", warmup=0.25, final_factor=0.0))
    trainer = make_trainer(strategy, options, max_steps=4, callbacks=[schedule, rates], global_batch_size=8)
    trainer.fit(make_module("gpt-small", "sgd"), DataLoader(Texts(24, 9), batch_size=2))
    return rates.seen[::2] if strategy != "tensor" else rates.seen[::4]


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_equal_under_every_layout(ranks, strategy: str) -> None:
    """The same rates per optimizer step, though ranks run several micro-batches per step."""
    for seen in equal_under(ranks, strategy, {"tensor": 2, "shard": 1} if strategy == "tensor" else {}):
        assert seen == pytest.approx([0.05, 0.1, 0.2 / 3, 0.1 / 3])


def test_configuration_is_typed() -> None:
    assert OmegaConf.get_type(compose("gpt").schedule) is RunSchedule

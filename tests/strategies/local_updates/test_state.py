"""Run states of replicas that differ: resumed between synchronizations, and by other strategies."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.strategies.local_updates.cases import Seen, difference, fit, mean_of
from trainwright.checkpoint.read.run_state import RunState

SAVED = 5
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "local_sgd": (2, "local_sgd", {"sync_every": 3, "average_optimizer": True}),
    "compressed": (2, "diloco", {"sync_every": 3, "compression": {"name": "topk", "ratio": 0.1}}),
    "streaming zero3": (
        4,
        "diloco",
        {"sync_every": 4, "fragments": 2, "overlap_steps": 2, "shard": 2, "compression": "int8", "offload_outer": True},
    ),
    "zero1 pairs": (4, "diloco", {"sync_every": 3, "shard": 2, "stage": 1}),
    "pipelines": (4, "diloco", {"sync_every": 3, "pipeline": 2}),
}


class Saving(pl.Callback):
    """Saves after ``SAVED`` steps, or at their validation, on the means."""

    def __init__(self, path: str, within_validation: bool = False) -> None:
        self.path = path
        self.within_validation = within_validation

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED and not self.within_validation:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED and self.within_validation:
            trainer.save_checkpoint(self.path)


def run(path: str, strategy: str, options: dict[str, Any], **more: Any) -> tuple[Seen, list[str]]:
    """Train eight steps and save on the way, or resume."""
    within = more.pop("within_validation", False)
    callbacks = [] if more.get("resume") else [Saving(path, within)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen = fit(strategy, options, steps=8, optimizer="adamw", callbacks=callbacks, **more)
    return seen, [str(each.message) for each in told]


@pytest.mark.thorough
@pytest.mark.parametrize("case", list(CASES))
def test_resume_between_synchronizations_is_bit_exact(ranks: Any, tmp_path: Path, case: str) -> None:
    world, strategy, options = CASES[case]
    within = case == "zero1 pairs"  # on the means
    more: dict[str, Any] = {"validate_every": SAVED, "within_validation": within} if within else {}
    path = str(tmp_path / "state")
    whole = ranks(run, world, path, strategy, options, **more)
    more.pop("within_validation", None)
    rest = ranks(run, world, path, strategy, options, resume=path, **more)
    for (one, _), (other, told) in zip(whole, rest, strict=True):
        for own, again in zip(one.own[SAVED:], other.own, strict=True):
            assert all(torch.equal(own[name], again[name]) for name in own)
        assert all(torch.equal(one.final[name], other.final[name]) for name in one.final)
        assert not [text for text in told if "was written with" in text or "Resuming from" in text]


class SavingTwice(pl.Callback):
    """Saves in the last hook of training, and after the strategy's teardown."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.path}/end")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.save_checkpoint(f"{self.path}/after")


def train_and_save(path: str, strategy: str, options: dict[str, Any]) -> None:
    fit(strategy, options, steps=SAVED, optimizer="adamw", callbacks=[SavingTwice(path)])


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["local_sgd", "streaming zero3"])
def test_save_after_fit(ranks: Any, tmp_path: Path, case: str) -> None:
    """Like ``trainer.save_checkpoint(...)`` after ``trainer.fit(...)``: both states have the means."""
    world, strategy, options = CASES[case]
    ranks(train_and_save, world, str(tmp_path), strategy, options)
    end, after = (RunState.open(str(tmp_path / name)) for name in ("end", "after"))
    assert set(end.keys()) == set(after.keys())
    for key in end.keys():  # noqa: SIM118 - a source is no dict
        if "/weights/" not in key:  # a replica's own
            assert torch.equal(end.read(key), after.read(key)), key


MOVES: dict[str, tuple[tuple[int, str, dict[str, Any]], tuple[int, str, dict[str, Any]], str]] = {
    "ddp to diloco": ((2, "ddp", {}), (2, "diloco", {"sync_every": 3}), ""),
    "diloco to ddp": ((2, "diloco", {"sync_every": 3}), (2, "ddp", {}), "were averaged"),
    "diloco to zero3 pairs": (
        (2, "diloco", {"sync_every": 3}),
        (4, "diloco", {"sync_every": 3, "shard": 2}),
        "its layout was replicate 2",
    ),
    "zero3 pairs to local_sgd": (
        (4, "diloco", {"sync_every": 3, "shard": 2}),
        (2, "local_sgd", {"sync_every": 3}),
        "outer optimizer is left out",
    ),
    "local_sgd to zero3": ((2, "local_sgd", {"sync_every": 3}), (2, "zero3", {}), "were averaged"),
}


def parameters_at_start(path: str, strategy: str, options: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """Return the parameters and outer state of a run resumed from ``path``."""
    found: dict[str, Any] = {}

    class Start(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if "weights" not in found:
                found["weights"] = dict(trainer.strategy.whole_parameters())
                outer = getattr(getattr(trainer.strategy, "replicas", None), "_outer", None)
                found["outer"] = None if outer is None else sorted(outer.momentum())

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(strategy, options, steps=SAVED + 1, optimizer="adamw", callbacks=[Start()], resume=path)
    return found["weights"], found["outer"], [str(each.message) for each in told]


@pytest.mark.sample(1)
@pytest.mark.parametrize("move", list(MOVES))
def test_other_strategies_resume_from_the_means(ranks: Any, tmp_path: Path, move: str) -> None:
    written, read, told = MOVES[move]
    path = str(tmp_path / "state")
    seen = [each for each, _ in ranks(run, written[0], path, *written[1:])]
    of_replicas = {each.replica: each.own[SAVED - 1] for each in seen}
    expected = mean_of(list(of_replicas.values()))
    starts = ranks(parameters_at_start, read[0], path, *read[1:])
    for weights, outer, messages in starts:
        assert difference(weights, expected) < 1e-6
        assert (outer is None) == (read[1] != "diloco")
        if written[1] == read[1] == "diloco":
            assert outer, "the outer momentum is read under another layout, too"
        lines = [text for text in messages if "was written with" in text or "Resuming from" in text]
        assert not told or not lines or told in lines[0]
    first = [text for text in starts[0][2] if "was written with" in text or "Resuming from" in text]
    assert bool(first) == bool(told)

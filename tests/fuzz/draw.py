"""Draws programs and their layouts by seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tests.fuzz.compare import comparable
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import BY_BATCH_ALONE, CALLBACKS, ONCE_PER_BATCH, OPTIONS, RANDOM, SEQUENCES, Program

T = TypeVar("T")


def _any(generator: random.Random, weighted: dict[T, float]) -> T:
    return generator.choices(list(weighted), list(weighted.values()))[0]


def _weights(text: str) -> dict[str, float]:
    """Return names with their weights from ``NAME 3, NAME 2``; ``nothing`` is the empty name."""
    pairs = (each.split() for each in text.split(","))
    return {"" if name == "nothing" else name: float(weight) for name, weight in pairs}


NETWORKS = _weights(
    "mlp 3, scaled 2, batch_norm 1, mixed 2, conv 1.5, transformer 4, tied 3, encoder 2, gru 1, "
    "lstm 1, mixed_sequence 1, two_names 1, conditioned 1.5, dropping 1.5"
)
LOSSES = _weights(
    "cross_entropy 2, mse 2, later_term 2, per_sample_mean 1, sum_loss 1, ignoring 3, smoothed 2, class_weighted 2, "
    "masked_mean 3, indexed_mean 2, two_terms 2, later_masked_term 2, rmse 1, contrastive 1, noisy 1.5, drawn_mask 1, "
    "pulled 0.7"
)
MODULES = _weights("Trained 6, Measured 3, Metrics 3, Rooted 2, Taught 1, ByHand 2, Typed 1, Tracking 1")
LOADERS = _weights(
    "plain 6, dropping 1, shuffled 2, own_sampler 1.5, own_batch_sampler 1.5, bulk 1, stream 1, ragged 2, combined 0.7"
)
SCHEDULERS = _weights(
    "nothing 4, warmup 2, by_epoch 1, one_cycle 1, plateau_by_step 1, plateau_by_epoch 1, plateau_on_validation 1"
)
OPTIMIZERS = _weights("momentum 4, nesterov 1, adamw 2, grouped 2")


def program_of(seed: int) -> Program:
    """Return the program of a seed."""
    g = random.Random(f"program {seed}")
    module = _any(g, MODULES)
    epochs, steps = g.choice([(1, 6), (2, 3), (2, 4), (3, 3), (3, 4)])
    double = g.random() < 0.65
    program = Program(
        network=_any(g, NETWORKS),
        loss=_any(g, LOSSES),
        module=module,
        optimizer=_any(g, OPTIMIZERS | ({"two": 4.0} if module == "ByHand" else {})),
        scheduler=_any(g, SCHEDULERS),
        loader=_any(g, LOADERS),
        accumulation=_any(g, {1: 5, 2: 2, 4: 1}),
        double=double,
        precision="32-true" if double else _any(g, {"32-true": 8, "bf16-mixed": 1, "16-mixed": 1}),
        clip=_any(g, {"": 3, "norm": 1, "value": 0.6}),
        epochs=epochs,
        steps=steps,
        rest=g.choice([0, 0, 1, 3, 4, 6]),
        padded_from=g.choice([-1, 0, 8, 16, 16]),
        validation=_any(g, {"": 1, "epoch": 2, "steps": 1}),
        after=_any(g, _weights("nothing 6, validate 1, test 1, predict 1, all 1")),
        callbacks=_callbacks(g),
        options=_options(random.Random(f"options {seed}")),
        stop=g.choice([0, 0, *range(1, epochs * steps)]),
        seed=seed,
    )
    return _made_consistent(program)


def _callbacks(g: random.Random) -> tuple[str, ...]:
    return tuple(name for name in CALLBACKS if g.random() < (0.03 if name in ("swa", "ema") else 0.08))


def _options(g: random.Random) -> tuple[str, ...]:
    return tuple(name for name in (*OPTIONS, "two_loaders", "global_batch", "schedule") if g.random() < 0.05)


# Options that Lightning does not take together, or that have no effect: (whether a program has them, what it gets).
Rule = tuple[Callable[[Program], bool], Callable[[Program], dict[str, Any]]]
RULES: list[Rule] = [
    (lambda p: p.module == "ByHand", lambda p: {"clip": "", "scheduler": "warmup" if p.scheduler else ""}),
    (lambda p: p.network not in SEQUENCES and p.loader == "ragged", lambda p: {"loader": "plain"}),
    (lambda p: p.scheduler == "plateau_on_validation" or p.loader == "stream", lambda p: {"validation": "epoch"}),
    (lambda p: not p.validation, lambda p: _without(p, "early_stopping", "checkpoint")),
    (lambda p: "swa" in p.callbacks, lambda p: _without(p, "ema")),
    (lambda p: not p.validation, lambda p: _but(p, "sanity", "every_second", "limit_val", "two_loaders")),
    (lambda p: p.validation == "steps" or p.scheduler == "plateau_on_validation", lambda p: _but(p, "every_second")),
    # Keys are named after loaders then.
    (
        lambda p: bool(
            {"plateau_on_validation", "early_stopping", "checkpoint", "predict", "all"} & {*p.components, p.after}
        ),
        lambda p: _but(p, "two_loaders"),
    ),
    (lambda p: p.loader == "combined", lambda p: _but(p, "two_loaders", "global_batch")),
    (lambda p: p.loader in ("stream", "bulk"), lambda p: _but(p, "global_batch")),
    (
        lambda p: (
            p.epochs < 2
            or p.steps % 2
            or p.rest
            or p.stop
            or p.drops
            or bool(p.components & {*RANDOM, *BY_BATCH_ALONE, *ONCE_PER_BATCH})
            or "global_batch" in p.options
            or p.validation == "steps"
            or p.scheduler == "plateau_by_step"
        ),
        lambda p: _but(p, "schedule"),
    ),
    (lambda p: p.scheduler.startswith("plateau") or p.module == "ByHand" or p.epochs < 2, lambda p: _without(p, "swa")),
    # Their state is not in a checkpoint of a step: hooks run after it is saved, or a stream starts anew.
    (lambda p: p.drops, lambda p: {"module": "Trained" if p.module == "Taught" else p.module, **_without(p, "swa")}),
    (lambda p: p.drops and p.loader == "stream", lambda p: {"loader": "plain"}),
    (lambda p: p.module == "Taught" or "swa" in p.callbacks or p.loader == "stream", lambda p: {"stop": 0}),
    (lambda p: p.drops and not p.stop, lambda p: {"stop": p.steps - 1}),
    (lambda p: bool(p.components & {*RANDOM, *BY_BATCH_ALONE, *ONCE_PER_BATCH}), lambda p: {"accumulation": 1}),
    # The scaler divides by its scale what backward adds without it.
    (lambda p: p.loss == "pulled" and p.precision == "16-mixed", lambda p: {"precision": "32-true"}),
    # Few layouts are comparable then.
    (lambda p: p.loader == "stream" or (not p.is_mean and p.seed % 4 != 0), lambda p: {"rest": 0}),
]


def _without(program: Program, *names: str) -> dict[str, Any]:
    return {"callbacks": tuple(each for each in program.callbacks if each not in names)}


def _but(program: Program, *names: str) -> dict[str, Any]:
    return {"options": tuple(each for each in program.options if each not in names)}


def _made_consistent(program: Program) -> Program:
    for has, changes in RULES:
        if has(program):
            program = replace(program, **changes(program))
    return program


def cells_of(seed: int, program: Program) -> list[str]:
    """Return the layouts of a seed."""
    g = random.Random(f"layouts {seed}")
    possible = {name: layout.weight for name, layout in LAYOUTS.items() if comparable(program, layout)}
    found: list[str] = []
    for _ in range(g.choice([2, 3, 3])):
        if possible:
            found.append(_any(g, possible))
            del possible[found[-1]]
    if program.drops:
        found = [f"{name}>{name}" for name in found if program.stop]
    elif program.stop and found:
        first = g.choice(found)
        second = first if g.random() < 0.4 else _any(g, {**possible, **dict.fromkeys(found, 1)})
        found[found.index(first)] = f"{first}>{second}"
    return found

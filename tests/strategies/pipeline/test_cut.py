"""Assignment of blocks and parameters to stages, and errors of steps that a pipeline does not support."""

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import RankError
from tests.strategies.pipeline.models import Block, Model, build, engine_of, make_batch, plan_of, reference, train
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.schedules import (
    CHOICES,
    block_problems,
    can_run,
    ranks_of_stages,
    split_blocks,
    stages_of_rank,
)

Ranks = Callable[..., list[Any]]


def lengths(weights: list[float], stages: int) -> list[int]:
    return [len(span) for span in split_blocks(weights, stages)]


def test_split_blocks_by_weight() -> None:
    assert sorted(lengths([1.0] * 6, 4)) == [1, 1, 2, 2]
    assert lengths([1.0] * 8, 4) == [2, 2, 2, 2]
    assert lengths([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1, 5]
    assert lengths([1.0, 1.0, 1.0, 1.0, 4.0], 2) == [4, 1]
    assert split_blocks([1.0, 2.0, 3.0], 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(ValueError, match="Use 1 to 2 stages"):
        split_blocks([1.0, 1.0], 3)


def test_split_blocks_minimizes_the_heaviest_stage() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        weights = torch.randint(1, 20, (9,), generator=generator).tolist()
        found = max(sum(weights[i] for i in span) for span in split_blocks(weights, 4))
        cuts = ([0, *inner, 9] for inner in combinations(range(1, 9), 3))
        assert found == min(max(sum(weights[a:b]) for a, b in zip(c[:-1], c[1:], strict=True)) for c in cuts)


def test_stages_of_a_rank() -> None:
    assert stages_of_rank(1, 2, 4, "interleaved_1f1b") == [1, 3]
    assert stages_of_rank(0, 2, 4, "zbv") == [0, 3]
    assert ranks_of_stages(2, 4, "dualpipev") == [0, 1, 1, 0]
    assert stages_of_rank(1, 2, 2, "1f1b") == [1]
    assert all(choice.load().__name__.startswith("Schedule") for choice in CHOICES.values())


@pytest.mark.parametrize(("arguments", "message"), [
    ((8, 2, "1f1b"), None),
    ((3, 2, "zbv"), "Set pipeline to at most 1"),
    ((5, 2, "looped_bfs", 3), "stages_per_rank to at most 2"),
    ((8, 2, "1f1b", None, [3, 4]), r"split=\[3, 4\].*\[4, 4\]"),
    ((8, 2, "1f1b", None, [3, 5]), None),
])  # fmt: skip
def test_block_problems(arguments: Any, message: str | None) -> None:
    problems = block_problems(*arguments)
    assert bool(problems) == (message is not None)
    assert message is None or re.search(message, " ".join(problems))


@pytest.mark.parametrize(("schedule", "ranks", "stages", "possible"), [
    ("gpipe", 2, 2, [1, 2, 3, 4, 5, 6]),
    ("1f1b", 4, 4, [4, 5, 6]),
    ("dualpipev", 2, 4, [4, 5, 6]),
    ("interleaved_1f1b", 2, 4, [1, 2, 3, 4, 6]),
])  # fmt: skip
def test_can_run(schedule: str, ranks: int, stages: int, possible: list[int]) -> None:
    assert [m for m in range(7) if can_run(schedule, m, ranks, stages)] == possible


def cut_of(model: Any, stages: int, mine: list[int], **changes: Any) -> PipelineCut:
    plan = plan_of(model, **changes)
    return PipelineCut(model, plan, split_blocks([1.0] * len(plan.blocks), stages), mine)


def test_holders_of_parameters() -> None:
    cut = cut_of(Model(4, tied=True), 2, [1])
    assert cut.holders["embed.weight"] == (0, 1)
    assert cut.holders["layers.1.inner.weight"] == (0,)
    assert cut.holders["norm.weight"] == (1,)
    assert cut.owned == {name for name, stages in cut.holders.items() if 1 in stages}
    assert "head.weight" not in cut.holders  # tied to the embedding
    both = cut_of(Model(4), 2, [0], first=("embed", "norm"))
    assert both.holders["norm.weight"] == (0, 1)
    assert cut_of(Model(4), 2, [0], last=("head",)).holders["norm.weight"] == (0,)  # sent to its users
    longer = cut_of(Model(4), 2, [0], first=("embed", ""), last=("norm", "head"))
    assert longer.holders["norm.weight"] == (1,)


def test_apply_leaves_placeholders() -> None:
    model = Model(4, tied=True)
    names = [name for name, _ in model.named_parameters()]
    cut = cut_of(model, 2, [1])
    cut.apply()
    assert [name for name, _ in model.named_parameters()] == [name for name in names if name in cut.owned]
    assert model.head.weight is model.embed.weight
    ghost = model.layers[0].inner.weight
    assert ghost.shape == (16, 8)
    assert not isinstance(ghost, nn.Parameter)
    assert ghost.untyped_storage().nbytes() == 4
    assert type(model.layers[0]).__name__ == "Block"
    with pytest.raises(RuntimeError, match="belongs to stage 0"):
        model.layers[0](torch.zeros(1, 1, 8))
    assert set(model.state_dict()) == {*cut.owned, "mask", "head.weight"}


def test_iterations_find_absent_parameters_without_values() -> None:
    """Code of a step that pairs or adds up parameters, from whichever step on, is right or an error."""
    model, whole = Model(4, tied=True), Model(4, tied=True)
    cut = cut_of(model, 2, [1])
    cut.apply()
    own = list(model.named_parameters())
    with cut.listed_ghosts():
        assert [(n, p.shape) for n, p in model.named_parameters()] == [
            (n, p.shape) for n, p in whole.named_parameters()
        ]
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
        absent = next(p for n, p in model.named_parameters() if n not in cut.owned)
        for parameter in model.requires_grad_(False).parameters():
            assert (parameter.grad, parameter.requires_grad) == (None, False)
        absent.data.clamp_(0, 1)  # its own stage does it
        absent.data *= 2
        for use in (lambda: absent.norm(), lambda: 0.5 * absent.data, lambda: int(absent.detach().sum())):
            with pytest.raises(RuntimeError, match="outside of their modules"):
                use()
        with torch.no_grad(), pytest.raises(RuntimeError, match="outside of their modules"):
            torch.zeros(absent.shape).add_(absent)
    assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), own, strict=True))


def test_apply_on_meta() -> None:
    with torch.device("meta"):
        model = Model(4)
    cut_of(model, 2, [0]).apply(torch.device("cpu"))
    assert model.head.weight.device.type == "cpu"
    assert model.head.weight.untyped_storage().nbytes() == 4
    assert model.embed.weight.is_meta


def test_recurrent_modules_release_their_weights() -> None:
    model = Model(2)
    model.add_module("memory", nn.LSTM(8, 8))
    cut_of(model, 2, [1], first=("embed", "memory")).apply()
    memory: Any = model.memory
    assert all(weight.untyped_storage().nbytes() == 4 for weight in memory._flat_weights)
    memory(torch.zeros(1, 1, 8))


def through(layers: Any, x: Any, *inputs: Any) -> Any:
    for layer in layers:
        x = layer(x, *inputs)
    return x


class Early(Model):
    """Uses the last norm before the blocks."""

    def hidden(self, ids: Any) -> Any:
        return through(self.layers, self.norm(self.embed(ids)))


class Twice(Model):
    def hidden(self, ids: Any) -> Any:
        return self.norm(through([*self.layers, *self.layers], self.embed(ids)))


class Backwards(Model):
    def hidden(self, ids: Any) -> Any:
        return self.norm(through(reversed(self.layers), self.embed(ids)))


class Short(Model):
    def hidden(self, ids: Any) -> Any:
        return self.norm(self.layers[0](self.embed(ids)))


class Penalty(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())


class Opaque(Model):
    def hidden(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: (output, object()))
            x = layer(x)[0]
        return self.norm(x)


class Vector(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logits(batch["ids"]).mean((1, 2))


_SHARED: list[Tensor] = []


class Hidden(Model):
    """An inner value of a block is put into a list."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _SHARED.clear()
        forward = Block.forward
        Block.forward = _append_inner  # type: ignore[method-assign]
        try:
            return super().training_step(batch, batch_idx) + sum(x.mean() for x in _SHARED)
        finally:
            Block.forward = forward  # type: ignore[method-assign]


def _append_inner(self: Block, x: Tensor, mask: Any = None, *, scale: float = 1.0) -> Tensor:
    inner = torch.tanh(self.inner(self.norm(x)))
    _SHARED.append(inner)
    return x + self.outer(inner)


class Collective(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        torch.distributed.all_reduce(loss.detach())
        return loss


class Running(Model):
    """Keeps a running mean of its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.1 * loss.detach()
        return loss


class Listed(Model):
    """Collects losses for the end of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.__dict__.setdefault("outputs", []).append(loss.detach())
        return loss


class Modest(Model):
    """Reads shapes and dtypes of values on other stages."""

    def hidden(self, ids: Any) -> Any:
        x = self.embed(ids).to(self.head.weight.dtype)
        mask = torch.ones_like(x[..., 0]) + x.new_zeros(ids.shape)
        return self.norm(through(self.layers, x, mask)).type_as(self.embed.weight)


MISUSES: list[tuple[Any, dict[str, Any], str | None]] = [
    (Early, {"last": ("head", "norm")}, r"'norm.bias'.*layer_norm, before the blocks.*plan.first=\['norm.bias'\]"),
    (Early, {"first": ("embed", "norm"), "last": ("head",)}, None),
    (Twice, {}, "The block 'layers.0' was called when all blocks had run"),
    (Backwards, {}, "The block 'layers.3' was called when 'layers.0' was next"),
    (Short, {}, "ended after the block 'layers.0'"),
    (Penalty, {}, "sees only those of this rank's stage"),
    (Opaque, {}, "returns a object, which cannot be sent"),
    (Hidden, {}, "uses a tensor that the block 'layers.0' computes but neither returns nor keeps"),
    (Collective, {}, r"a collective \(all_reduce\) of ranks \[0, 1\]"),
    (Running, {}, None),  # its code after the blocks runs once per batch
    (Listed, {}, "keeps tensors in 'outputs' .list."),
    (Modest, {}, None),
    (Model, {"first": ("embed", "norm"), "last": ("head",)}, None),
]


def misuse() -> list[str | None]:
    """Return the error of each model's first step, which must leave its state unchanged."""
    found: list[str | None] = []
    for kind, changes, _ in MISUSES:
        model = build(kind, 4)
        engine = engine_of(model, "gpipe", 2, plan_of(model, **changes))
        before = {name: value.clone() for name, value in model.named_buffers()}
        try:
            loss = train(engine, make_batch())
            wanted = reference(build(kind, 4), make_batch())[0][0]
            found.append(None if abs(float(loss - wanted)) < 1e-6 else f"{float(loss)} instead of {float(wanted)}")
        except (RuntimeError, TypeError) as error:
            found.append(str(error))
            assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
            assert not any(parameter.grad is not None for parameter in model.parameters())
    return found


def test_misuse_is_reported_on_every_rank_before_the_first_step(ranks: Ranks) -> None:
    for found in ranks(misuse, 2, timeout=60):
        for (kind, _, message), text in zip(MISUSES, found, strict=True):
            if message is None:
                assert text is None, f"{kind.__name__}: {text}"
            else:
                assert re.search(message, text or ""), f"{kind.__name__}: {text}"


def first_step(model: type[Model], changes: dict[str, Any]) -> str:
    instance = build(model, 4)
    engine = engine_of(instance, "gpipe", 2, plan_of(instance, **changes))
    try:
        train(engine, make_batch())
    except TypeError as error:
        assert not any(stage.fwd_cache for stage in engine.stages)
        # The other rank waits for a gradient; a launcher would end it.
        raise AssertionError(error) from error
    train(engine, make_batch())
    return "done"


def test_errors_release_activations(ranks: Ranks) -> None:
    assert ranks(first_step, 2, Modest, {}, timeout=30) == ["done", "done"]
    with pytest.raises(RankError, match="a loss of shape"):
        ranks(first_step, 2, Vector, {}, timeout=30)


def build_compiled() -> Model:
    model = build(Model, 4)
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def compiled() -> None:
    engine = engine_of(build_compiled())
    found = float(train(engine, make_batch()))
    assert found == pytest.approx(float(build(Model, 4).training_step(make_batch(), 0)), rel=1e-6)
    engine.detach()
    with pytest.raises(ValueError, match="schedule to one of: gpipe, 1f1b, interleaved_1f1b, looped_bfs"):
        engine_of(build_compiled(), "zbv")


def test_compiled_blocks(ranks: Ranks) -> None:
    ranks(compiled, 2, timeout=60)

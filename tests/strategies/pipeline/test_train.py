"""Training in a pipeline matches one process, also after errors and changes of requires_grad."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.strategies.pipeline.models import (
    WIDTH,
    Model,
    build,
    engine_of,
    make_batch,
    reference,
    train,
    worst_gradient,
)
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.pipeline import results
from trainwright.strategies.pipeline.engine import PipelineEngine
from trainwright.strategies.pipeline.stage import UserStepStage

Ranks = Callable[..., list[Any]]
ALL = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


def errors(
    schedule: str, blocks: int, micro_batches: int, samples: list[tuple[int, int]], options: Any, kind: Any = Model
) -> Any:
    """Return the worst errors of losses (relative) and gradients on this rank."""
    model = build(kind, blocks, **options)
    batches = [make_batch(n, length, seed) for seed, (n, length) in enumerate(samples)]
    losses, gradients = reference(model, *batches, scale=0.5)
    engine = engine_of(model, schedule, micro_batches)
    found = [train(engine, batch, scale=lambda loss, share: loss * share * 0.5) for batch in batches]
    assert not any(loss.requires_grad for loss in found)
    loss_error = max(abs(float(a) / float(b) - 1) for a, b in zip(found, losses, strict=True))
    return loss_error, worst_gradient(model, engine, gradients)


def check(results: list[Any]) -> None:
    for loss_error, gradient_error in results:
        assert loss_error < 1e-6
        assert gradient_error < 1e-6


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", ALL)
def test_schedules_match_one_process(ranks: Ranks, schedule: str) -> None:
    check(ranks(errors, 2, schedule, 5, 4, [(8, 6), (7, 5), (8, 6)], {}, timeout=60))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_four_ranks(ranks: Ranks, schedule: str) -> None:
    check(ranks(errors, 4, schedule, 9, 8, [(8, 6)], {"tied": True}, timeout=60))


@pytest.mark.parametrize("schedule", ALL)
def test_fewer_samples_than_micro_batches(ranks: Ranks, schedule: str) -> None:
    check(ranks(errors, 2, schedule, 4, 4, [(1, 6), (3, 6), (8, 6)], {}, timeout=60))


@pytest.mark.sample(7)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "options",
    [
        *({"style": s} for s in ("tuple", "dict", "dataclass", "view", "inplace", "fresh")),
        {"tied": True, "named": True},
    ],
    ids=str,
)
def test_block_structures(ranks: Ranks, options: dict[str, Any], schedule: str) -> None:
    check(ranks(errors, 2, schedule, 4, 4, [(8, 6)] * 2, options, timeout=60))


class Rounded(torch.autograd.Function):
    """What a wire of 16 bit does to a hidden state and its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].bfloat16().float()


def sent_in_16_bit(schedule: str, ends: tuple[int, ...]) -> tuple[float, float, int, int]:
    """Return errors against one process that rounds the outputs of blocks ``ends``; bytes sent in 32 and 16 bit."""
    model, batch = build(Model), make_batch()
    hooks = [model.layers[end].register_forward_hook(lambda *call: Rounded.apply(call[2])) for end in ends]
    (expected,), gradients = reference(model, batch)
    for hook in hooks:
        hook.remove()
    sizes = []
    for dtype in (None, torch.bfloat16):
        engine = engine_of(model if dtype else build(Model), schedule, sent_as=dtype)
        train(engine, batch)  # the first step negotiates
        model.zero_grad()
        calls: list[Any] = []
        end = listen(calls.append)
        loss = train(engine, batch)
        end()
        sizes.append(sum(call.size for call in calls if call.kind == "send"))
    return abs(float(loss / expected - 1)), worst_gradient(model, engine, gradients), sizes[0], sizes[1]


@pytest.mark.parametrize(("schedule", "ends"), [("1f1b", (1,)), ("zbv", (0, 2))])
def test_hidden_states_sent_in_16_bit(ranks: Ranks, schedule: str, ends: tuple[int, ...]) -> None:
    results = ranks(sent_in_16_bit, 2, schedule, ends)
    check([found[:2] for found in results])
    hidden = 4 * make_batch()["ids"].numel() * WIDTH * len(ends)
    assert sum(found[2] for found in results) == 2 * hidden  # and gradients
    assert sum(found[3] for found in results) == hidden


class Checkpointed(Model):
    def __init__(self, blocks: int, frozen: int) -> None:
        super().__init__(blocks)
        for module in (self.embed, *list(self.layers)[:frozen]):
            module.requires_grad_(frozen == 0)
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("frozen", [0, 2])
def test_checkpointed_and_frozen_blocks(ranks: Ranks, schedule: str, frozen: int) -> None:
    check(ranks(errors, 2, schedule, 4, 4, [(8, 6), (7, 5)], {"frozen": frozen}, Checkpointed, timeout=60))


def actions_until_sent(schedule: str) -> int:
    """Return the most actions between a computation and the send of its result, on this rank."""
    engine = engine_of(build(Model, 4), schedule, 8)
    train(engine, make_batch())
    order = [str(a) for a in engine._training._schedule(8)[0].pipeline_order_with_comms[dist.get_rank()]]
    sends = [name for name in order if "SEND_" in name]
    makers = {"SEND_F": ("F",), "SEND_B": ("B", "I")}
    made = [
        [order.index(n.replace(k, m)) for k in makers if k in n for m in makers[k] if n.replace(k, m) in order]
        for n in sends
    ]
    return max(order.index(name) - at[0] for name, at in zip(sends, made, strict=True))


def test_dualpipev_sends_immediately(ranks: Ranks) -> None:
    assert all(count <= 2 for count in ranks(actions_until_sent, 2, "dualpipev", timeout=60))


def live_of(engine: PipelineEngine) -> int:
    """Return the number of micro-batches with live activations."""
    return sum(len(stage.fwd_cache) + len(stage._deferred) for stage in engine.stages)


def live(schedule: str, micro_batches: int) -> int:
    model = build(Model, 4)
    engine = engine_of(model, schedule, micro_batches)
    most = 0
    forward = UserStepStage.forward_one_chunk

    def counted(self: UserStepStage, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        output = forward(self, *args, **kwargs)
        most = max(most, live_of(engine))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserStepStage, "forward_one_chunk", counted)
        train(engine, make_batch(16))
    assert live_of(engine) == 0
    return most


def test_live_activations_are_bounded_by_the_stages(ranks: Ranks) -> None:
    assert ranks(live, 2, "1f1b", 8, timeout=60) == [2, 1]
    assert ranks(live, 2, "gpipe", 8, timeout=60) == [8, 8]


def sent_and_held(schedule: str, micro_batches: int) -> tuple[int, int]:
    """Return the most sent activations and gradients that are alive at a time, on this rank."""
    engine = engine_of(build(Model, 4), schedule, micro_batches)
    alive: dict[bool, list[StorageWeakRef]] = {True: [], False: []}
    most = {True: 0, False: 0}
    ops = UserStepStage._ops

    def watched(self: UserStepStage, op: Any, tensors: Any, stage: int) -> Any:
        tensors = list(tensors)
        if op is dist.isend:
            forward = stage > self.stage_index
            alive[forward] = [ref for ref in alive[forward] if not ref.expired()]
            alive[forward] += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            most[forward] = max(most[forward], len(alive[forward]))
        return ops(self, op, tensors, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserStepStage, "_ops", watched)
        train(engine, make_batch(32))
    return most[True], most[False]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_sent_tensors_are_released_early(ranks: Ranks, schedule: str) -> None:
    held = ranks(sent_and_held, 2, schedule, 32, timeout=60)
    assert max(map(max, held)) <= 6


def freed(schedule: str) -> int:
    """Return the most block outputs that are alive at a time."""
    model = build(Model, 4)
    engine = engine_of(model, schedule, 8)
    alive: Any = weakref.WeakSet()
    most = 0

    def watch(module: Any, args: Any, output: Tensor) -> None:
        nonlocal most
        alive.add(output)
        gc.collect()
        most = max(most, len(alive))

    for index, layer in enumerate(model.layers):
        if engine.cut.owns_block(index):
            layer.register_forward_hook(watch)
    train(engine, make_batch(16))
    gc.collect()
    assert len(alive) == 0
    return most


def test_outputs_are_freed_with_their_micro_batch(ranks: Ranks) -> None:
    assert max(ranks(freed, 2, "1f1b", timeout=60)) <= 2 * 2 + 1


class Talkative(Model):
    """Logs in every way and returns a dict."""

    is_joined = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["ids"]
        logits = self.logits(ids)
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
        self.log("mean", losses.mean())
        self.log("tokens", float(ids.numel()), reduce_fx="sum")
        self.log("worst", losses.max() if self.is_joined else 1.0, reduce_fx=torch.max)
        self.log("sized", losses.mean(), True, on_step=False, batch_size=ids.numel())
        if batch_idx:
            self.log("late", 2.0)
        return {
            "loss": losses.mean(),
            "per_sample": losses.mean(1),
            "count": ids.shape[0],
            "names": "x",
            "half": losses.detach().mean().half(),
        }


def talk(joins: bool) -> Any:
    kind = Joined if joins else Talkative
    model, twin = build(kind, 4), build(kind, 4)
    calls: list[Any] = []
    model.log = lambda name, value, prog_bar=False, **kwargs: calls.append((name, float(value), prog_bar, kwargs))  # type: ignore[method-assign]
    installed = model.log
    engine = engine_of(model)
    sent: list[str] = []
    read = results.unpack
    outputs, expected = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "unpack", lambda data: (sent.append("objects"), read(data))[1])
        for index in (0, 0, 1, 1):
            batch = make_batch(7, 6, index)
            outputs.append(train(engine, batch, index))
            expected.append(twin.training_step(batch, index))
    assert model.log is installed
    return calls, twin.logged, outputs, expected, len(sent)


@pytest.mark.parametrize("joins", [False, True])
def test_logs_and_results_of_the_whole_batch_on_every_rank(ranks: Ranks, joins: bool) -> None:
    for calls, expected_calls, outputs, expected, sent in ranks(talk, 2, joins, timeout=60):
        assert [call[0] for call in calls] == [call[0] for call in expected_calls]
        for call, wanted in zip(calls, expected_calls, strict=True):
            assert call[1] == pytest.approx(wanted[1], rel=1e-6)
            named = {k: v.__name__ if callable(v) else v for k, v in wanted[3].items()}  # reductions are sent by name
            assert call[2:] == (wanted[2], named)
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.keys() == wanted.keys()
            torch.testing.assert_close(output["loss"], wanted["loss"].detach())
            torch.testing.assert_close(output["per_sample"], wanted["per_sample"].detach())
            assert output["half"].dtype == torch.float16
            assert output["names"] == ("x" if joins else ["x"] * 4)
            assert output["count"] == (7 if joins else pytest.approx((2 * 2 + 2 * 2 + 2 * 2 + 1) / 7))
        assert sent == 2  # at first and for a new entry


class Joined(Talkative):
    """Logs a value that is no sum over samples, so that its last part runs once per batch."""

    is_joined = True


class Silent(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx else None


def silent() -> Any:
    model = build(Silent, 4)
    engine = engine_of(model)
    batch = make_batch()
    nothing = train(engine, batch)
    gradients = [float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None]
    return nothing, sum(gradients), float(train(engine, batch, 1))


def test_steps_without_a_loss(ranks: Ranks) -> None:
    for nothing, gradients, something in ranks(silent, 2, timeout=60):
        assert nothing is None
        assert gradients == 0.0
        assert something > 0


class Fragile(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx and batch["ids"][0, 0] == batch["stop"]:
            raise ArithmeticError("in the middle")
        return super().training_step(batch, batch_idx)


def broken() -> Any:
    """One rank with two stages, so that no other rank waits."""
    model = build(Fragile, 4)
    batch = {**make_batch(), "stop": torch.tensor(-1)}
    _, gradients = reference(model, batch)
    engine = engine_of(model, "interleaved_1f1b", 4)
    log = model.log
    train(engine, batch)
    model.zero_grad()
    bad = {**batch, "stop": batch["ids"][4, 0]}
    with pytest.raises(ArithmeticError, match="in the middle"):
        train(engine, bad, 1)
    assert model.log == log
    assert live_of(engine) == 0
    model.zero_grad()
    train(engine, batch)
    return worst_gradient(model, engine, gradients)


def test_step_after_an_error(ranks: Ranks) -> None:
    assert ranks(broken, 1, timeout=60)[0] < 1e-6


class Early(Model):
    """Fails on one rank before or after the blocks, as the set-up of a layer may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = dist.get_rank() == batch["rank"]
        if fails and batch["early"]:
            raise ArithmeticError("of one stage")
        loss = super().training_step(batch, batch_idx)
        if fails:
            raise ArithmeticError("of one stage")
        return loss


def failed_first(rank: int, early: bool) -> str:
    engine = engine_of(build(Early, 4))
    with pytest.raises((ArithmeticError, RuntimeError)) as raised:
        train(engine, {**make_batch(), "rank": rank, "early": early})
    return str(raised.value)


@pytest.mark.parametrize(("rank", "early"), [(0, True), (1, True), (1, False)])
def test_an_error_of_one_stage_in_the_first_step_ends_all(ranks: Ranks, rank: int, early: bool) -> None:
    said = ranks(failed_first, 2, rank, early, timeout=30)
    assert said[rank] == "of one stage"
    assert "of one stage" in said[1 - rank] if early else "failed on another stage" in said[1 - rank]


def thawed() -> Any:
    model = build(Model, 4)
    batch = make_batch()
    _, gradients = reference(model, batch)
    trained = [model.embed, *list(model.layers)[:2]]
    for module in trained:
        module.requires_grad_(False)
    engine = engine_of(model)
    train(engine, batch)
    frozen = [name for name, p in model.named_parameters() if p.grad is None]
    model.zero_grad()
    for module in trained:
        module.requires_grad_(True)
    engine.refresh()
    train(engine, batch)
    return len(frozen), worst_gradient(model, engine, gradients)


def test_parameters_may_be_unfrozen(ranks: Ranks) -> None:
    (frozen, first), (none, second) = ranks(thawed, 2, timeout=60)
    assert frozen > 0
    assert none == 0
    assert max(first, second) < 1e-6

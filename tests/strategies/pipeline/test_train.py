"""Training through the stages of a pipeline equals one process."""

import gc
import warnings
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
    Model,
    build,
    engine_of,
    make_batch,
    reference,
    train,
    worst_gradient,
)
from trainwright.strategies.pipeline import results
from trainwright.strategies.pipeline.stage import OwnForwardStage
from trainwright.strategies.plan.model_plan import ModelPlan

Ranks = Callable[..., list[Any]]
ALL = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


def errors(schedule: str, blocks: int, micro_batches: int, samples: list[tuple[int, int]], options: Any) -> Any:
    """Worst relative error of the losses, worst error of a gradient, on this rank."""
    model = build(Model, blocks, **options)
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


@pytest.mark.parametrize("schedule", ALL)
def test_a_schedule_computes_what_one_process_does(ranks: Ranks, schedule: str) -> None:
    """Five blocks do not divide by the stages; the second batch has another number of samples and another length."""
    check(ranks(errors, 2, schedule, 5, 4, [(8, 6), (7, 5), (8, 6)], {}, timeout=60))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_four_ranks(ranks: Ranks, schedule: str) -> None:
    check(ranks(errors, 4, schedule, 9, 8, [(8, 6)], {"tied": True}, timeout=60))


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("samples", [1, 3])
def test_a_batch_of_fewer_samples_than_micro_batches(ranks: Ranks, schedule: str, samples: int) -> None:
    check(ranks(errors, 2, schedule, 4, 4, [(samples, 6), (8, 6)], {}, timeout=60))


@pytest.mark.parametrize("style", ["tuple", "dict", "dataclass", "view", "inplace", "fresh"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_pass_on_any_structure(ranks: Ranks, style: str, schedule: str) -> None:
    check(ranks(errors, 2, schedule, 4, 4, [(8, 6)] * 2, {"style": style}, timeout=60))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_tied_weights_and_named_blocks(ranks: Ranks, schedule: str) -> None:
    """Each holder has a part of a tied weight's gradient; the parts add up to the whole."""
    check(ranks(errors, 2, schedule, 4, 4, [(8, 6)], {"tied": True, "named": True}, timeout=60))


class Checkpointed(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__(4)
        for module in (self.embed, *list(self.layers)[:frozen]):
            module.requires_grad_(frozen == 0)
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def special(schedule: str, frozen: int) -> Any:
    model = build(Checkpointed, frozen)
    batches = [make_batch(), make_batch(7, 5, 1)]
    losses, gradients = reference(build(Checkpointed, frozen), *batches)
    engine = engine_of(model, schedule)
    found = [train(engine, batch) for batch in batches]
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            worst = max(worst, float((parameter.grad - gradients[name]).abs().max()))
        else:
            assert parameter.grad is None
    return max(abs(float(a - b)) for a, b in zip(found, losses, strict=True)), worst


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("frozen", [0, 2])
def test_checkpointed_and_frozen_blocks(ranks: Ranks, schedule: str, frozen: int) -> None:
    """Where no gradient flows back, weights behind still get theirs, also when inputs and weights are apart."""
    check(ranks(special, 2, schedule, frozen, timeout=60))


def actions_until_sent(schedule: str) -> int:
    """The most actions between a forward or backward and the sending of what it gave, on this rank."""
    engine = engine_of(build(Model, 4), schedule, 8)
    order = [str(a) for a in engine._schedule(8)[0].pipeline_order_with_comms[dist.get_rank()]]
    sends = [name for name in order if "SEND_" in name]
    makers = {"SEND_F": ("F",), "SEND_B": ("B", "I")}
    made = [
        [order.index(n.replace(k, m)) for k in makers if k in n for m in makers[k] if n.replace(k, m) in order]
        for n in sends
    ]
    return max(order.index(name) - at[0] for name, at in zip(sends, made, strict=True))


def test_dualpipev_sends_as_soon_as_it_can(ranks: Ranks) -> None:
    """Torch pairs forwards with backwards; one after the other, the first need not wait for the second."""
    assert all(count <= 2 for count in ranks(actions_until_sent, 2, "dualpipev", timeout=60))


def live(schedule: str, micro_batches: int) -> int:
    model = build(Model, 4)
    engine = engine_of(model, schedule, micro_batches)
    most = 0
    forward = OwnForwardStage.forward_one_chunk

    def counted(self: OwnForwardStage, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        output = forward(self, *args, **kwargs)
        most = max(most, sum(stage.live for stage in engine.stages))
        return output

    OwnForwardStage.forward_one_chunk = counted  # type: ignore[method-assign]
    try:
        train(engine, make_batch(16))
    finally:
        OwnForwardStage.forward_one_chunk = forward  # type: ignore[method-assign]
    assert [stage.live for stage in engine.stages] == [0] * len(engine.stages)
    return most


def test_live_activations_are_bounded_by_the_stages(ranks: Ranks) -> None:
    assert ranks(live, 2, "1f1b", 8, timeout=60) == [2, 1]
    assert ranks(live, 2, "gpipe", 8, timeout=60) == [8, 8]


def sent_and_held(schedule: str, micro_batches: int) -> tuple[int, int]:
    """The most sent activations and the most sent gradients that are held at a time, on this rank."""
    engine = engine_of(build(Model, 4), schedule, micro_batches)
    alive: dict[bool, list[StorageWeakRef]] = {True: [], False: []}
    most = {True: 0, False: 0}
    ops = OwnForwardStage._ops

    def watched(self: OwnForwardStage, op: Any, tensors: Any, stage: int) -> Any:
        tensors = list(tensors)
        if op is dist.isend:
            forward = stage > self.stage_index
            alive[forward] = [ref for ref in alive[forward] if not ref.expired()]
            alive[forward] += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            most[forward] = max(most[forward], len(alive[forward]))
        return ops(self, op, tensors, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnForwardStage, "_ops", watched)
        train(engine, make_batch(32))
    return most[True], most[False]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_what_was_sent_is_held_no_longer_than_it_travels(ranks: Ranks, schedule: str) -> None:
    """However many micro-batches a step has; torch's schedules of several stages hold all of them until its end."""
    held = ranks(sent_and_held, 2, schedule, 32, timeout=60)
    assert max(map(max, held)) <= 6


def freed(schedule: str) -> int:
    """Blocks' outputs that are alive after a step, and the most at any time."""
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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["ids"]
        logits = self.logits(ids)
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
        self.log("mean", losses.mean())
        self.log("tokens", float(ids.numel()), reduce_fx="sum")
        self.log("worst", losses.max(), reduce_fx=torch.max)
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


def talk() -> Any:
    model, twin = build(Talkative, 4), build(Talkative, 4)
    calls: list[Any] = []
    model.log = lambda name, value, prog_bar=False, **kwargs: calls.append((name, float(value), prog_bar, kwargs))  # type: ignore[method-assign]
    installed = model.log
    engine = engine_of(model)
    sent: list[str] = []
    read = results.unpack
    results.unpack = lambda data: (sent.append("objects"), read(data))[1]
    outputs, expected = [], []
    try:
        for index in (0, 0, 1, 1):
            batch = make_batch(7, 6, index)
            outputs.append(engine.train((batch, index), {}, batch=batch, scale=lambda loss, share: loss * share))
            expected.append(twin.training_step(batch, index))
    finally:
        results.unpack = read
    assert model.log is installed
    return calls, twin.logged, outputs, expected, len(sent)


def test_logs_and_results_are_those_of_the_whole_batch_on_every_rank(ranks: Ranks) -> None:
    for calls, expected_calls, outputs, expected, sent in ranks(talk, 2, timeout=60):
        assert [call[0] for call in calls] == [call[0] for call in expected_calls]
        for call, wanted in zip(calls, expected_calls, strict=True):
            assert call[1] == pytest.approx(wanted[1], rel=1e-6)
            named = {k: v.__name__ if callable(v) else v for k, v in wanted[3].items()}  # reductions travel by name
            assert call[2:] == (wanted[2], named)
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.keys() == wanted.keys()
            torch.testing.assert_close(output["loss"], wanted["loss"].detach())
            torch.testing.assert_close(output["per_sample"], wanted["per_sample"].detach())
            assert output["half"].dtype == torch.float16
            assert output["names"] == ["x"] * 4
            assert output["count"] == pytest.approx((2 * 2 + 2 * 2 + 2 * 2 + 1) / 7)
        assert sent == 2  # at first and when an entry came along


class Silent(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx else None


def silent() -> Any:
    model = build(Silent, 4)
    engine = engine_of(model)
    batch = make_batch()
    nothing = engine.train((batch, 0), {}, batch=batch, scale=lambda loss, share: loss * share)
    gradients = [float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None]
    something = engine.train((batch,), {"batch_idx": 1}, batch=batch, scale=lambda loss, share: loss * share)
    return nothing, sum(gradients), float(something)


def test_a_step_without_a_loss(ranks: Ranks) -> None:
    for nothing, gradients, something in ranks(silent, 2, timeout=60):
        assert nothing is None
        assert gradients == 0.0
        assert something > 0


def hugging_face(name: str, schedule: str) -> Any:
    import transformers

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        net: Any = transformers.LlamaForCausalLM(config)
        blocks, first, last = "net.model.layers", ("net.model.embed_tokens",), ("net.model.norm", "net.lm_head")
    else:
        config = transformers.GPT2Config(
            vocab_size=32, n_embd=16, n_layer=4, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        net = transformers.GPT2LMHeadModel(config)
        blocks, last = "net.transformer.h", ("net.transformer.ln_f", "net.lm_head")
        first = ("net.transformer.wte", "net.transformer.wpe")

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch, labels=batch["input_ids"]).loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch, labels=batch["input_ids"]).loss

    model: Any = Wrapped()
    ids = torch.randint(0, 32, (4, 8))
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    losses, gradients = reference(model, batch)
    plan = ModelPlan(blocks=tuple(f"{blocks}.{i}" for i in range(4)), first=first, last=last)
    engine = engine_of(model, schedule, 4, plan)
    found = train(engine, batch)
    with torch.no_grad(), engine.evaluating():
        valued = engine.relay(lambda: model.validation_step(batch, 0))
        greedy, cached = (
            engine.relay(partial(net.generate, ids[:1], max_new_tokens=3, do_sample=False, use_cache=cache))
            for cache in (False, True)
        )
    assert greedy.tolist() == cached.tolist()
    errors = abs(float(found - losses[0])), worst_gradient(model, engine, gradients)
    return errors, abs(float(valued - losses[0])), greedy.tolist()


@pytest.mark.parametrize(("name", "schedule"), [("llama", "1f1b"), ("gpt2", "zbv")])
def test_hugging_face_models(ranks: Ranks, name: str, schedule: str) -> None:
    pytest.importorskip("transformers")
    results = ranks(hugging_face, 2, name, schedule, timeout=120)
    for (loss_error, gradient_error), evaluation_error, greedy in results:
        assert loss_error < 1e-6
        assert gradient_error < 1e-6
        assert evaluation_error < 1e-6
        assert greedy == results[0][2]
        assert len(greedy[0]) == 11

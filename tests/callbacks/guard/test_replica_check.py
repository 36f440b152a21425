"""Detection and repair of flipped bits under layouts with replicas."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.callbacks.faulty import bits, fit, weights
from tests.callbacks.modules import loader
from tests.parity.harness import make_trainer
from tests.parity.layouts import Texts
from trainwright.callbacks import inject
from trainwright.callbacks.guard.replica_check import (
    Difference,
    ReplicaCheck,
    ReplicaDifferenceError,
    digest_of,
    receive,
    send,
)
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.read.find import list_checkpoints

NAME = "net.blocks.3.attention.out.weight"
# Layouts with three replicas: strategy, options, number of ranks.
MAJORITIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp": ("ddp", {}, 3),
    "zero1": ("zero1", {}, 3),
    "replicate x shard": ("zero3", {"replicate": 3, "shard": 2}, 6),
    "pipeline x replicate": ("hybrid", {"pipeline": 2, "replicate": 3, "stage": 1}, 6),
}
# Layouts without faults, including tensors replicated along some axes only.
EQUAL: dict[str, tuple[str, dict[str, Any], int]] = {
    **{name: MAJORITIES[name] for name in ("ddp", "zero1")},
    "zero2": ("zero2", {}, 2),
    "replicate x shard": ("zero3", {"replicate": 2, "shard": 2}, 4),
    "tensor x sequence": ("hybrid", {"tensor": 2, "replicate": 2, "sequence_parallel": True}, 4),
    "context": ("hybrid", {"context": 2, "replicate": 2, "stage": 1}, 4),
    "pipeline": ("hybrid", {"pipeline": 2, "shard": 2}, 4),
}


def ended(layout: str, *faults: Any, check: ReplicaCheck | None = None) -> tuple[dict[str, Any], ReplicaCheck | None]:
    strategy, options, _ = MAJORITIES.get(layout) or EQUAL[layout]
    callbacks = [*([check] if check else []), *faults]
    trainer = fit(strategy, options, *callbacks, steps=4, global_batch_size=12)
    return {name: bits(tensor).clone() for name, tensor in weights(trainer).items()}, check


def repaired(layout: str, rank: int) -> tuple[list[tuple[int, Difference]], bool, int | None]:
    undisturbed, _ = ended(layout)
    # Flipped after the second optimizer step, found before the third.
    check = ReplicaCheck(every_n_steps=1)
    flipped, _ = ended(layout, FlipAfterGradients(rank), check=check)
    same = all(torch.equal(flipped[name], undisturbed[name]) for name in undisturbed)
    return check.found, same, check.equal_at


class FlipAfterGradients(Callback):
    """Flips a bit between the backward pass and the check, before anything is computed with it."""

    sees_parts = True  # it reads this rank's tensors

    def __init__(self, rank: int) -> None:
        self.fault = inject.flip_bit(rank, 2, NAME)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.fault.rank:
            self.fault.strike(trainer, pl_module)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", MAJORITIES)
def test_flipped_bit_is_reported_and_repaired(ranks: Any, layout: str) -> None:
    world_size = MAJORITIES[layout][2]
    wrong = world_size - 1
    results = ranks(repaired, world_size, layout, wrong)
    for found, same, equal_at in results:
        [(step, difference)] = found
        assert step == 2
        assert difference.key == f"weights/{NAME}"
        assert difference.wrong == (wrong,)
        assert len(difference.holders) == 3
        assert same  # bit by bit equal to a run without the fault
        assert equal_at == 3


def undisturbed(layout: str) -> tuple[list[Any], int | None, int]:
    strategy, options, _ = EQUAL[layout]
    check = ReplicaCheck(every_n_steps=1)
    fit(strategy, options, check, steps=5, global_batch_size=12)
    shared = sum(len(members) for members in check._holders._members.values())
    return check.found, check.equal_at, shared


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", EQUAL)
def test_no_false_positives(ranks: Any, layout: str) -> None:
    for found, equal_at, shared in ranks(undisturbed, EQUAL[layout][2], layout):
        assert found == []
        assert equal_at == 4
        assert shared > 0


TWELVE = {"steps": 4, "global_batch_size": 12}


def error_of(*callbacks: Callback, layout: str = "ddp", **options: Any) -> tuple[str, list[str]]:
    """Return the error of a check, and the names of the tensors that differed."""
    strategy, arguments, _ = EQUAL[layout]
    try:
        fit(strategy, arguments, *callbacks, **{"steps": 6, **options})
    except ReplicaDifferenceError as error:
        return str(error), [each.name for each in error.differences]
    return "", []


def test_two_replicas_have_no_majority(ranks: Any) -> None:
    faulty = ReplicaCheck(every_n_steps=1), inject.flip_bit(3, 2, NAME)
    for text, names in ranks(error_of, 4, *faulty, layout="replicate x shard", **TWELVE):
        assert names == [NAME]
        assert f"Step 2: ranks 1, 3 hold different bytes of {NAME}; they were equal at step 1." in text
        assert "There is no majority" in text
        assert "resume=auto" in text


def test_stop_names_the_rank(ranks: Any) -> None:
    check = ReplicaCheck(every_n_steps=1, on_difference="stop", before_saves=False)
    for text, _ in ranks(error_of, 3, check, inject.flip_bit(1, 2, NAME), **TWELVE):
        assert f"rank 1 holds other bytes than rank 0, 2 of {NAME}" in text
        assert "not newer than that (ckpt_path=...)" in text
        assert "the machine of rank 1" in text


def broken(most_repairs: int) -> tuple[str, int]:
    check = ReplicaCheck(every_n_steps=1, most_repairs=most_repairs)
    faults = [inject.flip_bit(1, step, NAME, times=None) for step in (1, 2, 3)]
    return error_of(check, *faults, steps=5, global_batch_size=12)[0], len(check.found)


def test_most_repairs(ranks: Any) -> None:
    for text, count in ranks(broken, 3, 2):
        assert "Rank 1 had been repaired 2 time(s) before: remove its machine" in text
        assert count == 3
    for text, count in ranks(broken, 3, 3):
        assert (text, count) == ("", 3)


@pytest.mark.parametrize(("before_saves", "steps"), [(True, [2]), (False, [6, 4, 2])])
def test_check_before_saves(ranks: Any, before_saves: bool, steps: list[int]) -> None:
    # Flipped before the third step, saved after the fourth, without a check in between.
    check, saving = ReplicaCheck(100, before_saves=before_saves), RunStateCheckpoint(every_n_steps=2, keep_last=9)
    for text, _ in ranks(error_of, 2, check, saving, inject.flip_bit(1, 2, NAME)):
        assert ("they were equal at step 2" in text) == before_saves
    assert [found.step for found in list_checkpoints("run/checkpoints")] == steps


def test_check_before_saves_after_validation(ranks: Any) -> None:
    saving = RunStateCheckpoint(every=None, monitor="val_loss", keep_best=9, keep_last=9, save_at_end=False)
    callbacks = (ReplicaCheck(), saving, inject.flip_bit(1, 2, NAME))
    for text, _ in ranks(error_of, 2, *callbacks, val_data=Texts(4), val_check_interval=1):
        assert "they were equal at step 2" in text
    assert [found.step for found in list_checkpoints("run/checkpoints")] == [2, 1]


class Partners(pl.LightningModule):
    """Two networks with an optimizer each; the second optimizer steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward((self.first(batch[0]) - self.second(batch[0]) - batch[1]).square().mean())
        for optimizer in (second, first):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]


def checked_of_several_optimizers(every_n_steps: int) -> list[int]:
    steps = []

    class Noting(ReplicaCheck):
        def check(self, trainer: Any) -> Any:
            steps.append(trainer.global_step)
            return super().check(trainer)

    trainer = make_trainer("ddp", max_steps=12, max_epochs=-1, callbacks=[Noting(every_n_steps)])
    trainer.fit(Partners(), loader())
    return steps


def test_several_optimizers_skip_no_check(ranks: Any) -> None:
    assert ranks(checked_of_several_optimizers, 2, 4) == [[4, 8]] * 2


def moments() -> list[tuple[int, Difference]]:
    class FlipMoment(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank == 0:
                parameter = pl_module.get_parameter(NAME)
                trainer.optimizers[0].state[parameter]["momentum_buffer"][0, 0] += 1

    check = ReplicaCheck(every_n_steps=2)
    fit("ddp", {}, check, FlipMoment(), steps=4, global_batch_size=12)
    return check.found


def test_optimizer_state_is_compared(ranks: Any) -> None:
    for [(step, difference)] in ranks(moments, 3):
        assert step == 2
        assert difference.name == f"{NAME} (momentum_buffer of the optimizer)"
        assert difference.wrong == (0,)


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit("zero3", {}, ReplicaCheck(every_n_steps=1), steps=4)
    return [str(each.message) for each in caught if "ReplicaCheck" in str(each.message)]


def test_warning_without_replicas(ranks: Any) -> None:
    told, others = ranks(warned, 2)
    [text] = told
    assert "compares nothing" in text
    assert others == []


def test_names() -> None:
    assert Difference("weights/a.b", (0, 1), ()).name == "a.b"
    assert Difference("optimizer/1/a.b/exp_avg", (0, 1), ()).name == "a.b (exp_avg of the optimizer)"


def carried() -> bool:
    device = torch.device("cpu")
    fine = True
    for value in (torch.randn(3, 4).t(), torch.tensor(7), torch.randn(5).bfloat16(), torch.tensor([True, False])):
        sent = [value.clone()]
        dist.broadcast_object_list(sent)
        if dist.get_rank() == 0:
            send(value, 1, device)
        else:
            value.zero_()
            receive(value, 0, device)
            fine = fine and torch.equal(value, sent[0]) and digest_of(value) == digest_of(sent[0])
    return fine


def test_single_rank() -> None:
    check = ReplicaCheck(every_n_steps=1)
    fit("single", {}, check, steps=2)
    assert (check.found, check.equal_at) == ([], None)


def test_send_and_receive(ranks: Any) -> None:
    assert ranks(carried, 2) == [True, True]


def test_digest_depends_on_every_bit() -> None:
    tensor = torch.randn(4, 6)
    plain = digest_of(tensor)
    assert digest_of(tensor.t().contiguous().t()) == plain  # depends on the order of elements, not on strides
    octets = bits(tensor)
    for index in (0, 47, 95):
        octets[index] ^= 1
        assert digest_of(tensor) != plain
        octets[index] ^= 1
    assert digest_of(tensor) == plain

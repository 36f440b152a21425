import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.checkpoint.write.test_save import group as new_group
from tests.checkpoint.write.test_save import rank_and_size
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write import asynchronous as savers
from trainwright.checkpoint.write.asynchronous import AsyncSaver, BlockingSaver
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError

SIZE = 1000


def rank():
    return rank_and_size()[0]


def content(value: float, step: int) -> Content:
    """Replicated, sharded and rank-local tensors."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    row = torch.full((1, 4), value + rank())
    tensors = {f"weights/{index}": TensorParts.whole(torch.full((SIZE,), value + index)) for index in range(6)}
    tensors["weights/cut"] = TensorParts((size, 4), torch.float32, [((rank(), 0), row)])
    tensors[f"rank/{rank()}/rng"] = TensorParts.whole(torch.tensor([rank(), step]))
    return Content({"step": step}, tensors, {"step": step, "kind": "run state"})


def check(path: str, value: float, step: int, ranks: int) -> None:
    state = RunState.open(path)
    assert state.tree["step"] == step
    for index in range(6):
        assert state.read(f"weights/{index}").unique().tolist() == [value + index]
    assert state.read("weights/cut")[:, 0].tolist() == [value + r for r in range(ranks)]
    for r in range(ranks):
        assert state.read(f"rank/{r}/rng").tolist() == [r, step]


@contextmanager
def held():
    """Savers write once the event is set."""
    go = threading.Event()

    def write_then(*arguments):
        assert go.wait(60)
        return write(*arguments)

    with mock.patch.object(savers, "write", write_then):
        yield go


def train_while_it_is_written(folder):
    with held() as go:
        return train_until(go, folder)


def train_until(go, folder):
    seen, saver = [], AsyncSaver(new_group)
    state = content(1.0, 10)
    saver.save(state, f"{folder}/a", lambda manifest: seen.append(manifest.step))
    assert saver.in_flight == f"{folder}/a"
    assert not saver.all_done(dist.group.WORLD if new_group() else None)
    for parts in state.tensors.values():  # training continues in place
        for _, box in parts.parts:
            box.add_(100)
    assert not Path(folder, "a").exists()
    go.set()
    saved = saver.take()
    assert saved is not None
    assert saved.error is None
    assert saver.in_flight is None
    assert saver.take() is None
    check(f"{folder}/a", 1.0, 10, dist.get_world_size() if dist.is_initialized() else 1)
    saver.close()
    assert saver.num_bytes == 0
    return seen, saved.written_seconds > 0


def test_async_save_has_values_of_its_step(tmp_path):
    assert train_while_it_is_written(str(tmp_path)) == ([10], True)


def test_async_save_of_several_ranks(ranks, tmp_path):
    assert ranks(train_while_it_is_written, 3, str(tmp_path)) == [([10], True), ([], True), ([], True)]


def save_while_training_reduces(folder):
    saver = AsyncSaver(new_group)
    for step in range(1, 6):
        saver.save(content(float(step), step), f"{folder}/{step}")
        for _ in range(50):  # collectives of training, on the default group, in the main thread
            total = torch.ones(300)
            dist.all_reduce(total)
            assert total.unique().tolist() == [dist.get_world_size()]
        saved = saver.take()
        assert saved is not None
        assert saved.error is None
    saver.close()


def test_saving_beside_training_collectives(ranks, tmp_path):
    ranks(save_while_training_reduces, 2, str(tmp_path))
    for step in range(1, 6):
        check(str(tmp_path / str(step)), float(step), step, 2)


def copied_bytes(prepare):
    saver = AsyncSaver(new_group)
    if prepare:
        saver.prepare(content(0.0, 1).tensors)
    saver.save(content(0.0, 1), f"{Path.cwd()}/a")
    held = saver.num_bytes
    saver.take()
    saver.close()
    return held


@pytest.mark.parametrize("prepare", [False, True])
def test_replicated_tensors_are_copied_once(ranks, prepare):
    whole = 6 * SIZE * 4
    held = ranks(copied_bytes, 3, prepare)
    assert whole <= sum(held) <= whole + 3 * 1000, held
    assert max(held) <= whole / 3 + 1000


def change_what_is_held(folder):
    saver = AsyncSaver(new_group)
    for step, count in enumerate([2, 2, 5], 1):
        tensors = {f"w{index}": TensorParts.whole(torch.full((3,), float(step + index))) for index in range(count)}
        saver.save(Content({}, tensors), f"{folder}/{step}")
        saved = saver.take()
        assert saved is not None
        assert saved.error is None, saved.error
    saver.close()


def test_new_tensors_are_assigned(ranks, tmp_path):
    ranks(change_what_is_held, 2, str(tmp_path))
    state = RunState.open(str(tmp_path / "3"))
    assert {key: state.read(key)[0].item() for key in state.keys()} == {f"w{i}": 3.0 + i for i in range(5)}  # noqa: SIM118


def fail_on_one_rank(folder, asynchronous, failing):
    def write_or_fail(content, path, group):
        if rank() == failing:
            content.tensors["weights/0"].parts[0] = ((0,), None)
        return write(content, path, group)

    saver = AsyncSaver(new_group) if asynchronous else BlockingSaver(new_group)
    state = content(1.0, 1)
    # A tensor that only the failing rank holds, so that it is that rank's to write.
    state.tensors = {"weights/0": state.tensors["weights/0"]} if rank() == failing else {}
    with mock.patch.object(savers, "write", write_or_fail):
        saver.save(state, f"{folder}/a")
        failed = saver.take()
    saver.close()
    assert failed is not None
    return type(failed.error).__name__, str(failed.error)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_write_error_fails_all_ranks(ranks, tmp_path, asynchronous):
    outcomes = ranks(fail_on_one_rank, 2, str(tmp_path), asynchronous, 1)
    assert [kind for kind, _ in outcomes] == ["CheckpointError"] * 2
    assert all("rank 1" in text for _, text in outcomes)
    assert [path.name for path in tmp_path.iterdir()] == []


def fail_before_writing(folder):
    saver = AsyncSaver(new_group)
    if rank() == 1:
        saver._staging.stage = no_memory
    saver.save(content(1.0, 1), f"{folder}/a")
    failed = saver.take()
    saver.close()
    return str(failed.error)


def no_memory(tensors):
    raise MemoryError("no memory for a copy")


def test_out_of_memory_fails_all_ranks(ranks, tmp_path):
    texts = ranks(fail_before_writing, 2, str(tmp_path))
    assert texts == [f"Saving {tmp_path}/a failed: rank 1: no memory for a copy"] * 2
    assert not list(tmp_path.iterdir())


def fail_afterwards(folder):
    def clear(manifest):
        raise CheckpointError("cannot delete the old one")

    saver = AsyncSaver(new_group)
    saver.save(content(1.0, 1), f"{folder}/a", clear)
    failed = saver.take()
    saver.close()
    return str(failed.error)


def test_follow_up_error_is_reported_on_all_ranks(ranks, tmp_path):
    texts = ranks(fail_afterwards, 2, str(tmp_path))
    told = f"{tmp_path}/a is saved, but older checkpoints could not be deleted: rank 0: cannot delete the old one"
    assert texts == [told] * 2
    check(str(tmp_path / "a"), 1.0, 1, 2)


def test_base_exceptions_are_kept(tmp_path):
    saver = AsyncSaver(new_group)
    with mock.patch.object(savers, "write", side_effect=CheckpointException("torch's own", {})):
        saver.save(content(1.0, 1), str(tmp_path / "a"))
        saved = saver.take()
    assert saved is not None
    assert "torch's own" in str(saved.error)


def test_waiting(tmp_path):
    """With a limit, and of the next save for the one before."""
    saver = AsyncSaver(new_group)
    with held() as go:
        saver.save(content(1.0, 1), str(tmp_path / "a"))
        assert not saver.wait(timeout=0.05)
        threading.Timer(0.2, go.set).start()
        assert saver.take().error is None
        saver.save(content(2.0, 2), str(tmp_path / "b"))
        assert saver.wait(timeout=60)
        assert saver.take().error is None
    check(str(tmp_path / "a"), 1.0, 1, 1)
    check(str(tmp_path / "b"), 2.0, 2, 1)

"""EIO and ENOSPC at each system call of a save: the latest good checkpoint stays good, and one paragraph says why."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.foreign.test_malicious import Net, loader
from tests.checkpoint.store import killed
from tests.faults import system_calls
from tests.faults.system_calls import Ended, Errors, SystemCall
from tests.parity.harness import make_trainer
from trainwright import RunStateCheckpoint
from trainwright.checkpoint.foreign.state_file import write_file
from trainwright.checkpoint.format.manifest import Manifest, read_manifest, verify
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.store.storage import clean_up
from trainwright.checkpoint.write.asynchronous import save_together
from trainwright.checkpoint.write.retention import Retention, apply, may_delete
from trainwright.checkpoint.write.save import Content, write
from trainwright.command.cli import main
from trainwright.core.errors import CheckpointError
from trainwright.core.failures.uncaught import Uncaught

# TRAINWRIGHT_DISK_FAULTS=all fails each call with each error in each way. Without it every third call of a save fails
# in one of them, and fewer calls of whole runs.
ALL = os.environ.get("TRAINWRIGHT_DISK_FAULTS") == "all"
REFUSED = 3  # exit code of an attempt that ended with a CheckpointError
ERRORS = (errno.EIO, errno.ENOSPC)
REASONS = ("Input/output error", "No space left on device", "no space left on")

pytestmark = (
    [pytest.mark.timeout(7200 if ALL else 300)]
    if system_calls.why_not() is None
    else [pytest.mark.skip(str(system_calls.why_not()))]
)


# ---- which calls fail ------------------------------------------------------------------------------------------------


def fails(first: int, number: int, lasting: bool, counts: Callable[[SystemCall], bool] = lambda call: True) -> Errors:
    """Let a call fail, and those that follow it if the fault lasts; a disk that stays full fails what needs space."""
    seen = 0

    def error_of(call: SystemCall) -> int:
        nonlocal seen
        if not seen and not counts(call):
            return 0
        seen += 1
        if seen <= first or (seen > first + 1 and not lasting):
            return 0
        return number if call.allocates or number == errno.EIO or seen == first + 1 else 0

    return error_of


def ways(call: int) -> list[tuple[int, bool]]:
    """Error numbers for the n-th call, and whether they last."""
    found = [(number, lasting) for number in ERRORS for lasting in (False, True)]
    return found if ALL else [found[call % 4]]


class Met:
    """Outcomes of attempts, by the first failed call."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()

    def add(self, ended: Ended) -> None:
        if ended.failed:
            self.calls[ended.failed[0].name, ended.code] += 1

    def num(self, code: int) -> int:
        """How many ended with an exit code."""
        return sum(count for (_, each), count in self.calls.items() if each == code)


@pytest.fixture
def met(request: pytest.FixtureRequest) -> Iterator[Met]:
    """Where all calls fail, figures are printed: ``pytest -s``."""
    met = Met()
    yield met
    if ALL:
        print(f"\n{request.node.name}: {sum(met.calls.values())} faults {dict(sorted(met.calls.items()))}")


# ---- saves -----------------------------------------------------------------------------------------------------------


def content(step: int) -> Content:
    """Two tensors whose values follow from their step."""
    tensors = {f"weights/{name}": torch.arange(400.0) + step for name in "ab"}
    tree = {"global_step": step, "state_dict": {key[8:]: {"~": "tensor", "key": key} for key in tensors}}
    about = {"step": step, "kind": "run state", "metrics": {}}
    return Content(tree, {key: TensorParts.whole(value) for key, value in tensors.items()}, about)


def step_of(path: Path) -> int:
    """The step of a checkpoint, every value of which is what was written."""
    state = RunState.open(str(path))
    for key in state.keys():  # noqa: SIM118 - a source is no dict
        assert torch.equal(state.read(key), torch.arange(400.0) + state.manifest.step)
    return state.manifest.step


def save_folder(folder: Path, name: str) -> None:
    write(content(2), str(folder / name))


def save_without_swap(folder: Path, name: str) -> None:
    killed.without_swap()
    save_folder(folder, name)


def save_and_delete(
    folder: Path, name: str, saved: Content | None = None, group: dist.ProcessGroup | None = None
) -> None:
    retention, path = Retention(keep_last=1), str(folder / name)

    def clear(newest: Manifest) -> None:
        apply(folder, retention, path, verified=True)

    save_together(
        saved or content(2), path, group, clear, read_back_if=lambda newest: bool(may_delete(folder, retention, path))
    )


def save_file(folder: Path, name: str) -> None:
    write_file(content(2), str(folder / name))


# Writers and names of the checkpoints of the first and of the second step.
SAVES: dict[str, tuple[Callable[..., Any], str, Callable[[Path, str], None], str]] = {
    "a folder": (write, "1.ckpt", save_folder, "2.ckpt"),
    "in its place": (write, "last.ckpt", save_folder, "last.ckpt"),
    "in its place, without swapping": (write, "last.ckpt", save_without_swap, "last.ckpt"),
    "deleting the one before": (write, "1.ckpt", save_and_delete, "2.ckpt"),
    "a file": (write_file, "1.ckpt", save_file, "2.ckpt"),
    "a file in its place": (write_file, "last.ckpt", save_file, "last.ckpt"),
    "a file in the place of a folder": (write, "last.ckpt", save_file, "last.ckpt"),
    "a folder in the place of a file": (write_file, "last.ckpt", save_folder, "last.ckpt"),
    "a folder in the place of a file, without swapping": (write_file, "last.ckpt", save_without_swap, "last.ckpt"),
}


def attempt(save: Callable[[], None]) -> int:
    try:
        save()
    except CheckpointError as error:
        print(error)
        return REFUSED
    return 0


def good_steps(folder: Path) -> set[int]:
    """Steps of the checkpoints of a folder, all of which must be good."""
    return {step_of(path) for path in folder.iterdir()}


def check(folder: Path, ended: Ended) -> None:
    """Check the invariants after each attempt."""
    where = f"{ended.failed}:\n{ended.said}"
    assert ended.code in (0, REFUSED), where
    assert "Traceback" not in ended.said, where
    assert "Exception ignored" not in ended.said, where
    if ended.code == REFUSED:
        assert "\n\n" not in ended.said.strip(), where
        assert any(reason in ended.said for reason in REASONS), where
    if all(path.is_dir() for path in folder.iterdir()):
        newest, _ = newest_good([str(folder)])
        assert newest is not None, where
    clean_up(folder)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], where
    good = good_steps(folder)
    assert good, where
    if ended.code == 0:
        assert 2 in good, where
    if "untouched" in ended.said:
        assert 1 in good, where


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SAVES)
def test_a_fault_at_each_call_of_a_save(tmp_path: Path, met: Met, kind: str) -> None:
    before, first, save, second = SAVES[kind]
    call, last = 0 if ALL else list(SAVES).index(kind) % 3, False
    while not last:
        for number, lasting in ways(call // 3):
            folder = tmp_path / "checkpoints"
            before(content(1), str(folder / first))
            work = partial(attempt, partial(save, folder, second))
            ended = system_calls.run(work, folder, fails(call, number, lasting))
            last = not ended.failed
            met.add(ended)
            check(folder, ended)
            shutil.rmtree(folder)
        # Calls of a save that deletes are those of a save, of listing and of deleting.
        call += 1 if ALL else 5 if kind == "deleting the one before" else 3
    assert met.num(REFUSED) > (3 if kind == "deleting the one before" else 6)


# ---- two ranks -------------------------------------------------------------------------------------------------------


def save_on_rank(rank: int, folder: Path, meeting: Path) -> int:
    """Rows of two ranks into one checkpoint, in the place of the one before it."""
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2, timeout=timeout)
    whole = content(2)
    for key, parts in whole.tensors.items():
        [(_, tensor)] = parts.parts
        whole.tensors[key] = TensorParts(parts.shape, parts.dtype, [((rank * 200,), tensor[rank * 200 :][:200])])
    code = attempt(partial(save_and_delete, folder, "2.ckpt", whole, dist.group.WORLD))
    dist.barrier()  # a rank that raises alone leaves the other one waiting here
    return code


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank(tmp_path: Path, met: Met, rank: int) -> None:
    call, last = 0, False
    while not last:
        for number, lasting in ways(call):
            folder, meeting = tmp_path / "checkpoints", tmp_path / f"{call}-{number}-{lasting}"
            write(content(1), str(folder / "1.ckpt"))
            works = [(partial(save_on_rank, each, folder, meeting), None) for each in range(2)]
            works[rank] = works[rank][0], fails(call, number, lasting)
            ended = system_calls.run_together(works, folder)
            last = not ended[rank].failed
            met.add(ended[rank])
            for each in ended:
                each.failed = ended[rank].failed
                check(folder, each)
            assert ended[0].code == ended[1].code, ended
            shutil.rmtree(folder)
        call += 1 if ALL else (13, 5)[rank]  # the second rank makes fewer calls
    assert call > 20


# ---- training --------------------------------------------------------------------------------------------------------


def train(folder: Path, options: dict[str, Any]) -> int:
    """Train three steps with a checkpoint after each; report an error as the command does."""
    saver = RunStateCheckpoint(str(folder), every=None, every_n_steps=1, **options)
    trainer = make_trainer("single", {}, max_steps=3, max_epochs=-1, callbacks=[saver], enable_checkpointing=True)
    code = 0
    try:
        trainer.fit(Net(), loader())
    except Exception as error:
        Uncaught(folder.parent).report(error)
        code = REFUSED
    assert code or trainer.global_step == 3
    print(f"newest: {saver.last_model_path}")
    return code


def resume(folder: Path) -> int:
    """Resume from the newest checkpoint and make one step; return the step that it was of."""
    path, _ = newest_good([str(folder)])
    assert path is not None
    step = read_manifest(path).step
    saver = RunStateCheckpoint(str(folder), every=None)
    options = {"max_steps": step + 1, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer("single", {}, callbacks=[saver], **options)
    trainer.fit(Net(), loader(), ckpt_path="last")
    assert os.listdir(folder) == [f"step={step + 1}"]
    return step


def check_training(folder: Path, ended: Ended, *, continues: bool) -> None:
    where = f"{ended.failed}:\n{ended.said}"
    assert ended.code == 0 or (ended.code == REFUSED and not continues), where
    assert "Traceback" not in ended.said, where
    assert "Exception ignored" not in ended.said, where
    told = re.findall("^trainwright: .*\n(?:.+\n)*", ended.said, re.MULTILINE)
    assert len(told) == (ended.code != 0), where
    for paragraph in told:
        assert any(reason in paragraph for reason in REASONS), where
    [newest] = re.findall("^newest: (.*)", ended.said, re.MULTILINE)
    assert verify(newest) == [], where
    resumed = system_calls.run(partial(resume, folder))
    assert resumed.code in (1, 2, 3), f"{where}\n{resumed.said}"
    assert "Error" not in resumed.said, f"{where}\n{resumed.said}"


def is_of_step(step: int, call: SystemCall) -> bool:
    return any(f"step={step}" in path for path in call.paths)


OPTIONS: list[dict[str, Any]] = [
    {}, {"asynchronous": True}, {"on_error": "warn"}, {"asynchronous": True, "on_error": "warn"},
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options)) or "default")
def test_a_fault_at_each_call_of_the_second_save_of_a_run(tmp_path: Path, met: Met, options: dict[str, Any]) -> None:
    system_calls.import_for(partial(train, tmp_path / "imports", options))
    call, last = 0 if ALL else 11 * OPTIONS.index(options), False
    continues = options.get("on_error") == "warn"
    while not last:
        for number, lasting in ways(call):
            folder = tmp_path / f"{call}-{number}-{lasting}" / "checkpoints"
            errors = fails(call, number, lasting, partial(is_of_step, 2))
            ended = system_calls.run(partial(train, folder, options), folder, errors)
            last = not ended.failed or is_of_step(3, ended.failed[0])
            met.add(ended)
            check_training(folder, ended, continues=continues)
        call += 1 if ALL else 43
    assert met.num(0)
    assert bool(met.num(REFUSED)) != continues


# ---- the files of a run ----------------------------------------------------------------------------------------------

WORDS = ("recipe=linear_regression", "strategy=single", "devices=1", "accelerator=cpu")


def command(run_dir: Path, *words: str) -> int:
    return main(["fit", *WORDS, "checkpoint.last.every_n_steps=1", f"run_dir={run_dir}", *words])


def check_command(run_dir: Path, ended: Ended) -> None:
    where = f"{ended.failed}:\n{ended.said}"
    assert ended.code in (0, 1, 2), where
    assert "Traceback" not in ended.said, where
    assert "Exception ignored" not in ended.said, where
    told = re.findall("^trainwright: (?!no report was written).*", ended.said, re.MULTILINE)
    assert len(told) == (ended.code != 0), where
    if ended.code == 2:
        assert not run_dir.exists() or len(ended.failed) > 1, where
    if not run_dir.exists():
        return
    again = system_calls.run(partial(command, run_dir, "max_steps=3", "resume=auto"))
    assert again.code == 0, f"{where}\n{again.said}"
    left = [path for path in run_dir.rglob("*") if re.search(r"\.(partial|removed|replaced)", path.name)]
    assert left == [], where


def is_of_run(call: SystemCall) -> bool:
    """Checkpoints have the tests above."""
    return any("/checkpoints" not in path for path in call.paths)


@pytest.mark.thorough
def test_faults_at_calls_of_a_whole_run(tmp_path: Path, met: Met) -> None:
    """Of about 240 calls on other files than checkpoints, every 61st fails."""
    system_calls.import_for(partial(command, tmp_path / "imports", "max_steps=2"))
    call, last = 0, False
    while not last:
        for number, lasting in ways(call):
            run_dir = tmp_path / f"{call}-{number}-{lasting}"
            seen = fails(call, number, lasting)
            ended = system_calls.run(
                partial(command, run_dir, "max_steps=2"),
                run_dir,
                lambda each, seen=seen: seen(each) if is_of_run(each) else 0,
            )
            last = not ended.failed
            met.add(ended)
            check_command(run_dir, ended)
        call += 1 if ALL else 61
    assert met.num(0) > 0

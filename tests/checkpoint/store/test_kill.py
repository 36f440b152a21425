"""A process that saves is ended at any instant: what was complete is there, and after cleaning nothing else is."""

import os
import random
import shutil
import signal
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint import small
from tests.checkpoint.store import killed
from trainwright.checkpoint.read import find
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store import local_files
from trainwright.checkpoint.store.storage import clean_up
from trainwright.checkpoint.write.retention import Retention, apply

ROUNDS = 25
SIZE = 60_000  # elements of the largest tensor: two files of 360 kB


@pytest.fixture(params=["disk", "memory"])
def places(request, tmp_path):
    """A folder for checkpoints, and one for temporary files on another file system."""
    other = Path("/dev/shm") / f"trainwright-{uuid.uuid4().hex}"
    other.mkdir()
    folders = (
        (tmp_path / "checkpoints", other) if request.param == "disk" else (other / "checkpoints", tmp_path / "tmp")
    )
    for folder in folders:
        folder.mkdir(exist_ok=True)
    yield folders
    shutil.rmtree(other)


def save_for_ever(folder, step, same_name, swap, report):
    if not swap:
        killed.without_swap()
    while True:
        step += 1
        target = folder / ("last.ckpt" if same_name else f"step_{step}.ckpt")
        small.write(target, step, size=SIZE, divided=step % 2 == 0)
        report(step)
        if not same_name:
            apply(folder, Retention(keep_last=2), target)


def check(folder, reported):
    """The newest whole checkpoint is one that was at least as far as the last one reported. Returns its step."""
    path, passed_over = newest_good([str(folder)])
    assert passed_over == []
    assert path is not None
    step = small.read(path)
    assert step >= reported
    return step


def check_cleaned(folder, step):
    clean_up(folder)
    assert small.hidden(folder) == []
    assert check(folder, step) == step
    for path in folder.iterdir():
        small.read(path)


@pytest.mark.parametrize(("same_name", "swap"), [(False, True), (True, True), (True, False)])
def test_ended_at_random(places, monkeypatch, same_name, swap):
    folder, temporary = places
    monkeypatch.setenv("TMPDIR", str(temporary))
    draw = random.Random(f"{same_name} {swap} {folder.parts[1]}")
    step, left, saved = 0, 0, 0
    small.write(folder / "last.ckpt", 0, size=SIZE)
    for turn in range(ROUNDS):
        number = signal.SIGTERM if turn % 8 == 7 else signal.SIGKILL
        with killed.forked(partial(save_for_ever, folder, step, same_name, swap)) as child:
            child.wait_until_begun()
            if turn % 2:  # a slow disk saves nothing within the longest wait
                child.wait_for_report()
            time.sleep(draw.uniform(0, 0.05))
            reported, status = child.end(number)
        assert os.WTERMSIG(status) == number, "it ended before it was killed"
        left += bool(small.hidden(folder))
        saved += len(reported)
        step = check(folder, reported[-1] if reported else step)
        check_cleaned(folder, step)
    assert list(temporary.iterdir()) == []
    assert left, "no save was hit: the test shows nothing"
    assert saved, "no save was complete: the test shows nothing"


@pytest.mark.parametrize("swap", [True, False])
def test_a_reader_finds_one_while_it_is_replaced(tmp_path, swap):
    small.write(tmp_path / "last.ckpt", 0)
    steps = [0]
    with killed.forked(partial(replace_for_ever, tmp_path / "last.ckpt", swap)) as child:
        child.wait_until_begun()
        while len(steps) < 100 or len(set(steps)) < 5:
            (found,) = list_checkpoints(tmp_path)
            steps.append(found.step)
        reported, _ = child.end(signal.SIGKILL)
    assert steps == sorted(steps)
    check_cleaned(tmp_path, check(tmp_path, reported[-1]))


def replace_for_ever(target, swap, report):
    if not swap:
        killed.without_swap()
    step = 0
    while True:
        step += 1
        small.write(target, step, divided=step % 2 == 0)
        report(step)


def replace_step_by_step(target, report):
    """Stops before each renaming."""
    killed.without_swap()
    rename = os.rename

    def rename_later(*args):
        os.kill(os.getpid(), signal.SIGSTOP)
        rename(*args)

    os.rename = rename_later
    step = 0
    while True:
        step += 1
        small.write(target, step)


def go_on(child):
    os.kill(child.pid, signal.SIGCONT)
    os.waitpid(child.pid, os.WUNTRACED)


def test_a_reader_finds_one_whose_writer_stands_between_two_renamings(tmp_path):
    small.write(tmp_path / "last.ckpt", 0)
    with killed.forked(partial(replace_step_by_step, tmp_path / "last.ckpt")) as child:
        os.waitpid(child.pid, os.WUNTRACED)
        go_on(child)
        assert not (tmp_path / "last.ckpt").exists()
        check(tmp_path, 0)
        go_on(child)
        check(tmp_path, 1)


@pytest.mark.parametrize("renamings", range(1, 7))
def test_a_reader_finds_one_though_each_look_meets_another_renaming(tmp_path, monkeypatch, renamings):
    """6 attempts, each with 60 looks that a writer outruns."""
    monkeypatch.setattr(local_files, "_BETWEEN_LOOKS", 0)
    small.write(tmp_path / "last.ckpt", 0)
    with killed.forked(partial(replace_step_by_step, tmp_path / "last.ckpt")) as child:
        os.waitpid(child.pid, os.WUNTRACED)
        left = [60]

        def outrun(look):
            def looking(*args, **kwargs):
                if left[0] > 0:
                    left[0] -= 1
                    for _ in range(renamings):
                        go_on(child)
                return look(*args, **kwargs)

            return looking

        for name in ("folders_in", "read_manifest", "_is_meant_as_checkpoint"):
            monkeypatch.setattr(find, name, outrun(getattr(find, name)))
        while left[0] > 0:
            said = []
            assert len(list_checkpoints(tmp_path, said.append)) == 1
            assert said == []
        check(tmp_path, 0)


def save_once(folder, call, act, swap, report):
    if not swap:
        killed.without_swap()
    killed.at_call(call, act)
    small.write(folder / "last.ckpt", 2, divided=True)
    report(2)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def calls_of_a_save(tmp_path, act, swap):
    """Saves that something happens to before each single change of the disk: folder, reported steps, exit status."""
    call, status = 0, -1
    while status != 0:
        folder = tmp_path / str(call)
        small.write(folder / "last.ckpt", 1)
        with killed.forked(partial(save_once, folder, call, act, swap)) as child:
            child.wait_until_begun()
            reported, status = child.end()
        yield folder, reported, status
        call += 1


@pytest.mark.parametrize("swap", [True, False])
def test_killed_before_each_change_of_the_disk(tmp_path, swap):
    steps = []
    for folder, reported, status in calls_of_a_save(tmp_path, kill_self, swap):
        assert status in (0, signal.SIGKILL)
        steps.append(check(folder, reported[-1] if reported else 1))
        check_cleaned(folder, steps[-1])
        assert os.listdir(folder) == ["last.ckpt"]
    assert len(steps) > 20
    assert steps == sorted(steps), "once it is published, it stays"
    assert set(steps) == {1, 2}


def leave():
    raise SystemExit(7)


@pytest.mark.parametrize("swap", [True, False])
def test_left_before_each_change_of_the_disk(tmp_path, swap):
    """As from a signal's handler that raises: the process tidies up by itself."""
    steps = []
    for folder, reported, status in calls_of_a_save(tmp_path, leave, swap):
        assert os.waitstatus_to_exitcode(status) in (0, 7)
        assert os.listdir(folder) == ["last.ckpt"]
        steps.append(check(folder, reported[-1] if reported else 1))
    assert len(steps) > 20
    assert steps == sorted(steps)

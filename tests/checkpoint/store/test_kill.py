"""Saves that are killed at any point: the last complete checkpoint stays, and clean_up removes the rest."""

import os
import signal
from functools import partial

import pytest

from tests.checkpoint import small
from tests.checkpoint.store import killed
from trainwright.checkpoint.read import find
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store import local_files
from trainwright.checkpoint.store.storage import clean_up
from trainwright.checkpoint.write.retention import Retention, apply


def check(folder, reported):
    """Return the step of the newest good checkpoint, which must be at least the last reported one."""
    path, skipped = newest_good([str(folder)])
    assert skipped == []
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


def replace_forever(target, swap, report):
    if not swap:
        killed.without_swap()
    step = 0
    while True:
        step += 1
        small.write(target, step, divided=step % 2 == 0)
        report(step)


@pytest.mark.parametrize("swap", [True, False])
def test_concurrent_reader_sees_complete_checkpoints(tmp_path, swap):
    small.write(tmp_path / "last.ckpt", 0)
    steps = [0]
    with killed.forked(partial(replace_forever, tmp_path / "last.ckpt", swap)) as child:
        child.wait_until_started()
        while len(steps) < 100 or len(set(steps)) < 5:
            (found,) = list_checkpoints(tmp_path)
            steps.append(found.step)
        reported, _ = child.end(signal.SIGKILL)
    assert steps == sorted(steps)
    check_cleaned(tmp_path, check(tmp_path, reported[-1]))


def replace_step_by_step(target, report):
    """Replace a checkpoint repeatedly, stopping before each rename."""
    killed.without_swap()
    rename = os.rename

    def stop_and_rename(*args):
        os.kill(os.getpid(), signal.SIGSTOP)
        rename(*args)

    os.rename = stop_and_rename
    for step in range(1, 10**6):
        small.write(target, step)


def resume(child):
    os.kill(child.pid, signal.SIGCONT)
    os.waitpid(child.pid, os.WUNTRACED)


@pytest.mark.sample(2)
@pytest.mark.parametrize("renames", [1, 2, 3, 5])
def test_reader_overtaken_by_renames_finds_a_checkpoint(tmp_path, monkeypatch, renames):
    monkeypatch.setattr(local_files, "_RETRY_SECONDS", 0)
    small.write(tmp_path / "last.ckpt", 0)
    with killed.forked(partial(replace_step_by_step, tmp_path / "last.ckpt")) as child:
        os.waitpid(child.pid, os.WUNTRACED)
        resume(child)
        assert not (tmp_path / "last.ckpt").exists()
        check(tmp_path, 0)  # stopped between two renames
        remaining = [60]

        def overtaken(read):
            def reading(*args, **kwargs):
                if remaining[0] > 0:
                    remaining[0] -= 1
                    for _ in range(renames):
                        resume(child)
                return read(*args, **kwargs)

            return reading

        for name in ("folders_in", "read_manifest"):
            monkeypatch.setattr(find, name, overtaken(getattr(find, name)))
        while remaining[0] > 0:
            assert len(list_checkpoints(tmp_path)) == 1
        check(tmp_path, 0)


def save_once(folder, call, act, swap, report):
    if not swap:
        killed.without_swap()
    killed.at_call(call, act)
    small.write(folder / "last.ckpt", 2, divided=True)
    report(2)
    apply(folder, Retention(), folder / "last.ckpt")


def interrupted_saves(tmp_path, act, swap):
    """Interrupt saves before each change of the disk; yield folder, reported steps and exit status."""
    call, status = 0, -1
    while status != 0:
        folder = tmp_path / str(call)
        small.write(folder / "last.ckpt", 1)
        small.write(folder / "old.ckpt", 0)
        with killed.forked(partial(save_once, folder, call, act, swap)) as child:
            child.wait_until_started()
            reported, status = child.end()
        yield folder, reported, status
        call += 1


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    raise SystemExit(7)  # like a signal handler that raises


@pytest.mark.sample(1)
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize(("act", "status"), [(kill_self, signal.SIGKILL), (leave, 7 << 8)])
def test_save_interrupted_before_each_change_of_the_disk(tmp_path, monkeypatch, act, status, swap):
    temporary, steps = tmp_path / "temporary", []
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    for folder, reported, ended in interrupted_saves(tmp_path, act, swap):
        assert ended in (0, status)
        steps.append(check(folder, reported[-1] if reported else 1))
        if act is leave:
            assert set(os.listdir(folder)) - {"old.ckpt"} == {"last.ckpt"} or reported
        check_cleaned(folder, steps[-1])
        assert set(os.listdir(folder)) <= {"last.ckpt", "old.ckpt"}
    assert os.listdir(folder) == ["last.ckpt"]
    assert os.listdir(temporary) == []
    assert len(steps) > 20
    assert steps == sorted(steps), "published checkpoints stay"
    assert set(steps) == {1, 2}

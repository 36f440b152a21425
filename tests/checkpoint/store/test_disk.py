"""Disks that are full while a checkpoint is written: the one before stays whole, nothing is left, and it is said so."""

import errno
import os
import re
import resource
import subprocess
from contextlib import contextmanager
from functools import partial

import pytest

from tests.checkpoint import small
from tests.checkpoint.store import killed
from trainwright.checkpoint.format.manifest import Manifest
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.store.write_errors import write_error
from trainwright.core.errors import CheckpointError

FILES = ["rank_00000.safetensors", "rank_00001.safetensors", "state.json", "tensors.json"]
SIZE = 64 << 10


def write(target, sizes, about=""):
    """A checkpoint whose files have these sizes, written in this order, and whose manifest has ``about`` in it."""
    with PendingFolder.create(target) as pending:
        records = [pending.write_file(name, os.urandom(size), rank) for rank, (name, size) in enumerate(sizes.items())]
        pending.publish(Manifest({record.name: record for record in records}, {"step": 2, "note": about}))


def refused(work):
    """Messages of the error that ``work`` raised."""
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def check_nothing_happened(folder):
    assert sorted(path.name for path in folder.iterdir() if path.name != "filler") == ["a.ckpt"]
    path, passed_over = newest_good([str(folder)])
    assert passed_over == []
    assert path is not None
    assert small.read(path) == 1


@contextmanager
def small_disk(path, size):
    path.mkdir()
    options = ["-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(["mount", "-t", "tmpfs", *options], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here; the test with a limit on the size of a file says nearly the same")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("name", ["a.ckpt", "b.ckpt"])
def test_a_full_disk_at_each_file(tmp_path, name):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        small.write(disk / "a.ckpt", 1)
        for position, file in enumerate([*FILES, "manifest.json"]):
            fill(disk, leave=position * SIZE + SIZE // 2)
            message = refused(partial(write, disk / name, dict.fromkeys(FILES, SIZE), "x" * SIZE))
            where = rf"{disk}/\.{name}.partial-\S+/{file}" if file != "manifest.json" else str(disk / name)
            assert_full(message, where, str(disk))
            check_nothing_happened(disk)


def fill(disk, leave):
    (disk / "filler").unlink(missing_ok=True)
    stats = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(stats.f_bavail * stats.f_frsize - leave))


def assert_full(message, where, mount):
    pattern = (
        rf"{where}: no space left on {mount}: needed 6\d\.\d KiB, free [\d.]+ \w+; free space or choose another folder"
    )
    assert re.match(pattern, message), message
    assert "checkpoint.*.dirpath=" in message


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_limit_on_the_size_of_a_file(tmp_path, file):
    small.write(tmp_path / "a.ckpt", 1)

    def limited(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, SIZE))
        sizes = dict.fromkeys(FILES, 100) | ({file: 2 * SIZE} if file in FILES else {})
        message = refused(partial(write, tmp_path / "a.ckpt", sizes, "" if file in FILES else "x" * 2 * SIZE))
        assert "the limit on the size of a file (ulimit -f) is reached, no space left on" in message
        assert f"/{file}: " in message or file == "manifest.json"
        assert re.search(r"needed 12\d\.\d KiB, free ", message)
        report(2)

    with killed.forked(limited) as child:
        child.wait_until_begun()
        assert child.end() == ([2], 0)
    check_nothing_happened(tmp_path)


def test_space_that_is_missed_when_data_reaches_the_disk(tmp_path, monkeypatch):
    """File systems that allocate late say so at fsync only."""
    small.write(tmp_path / "a.ckpt", 1)

    def full(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = refused(partial(write, tmp_path / "a.ckpt", {"state.json": 100}))
    assert "/state.json: the quota is used up, no space left on" in message
    assert "needed 100 B" in message
    check_nothing_happened(tmp_path)


def test_a_store_does_not_tell_its_space():
    text = str(write_error(OSError(errno.ENOSPC, "full"), "memory://x/state.json", 2048))
    assert "memory://x/state.json: no space left on memory://: needed 2.0 KiB, free space or choose" in text

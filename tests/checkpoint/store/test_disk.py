"""Full disks during a save: the previous checkpoint stays, nothing is left over, and the error gives the sizes."""

import errno
import os
import re
import resource

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


def write(target, sizes, about):
    with PendingFolder.create(target) as pending:
        records = [pending.write_file(name, os.urandom(size), rank) for rank, (name, size) in enumerate(sizes.items())]
        pending.publish(Manifest({record.name: record for record in records}, {"step": 2, "note": about}))


def refused(target, sizes, about=""):
    """Return the error of writing files of these sizes, and a manifest that contains ``about``."""
    with pytest.raises(CheckpointError) as caught:
        write(target, sizes, about)
    return str(caught.value)


def check_nothing_happened(folder):
    assert os.listdir(folder) == ["a.ckpt"]
    assert newest_good([str(folder)]) == (str(folder / "a.ckpt"), [])
    assert small.read(folder / "a.ckpt") == 1


@pytest.mark.parametrize("target", ["a.ckpt", "b.ckpt"])
@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_file_size_limit(tmp_path, file, target):
    small.write(tmp_path / "a.ckpt", 1)

    def limited(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, SIZE))
        sizes = dict.fromkeys(FILES, 100) | ({file: 2 * SIZE} if file in FILES else {})
        message = refused(tmp_path / target, sizes, "" if file in FILES else "x" * 2 * SIZE)
        where = rf"{tmp_path}/\.{target}.partial-\S+/{file}" if file in FILES else str(tmp_path / target)
        full = r"the limit on the size of a file \(ulimit -f\) is reached, no space left on /\S*: needed 12\d\.\d KiB"
        assert re.match(rf"{where}: {full}, free [\d.]+ \w+; free space or choose another folder", message), message
        assert "checkpoint.*.dirpath=" in message
        report(2)

    with killed.forked(limited) as child:
        child.wait_until_started()
        assert child.end() == ([2], 0)
    check_nothing_happened(tmp_path)


def test_full_disk_reported_by_fsync(tmp_path, monkeypatch):
    small.write(tmp_path / "a.ckpt", 1)

    def full(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = refused(tmp_path / "a.ckpt", {"state.json": 100})
    assert "/state.json: the quota is used up, no space left on" in message
    assert "needed 100 B" in message
    check_nothing_happened(tmp_path)


def test_full_store():
    text = str(write_error(OSError(errno.ENOSPC, "full"), "memory://x/state.json", 2048))
    assert "memory://x/state.json: no space left on memory://: needed 2.0 KiB, free space or choose" in text

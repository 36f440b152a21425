"""The temporary folder, with concurrent processes."""

import fcntl
import tempfile

from trainwright.core.processes import scratch


def test_folder_under_construction_is_not_abandoned(tmp_path, monkeypatch):
    flock = fcntl.flock

    def others_first(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:  # that of who makes the folder
            scratch.remove_abandoned(tmp_path)
        flock(descriptor, how)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_LONGEST_PARENT", len(str(tmp_path)))
    monkeypatch.setattr(fcntl, "flock", others_first)
    folder = scratch.scratch.__wrapped__()
    assert folder.is_dir()
    scratch.remove_abandoned(tmp_path)
    assert folder.is_dir()

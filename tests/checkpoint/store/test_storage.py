from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint import small
from trainwright.checkpoint.format.manifest import Manifest, read_manifest
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store import local_files, owners, remote_files
from trainwright.checkpoint.store import publish as exchange
from trainwright.checkpoint.store.paths import join_path, split_path
from trainwright.checkpoint.store.storage import Folder, PendingFolder, clean_up, folders_in, remove
from trainwright.checkpoint.store.write_errors import free_bytes
from trainwright.core.errors import CheckpointError

DEAD = "00000000-3fffff-1-{place}"  # a process id above Linux's maximum


def dead_token():
    return DEAD.format(place=owners.new_token()[-16:])


def foreign_token():
    return DEAD.format(place="0" * 16)


@pytest.fixture(params=["local", "memory"])
def parent(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
        return
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    store = fsspec.filesystem("memory")
    if store.exists(name):
        store.rm(name, recursive=True)


def everything(parent):
    """Paths of all files below a folder."""
    store, root = fsspec.core.url_to_fs(parent)
    return sorted(store.find(root))


def test_checkpoint_is_written_replaced_and_removed(parent):
    target = join_path(parent, "a.ckpt")
    written = small.write(target, 3)
    assert read_manifest(target) == written
    assert small.read(target) == 3
    assert Folder(target).exists()
    assert Folder(target, written).size("state.json") == written.files["state.json"].size
    assert len(Folder(target).names()) == 5
    count = len(everything(parent))
    small.write(target, 2)
    assert small.read(target) == 2
    assert len(everything(parent)) == count
    remove(target)
    assert everything(parent) == []
    assert not Folder(target).exists()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        remove(target)


def test_unpublished_checkpoints_are_invisible(parent):
    target = join_path(parent, "a.ckpt")
    pending = PendingFolder.create(target)
    record = pending.write_file("state.json", b"{}", 0)
    assert list_checkpoints(parent) == []
    with pytest.raises(CheckpointError):
        read_manifest(target)
    pending.publish(Manifest({record.name: record}))
    assert [found.path for found in list_checkpoints(parent)] == [target]
    pending.discard()
    assert read_manifest(target).files == {"state.json": record}


def test_an_error_discards_everything(parent):
    target = join_path(parent, "a.ckpt")
    small.write(target, 1)
    before = everything(parent)
    try:
        with PendingFolder.create(target) as pending:
            pending.write_file("state.json", b"{}", 0)
            pending.create_file("rank_00000.safetensors", 0).write(b"half")
            raise ZeroDivisionError
    except ZeroDivisionError:
        pending.discard()
    assert everything(parent) == before
    assert small.read(target) == 1
    if "://" not in parent:
        assert small.hidden(parent) == []


@pytest.mark.parametrize("swap", [True, False])
def test_sync_before_publishing(tmp_path, monkeypatch, swap):
    """Power that fails must not leave a name without its bytes: files, manifest, folder, name, in this order."""
    small.write(tmp_path / "a", 1)
    events = []

    def sync(descriptor, sync=os.fsync):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def rename(source, target, rename=os.rename):
        events.append(("rename", os.path.basename(target)))
        rename(source, target)

    def swapped(one, other, swap_names=exchange._swap):
        events.append(("rename", os.path.basename(other)))
        return swap and swap_names(one, other)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(exchange, "_swap", swapped)
    manifest = small.write(tmp_path / "a", 2)
    named = events.index(("rename", "a"))
    assert {name for _, name in events[:4]} == set(manifest.files)
    assert events[4] == ("sync", "manifest.json")
    assert events[5][1].startswith(".a.partial-")
    assert named == 6
    visible = max(index for index, event in enumerate(events) if event == ("rename", "a"))
    assert ("sync", tmp_path.name) in events[visible:]


def test_listed_files_must_exist(parent, monkeypatch):
    monkeypatch.setattr("trainwright.checkpoint.store.storage._PATIENCE_SECONDS", 0.0)
    target = join_path(parent, "a.ckpt")
    pending = PendingFolder.create(target)
    record = pending.write_file("rank_00000.safetensors", b"x", 0)
    away = PendingFolder.create(join_path(parent, "elsewhere")).write_file("rank_00007.safetensors", b"x", 7)
    with pytest.raises(
        CheckpointError, match=r"(?s)rank_00007.safetensors of rank 7 \(missing\).*must share the folder"
    ):
        pending.publish(Manifest({record.name: record, away.name: away}))
    pending.discard()
    assert list_checkpoints(parent) == []


def test_only_checkpoints_are_removed_or_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    for attempt in (lambda: remove(tmp_path / "mine"), lambda: PendingFolder.create(tmp_path / "mine")):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            attempt()
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
    assert os.listdir(tmp_path) == ["mine"]


def test_links_are_replaced_and_removed(tmp_path):
    small.write(tmp_path / "real", 1)
    (tmp_path / "link").symlink_to("real")
    small.write(tmp_path / "link", 2)
    assert (small.read(tmp_path / "real"), small.read(tmp_path / "link")) == (1, 2)
    (tmp_path / "other").symlink_to("real")
    remove(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_file_where_a_folder_is_needed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"is a file; a checkpoint is a folder.*dirpath="):
        PendingFolder.create(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"a file where a folder is needed.*dirpath="):
        PendingFolder.create(tmp_path / "file" / "a.ckpt")
    assert (tmp_path / "file").read_text() == "x"

    def denied(path, *args):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(CheckpointError, match=r"not allowed to write there.*dirpath="):
        PendingFolder.create(tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["../up", "/root", "a/b", "", ".hidden", "manifest.json", "a\\b", "a\0b"])
def test_file_names_stay_in_the_folder(tmp_path, name):
    with PendingFolder.create(tmp_path / "a.ckpt") as pending:
        with pytest.raises(CheckpointError, match="cannot have a file named"):
            pending.create_file(name, 0)
        pending.discard()
    assert os.listdir(tmp_path) == []


def test_two_ranks_cannot_write_one_file(tmp_path):
    pending = PendingFolder.create(tmp_path / "a.ckpt")
    other = PendingFolder.join(tmp_path / "a.ckpt", pending.token)
    file = pending.create_file("x", 0)
    with pytest.raises(CheckpointError):
        other.create_file("x", 1)
    file.close()
    pending.discard()
    with pytest.raises(CheckpointError, match="not a token"):
        PendingFolder.join(tmp_path / "a.ckpt", "../x")


def test_unsupported_stores():
    with pytest.raises(CheckpointError, match="cannot be written to https://"):
        PendingFolder.create("https://example.org/a.ckpt")
    with pytest.raises(CheckpointError, match="nosuch://bucket/a.ckpt cannot be opened"):
        Folder("nosuch://bucket/a.ckpt")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/a/b/", ("/a", "b")),
        ("file:///a/b", ("/a", "b")),
        ("s3://bucket/a/b/", ("s3://bucket/a", "b")),
        ("memory://a", ("memory://", "a")),
    ],
)
def test_paths(path, parts):
    assert split_path(path) == parts
    assert split_path(join_path(*parts)) == parts


def test_free_bytes(tmp_path):
    stats = os.statvfs(tmp_path)
    assert free_bytes(str(tmp_path / "not" / "there")) == pytest.approx(stats.f_bavail * stats.f_frsize, rel=0.2)
    assert free_bytes("memory://x") is None


# ---- leftovers of killed writers -------------------------------------------------------------------------------------


def hide(folder, name, what, token):
    """Put a checkpoint where a writer with this token would have it."""
    os.rename(folder / name, folder / f".{name}.{what}-{token}")


@pytest.mark.parametrize("what", ["partial", "removed"])
def test_leftovers_of_dead_processes_are_removed(tmp_path, what):
    small.write(tmp_path / "a", 1)
    small.write(tmp_path / "b", 2)
    hide(tmp_path, "a", what, dead_token())
    assert len(clean_up(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["b"]
    assert clean_up(tmp_path) == []


def test_files_of_live_processes_stay(parent):
    target = join_path(parent, "a.ckpt")
    small.write(target, 1)
    pending = PendingFolder.create(target)
    record = pending.write_file("state.json", b"{}", 0)
    assert clean_up(parent) == []
    pending.publish(Manifest({record.name: record}))
    assert list(read_manifest(target).files) == ["state.json"]


def test_liveness_of_writers():
    token = owners.new_token()
    random, pid, started, place = token.split("-")
    assert owners.owner_lives(token)
    assert not owners.owner_lives(f"{random}-{pid}-{int(started, 16) + 1:x}-{place}")  # a reused process id
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    token = f"{random}-{zombie:x}-{owners._started(zombie):x}-{place}"
    while owners.owner_lives(token):
        time.sleep(0.001)
    os.waitpid(zombie, 0)


def test_files_of_another_machine_stay_for_ten_minutes(tmp_path):
    small.write(tmp_path / "a", 1)
    hide(tmp_path, "a", "partial", foreign_token())
    assert clean_up(tmp_path) == []
    (left,) = tmp_path.iterdir()
    long_ago = time.time() - 2 * owners.ABANDONED_SECONDS
    for path in (*left.iterdir(), left):
        os.utime(path, (long_ago, long_ago))
    (left / "state.json").touch()
    assert clean_up(tmp_path) == []
    os.utime(left / "state.json", (long_ago, long_ago))
    assert clean_up(tmp_path) == [str(left)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", [1, 2])
def test_interrupted_replacement(tmp_path, step):
    small.write(tmp_path / "a", 1)
    hide(tmp_path, "a", "replaced", dead_token())
    if step == 2:  # interrupted after the new one had its name
        small.write(tmp_path / "a", 2)
    (found,) = list_checkpoints(tmp_path)
    assert small.read(found.path) == step
    clean_up(tmp_path)
    assert os.listdir(tmp_path) == ["a"]
    assert small.read(tmp_path / "a") == step


def test_replacement_without_swapping(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "_swap", lambda one, other: False)
    small.write(tmp_path / "a", 1)
    small.write(tmp_path / "a", 2)
    assert small.read(tmp_path / "a") == 2
    assert os.listdir(tmp_path) == ["a"]

    def second_fails(source, target, rename=os.rename):
        if "partial" in source and not os.path.basename(target).startswith("."):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        small.write(tmp_path / "a", 3)
    monkeypatch.undo()
    assert small.read(tmp_path / "a") == 2
    assert os.listdir(tmp_path) == ["a"]


def test_reader_waits_for_a_rename(tmp_path, monkeypatch):
    """Between the two renamings of a replacement the folder has no visible checkpoint."""
    small.write(tmp_path / "a", 1)
    token = owners.new_token()
    hide(tmp_path, "a", "replaced", token)
    looks = []

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            os.rename(tmp_path / f".a.replaced-{token}", tmp_path / "a")

    monkeypatch.setattr(local_files.time, "sleep", wait)
    assert folders_in(tmp_path) == [str(tmp_path / "a")]
    assert len(looks) == 3


def test_files_of_a_dead_writer_in_a_store():
    store = fsspec.filesystem("memory")
    parent = f"memory://{uuid.uuid4().hex}"
    small.write(f"{parent}/good", 1)
    before = everything(parent)
    token = dead_token()
    for path in (f"{parent}/good/state.{token}.json", f"{parent}/half/rank_00000.{token}.safetensors"):
        store.pipe_file(path, b"left")
    store.pipe_file(f"{parent}/half/foreign.{foreign_token()}.json", b"young")
    store.pipe_file(f"{parent}/notes/readme.txt", b"mine")
    removed = clean_up(parent)
    assert sorted(path.rpartition("/")[2] for path in removed) == [
        f"rank_00000.{token}.safetensors",
        f"state.{token}.json",
    ]
    root = parent.removeprefix("memory:/")
    assert everything(parent) == sorted(
        [*before, f"{root}/half/foreign.{foreign_token()}.json", f"{root}/notes/readme.txt"]
    )
    assert small.read(f"{parent}/good") == 1
    store.rm(root, recursive=True)


def test_published_files_outlive_their_writer(monkeypatch):
    monkeypatch.setattr(remote_files, "is_abandoned", lambda token, idle: True)
    store = fsspec.filesystem("memory")
    parent = f"memory://{uuid.uuid4().hex}"
    small.write(f"{parent}/a", 1)
    assert clean_up(parent) == []
    assert small.read(f"{parent}/a") == 1
    data = store.cat_file(f"{parent}/a/manifest.json")
    store.pipe_file(f"{parent}/a/manifest.json", data[1:])
    assert clean_up(parent) == [], "the files of a damaged manifest are unknown"
    store.rm_file(f"{parent}/a/manifest.json")
    assert len(clean_up(parent)) == 4
    assert everything(parent) == []


# ---- stores that break -----------------------------------------------------------------------------------------------


class Broken(MemoryFileSystem):
    """A store with injected faults."""

    protocol = "broken"
    store = {}  # noqa: RUF012 - as in the base class: shared by all instances
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    faults: dict[str, object] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("broken://", "memory://"))

    def _open(self, path, mode="rb", **kwargs):
        if self.faults.get(f"open {mode}") and self.faults["match"] in path:
            raise ConnectionError("the network is down")
        file = super()._open(path, mode, **kwargs)
        return _BrokenFile(file, self.faults) if self.faults.get("match", "\0") in path else file

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        fault = self.faults.get("put")
        if fault == "lost":
            raise ConnectionError("the network is down")
        super().pipe_file(path, value[: len(value) // 2] if fault == "half" else value, **kwargs)
        if fault == "answer lost":
            raise ConnectionError("the answer was lost")
        if fault == "half":
            self.faults.clear()

    def cat_file(self, path, **kwargs):
        return super(MemoryFileSystem, self).cat_file(path, **kwargs)


class _BrokenFile:
    def __init__(self, file, faults):
        self._file = file
        self._faults = faults
        self._reads = 0

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._file.close()

    def read(self, size=-1):
        return self._file.read(size)

    def readinto(self, buffer):
        self._reads += 1
        if self._faults.get("read") == "fails" and self._reads > 1:
            raise ConnectionResetError("the peer has gone")
        if self._faults.get("read") == "ends" and self._reads > 1:
            return 0
        if self._faults.get("read") == "short":
            buffer = memoryview(buffer)[: max(1, len(buffer) // 3)]
        return self._file.readinto(buffer)

    def write(self, data):
        if self._faults.get("write") == "fails":
            raise ConnectionResetError("the peer has gone")
        return self._file.write(data[: len(data) // 2] if self._faults.get("write") == "short" else data)


@pytest.fixture
def broken():
    fsspec.register_implementation("broken", Broken, clobber=True)
    Broken.store.clear()
    Broken.faults.clear()
    yield Broken.faults
    Broken.faults.clear()


@pytest.mark.parametrize("fault", [{"open wb": True}, {"write": "fails"}, {"write": "short"}])
@pytest.mark.parametrize("file", ["/rank_00001", "/state", "/tensors"])
def test_store_fails_to_write(broken, fault, file):
    small.write("broken://c/a", 1)
    before = sorted(Broken.store)
    broken.update(match=file, **fault)
    with pytest.raises(CheckpointError, match=rf"broken://c/a{file}\.\S+: could not be written"):
        small.write("broken://c/a", 2)
    broken.clear()
    assert sorted(Broken.store) == before
    assert small.read("broken://c/a") == 1


@pytest.mark.parametrize("fault", ["lost", "half", "answer lost"])
def test_store_fails_to_put_a_manifest(broken, fault):
    small.write("broken://c/a", 1)
    before = set(Broken.store)
    broken["put"] = fault
    if fault == "answer lost":  # stored nevertheless
        small.write("broken://c/a", 2)
    else:
        with pytest.raises(CheckpointError, match="broken://c/a: could not be written"):
            small.write("broken://c/a", 2)
    broken.clear()
    assert (set(Broken.store) == before) == (fault != "answer lost")
    assert small.read("broken://c/a") == (2 if fault == "answer lost" else 1)
    assert len(Broken.store) == 5


@pytest.mark.parametrize("fault", [{"open rb": True}, {"read": "fails"}, {"read": "ends"}, {"read": "short"}])
def test_store_fails_to_read(broken, fault):
    small.write("broken://c/a", 1, size=100_000)
    broken.update(match="rank_00001", **fault)
    if fault == {"read": "short"}:  # short reads are completed
        assert small.read("broken://c/a") == 1
        return
    with pytest.raises(CheckpointError, match=r"broken://c/a/rank_00001\.\S+: (could not be read|truncated)"):
        small.read("broken://c/a")


@pytest.mark.parametrize(
    "module",
    [
        "core.errors",
        "checkpoint.format.manifest",
        "checkpoint.store.storage",
        "checkpoint.read.find",
        "checkpoint.write.retention",
    ],
)
def test_modules_for_launching_processes_do_not_import_torch(module):
    code = f"import sys, trainwright.{module}; print(*({{'torch', 'lightning', 'fsspec'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []

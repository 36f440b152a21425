"""Overlapping boxes, endless files and nested values, which neither hashes nor a JSON parser refuse."""

import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.security.deadlines import deadline
from tests.security.mutations import MANIFEST, _record, _sealed, write_divided, write_folder
from tests.security.test_contents import EXPORTS, LOOKING, importing, problem_of_reading, read_all
from trainwright.checkpoint.foreign import unpickle
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.unpickle import load_inert
from trainwright.checkpoint.format.boxes import tiles
from trainwright.checkpoint.store import remote_files
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import MOST_JSON, ContentError, parse_json, read_at_most
from trainwright.tools.checkpoints.report import listed, verified
from trainwright.tools.report.records import read_checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints" / "step_4"
    path.parent.mkdir(parents=True)
    write_folder(path)
    return path


def rewrite(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file of a checkpoint, and make the manifest agree."""
    plain = json.loads((path / name).read_bytes())
    change(plain)
    (path / name).write_text(json.dumps(plain))
    manifest = json.loads((path / MANIFEST).read_bytes())
    record = _record(path, name, 0)
    manifest["files"][name] |= {"size": record.size, "xxh3_128": record.hash}
    (path / MANIFEST).write_bytes(_sealed(manifest))


def grid(rows: int, columns: int) -> list[tuple[list[int], list[int]]]:
    return [([row, column], [1, 1]) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize(("shape", "boxes", "whole"), [
    ([4], [([0], [2]), ([2], [2])], True),
    ([4], [([0], [2]), ([0], [2])], False),  # half is there twice, half not at all
    ([4], [([0], [3]), ([2], [1])], False),
    ([], [([], [])], True),
    ([], [([], []), ([], [])], False),
    ([], [], False),
    ([0, 3], [([0, 0], [0, 3])], True),
    ([2, 2], [([0, 0], [1, 2]), ([1, 0], [1, 1]), ([1, 1], [1, 1])], True),
    ([2, 2], [([0, 0], [1, 2]), ([0, 1], [2, 1])], False),  # an L and a hole, of equal volume
    ([3, 3], [([0, 0], [2, 1]), ([2, 0], [1, 2]), ([1, 2], [2, 1]), ([0, 1], [1, 2]), ([1, 1], [1, 1])], True),
    ([100, 100], grid(100, 100), True),
    ([100, 100], [*grid(100, 100)[:-1], ([0, 0], [1, 1])], False),
])  # fmt: skip
def test_tiles(shape: list[int], boxes: list[Any], whole: bool) -> None:
    with deadline(20):  # each of 10,000 boxes with each other would take minutes
        assert tiles(([0] * len(shape), shape), boxes) is whole


def test_overlapping_boxes_are_refused(checkpoint: Path) -> None:
    """Six readers of boxes of the right number of elements that leave half of a tensor to uninitialized memory."""

    def overlap(plain: Any) -> None:
        entry = plain["tensors"]["tree/state_dict/layer.weight"]
        (_, _, file, name) = entry["boxes"][0]
        entry["boxes"] = [[[0, 0], [2, 3], file, name], [[0, 0], [2, 3], file, name]]

    rewrite(checkpoint, "tensors.json", overlap)
    problems, _ = verified(str(checkpoint))
    assert len(problems) == 1
    assert "layer.weight of shape (4, 3) has overlapping boxes" in problems[0]
    assert listed(str(checkpoint.parent), deep=True)[0].problems == problems
    for reader in (read_all, *(EXPORTS[name] for name in ("safetensors", "lightning", "torch"))):
        with pytest.raises(CheckpointError, match="overlapping boxes"):
            reader(str(checkpoint))


@pytest.mark.parametrize(
    ("box", "text"), [([[1, 0], [2, 6], 1], "overlapping boxes"), ([[2, 0], [2, 6], 9], "rank_00009")]
)
def test_overlapping_boxes_of_many_ranks_are_refused(tmp_path: Path, box: Any, text: str) -> None:
    path = tmp_path / "step_4"
    write_divided(path)
    rewrite(path, "boxes_00000.json", lambda plain: plain["tensors"].update({"weights/a": [[[0, 0], [2, 6], 0], box]}))
    (problem,) = verified(str(path))[0]
    assert "weights/a of shape (4, 6)" in problem
    assert text in problem
    with pytest.raises(CheckpointError, match=text):
        read_all(str(path))


def test_a_box_that_its_file_does_not_hold_is_refused(checkpoint: Path) -> None:
    def rename(plain: Any) -> None:
        tensors = plain["tensors"]
        key = "tree/state_dict/layer.bias"
        tensors[key]["boxes"][0][3] = "tree/state_dict/layer.weight"

    rewrite(checkpoint, "tensors.json", rename)
    with pytest.raises(CheckpointError, match=r"should hold TensorEntry.*layer\.weight"):
        read_all(str(checkpoint))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(30 << 30)


@pytest.mark.parametrize("make", [fifo, device, sparse])
@pytest.mark.parametrize("name", [MANIFEST, "state.json", "tensors.json", "rank_00000.safetensors"])
def test_readers_end(checkpoint: Path, name: str, make: Callable[[Path], None]) -> None:
    """120: a FIFO, a device and a sparse file of 30 GB in the place of each file, before ten readers."""
    (checkpoint / name).unlink()
    make(checkpoint / name)
    problems = {}
    for reader, read in (LOOKING | EXPORTS).items():
        with deadline(60):
            problems[reader] = problem_of_reading(read, str(checkpoint))
    assert not any(problems.values()), problems
    assert verdict(checkpoint) is not None


def verdict(path: Path) -> str | None:
    try:
        problems, _ = verified(str(path))
    except CheckpointError as error:
        return str(error)
    return problems[0] if problems else None


@pytest.mark.parametrize("make", [fifo, device, sparse])
def test_files_of_other_tools_end(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """36: the same in the place of single files, and of files in a folder."""
    for name in ("a.ckpt", "b.safetensors", "model/c.safetensors", "model/config.json", "deep/latest"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        make(path)
        for reader in (importing, load_pickled):
            assert problem_of_reading(reader, str(path)) is None, name
    for folder in ("model", "deep"):
        assert problem_of_reading(importing, str(tmp_path / folder)) is None
    assert read_checkpoints(tmp_path, []) == []


def test_a_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    sparse(tmp_path / "x")
    with (tmp_path / "x").open("rb") as file, pytest.raises(CheckpointError, match=r"has 30\.0 GiB, and at most"):
        read_at_most(file, "x")
    assert MOST_JSON < 1 << 30


def test_an_archive_whose_contents_are_said_to_be_huge(tmp_path: Path) -> None:
    """The list of contents of a zip archive is said to take 29 GiB of zeros."""
    path = tmp_path / "x.ckpt"
    size, length = 30 << 30, 29 << 30
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, length, size - length)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.truncate(size)
        file.seek(size)
        file.write(end + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))
    for reader in (importing, load_pickled, load_inert):
        assert problem_of_reading(reader, str(path)) is None
    with pytest.raises(CheckpointError, match="longer than any writer makes it"):
        load_inert(path)


_SENT: list[int] = []


class _Endless(BaseHTTPRequestHandler):
    """Answers with zeros, which it announces at "/announced" alone."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        if self.path == "/announced":
            self.send_header("Content-Length", str(1 << 60))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with suppress(OSError):  # the reader has enough
            while True:
                self.wfile.write(bytes(1 << 16))
                _SENT.append(1 << 16)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("name", ["announced", "endless"])
def test_what_a_web_server_sends_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "free_bytes", lambda folder: 32 << 20)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    _SENT.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with deadline(20), pytest.raises(CheckpointError, match=r"larger than 16\.0 MiB"):
            load_inert(f"http://127.0.0.1:{server.server_port}/{name}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (not _SENT) == (name == "announced")


def test_a_manifest_of_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "MOST_JSON", 1000)
    store = fsspec.filesystem("memory")
    for size in (1000, 1001):
        store.pipe_file("/bounded/manifest.json", bytes(size))
        files = remote_files.RemoteFiles("memory://bounded")
        if size == 1000:
            assert files.manifest_bytes() == bytes(1000)
        else:
            with pytest.raises(CheckpointError, match="1001 B, and at most 1000 B"):
                files.manifest_bytes()
    store.rm("/bounded", recursive=True)


@pytest.mark.parametrize("data", [
    b"[" * 100_000, b"[" * 300 + b"]" * 300, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"a":1,"a":2}', b"9" * 5000,
])  # fmt: skip
def test_json_that_is_refused(data: bytes) -> None:
    with pytest.raises(ContentError):
        parse_json(data)


PAIR = b"q\x00h\x00\x86"  # keep the top of the stack, and make a pair of it and itself
PICKLES = {
    "a key whose hash takes 2^150 steps": b"\x80\x02}K\x01" + PAIR * 150 + b"K\x01s.",
    "a value that unfolds to 2^150": b"\x80\x02}X\x01\x00\x00\x00aK\x01" + PAIR * 150 + b"s.",
    "5,000 levels": b"\x80\x02}X\x01\x00\x00\x00aK\x01" + b"\x85" * 5000 + b"s.",
}
READ_ALL = """
import sys
from trainwright.core.errors import CheckpointError
from trainwright.checkpoint.foreign.importing import import_checkpoint
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.unpickle import load_inert
for path in sys.argv[1:]:
    for read in (load_pickled, load_inert, lambda path: import_checkpoint(path, path + ".to")):
        try:
            read(path)
        except CheckpointError as error:
            print("refused", error)
"""


def test_pickles_that_would_never_end(tmp_path: Path) -> None:
    """9, in a process of their own: hashing in C takes no signal."""
    paths = []
    for index, data in enumerate(PICKLES.values()):
        paths.append(tmp_path / f"{index}.ckpt")
        with zipfile.ZipFile(paths[-1], "w") as archive:
            archive.writestr("x/data.pkl", data)
            archive.writestr("x/version", "3")
    done = subprocess.run([sys.executable, "-c", READ_ALL, *paths], capture_output=True, text=True, timeout=120)
    assert (done.stdout.count("refused"), done.returncode) == (9, 0), done

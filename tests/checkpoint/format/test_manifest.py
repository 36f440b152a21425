import json
import math
import os
import random
import shutil

import pytest
import xxhash

from tests.checkpoint import small
from trainwright.checkpoint.format.manifest import VERSION, FileRecord, Manifest, read_manifest, verify
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

SHARDS = ["rank_00000.safetensors", "rank_00001.safetensors"]
WRITERS = {**dict(zip(SHARDS, (0, 1), strict=True)), "state.json": 0, "tensors.json": 1, "manifest.json": 0}


@pytest.fixture
def checkpoint(tmp_path):
    small.write(tmp_path / "a", 7)
    return tmp_path / "a"


def problems_of(path):
    """Return the problems that a reader reports before use."""
    try:
        return verify(path)
    except DamagedCheckpoint as error:
        return list(error.problems)


def assert_only(problems, file):
    """The one damaged file is named, with the rank that wrote it."""
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{file} (written by rank {WRITERS[file]})")


def test_intact_checkpoint(checkpoint):
    assert verify(checkpoint) == []
    assert verify(checkpoint, deep=False) == []
    data = (checkpoint / "manifest.json").read_bytes()
    assert Manifest.from_bytes(data).to_bytes() == data
    ranks = {name: record.rank for name, record in read_manifest(checkpoint).files.items()}
    assert {**ranks, "manifest.json": 0} == WRITERS
    (checkpoint / "notes.txt").write_text("mine")
    assert verify(checkpoint) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("file", WRITERS)
def test_any_flipped_bit_is_found(checkpoint, file):
    draw = random.Random(file)
    path = checkpoint / file
    data = path.read_bytes()
    for _ in range(150):
        position, bit = draw.randrange(len(data)), draw.randrange(8)
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :])
        assert_only(problems_of(checkpoint), file)
    path.write_bytes(data)
    assert problems_of(checkpoint) == []


def test_every_single_bit_of_a_manifest_matters():
    data = Manifest({"a": FileRecord("a", 1, "0" * 32, 0)}, {"step": 1, "x": True}).to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(ValueError, match="^it "):
                Manifest.from_bytes(bytes(flipped))


@pytest.mark.parametrize("file", WRITERS)
def test_any_truncation_is_found(checkpoint, file):
    draw = random.Random(file)
    path = checkpoint / file
    data = path.read_bytes()
    for length in [0, 1, len(data) - 1, *(draw.randrange(len(data)) for _ in range(40))]:
        path.write_bytes(data[:length])
        assert_only(problems_of(checkpoint), file)
        if file != "manifest.json":
            (problem,) = verify(checkpoint, deep=False)
            assert f"{length} bytes" in problem
            assert str(len(data)) in problem
    path.write_bytes(data + b"\0")
    assert_only(problems_of(checkpoint), file)


@pytest.mark.parametrize("file", [name for name in WRITERS if name != "manifest.json"])
@pytest.mark.parametrize("deep", [True, False])
def test_a_missing_file_is_found(checkpoint, file, deep):
    (checkpoint / file).unlink()
    problems = verify(checkpoint, deep=deep)
    assert_only(problems, file)
    assert problems[0].endswith("missing")


def test_swapped_files(checkpoint, tmp_path):
    small.write(tmp_path / "b", 8)
    one, other = (checkpoint / name for name in SHARDS)
    one.rename(checkpoint / "x")
    other.rename(one)
    (checkpoint / "x").rename(other)
    shutil.copy(checkpoint / "state.json", checkpoint / "tensors.json")
    first, second, third = verify(checkpoint)
    assert "rank_00000.safetensors (written by rank 0): holds what rank 1 wrote" in first
    assert "rank_00001.safetensors (written by rank 1): holds what rank 0 wrote" in second
    assert "two files were swapped" in first
    assert "tensors.json (written by rank 1): holds what rank 0 wrote as state.json" in third
    for name in (*SHARDS, "tensors.json"):  # of another checkpoint
        shutil.copy(tmp_path / "b" / name, checkpoint / name)
    assert len(verify(checkpoint)) == 3
    assert verify(checkpoint, deep=False) == []


def test_ranks_share_the_work(checkpoint):
    for name in WRITERS:
        if name != "manifest.json":
            (checkpoint / name).write_bytes(b"")
    parts = [verify(checkpoint, part=(index, 3)) for index in range(3)]
    assert sorted(map(len, parts)) == [1, 1, 2]
    assert sorted(sum(parts, [])) == sorted(verify(checkpoint))
    with pytest.raises(ValueError, match="part"):
        verify(checkpoint, part=(3, 3))
    (checkpoint / "state.json").unlink()
    (checkpoint / "state.json").mkdir()  # unreadable
    assert verify(checkpoint)[-2].startswith("state.json (written by rank 0)")


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint \S*/b\. There is none in"):
        read_manifest(tmp_path / "b")
    small.write(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint \S*/b\. \S+ has: a\."):
        read_manifest(tmp_path / "b")


def test_a_file_and_half_a_checkpoint(checkpoint):
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        read_manifest(checkpoint / "manifest.json")
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest.json: it was not completely written"):
        read_manifest(checkpoint)


def sealed(content):
    """A manifest with a right hash, whatever it says."""
    body = json.dumps(content, sort_keys=True, indent=1) + "\n"
    content = {**content, "xxh3_128": xxhash.xxh3_128_hexdigest(body.encode())}
    return (json.dumps(content, sort_keys=True, indent=1) + "\n").encode()


def test_newer_version_asks_to_update(checkpoint):
    (checkpoint / "manifest.json").write_bytes(sealed({"version": VERSION + 1, "anything": []}))
    said = rf"{checkpoint}.*version {VERSION + 1}.*to {VERSION}: update trainwright"
    with pytest.raises(CheckpointError, match=said):
        read_manifest(checkpoint)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", " ", "manifest.json"])
@pytest.mark.parametrize("field", ["name", "stored"])
def test_files_outside_of_the_folder_are_refused(checkpoint, name, field):
    record = {"size": 1, "xxh3_128": "0" * 32, "rank": 0}
    files = {name: record} if field == "name" else {"a": {**record, "stored": name}}
    (checkpoint / "manifest.json").write_bytes(sealed({"version": 1, "files": files, "about": {}}))
    with pytest.raises(CheckpointError, match="cannot have a file named"):
        read_manifest(checkpoint)


def test_duplicate_stored_names_are_refused(checkpoint):
    record = {"size": 1, "xxh3_128": "0" * 32, "rank": 0}
    files = {"a": record, "b": {**record, "stored": "A"}}
    (checkpoint / "manifest.json").write_bytes(sealed({"version": 1, "files": files, "about": {}}))
    with pytest.raises(CheckpointError, match="lists a file twice"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("content", [
    {"version": 1},
    {"version": 1, "files": [], "about": {}},
    {"version": "1", "files": {}, "about": {}},
    {"version": 0, "files": {}, "about": {}},
    {"version": 1, "files": {"a": 3}, "about": {}},
    {"version": 1, "files": {"a": {"size": -1, "xxh3_128": "0", "rank": 0}}, "about": {}},
    {"version": 1, "files": {"a": {"size": 1, "xxh3_128": 0, "rank": 0}}, "about": {}},
    {"version": 1, "files": {"a": {"size": 1.0, "xxh3_128": "0", "rank": 0}}, "about": {}},
    *({"version": 2, "files": {}, "about": {}, **more} for more in [
        {}, {"lists": {}}, {"lists": {}, "token": 3}, {"lists": {"a": [1, 2]}, "token": ""}, {"lists": [], "token": ""},
    ]),
])  # fmt: skip
def test_malformed_manifests(checkpoint, content):
    (checkpoint / "manifest.json").write_bytes(sealed(content))
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json \(written by rank 0\)"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version": 1' + b"0" * 5000])
def test_manifests_that_are_not_parseable(checkpoint, data):
    (checkpoint / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(checkpoint)


def test_about_round_trips():
    about = {"step": 3, "metrics": {"loss": 0.1, "bad": math.nan, "worst": math.inf, "text": "x"}, "names": ["ä", None]}
    manifest = Manifest.from_bytes(Manifest({}, about).to_bytes())
    assert manifest.metric("loss") == 0.1
    assert math.isnan(manifest.metric("bad"))
    assert manifest.metric("worst") == math.inf
    assert manifest.metric("text") is None
    assert manifest.metric("other") is None
    assert manifest.about["names"] == ["ä", None]
    assert (manifest.step, manifest.created) == (3, "")
    json.loads(manifest.to_bytes(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("about", [{"x": object()}, {"x": {1: 2}}, {"x": b"1"}])
def test_about_must_be_json(about):
    with pytest.raises(CheckpointError, match="plain JSON"):
        Manifest({}, about).to_bytes()


def test_verifying_needs_no_memory_for_a_file(tmp_path):
    """A file is read through a small buffer: a sparse one of 256 MiB would show."""
    import resource

    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "big", "wb") as file:
        file.truncate(1 << 28)
    manifest = Manifest({"big": FileRecord("big", 1 << 28, "0" * 32, 0)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (problem,) = verify(tmp_path / "a", manifest)
    assert "changed content" in problem
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    os.remove(tmp_path / "a" / "big")

"""Checkpoints whose metadata is divided among ranks, here from two ranks on."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint import small
from tests.checkpoint.write.test_save import COLUMNS, ROWS, check_content, content_of, group, matrix
from tests.strategies.state.test_checkpointing import TENSOR, Net, data, fit_and_resume, trainer_of
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.exchange.distinct import EqualRanks
from trainwright.checkpoint.format import manifest as manifests
from trainwright.checkpoint.format import records
from trainwright.checkpoint.format.directory import BoxPlace, Directory, Entry
from trainwright.checkpoint.format.manifest import read_manifest, records_of, verify
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.store.storage import Folder, PendingFolder, clean_up, remove
from trainwright.checkpoint.write import split
from trainwright.checkpoint.write.assignment import WriteAssigner
from trainwright.checkpoint.write.save import Content, with_assignment, write
from trainwright.command.cli import main
from trainwright.core.errors import CheckpointError, DamagedCheckpoint

RANKS = 5
META = ["boxes_00000.json", "boxes_00001.json", "boxes_00002.json", "boxes_00003.json", "boxes_00004.json"]
LISTS = ["files_00000.json", "files_00001.json", "files_00002.json"]
SHARDS = [f"rank_{rank:05d}.safetensors" for rank in range(RANKS)]
WRITER = {
    **{name: rank for rank, name in enumerate(META)},
    **{name: 2 * number for number, name in enumerate(LISTS)},
    **{name: rank for rank, name in enumerate(SHARDS)},
    "state.json": 0,
    "tensors.json": 0,
}


@contextmanager
def many(ranks: int = 2, least: int = 1) -> Iterator[None]:
    """Two ranks have a list of their files, and ranks that hold the same have a file of boxes of their own."""
    with (
        mock.patch.object(split, "RANKS_PER_LIST", ranks),
        mock.patch.object(split, "MOST_UNDIVIDED", 0),
        mock.patch.object(split, "_LEAST", least),
        mock.patch.object(split, "_BYTES_PER_FILE", 0),
    ):
        yield


def save_divided(path: str, steps: tuple[int, ...] = (4,)) -> list[str]:
    """The files that this rank composed for all, which it does once for equal deals."""
    members = group()
    assigner = WriteAssigner(members)
    with many():
        for step in steps:
            content = with_assignment(content_of(step), assigner)
            write(content, path, members)
    assert assigner.last is not None
    return sorted(assigner.last.composed)


@pytest.fixture
def checkpoint(ranks: Any, tmp_path: Path) -> Path:
    ranks(save_divided, RANKS, str(tmp_path / "x"))
    return tmp_path / "x"


def test_metadata_is_divided_among_ranks(ranks: Any, tmp_path: Path) -> None:
    composed = ranks(save_divided, RANKS, str(tmp_path / "x"), (3, 4))
    assert composed == [["boxes_00000.json", "tensors.json"], *([name] for name in META[1:])]
    manifest = read_manifest(tmp_path / "x")
    assert manifest.version == records.SPLIT
    assert sorted(manifest.files) == sorted([*META, *LISTS, "state.json", "tensors.json"])
    assert {name: each.files for name, each in manifest.lists.items()} == dict(zip(LISTS, (2, 2, 1), strict=True))
    assert {each.name: each.rank for each in records_of(tmp_path / "x", manifest)} == WRITER
    assert {path.name for path in (tmp_path / "x").iterdir()} == {*WRITER, "manifest.json"}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "x").iterdir() if path.name != "manifest.json"}
    assert manifest.num_bytes == manifest.about["bytes"] == sum(sizes.values())
    assert manifest.num_files == len(sizes)
    assert verify(tmp_path / "x") == []
    assert records.Manifest.from_bytes((tmp_path / "x" / "manifest.json").read_bytes()) == manifest


def test_any_box_can_be_read(ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
    state = RunState.open(str(checkpoint))
    check_content(state, RANKS)
    assert set(state.stored) == set(state.keys())
    assert len(state.keys()) == 4 + RANKS
    assert "rank/4/own" in state.keys()  # noqa: SIM118 - no mapping
    assert "rank/5/own" not in state.keys()  # noqa: SIM118
    assert state.keys_under("rank/3/") == ["rank/3/own"]
    assert state.keys_under("s") == ["scalar", "split"]
    assert len(state.keys_under("rank/")) == RANKS
    with pytest.raises(KeyError):
        state.shape("rank/5/own")
    ranks(save_whole, RANKS, str(tmp_path / "whole"))
    whole = RunState.open(str(tmp_path / "whole"))
    assert whole.manifest.version == records.WHOLE
    assert whole.stored == state.stored


def save_whole(path: str) -> None:
    write(content_of(4), path, group())


def test_ranks_read_only_their_metadata(checkpoint: Path) -> None:
    with mock.patch.object(Folder, "read", autospec=True, side_effect=Folder.read) as read:
        state = RunState(str(checkpoint), read_manifest(checkpoint))
        rows = torch.empty(1, COLUMNS)
        state.fill({"split": TensorParts((ROWS, COLUMNS), torch.float32, [((4, 0), rows)])})
        state.read("rank/2/own")
    assert torch.equal(rows, matrix(4)[4:5])
    assert [call.args[1] for call in read.call_args_list] == ["manifest.json", "tensors.json", "boxes_00003.json"]


def save_two_shards(path: str) -> None:
    """Two ranks hold one half, two the other; all hold some numbers, of which each pair writes some."""
    rank = dist.get_rank()
    half = TensorParts((4,), torch.float32, [((rank % 2 * 2,), torch.arange(2.0) + rank % 2 * 2)])
    numbers = {f"n{number}": TensorParts.whole(torch.tensor(number)) for number in range(6)}
    with many():
        write(Content({}, {"w": half, **numbers}, {}), path, group())


def test_replicated_boxes_are_in_every_box_file(ranks: Any, tmp_path: Path) -> None:
    ranks(save_two_shards, 4, str(tmp_path / "x"))
    told = [json.loads((tmp_path / "x" / name).read_bytes())["tensors"] for name in META[:2]]
    assert [sorted(each) for each in told] == [[*(f"n{number}" for number in range(6)), "w"]] * 2
    assert told[0].pop("w") != told[1].pop("w")
    assert told[0] == told[1]
    assert {rank for ((_, _, rank),) in told[0].values()} == {0, 1, 2, 3}
    state = RunState.open(str(tmp_path / "x"))
    with mock.patch.object(Folder, "read", autospec=True, side_effect=Folder.read) as read:
        half = torch.empty(2)
        targets = {f"n{number}": torch.tensor(-1) for number in range(6)}
        wanted = {key: TensorParts.whole(value) for key, value in targets.items()}
        state.fill({"w": TensorParts((4,), torch.float32, [((2,), half)]), **wanted})
    assert half.tolist() == [2, 3]
    assert [int(value) for value in targets.values()] == list(range(6))
    assert [call.args[1] for call in read.call_args_list] == ["tensors.json", "boxes_00001.json"]
    assert state.read("w").tolist() == [0, 1, 2, 3]


def named(problems: list[str], file: str) -> None:
    assert [problem.partition(" (")[0] for problem in problems] == [file], problems
    assert f"written by rank {WRITER[file]}" in problems[0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("file", WRITER)
def test_damage_is_found(checkpoint: Path, file: str) -> None:
    path, draw = checkpoint / file, random.Random(file)
    data = path.read_bytes()
    for _ in range(20):
        position, bit = draw.randrange(len(data)), draw.randrange(8)
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :])
        named(verify(checkpoint), file)
    for length in (0, 1, len(data) - 1):
        path.write_bytes(data[:length])
        named(verify(checkpoint), file)
        named(verify(checkpoint, deep=False), file)
    path.unlink()
    named(verify(checkpoint), file)
    named(verify(checkpoint, deep=False), file)
    with pytest.raises(DamagedCheckpoint, match=file):
        RunState.open(str(checkpoint))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_ranks_share_the_verification(checkpoint: Path, count: int) -> None:
    looked: list[str] = []
    with mock.patch.object(manifests, "_problem", side_effect=lambda record, **_: looked.append(record.name)):
        for index in range(count):
            verify(checkpoint, part=(index, count))
    assert sorted(looked) == sorted(WRITER)
    for name in SHARDS:
        (checkpoint / name).write_bytes(b"")
    found = [problem for index in range(count) for problem in verify(checkpoint, part=(index, count))]
    assert sorted(found) == sorted(verify(checkpoint))
    assert len(found) == RANKS


def test_swapped_files_are_reported(checkpoint: Path) -> None:
    one, other = (checkpoint / name for name in SHARDS[2:4])
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    assert [("were swapped" in problem) for problem in verify(checkpoint)] == [True, True]


@pytest.mark.sample(8)
@pytest.mark.parametrize("file", ["tensors.json", "boxes_00001.json", "files_00001.json"])
@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"tensors": 3}', b'{"files": {"a": 3}}'])
def test_malformed_files_are_refused(checkpoint: Path, file: str, data: bytes) -> None:
    forged(checkpoint, file, data)
    with pytest.raises(CheckpointError, match=file):
        RunState.open(str(checkpoint)).read("split")


def forged(path: Path, file: str, data: bytes) -> None:
    """Replace a file and forge a matching manifest."""
    manifest = read_manifest(path)
    (path / file).write_bytes(data)
    digest = manifests.xxhash.xxh3_128_hexdigest(data)
    old = manifest.files[file]
    manifest.files[file] = records.FileRecord(file, len(data), digest, old.rank)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


def test_files_outside_of_the_folder_are_refused(checkpoint: Path) -> None:
    (checkpoint.parent / "outside.safetensors").write_bytes(b"x")
    data = (checkpoint / "files_00001.json").read_bytes()
    forged(checkpoint, "files_00001.json", data.replace(SHARDS[2].encode(), b"../outside.safetensors"))
    with pytest.raises(CheckpointError, match="cannot have a file named"):
        records_of(checkpoint, read_manifest(checkpoint))
    assert "cannot have a file named" in verify(checkpoint)[0]


@pytest.mark.parametrize(("old", "new", "text"), [
    (b"[[[1,0],[1,5],1]]", b"[[[2,0],[1,5],1]]", r"part at \(0, 0\) of \(7, 5\) has only 25 of its 35"),
    (b"[[[1,0],[1,5],1]]", b"[[[1,3],[1,5],1]]", r"cannot have a box at \(1, 3\)"),
    (b"[[[1,0],[1,5],1]]", b"[[[1],[1],1]]", r"cannot have a box at \(1,\)"),
    (b"[[[1,0],[1,5],1]]", b"[[[1,0],[1,5],-1]]", r"boxes_00001.json is malformed"),
    (b"[[[1,0],[1,5],1]]", b"[[[1,0],[1,5],99]]", r"rank_00099.safetensors"),
])  # fmt: skip
def test_boxes_that_do_not_tile_the_tensor(checkpoint: Path, old: bytes, new: bytes, text: str) -> None:
    data = (checkpoint / "boxes_00001.json").read_bytes()
    assert old in data
    forged(checkpoint, "boxes_00001.json", data.replace(old, new))
    with pytest.raises(CheckpointError, match=text):
        RunState.open(str(checkpoint)).read("split")


def test_box_files_are_verified_when_read(checkpoint: Path) -> None:
    state = RunState.open(str(checkpoint))
    (checkpoint / "boxes_00002.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint, match=r"boxes_00002.json \(written by rank 2\): truncated"):
        state.read("split")


def test_older_readers_ask_to_update(checkpoint: Path) -> None:
    with mock.patch.object(records, "VERSION", records.WHOLE), pytest.raises(CheckpointError) as error:
        read_manifest(checkpoint)
    assert "format version 2; this installation reads versions up to 1: update trainwright" in str(error.value)


def fail_at(path: str, bad: int, file: str) -> str:
    members = group()
    write(content_of(1), path, members)
    usual = PendingFolder.write_file

    def failing(self: PendingFolder, name: str, data: bytes, rank: int) -> Any:
        if (rank, name) == (bad, file):
            raise CheckpointError(f"{name}: Input/output error")
        return usual(self, name, data, rank)

    with many(), mock.patch.object(PendingFolder, "write_file", failing), pytest.raises(CheckpointError) as error:
        write(content_of(2), path, members)
    with many():
        write(content_of(3), path, members)  # nothing is left on the way between ranks
    return str(error.value)


@pytest.mark.parametrize("file", ["files_00000.json", "files_00001.json", "boxes_00003.json", "tensors.json"])
def test_failure_of_one_rank_fails_all(ranks: Any, tmp_path: Path, file: str) -> None:
    for message in ranks(fail_at, RANKS, str(tmp_path / "x"), WRITER[file], file):
        assert f"(rank {WRITER[file]})" in message
        assert "Input/output error" in message
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert torch.equal(RunState.open(str(tmp_path / "x")).read("split"), matrix(3))


def lose_a_row(path: str) -> str:
    rank, content = dist.get_rank(), content_of(1)
    if rank == 3:
        content.tensors["split"].parts.clear()
    with many(), pytest.raises(CheckpointError) as error:
        write(content, path, group())
    return str(error.value)


def test_incomplete_tensors_are_not_published(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(lose_a_row, RANKS, str(tmp_path / "x")):
        assert "split of shape (7, 5), as sharded over the ranks, has only 30 of its 35 elements" in message
    assert list(tmp_path.iterdir()) == []


def hide(path: str, bad: int) -> str:
    """Rank ``bad`` writes into a folder that others do not see."""
    usual = PendingFolder.create_file
    away = str(Path(path).parent / "elsewhere")

    def elsewhere(self: PendingFolder, name: str, rank: int, size: int | None = None) -> Any:
        if rank == bad and self._files.path != away:
            shutil.copytree(self._files.path, away, dirs_exist_ok=True)
            self._files.path = away  # type: ignore[misc]
        return usual(self, name, rank, size)

    with (
        many(),
        mock.patch("trainwright.checkpoint.store.storage._PATIENCE_SECONDS", 0.2),
        mock.patch.object(PendingFolder, "create_file", elsewhere),
        pytest.raises(CheckpointError) as error,
    ):
        write(content_of(1), path, group())
    return str(error.value)


@pytest.mark.parametrize("bad", [1, 2])
def test_ranks_without_a_shared_folder(ranks: Any, tmp_path: Path, bad: int) -> None:
    for message in ranks(hide, RANKS, str(tmp_path / "x"), bad):
        assert "All machines must share the folder" in message
    assert not (tmp_path / "x").exists()


class Shared(LocalFileSystem):
    """A store that several processes see."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(path.removeprefix("shared://") if isinstance(path, str) else path)


def save_in_store(path: str, steps: tuple[int, ...]) -> None:
    fsspec.register_implementation("shared", Shared, clobber=True)
    save_divided(path, steps)


def test_divided_checkpoint_in_a_store(ranks: Any, tmp_path: Path) -> None:
    fsspec.register_implementation("shared", Shared, clobber=True)
    path = f"shared://{tmp_path}/x"
    ranks(save_in_store, RANKS, path, (3, 4))
    manifest = read_manifest(path)
    assert len(list((tmp_path / "x").iterdir())) == manifest.num_files + 1
    assert all(manifest.token in each.file for each in records_of(path, manifest))
    assert verify(path) == []
    assert [verify(path, part=(index, 3)) for index in range(3)] == [[], [], []]
    assert torch.equal(RunState.open(path).read("split"), matrix(4))
    assert clean_up(f"shared://{tmp_path}") == []
    small.write(path, 5)
    assert small.read(path) == 5
    assert len(list((tmp_path / "x").iterdir())) == 5
    remove(path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("place", ["folder", "store"])
def test_versions_replace_each_other(tmp_path: Path, place: str) -> None:
    parent = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    for step in range(4):
        small.write(f"{parent}/x", step, divided=step in (1, 2))
        path, _ = newest_good([parent])
        assert path is not None
        assert small.read(path) == step
        assert clean_up(parent) == []
        assert len(Folder(f"{parent}/x").names()) == read_manifest(path).num_files + 1
    remove(f"{parent}/x")
    assert newest_good([parent]) == (None, [])


def equal_groups(ranks: int, groups: int, length: int) -> EqualRanks:
    return EqualRanks([rank % groups for rank in range(ranks)], list(range(groups)), [length] * groups)


def test_small_runs_are_not_divided() -> None:
    assert split.divide_metadata(equal_groups(256, 8, 1000)) is None
    assert split.divide_metadata(equal_groups(256, 8, split.MOST_UNDIVIDED)) is not None
    assert split.divide_metadata(equal_groups(257, 1, 1000)) is not None


@pytest.mark.parametrize(
    ("ranks", "groups", "boxes"), [(1_000, 8, 200), (4_096, 4_096, 2_000), (100_000, 100_000, 2_000)]
)
def test_metadata_per_rank_grows_sublinearly(ranks: int, groups: int, boxes: int) -> None:
    found = split.divide_metadata(equal_groups(ranks, groups, 70 * boxes))
    assert found is not None
    assert len(found.lists) == -(-ranks // 256)
    files = len(found.boxes)
    read = 512 * files + found.groups * 70 * boxes
    assert read < 512 * 1024 + 2 * (512 * groups * 70 * boxes) ** 0.5
    assert [found.boxes_of(number) for number in (0, groups - 1)] == [0, files - 1]
    assert found.list_of(ranks - 1)[-1] == ranks - 1


def test_directory_shares_patterns() -> None:
    places = tuple(BoxPlace(number, (number, 0), (number + 1, 8)) for number in range(50))
    tensors = {f"block.{number}": Entry("float32", (50, 8), places) for number in range(100)}
    own = {"torch": Entry("uint8", (5056,))}
    directory = Directory(tensors, [own, {}], [(70_000, 0), (1, 1), (29_999, 0)])
    data = directory.to_bytes()
    assert len(data) < 8_000
    again = Directory.from_bytes(data, 100_000)
    assert again == directory
    assert json.loads(data)["own"] == [[70_000, 0], [1, 1], [29_999, 0]]
    assert again.num_ranks == 100_000
    assert (again.own_of(70_000), again.own_of(99_999), again.own_of(100_000)) == ({}, own, {})
    assert len(again.keys()) == 100 + 99_999
    assert len(list(again.keys())) == len(again.keys())


def one_box(_: str) -> None:
    content = Content({}, {"a": TensorParts.whole(torch.ones(2))}, {})
    with many(ranks=256, least=10**6):
        write(content, _, group())


def test_small_groups_share_a_box_file(ranks: Any, tmp_path: Path) -> None:
    ranks(one_box, 3, str(tmp_path / "x"))
    assert sorted(read_manifest(tmp_path / "x").files) == [
        "boxes_00000.json",
        "files_00000.json",
        "state.json",
        "tensors.json",
    ]
    assert RunState.open(str(tmp_path / "x")).read("a").tolist() == [1, 1]


def fit_divided(strategy: str, options: dict[str, Any], folder: str) -> tuple[Any, ...]:
    with many():
        return fit_and_resume(strategy, options, folder, 3)


class Told(Net):
    """Keeps the parameters with which training begins."""

    def on_train_start(self) -> None:
        self.told = {name: value.clone() for name, value in self.trainer.strategy.whole_parameters()}


def parameters_of(strategy: str, options: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    module = Told()
    trainer_of(strategy, options, max_steps=4, allow_changed_data=True).fit(module, data(2), ckpt_path=path)
    return module.told


def test_a_run_resumes(ranks: Any, tmp_path: Path) -> None:
    for expected, found, buffers in ranks(fit_divided, 2, "hybrid", {**TENSOR, "one_file": False}, str(tmp_path)):
        assert found == expected
        assert buffers
    state = RunState.open(str(tmp_path / "step=3.ckpt"))
    assert state.manifest.version == records.SPLIT
    alone = parameters_of("single", {}, state.path)
    for name, value in alone.items():
        assert torch.equal(state.read(f"weights/{name}"), value), name
    for found in ranks(parameters_of, 3, "zero3", {}, state.path):
        assert all(torch.equal(value, alone[name]) for name, value in found.items())


def fit_and_keep_two(folder: str) -> None:
    with many():
        saver = RunStateCheckpoint(dirpath=folder, every_n_steps=1, keep_last=2, asynchronous=True)
        trainer_of("zero2", {}, max_steps=4, callbacks=[saver], enable_checkpointing=True).fit(Net(), data(2))


def test_divided_checkpoints_are_saved_listed_and_exported(ranks, tmp_path, capsys):
    ranks(fit_and_keep_two, 3, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3", "step=4"]
    newest = tmp_path / "step=4"
    assert read_manifest(newest).version == records.SPLIT
    assert main(["checkpoint", "list", str(tmp_path), "--deep"]) == 0
    assert capsys.readouterr().out.count("good") == 2
    assert main(["checkpoint", "verify", str(newest)]) == 0
    assert f"{read_manifest(newest).num_files} files" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(newest), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {*told["files"], "manifest.json"} == {path.name for path in newest.iterdir()}
    assert {each["name"] for each in told["tensors"]} == set(RunState.open(str(newest)).keys())
    for format in ("safetensors", "lightning"):
        to = str(tmp_path / f"exported.{'ckpt' if format == 'lightning' else format}")
        assert main(["checkpoint", "export", str(newest), "--format", format, "--to", to]) == 0
    held = torch.load(tmp_path / "exported.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(held["embed.weight"], RunState.open(str(newest)).read("weights/embed.weight"))
    capsys.readouterr()
    (newest / "manifest.json").unlink()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "half-written" in capsys.readouterr().out

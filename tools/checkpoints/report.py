"""Results of `trainwright checkpoint verify`, `inspect` and `list`; needs neither torch nor Lightning."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint.format.boxes import plain_from_json
from trainwright.checkpoint.format.contents import problems_of_contents
from trainwright.checkpoint.format.directory import Directory
from trainwright.checkpoint.format.manifest import MANIFEST, FileRecord, Manifest, read_manifest, records_of, verify
from trainwright.checkpoint.format.records import TENSORS, WHOLE
from trainwright.checkpoint.read.candidates import Candidate, candidates_in
from trainwright.checkpoint.store.paths import is_remote, join_path, local_path, normal_path
from trainwright.checkpoint.store.storage import Folder, folders_in
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.run.run_directory import CHECKPOINTS
from trainwright.core.text.bounded import interpreting
from trainwright.core.text.plain import aligned, finite
from trainwright.core.text.sizes import size_text

GOOD, DAMAGED, UNFINISHED, UNCHECKED = "good", "damaged", "half-written", "not checkable"
_SHOWN_TENSORS = 40
_PARTIAL = ".partial-"
_CHECKPOINT_FILE = re.compile(r"(rank_\d+.*\.safetensors|(state|tensors|(files|boxes)_\d+).*\.json)$")


def verified(path: str) -> tuple[list[str], str]:
    """Read every byte of a checkpoint and compare checksums.

    Returns:
        One text per damaged file, naming it and the rank that wrote it; and the line to print if there are none.

    Raises:
        CheckpointError: if there is no finished checkpoint at `path`.
    """
    try:
        manifest = manifest_at(path)
    except DamagedCheckpoint as error:
        return list(error.problems), ""
    problems = _problems(path, manifest, deep=True)
    size = size_text(manifest.num_bytes)
    return problems, f"good: {path}, step {manifest.step}, {manifest.num_files} files, {size}"


def _problems(path: str, manifest: Manifest, *, deep: bool) -> list[str]:
    """Return problems with the files of a checkpoint, and if `deep` with their contents."""
    problems = verify(path, manifest, deep=deep)
    return problems or (problems_of_contents(path, manifest) if deep else [])


def manifest_at(path: str) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: as `read_manifest`; for a folder of checkpoints it names the newest.
    """
    folder = Path(local_path(normal_path(path)))  # refuses an empty path
    if not is_remote(path) and folder.is_dir() and not os.path.exists(folder / MANIFEST):
        inside = [each.path for at in (folder, folder / CHECKPOINTS) for each in candidates_in(str(at))]
        if inside:
            raise CheckpointError(f"{path} contains checkpoints but is not one itself; type the newest: {inside[0]}")
    return read_manifest(path)


# ---- inspect --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportedTensor:
    """A row of the table of tensors.

    Attributes:
        name: its key.
        shape: of the whole tensor.
        dtype: torch's name without `torch.`
        bytes: of its values; None for a dtype of unknown size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int | None


@dataclass(frozen=True)
class Inspection:
    """Contents of a checkpoint, read without its tensors.

    Attributes:
        path: of the checkpoint.
        manifest: as published.
        tensors: of all ranks, by name.
        files: of all ranks.
    """

    path: str
    manifest: Manifest
    tensors: Sequence[ReportedTensor]
    files: Sequence[FileRecord]

    @classmethod
    def of(cls, path: str) -> "Inspection":
        """Inspect a checkpoint.

        Raises:
            CheckpointError: if there is no finished checkpoint at `path`, or its list of tensors cannot be read.
        """
        manifest = manifest_at(path)
        folder = Folder(path, manifest)
        files = records_of(folder.path, manifest)
        try:
            with interpreting(join_path(folder.path, TENSORS)):
                found = _tensors_of(folder.read(TENSORS), manifest, len(files))
                tensors = [_tensor(*each) for each in sorted(found)]
        except CheckpointError as error:
            raise DamagedCheckpoint(folder.path, [f"{TENSORS} (written by rank 0): {error}"]) from error
        return cls(folder.path, manifest, tensors, files)

    def bytes_of_ranks(self) -> dict[int, tuple[int, int]]:
        """Return bytes and number of files written, by rank."""
        found: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for record in self.files:
            size, files = found[record.rank]
            found[record.rank] = (size + record.size, files + 1)
        return dict(sorted(found.items()))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document; bytes are integers."""
        files = {
            record.name: {"bytes": record.size, "xxh3_128": record.hash, "rank": record.rank} for record in self.files
        }
        tensors = [asdict(each) for each in self.tensors]
        return {"path": self.path, "about": finite(self.manifest.about), "files": files, "tensors": tensors}

    def to_text(self, *, every_tensor: bool = False) -> str:
        """Return text for a terminal, with the first or all tensors."""
        head = [f"  {title:<14}{text}" for title, text in _facts(self.manifest) if text]
        ranks = [
            f"  {f'rank {rank}':<14}{size_text(size)} in {files} file{'s' * (files != 1)}"
            for rank, (size, files) in self.bytes_of_ranks().items()
        ]
        shown = self.tensors if every_tensor else self.tensors[:_SHOWN_TENSORS]
        rows = [(t.name, "x".join(map(str, t.shape)) or "scalar", t.dtype, _count(t.bytes)) for t in shown]
        hidden = len(self.tensors) - len(shown)
        total = sum(each.bytes or 0 for each in self.tensors)
        return "\n".join(
            [
                self.path,
                *head,
                *(ranks if every_tensor else _shortened(ranks)),
                "",
                f"{len(self.tensors)} tensors, {size_text(total)}",
                *aligned(("name", "shape", "dtype", "bytes"), rows, "<>>>"),
                *([f"  ... and {hidden} more; --all shows them"] if hidden else []),
                "",
            ]
        )


_NOTHING = "-"
# Bytes of dtypes whose names lack their number of bits.
_ODD_DTYPES = {"bool": 1}


def _tensors_of(data: bytes, manifest: Manifest, files: int) -> Iterator[tuple[str, Sequence[int], str]]:
    """Yield name, shape and dtype of each tensor in `tensors.json`."""
    if manifest.version == WHOLE:
        yield from ((name, entry.shape, entry.dtype) for name, entry in plain_from_json(data).items())
        return
    directory = Directory.from_bytes(data, files)
    for name in directory.keys():  # noqa: SIM118 - no mapping
        entry = directory.find(name)
        if entry is not None:
            yield name, entry.shape, entry.dtype


def _tensor(name: str, sizes: Sequence[int], dtype: str) -> ReportedTensor:
    shape = tuple(sizes)
    bits = re.match(r"[a-z]+(\d{1,3})(?!\d)", dtype)
    size = int(bits[1]) // 8 if bits else _ODD_DTYPES.get(dtype)
    return ReportedTensor(name, shape, dtype, None if size is None else size * math.prod(shape))


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    about = manifest.about
    yield "kind", str(about.get("kind", ""))
    yield "step", _count(about.get("step"))
    yield "epoch", _count(about.get("epoch"))
    yield "created", str(about.get("created", ""))
    yield "strategy", str(about.get("strategy", ""))
    yield "layout", _layout(about)
    yield "global batch", _count(about.get("global_batch_size"), "samples per optimizer step")
    yield "samples", _count(about.get("samples"), "read")
    yield "metrics", _pairs(about.get("metrics"), "=")
    yield "versions", _pairs(about.get("versions"), " ")
    yield "size", f"{size_text(manifest.num_bytes)} in {manifest.num_files} files"


def _layout(about: Mapping[str, Any]) -> str:
    layout = about.get("layout")
    axes = _pairs({axis: size for axis, size in layout.items() if size != 1}, "=") if isinstance(layout, dict) else ""
    ranks = about.get("world_size")
    if ranks is None:
        return axes
    text = f"{ranks} rank{'s' * (ranks != 1)}, {about.get('data_ranks', '?')} of which read different samples"
    return f"{axes} ({text})" if axes else text


def _pairs(values: Any, between: str) -> str:
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{name}{between}{f'{v:.6g}' if isinstance(v, float) else v}" for name, v in values.items())


def _count(number: Any, what: str = "") -> str:
    if number is None:
        return "" if what else _NOTHING
    text = f"{number:,}" if isinstance(number, int) else str(number)
    return f"{text} {what}".rstrip()


def _shortened(lines: list[str]) -> list[str]:
    most = 8
    left = len(lines) - most
    return [*lines[:most], f"  ... and {left} more ranks; --all shows them"] if left > 0 else lines


@dataclass(frozen=True)
class Row:
    """A checkpoint in a list.

    Attributes:
        path: of the checkpoint.
        state: good, damaged, half-written, or not checkable (Lightning's single files).
        step: optimizer steps done; None if unknown.
        created: ISO time.
        bytes: of all its files.
        metrics: by name.
        problems: of its files.
    """

    path: str
    state: str
    step: int | None = None
    created: str = ""
    bytes: int | None = None
    metrics: Mapping[str, Any] | None = None
    problems: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**asdict(self), "metrics": finite(self.metrics or {})}


def listed(path: str, *, deep: bool = False) -> list[Row]:
    """Return the checkpoints in a folder, in the `checkpoints` folder of a run, or of all runs below it; newest first.

    Args:
        path: the folder.
        deep: read and compare every byte; False checks manifest and sizes.

    Raises:
        CheckpointError: if there is no such folder, or nothing in it.
    """
    normal_path(path)  # refuses an empty path
    if not is_remote(path) and not os.path.isdir(local_path(path)):
        what = "this is not a folder" if os.path.lexists(local_path(path)) else "this folder does not exist"
        raise CheckpointError(f"{path}: {what}; type a folder of checkpoints, or runs/<name>")
    folders = [path] if is_remote(path) else _folders_below(Path(local_path(path)))
    rows = [row for folder in folders for row in _rows_of(folder, deep)]
    if not rows:
        if _is_checkpoint(path):
            raise CheckpointError(f"{path}: this is one checkpoint; use inspect or verify, or list its parent")
        raise CheckpointError(f"{path}: there are no checkpoints here or in the {CHECKPOINTS} folders of runs below")
    return rows


def _is_checkpoint(path: str) -> bool:
    folder = Folder(path)
    return folder.exists() and any(name == MANIFEST or _CHECKPOINT_FILE.match(name) for name in folder.names())


def table_of(rows: Sequence[Row]) -> str:
    """Return a table for a terminal; problems follow the line of their checkpoint."""
    cells = [
        (
            _NOTHING if row.step is None else str(row.step),
            row.state,
            _NOTHING if row.bytes is None else size_text(row.bytes),
            row.created[:19].replace("T", " "),
            _shown(row.path),
            _pairs(row.metrics, "="),
        )
        for row in rows
    ]
    head, *lines = aligned(("step", "state", "size", "created (UTC)", "path", "metrics"), cells, "><><<<")
    below = [[f"        {problem}" for problem in row.problems] for row in rows]
    return "\n".join([head, *(line for text, more in zip(lines, below, strict=True) for line in (text, *more))])


def _folders_below(path: Path) -> list[str]:
    """Return `path` itself, its `checkpoints`, and those of the runs in it, newest run first."""
    runs = sorted((folder for folder in path.glob(f"*/{CHECKPOINTS}") if os.path.isdir(folder)), reverse=True)
    # Unlike Path.is_dir, os.path.isdir returns False for folders without permission.
    return [str(folder) for folder in (path, path / CHECKPOINTS, *runs) if os.path.isdir(folder)]


def _rows_of(folder: str, deep: bool) -> list[Row]:
    rows = [_row_of(candidate, deep) for candidate in candidates_in(folder)]
    known = {os.path.realpath(row.path) for row in rows}
    unfinished = [_row_of_unfinished(path) for path in _children(folder) if os.path.realpath(path) not in known]
    return [*rows, *(row for row in unfinished if row is not None)]


def _children(folder: str) -> list[str]:
    """Return the folders that may be finished or unfinished checkpoints."""
    hidden = [] if is_remote(folder) else sorted(Path(local_path(folder)).glob(f".*{_PARTIAL}*"))
    return [*folders_in(folder), *map(str, hidden)]


def _row_of(candidate: Candidate, deep: bool) -> Row:
    path, manifest, created = candidate.path, candidate.manifest, candidate.created
    if candidate.damage is not None:
        return Row(path, DAMAGED, created=created, problems=[candidate.damage])
    if manifest is None:
        return Row(path, UNCHECKED, created=created, bytes=os.path.getsize(path))
    try:
        problems = _problems(path, manifest, deep=deep)
    except CheckpointError as error:
        problems = [str(error)]
    step = manifest.step if manifest.step >= 0 else None
    state = DAMAGED if problems else GOOD
    return Row(path, state, step, created, manifest.num_bytes, manifest.about.get("metrics"), problems)


def _row_of_unfinished(path: str) -> Row | None:
    """Return the row of a folder without a manifest; None if it is not a checkpoint."""
    if _PARTIAL in os.path.basename(path):
        return Row(path, UNFINISHED, problems=["is being written, or its run was killed while writing"])
    try:
        names = Folder(path).names()
    except CheckpointError as error:
        return Row(path, DAMAGED, problems=[str(error)])
    if MANIFEST in names or not any(_CHECKPOINT_FILE.match(name) for name in names):
        return None
    return Row(path, UNFINISHED, problems=[f"has no {MANIFEST}: writing did not finish, or the file was deleted"])


def _shown(path: str) -> str:
    """Return a path as a user would type it in the current directory."""
    if is_remote(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative

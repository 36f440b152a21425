"""What a checkpoint consists of, as written in its ``manifest.json``. Pure data; nothing here touches a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from trainwright.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 1
"""Version of the format that this code writes, and the newest that it reads."""

_HASH = "xxh3_128"


class ManifestError(ValueError):
    """Bytes that are not what a writer of manifests wrote."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as it was when it was written.

    Args:
        name: by which the other files and the code call it, e.g. ``rank_00003.safetensors``.
        size: bytes.
        hash: xxh3_128 of its bytes, 32 hexadecimal digits.
        rank: global rank that wrote it.
        stored: its name in the folder; ``""``: the same as ``name``. Object stores have no renaming, so there the names
            of one writing carry its token.
    """

    name: str
    size: int
    hash: str
    rank: int
    stored: str = ""

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return self.stored or self.name


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, and what is known about it without reading them.

    Args:
        files: record of each file, by :attr:`FileRecord.name`.
        about: plain JSON: ``step``, ``epoch``, ``layout``, ``world_size``, ``strategy``, ``versions``, ``created``,
            ``metrics``, ``kind`` and what else the writer tells. Values that JSON lacks are written as the texts
            ``NaN``, ``Infinity`` and ``-Infinity``.
        version: of the format.

    Raises:
        CheckpointError: if a file name could lead out of the folder, or two files have one name.
    """

    files: dict[str, FileRecord]
    about: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        for key, record in self.files.items():
            if key != record.name:
                raise CheckpointError(f"A manifest calls a file both {key!r} and {record.name!r}.")
            check_file_name(record.name)
            check_file_name(record.file)
        stored = [record.file for record in self.files.values()]
        if len({name.casefold() for name in stored}) != len(stored):
            raise CheckpointError(f"A manifest names a file twice: {sorted(stored)}.")

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written; -1 if that is not known."""
        step = self.about.get("step")
        return step if isinstance(step, int) else -1

    @property
    def created(self) -> str:
        """ISO time at which it was written; ``""`` if that is not known."""
        return str(self.about.get("created", ""))

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.size for record in self.files.values())

    def metric(self, name: str) -> float | None:
        """A monitored value; ``None`` if it was not logged or is no number."""
        metrics = self.about.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            return None

    def to_bytes(self) -> bytes:
        """The one way to write this manifest: sorted, with a hash of everything else in it.

        Raises:
            CheckpointError: if ``about`` holds what JSON cannot.
        """
        files = {name: _record_to_json(record) for name, record in self.files.items()}
        content = {"files": files, "about": self.about, "version": self.version}
        try:
            return _sealed(_finite(content))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"What is told about a checkpoint must be plain JSON: {error}.") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            ManifestError: if any bit of it differs from what was written.
            CheckpointError: if a newer version of this package wrote it, or it names files outside of its folder.
        """
        content = _opened(data)
        version = content.get("version")
        if not isinstance(version, int) or version < 1:
            raise ManifestError(f"it has no version (found {version!r})")
        if version > VERSION:
            raise CheckpointError(
                f"has version {version} of the format; this installation reads versions up to {VERSION}: "
                "update trainwright (pip install --upgrade trainwright)"
            )
        files, about = content.get("files"), content.get("about")
        if not isinstance(files, dict) or not isinstance(about, dict):
            raise ManifestError("it lists no files")
        return cls({name: _record_from_json(name, value) for name, value in files.items()}, about, version)


def check_file_name(name: str) -> None:
    """Raise :class:`CheckpointError` unless ``name`` is a plain visible file of the checkpoint's own folder."""
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(
            f"A checkpoint cannot have a file named {name!r}: file names are letters, digits, '_', '-' and '.', do not "
            f"begin with '.', have no folders, and are not {MANIFEST!r}."
        )


# Characters outside of this list are legal in some stores only; a separator or '..' would lead out of the folder.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.\-]{0,199}")


def _sealed(content: dict[str, Any]) -> bytes:
    body = _canonical(content)
    return _canonical({**content, _HASH: xxhash.xxh3_128_hexdigest(body)})


def _opened(data: bytes) -> dict[str, Any]:
    """The content of sealed bytes. The envelope is the same in every version of the format, so that a flipped bit in
    the version is taken for damage, not for a newer version."""
    try:
        content = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"it is no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict) or _HASH not in content:
        raise ManifestError("it has no hash of itself")
    content.pop(_HASH)
    # Byte for byte: spaces, the case of a digit and the order of keys would survive parsing.
    if _sealed(content) != data:
        raise ManifestError("it does not have the hash that was written into it")
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def _finite(value: Any) -> Any:
    """``value`` with the texts NaN, Infinity and -Infinity for numbers that JSON lacks, and every key a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"keys must be texts, not {wrong[0]!r}")
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _record_to_json(record: FileRecord) -> dict[str, Any]:
    value: dict[str, Any] = {"size": record.size, _HASH: record.hash, "rank": record.rank}
    return {**value, "stored": record.stored} if record.stored else value


def _record_from_json(name: str, value: object) -> FileRecord:
    if not isinstance(value, dict):
        raise ManifestError(f"its record of {name} is {value!r}")
    size, digest, rank, stored = (value.get(key) for key in ("size", _HASH, "rank", "stored"))
    if not (isinstance(size, int) and isinstance(rank, int) and isinstance(digest, str) and size >= 0 <= rank):
        raise ManifestError(f"its record of {name} is {value!r}")
    return FileRecord(name, size, digest, rank, str(stored or ""))

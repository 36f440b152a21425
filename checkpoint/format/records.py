"""What a checkpoint consists of, as written in its ``manifest.json``. Pure data; nothing here touches a file.

The manifest of a run of few ranks names every file (version 1 of the format). That of many ranks names the files that
tell of the others, its *lists*: each holds the records of the files that some ranks wrote (version 2). So nobody writes
or reads a record of each rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import ContentError, parse_json
from trainwright.core.text.printable import shortened

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.json"
"""Files of every checkpoint: what it consists of, everything that is no tensor, and where the boxes of tensors are."""
WHOLE, SPLIT = 1, 2
"""Versions of the format: a manifest that names all files, and one whose lists do."""
VERSION = SPLIT
"""The newest version of the format that this code reads."""

TENSOR_FILE = ".safetensors"
"""How the names of files of tensors end; other files that hold tensors hold the bytes of one each."""

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


class Listed(NamedTuple):
    """What a list of files tells of, without reading it."""

    files: int
    """How many files."""
    num_bytes: int
    """Their size together."""


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, and what is known about it without reading them.

    Args:
        files: record of each file, by :attr:`FileRecord.name`; without those that a list names.
        about: plain JSON: ``step``, ``epoch``, ``layout``, ``world_size``, ``strategy``, ``versions``, ``created``,
            ``metrics``, ``kind`` and what else the writer tells. Values that JSON lacks are written as the texts
            ``NaN``, ``Infinity`` and ``-Infinity``.
        version: of the format.
        lists: by name, the files among ``files`` that hold records of others; none in version 1.
        token: that the names of the files in the folder carry, where these are not those of their records; only in
            version 2, in which the records of most files are elsewhere.

    Raises:
        CheckpointError: if a file name could lead out of the folder, or two files have one name.
    """

    files: dict[str, FileRecord]
    about: dict[str, Any] = field(default_factory=dict)
    version: int = WHOLE
    lists: dict[str, Listed] = field(default_factory=dict)
    token: str = ""

    def __post_init__(self) -> None:
        for key, record in self.files.items():
            if key != record.name:
                raise CheckpointError(f"A manifest calls a file both {key!r} and {record.name!r}.")
            check_file_name(record.name)
            check_file_name(record.file)
        if self.token:
            check_file_name(self.token)
        stored = [record.file for record in self.files.values()]
        if len({name.casefold() for name in stored}) != len(stored):
            raise CheckpointError(f"A manifest names a file twice: {shortened(str(sorted(stored)))}.")

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
        return sum(record.size for record in self.files.values()) + sum(each.num_bytes for each in self.lists.values())

    @property
    def num_files(self) -> int:
        """How many files there are."""
        return len(self.files) + sum(each.files for each in self.lists.values())

    def stored(self, name: str) -> str:
        """What a file is called in the folder."""
        record = self.files.get(name)
        return record.file if record else with_token(name, self.token)

    def names(self, file: str) -> bool:
        """Whether a file of the folder is one of the checkpoint's; where a list names it, whether its name fits."""
        return file in self._stored or (bool(self.token) and f".{self.token}" in file)

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(record.file for record in self.files.values())

    def metric(self, name: str) -> float | None:
        """A monitored value; ``None`` if it was not logged or is no number."""
        metrics = self.about.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        try:
            return None if value is None else float(value)
        except (OverflowError, TypeError, ValueError):
            return None

    def to_bytes(self) -> bytes:
        """The one way to write this manifest: sorted, with a hash of everything else in it.

        Raises:
            CheckpointError: if ``about`` holds what JSON cannot.
        """
        files = {name: _record_to_json(record) for name, record in self.files.items()}
        content: dict[str, Any] = {"files": files, "about": self.about, "version": self.version}
        if self.version >= SPLIT:
            content |= {"lists": {name: list(each) for name, each in self.lists.items()}, "token": self.token}
        try:
            _check_about(self.about)
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
        if type(version) is not int or version < 1:
            raise ManifestError(f"it has no version (found {shortened(repr(version))})")
        if version > VERSION:
            raise CheckpointError(
                f"has version {version} of the format; this installation reads versions up to {VERSION}: "
                "update trainwright (pip install --upgrade trainwright)"
            )
        files, about = content.get("files"), content.get("about")
        if not isinstance(files, dict) or not isinstance(about, dict):
            raise ManifestError("it lists no files")
        _check_about(about)
        records = {name: _record_from_json(name, value) for name, value in files.items()}
        if version == WHOLE:
            return cls(records, about, version)
        lists, token = content.get("lists"), content.get("token")
        if not isinstance(lists, dict) or not isinstance(token, str):
            raise ManifestError("it has no lists of files")
        return cls(records, about, version, {name: _listed(name, each, records) for name, each in lists.items()}, token)


def file_of(rank: int) -> str:
    """Name of the file of tensors that a rank writes."""
    return f"rank_{rank:05d}{TENSOR_FILE}"


def with_token(name: str, token: str) -> str:
    """What a file of one writing is called in a folder where the names of all its files carry its token.

    Args:
        name: of the file.
        token: ``""``: it is called by its name.
    """
    if not token:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{token}.{ending}" if dot else f"{name}.{token}"


def list_to_bytes(records: Iterable[FileRecord]) -> bytes:
    """A list of files, as it is written; the names under which they are stored follow from the manifest."""
    plain = {record.name: [record.size, record.hash, record.rank] for record in records}
    return json.dumps({"files": plain}, separators=(",", ":")).encode("ascii")


def list_from_bytes(data: bytes, token: str) -> list[FileRecord]:
    """What :func:`list_to_bytes` was given.

    Args:
        data: of the list.
        token: of the manifest.

    Raises:
        ManifestError: if it is no such list.
        CheckpointError: if it names files outside of its folder.
    """
    try:
        plain = parse_json(data)["files"].items()
        values = {name: {"size": size, _HASH: digest, "rank": rank} for name, (size, digest, rank) in plain}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"it is no list of files ({type(error).__name__}: {error})") from None
    for name in values:
        check_file_name(name)
    stored = {name: with_token(name, token) if token else "" for name in values}
    return [_record_from_json(name, {**value, "stored": stored[name]}) for name, value in values.items()]


def _listed(name: str, value: object, records: Mapping[str, FileRecord]) -> Listed:
    numbers = value if isinstance(value, list) and len(value) == len(Listed._fields) else []
    if name not in records or not numbers or not all(_is_natural(each) for each in numbers):
        raise ManifestError(f"its list {name} is {shortened(repr(value))}")
    return Listed(*numbers)


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
        content = parse_json(data)
    except ContentError as error:
        raise ManifestError(str(error)) from None
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
    content = value if isinstance(value, dict) else {}
    size, digest, rank, stored = (content.get(key) for key in ("size", _HASH, "rank", "stored"))
    is_hash = isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{32}", digest)
    if not (_is_natural(size) and _is_natural(rank) and is_hash and isinstance(stored, str | None)):
        raise ManifestError(f"its record of {name} is {shortened(repr(value))}")
    return FileRecord(name, size, digest, rank, stored or "")  # type: ignore[arg-type]


def _is_natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


_ABOUT: dict[str, type | tuple[type, ...]] = {
    "bytes": int,
    "created": str,
    "data_ranks": int,
    "epoch": int,
    "global_batch_size": int,
    "hugging_face": list,
    "kind": str,
    "layout": dict,
    "metrics": dict,
    "samples": int,
    "step": int,
    "strategy": str,
    "versions": dict,
    "world_size": int,
}


def _check_about(about: Mapping[str, Any]) -> None:
    """Refuse what readers would take for something else; ``None`` and what nobody reads may be there."""
    for name, kind in _ABOUT.items():
        value = about.get(name)
        is_wrong = (
            not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 1 << 63)
        )
        if value is not None and is_wrong:
            raise ManifestError(f"its {name} is {shortened(repr(value))}, not a {getattr(kind, '__name__', kind)}")
    for name, value in (about.get("layout") or {}).items():
        if not _is_natural(value):
            raise ManifestError(f"the axis {name} of its layout is {shortened(repr(value))}")

"""Contents of ``manifest.json``. Pure data; does not access files.

In format version 1 the manifest lists every file. In version 2, for many ranks, it lists files that list the others,
its *lists*: each has the records of the files of some ranks, so that no process handles a record of every rank.
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
from trainwright.core.text.printable import one_line, shortened

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.json"
"""Files of every checkpoint: the list of files, all values other than tensors, and the locations of tensor boxes."""
WHOLE, SPLIT = 1, 2
"""Format versions: a manifest that lists all files, and one with lists."""
VERSION = SPLIT
"""Newest format version that this code reads."""

TENSOR_FILE = ".safetensors"
"""Suffix of safetensors files; other tensor files hold the bytes of one tensor each."""

OBJECTS = "objects"
"""In a manifest's description: names of entries of Lightning's checkpoint dict that only the file's pickle holds."""

_HASH = "xxh3_128"


def objects_problem(about: Mapping[str, Any]) -> str:
    """Return why a checkpoint with :data:`OBJECTS` is only resumed from if the user trusts it, and what to type."""
    return (
        f"hooks or callbacks have put objects into {shortened(one_line(str(about[OBJECTS])))} of it: they are pickled "
        "and can run any code. If you wrote it, or trust who did, type trust=true (weights_only=False in Python); or "
        "start from its weights with init_from="
    )


class ManifestError(ValueError):
    """A malformed or damaged manifest."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as written.

    Args:
        name: logical name, e.g. ``rank_00003.safetensors``.
        size: bytes.
        hash: xxh3_128 of its bytes, 32 hexadecimal digits.
        rank: global rank that wrote it.
        stored: its name in the folder; ``""``: the same as ``name``. Object stores cannot rename, so there the names of
            one save carry its token.
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
    """Summary of a list of files."""

    files: int
    """Number of files."""
    num_bytes: int
    """Their total size."""


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and a description of it.

    Args:
        files: record of each file, by :attr:`FileRecord.name`; without those in lists.
        about: plain JSON: ``step``, ``epoch``, ``layout``, ``world_size``, ``strategy``, ``versions``, ``created``,
            ``metrics``, ``kind`` and more. NaN and infinities are written as the texts ``NaN``, ``Infinity`` and
            ``-Infinity``.
        version: of the format.
        lists: by name, the files among ``files`` that hold records of others; none in version 1.
        token: part of all stored file names, if these differ from the logical names; only in version 2, which does not
            list most of them.

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
                raise CheckpointError(f"A manifest names a file both {key!r} and {record.name!r}.")
            check_file_name(record.name)
            check_file_name(record.file)
        if self.token:
            check_file_name(self.token)
        stored = [record.file for record in self.files.values()]
        if len({name.casefold() for name in stored}) != len(stored):
            raise CheckpointError(f"A manifest lists a file twice: {shortened(str(sorted(stored)))}.")

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written; -1 if unknown."""
        step = self.about.get("step")
        return step if isinstance(step, int) else -1

    @property
    def created(self) -> str:
        """ISO time of writing; ``""`` if unknown."""
        return str(self.about.get("created", ""))

    @property
    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(record.size for record in self.files.values()) + sum(each.num_bytes for each in self.lists.values())

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self.files) + sum(each.files for each in self.lists.values())

    def stored(self, name: str) -> str:
        """Return the name of a file in the folder."""
        record = self.files.get(name)
        return record.file if record else with_token(name, self.token)

    def names(self, file: str) -> bool:
        """Return whether a stored file belongs to the checkpoint; for files in lists, judged by the token in its
        name."""
        return file in self._stored or (bool(self.token) and f".{self.token}" in file)

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(record.file for record in self.files.values())

    def metric(self, name: str) -> float | None:
        """Return a monitored value; ``None`` if it was not logged or is not a number."""
        metrics = self.about.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        try:
            return None if value is None else float(value)
        except (OverflowError, TypeError, ValueError):
            return None

    def to_bytes(self) -> bytes:
        """Return the canonical form of this manifest: sorted, with a hash of its contents.

        Raises:
            CheckpointError: if ``about`` is not plain JSON.
        """
        files = {name: _record_to_json(record) for name, record in self.files.items()}
        content: dict[str, Any] = {"files": files, "about": self.about, "version": self.version}
        if self.version >= SPLIT:
            content |= {"lists": {name: list(each) for name, each in self.lists.items()}, "token": self.token}
        try:
            _check_about(self.about)
            return _sealed(_finite(content))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"The description of a checkpoint must be plain JSON: {error}.") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the output of :meth:`to_bytes`.

        Raises:
            ManifestError: if any bit differs from what was written.
            CheckpointError: if a newer version of this package wrote it, or it names files outside of its folder.
        """
        content = _opened(data)
        version = content.get("version")
        if type(version) is not int or version < 1:
            raise ManifestError(f"it has no version (found {shortened(repr(version))})")
        if version > VERSION:
            raise CheckpointError(
                f"has format version {version}; this installation reads versions up to {VERSION}: "
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
    """Return the name of a rank's tensor file."""
    return f"rank_{rank:05d}{TENSOR_FILE}"


def with_token(name: str, token: str) -> str:
    """Return the stored name of a file whose folder puts a token into all names.

    Args:
        name: of the file.
        token: ``""``: the name is unchanged.
    """
    if not token:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{token}.{ending}" if dot else f"{name}.{token}"


def list_to_bytes(records: Iterable[FileRecord]) -> bytes:
    """Return the contents of a list of files; stored names follow from the manifest."""
    plain = {record.name: [record.size, record.hash, record.rank] for record in records}
    return json.dumps({"files": plain}, separators=(",", ":")).encode("ascii")


def list_from_bytes(data: bytes, token: str) -> list[FileRecord]:
    """Parse the output of :func:`list_to_bytes`.

    Args:
        data: of the list.
        token: of the manifest.

    Raises:
        ManifestError: if it is malformed.
        CheckpointError: if it names files outside of its folder.
    """
    try:
        plain = parse_json(data)["files"].items()
        values = {name: {"size": size, _HASH: digest, "rank": rank} for name, (size, digest, rank) in plain}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"it is not a list of files ({type(error).__name__}: {error})") from None
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
    """Raise :class:`CheckpointError` unless ``name`` is a plain visible file in the checkpoint's own folder."""
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(
            f"A checkpoint cannot have a file named {name!r}: allowed are letters, digits, '_', '-' and '.', not "
            f"beginning with '.', without folders, and not {MANIFEST!r}."
        )


# Other characters are illegal in some stores; separators and '..' would lead out of the folder.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.\-]{0,199}")


def _sealed(content: dict[str, Any]) -> bytes:
    body = _canonical(content)
    return _canonical({**content, _HASH: xxhash.xxh3_128_hexdigest(body)})


def _opened(data: bytes) -> dict[str, Any]:
    """Return the content of sealed bytes.

    The envelope is the same in every format version, so that a flipped bit in the version counts as damage.
    """
    try:
        content = parse_json(data)
    except ContentError as error:
        raise ManifestError(str(error)) from None
    if not isinstance(content, dict) or _HASH not in content:
        raise ManifestError("it has no hash")
    content.pop(_HASH)
    # Compared as bytes: whitespace, letter case of digits and key order do not survive parsing.
    if _sealed(content) != data:
        raise ManifestError("it does not match its hash")
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as texts; raise for keys that are not texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"keys must be strings, not {wrong[0]!r}")
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


_ABOUT: dict[type, tuple[str, ...]] = {
    int: ("bytes", "data_ranks", "epoch", "global_batch_size", "samples", "step", "world_size"),
    str: ("created", "kind", "strategy"),
    list: ("hugging_face",),
    dict: ("layout", "metrics", "versions"),
}


def _check_about(about: Mapping[str, Any]) -> None:
    """Raise for values of a wrong type under known names; ``None`` and unknown names are allowed."""
    for kind, value, name in ((kind, about.get(name), name) for kind, names in _ABOUT.items() for name in names):
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (is_right and (kind is not int or abs(value) < 1 << 63)):
            raise ManifestError(f"its {name} is {shortened(repr(value))}, not a {kind.__name__}")
    for name, value in (about.get("layout") or {}).items():
        if not _is_natural(value):
            raise ManifestError(f"the axis {name} of its layout is {shortened(repr(value))}")

"""Discovery and validation of text files, and their concatenation into one file for memory mapping.

Imports neither torch nor lightning, so configurations are checked before any process pays for them.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SNIFF_BYTES = 1 << 20
"""Bytes of a file checked for text."""

STALE_SECONDS = 3600.0
"""Age, seconds, at which an unfinished cache file is considered abandoned by a killed process."""

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class CorpusError(ValueError):
    """The requested text cannot be used; the message has the given value and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """Files of text in reading order."""

    root: Path
    """The file itself, or the folder of ``files``."""
    files: tuple[Path, ...]
    """Absolute paths, sorted by path relative to ``root``."""

    @property
    def is_single_file(self) -> bool:
        """True if the text is one file, which is mapped in place."""
        return self.files == (self.root,)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def standard_library() -> Corpus:
    """Return the source files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [file for file in _walk(root, skip=_TEST_FOLDERS) if file.suffix == ".py"]
    if not found:
        raise CorpusError(
            f"The standard library at {root} has no source files (*.py). "
            "Type data.path=/path/to/text, a text file or folder"
        )
    return Corpus(root, tuple(found))


def find_corpus(path: str | os.PathLike[str] | None, pattern: str = "*") -> Corpus:
    """Return the text at ``path``.

    Args:
        path: a text file, or a folder, whose files are read in order of their relative paths, without hidden ones.
            ``None``: :func:`standard_library`.
        pattern: shell-style pattern for names of a folder's files, such as ``*.txt``.

    Raises:
        CorpusError: if the path is missing, has no such file, is empty, or has a file that is not text.
    """
    if path is None:
        return standard_library()
    root = Path(path).expanduser().absolute()
    if not root.exists():
        raise CorpusError(
            f"data.path={path} does not exist (resolved to {root}). Type a text file or a folder of text files."
        )
    if root.is_file():
        corpus = Corpus(root, (root,))
    else:
        corpus = Corpus(root, tuple(file for file in _walk(root) if file.match(pattern)))
        if not corpus.files:
            raise CorpusError(
                f"data.path={path} has no file whose name matches data.pattern={pattern!r}. "
                "Type a folder of text files, or another pattern, such as data.pattern='*.txt'."
            )
    for file in corpus.files:
        _refuse_binary(file, in_folder=not corpus.is_single_file)
    if corpus.num_bytes == 0:
        raise CorpusError(f"data.path={path} is empty (0 bytes of text). Type a file or folder with text.")
    return corpus


def default_cache_dir() -> Path:
    """Return the folder of concatenated text: ``$XDG_CACHE_HOME/trainwright/corpora``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainwright" / "corpora"


def joined_file(corpus: Corpus, cache_dir: Path) -> Path:
    """Return the file with the text of ``corpus``, which may not exist yet.

    A folder's file is named after the folder and a hash of every file's relative path, size and modification time, so
    changed text gets a new file.
    """
    if corpus.is_single_file:
        return corpus.root
    key = hashlib.blake2b(str(corpus.root).encode(), digest_size=8)
    for file in corpus.files:
        status = file.stat()
        key.update(
            f"\0{file.relative_to(corpus.root)}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="replace")
        )
    return cache_dir / f"{corpus.root.name or 'root'}-{key.hexdigest()}.txt"


def join_files(corpus: Corpus, cache_dir: Path) -> Path:
    """Concatenate the text of ``corpus`` unless that exists, and return its file.

    A newline is appended to files that do not end with one. Written to a temporary file and renamed, so several nodes
    may do this at once and a killed process leaves no incomplete file.

    Raises:
        CorpusError: if a file is not UTF-8 text.
    """
    target = joined_file(corpus, cache_dir)
    if corpus.is_single_file or target.exists():
        return target
    with new_file(target) as out:
        for file in corpus.files:
            _append_text(file, out)
    return target


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary cache file that is renamed to ``target`` on success and deleted on an error.

    Creates the folder, and removes abandoned files in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    unfinished = target.with_name(f"{target.name}.{os.uname().nodename}-{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as out:
            yield out
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class Split:
    """Byte ranges of the training, validation and test text."""

    train: tuple[int, int]
    validation: tuple[int, int]
    test: tuple[int, int]


def split_by_position(num_bytes: int, held_out: float) -> Split:
    """Split a text: the beginning trains; of the last ``held_out`` part, the first half validates, the second tests.

    Raises:
        CorpusError: if ``held_out`` is not between 0 and 1.
    """
    if not 0 < held_out < 1:
        raise CorpusError(f"data.held_out={held_out} (allowed: more than 0, less than 1). Type a part, such as 0.05.")
    num_held_out = round(num_bytes * held_out)
    first, second = num_bytes - num_held_out, num_bytes - num_held_out // 2
    return Split((0, first), (first, second), (second, num_bytes))


def num_windows(num_bytes: int, seq_len: int) -> int:
    """Return the number of windows of ``seq_len + 1`` bytes that start ``seq_len`` bytes apart."""
    return max(0, (num_bytes - 1) // seq_len)


def problems_of_size(num_bytes: int, seq_len: int, held_out: float, num_data_ranks: int) -> list[str]:
    """Return why a text of ``num_bytes`` is too short for these windows and data ranks, if it is."""
    if seq_len < 1:
        return [f"data.seq_len={seq_len} (allowed: 1 or more bytes)"]
    try:
        split = split_by_position(num_bytes, held_out)
    except CorpusError as error:
        return [str(error)]
    # Every rank needs a training window, but not an evaluation window.
    parts = (("training", split.train, num_data_ranks), ("validation", split.validation, 1), ("test", split.test, 1))
    found = (_problem_of_part(name, end - begin, seq_len, needed) for name, (begin, end), needed in parts)
    # Only the first: the remedy of the others is the same.
    return [problem for problem in found if problem is not None][:1]


def _problem_of_part(name: str, num_bytes: int, seq_len: int, needed: int) -> str | None:
    windows = num_windows(num_bytes, seq_len)
    if windows >= needed:
        return None
    why = "at least one is needed" if needed == 1 else f"{needed} data ranks need one each"
    remedies = ["more text (data.path)", "a shorter data.seq_len", "another data.held_out"]
    if needed > 1:
        remedies.append("fewer devices")
    return (
        f"The {name} text has {num_bytes} bytes, which is {windows} windows of data.seq_len={seq_len}, but {why}. "
        f"Use {', '.join(remedies[:-1])} or {remedies[-1]}."
    )


def check(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of the ``data`` part of a configuration that uses ``TextCorpus``.

    Args:
        config: the composed configuration, with a mapping ``data``.
        num_data_ranks: ranks that read different samples.
    """
    data = config["data"]
    try:
        corpus = find_corpus(data.get("path"), data.get("pattern", "*"))
    except CorpusError as error:
        return [str(error)]
    held_out = float(data.get("held_out", 0.05))
    return problems_of_size(corpus.num_bytes, int(data["seq_len"]), held_out, num_data_ranks)


def _walk(root: Path, skip: Collection[str] = ()) -> list[Path]:
    """Return files below ``root``, sorted by relative path, that are not hidden nor in a folder named in ``skip``."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _refuse_binary(file: Path, in_folder: bool) -> None:
    with file.open("rb") as stream:
        begin = stream.read(SNIFF_BYTES)
    decoder = codecs.getincrementaldecoder("utf-8")()
    _decode(decoder, begin, file, in_folder, final=len(begin) < SNIFF_BYTES)


def _decode(decoder: codecs.IncrementalDecoder, piece: bytes, file: Path, in_folder: bool, final: bool) -> None:
    try:
        decoder.decode(piece, final)
        why = "it has a zero byte" if b"\0" in piece else ""
    except UnicodeDecodeError as error:
        why = f"byte {error.object[error.start]:#04x} is not UTF-8"
    if why:
        remedy = "Select the text files, such as data.pattern='*.txt', or" if in_folder else "Type a text file, or"
        raise CorpusError(f"{file} is not text: {why}. {remedy} convert it to UTF-8.")


def _append_text(file: Path, out: BinaryIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    last = b"\n"
    with file.open("rb") as stream:
        while piece := stream.read(SNIFF_BYTES):
            _decode(decoder, piece, file, in_folder=True, final=False)
            out.write(piece)
            last = piece[-1:]
    _decode(decoder, b"", file, in_folder=True, final=True)
    if last != b"\n":
        out.write(b"\n")


def _remove_stale(cache_dir: Path) -> None:
    """Remove abandoned unfinished files in ``cache_dir``."""
    for file in cache_dir.glob("*.unfinished"):
        try:
            if time.time() - file.stat().st_mtime > STALE_SECONDS:
                file.unlink()
        except FileNotFoundError:
            continue  # finished by its process, or removed by another

"""Documents, conversations and preference pairs as rows of tokens."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainwright.recipes.data.corpus import default_cache_dir, new_file
from trainwright.recipes.data.text_corpus import loader_of
from trainwright.recipes.finetune.encoding import NOT_TRAINED, encode_all, load_tokenizer
from trainwright.recipes.finetune.records import RecordsError, files_of, read_records
from trainwright.recipes.hugging_face.folders import model_folder


class DocumentPiece(NamedTuple):
    """Part of a document: tokens ``begin`` to ``end`` are inputs, each predicts the next token."""

    document: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of its positions."""
        return self.end - self.begin


def pieces_of(lengths: Sequence[int], seq_len: int, split: bool) -> list[DocumentPiece]:
    """Cut documents into pieces that fit into a row.

    Args:
        lengths: tokens per document.
        seq_len: tokens per row.
        split: cut a longer document into several pieces, which predict each of its tokens but the first once; off:
            keep only its beginning.
    """
    return [
        DocumentPiece(number, begin, min(begin + seq_len, length - 1))
        for number, length in enumerate(lengths)
        for begin in (range(0, length - 1, seq_len) if split else range(min(1, max(0, length - 1))))
    ]


def pack(pieces: Sequence[DocumentPiece], seq_len: int) -> list[list[DocumentPiece]]:
    """Pack pieces into rows by best-fit decreasing: each piece goes into the fullest row with room for it.

    Deterministic in the pieces. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest rows,
    plus 4.
    """
    rows: list[list[DocumentPiece]] = []
    room: list[tuple[int, int]] = []  # free positions of a row, and its index
    for piece in sorted(pieces, key=lambda piece: piece.size, reverse=True):
        place = bisect_left(room, (piece.size, -1))
        if place == len(room):
            rows.append([])
            room.append((seq_len, len(rows) - 1))
        free, row = room.pop(place)
        rows[row].append(piece)
        insort(room, (free - piece.size, row))
    return rows


IGNORED = -100
"""Label of an untrained position, as in torch and transformers."""
_ARRAYS = {"tokens": "int32", "targets": "int16", "lengths": "int64"}
_VERSION = 1  # of the cache format


class Documents:
    """Tokens of documents in memory-mapped files.

    Args:
        stem: path of the files without the suffixes of the arrays.
    """

    def __init__(self, stem: Path) -> None:
        self.stem = stem
        self.tokens, self.targets, self.lengths = (
            np.fromfile(_file(stem, name), dtype) if name == "lengths" else np.memmap(_file(stem, name), dtype, "r")
            for name, dtype in _ARRAYS.items()
        )
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __reduce__(self) -> Any:
        return Documents, (self.stem,)  # pickling a memmap would copy all tokens into every worker

    def of(self, piece: DocumentPiece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return input tokens, target tokens, and bytes of the targets, each ``(piece.size,)``."""
        start = self.starts[piece.document]
        begin, end = start + piece.begin, start + piece.end
        return self.tokens[begin:end], self.tokens[begin + 1 : end + 1], self.targets[begin + 1 : end + 1]

    def trains(self, piece: DocumentPiece) -> bool:
        """Return whether any token of a piece is trained."""
        return bool((self.of(piece)[2] != NOT_TRAINED).any())


class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows of ``seq_len`` positions with packed pieces, each starting at position id 0.

    An item is ``input_ids``, ``labels`` (the target at each position, or -100) and ``position_ids``, all int64
    ``(seq_len,)``; ``num_bytes``, UTF-8 bytes of the labels' text, and ``number``, the row's index, both int64 ``()``.

    Args:
        documents: the tokens.
        rows: pieces of each row.
        seq_len: positions per row.
        pad: token at unused positions.
        width: distance of the starts of pieces; ``None``: pieces are contiguous.
    """

    def __init__(
        self, documents: Documents, rows: list[list[DocumentPiece]], seq_len: int, pad: int, width: int | None = None
    ) -> None:
        self.documents, self.rows, self.seq_len, self.pad, self.width = documents, rows, seq_len, pad, width

    def __len__(self) -> int:
        return len(self.rows)

    def separate(self, index: int, most: int) -> TokenRows:
        """Return the first pieces of a row, at most ``most``, each in a separate row."""
        return TokenRows(self.documents, [[piece] for piece in self.rows[index][:most]], self.seq_len, self.pad)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the row ``index``."""
        ids = np.full(self.seq_len, self.pad, np.int64)
        labels = np.full(self.seq_len, IGNORED, np.int64)
        positions = np.arange(self.seq_len)
        begin = num_bytes = 0
        for number, piece in enumerate(self.rows[index]):
            begin = begin if self.width is None else number * self.width
            read, predicted, count = self.documents.of(piece)
            place = slice(begin, begin + piece.size)
            trained = count != NOT_TRAINED
            ids[place] = read
            labels[place] = np.where(trained, predicted, IGNORED)
            positions[begin:] = np.arange(self.seq_len - begin)
            num_bytes += int(count[trained].sum())
            begin = place.stop
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        counts = {"num_bytes": torch.tensor(num_bytes), "number": torch.tensor(index)}
        return {name: torch.from_numpy(value) for name, value in arrays.items()} | counts


class FineTuneData(LightningDataModule):
    """Records as rows of tokens, see :class:`TokenRows`, with a training and validation split by document.

    Tokens are computed once per node, into files under ``cache_dir`` named after the records and the tokenizer.

    Args:
        path: see :func:`~trainwright.recipes.finetune.records.read_records`.
        tokenizer: a folder with a fast tokenizer of Hugging Face, or the id of one on the Hub.
        format: ``"text"``, ``"chat"`` or ``"preference"``.
        seq_len: positions per row. A longer text is split, a longer conversation truncated.
        batch_size: rows per micro-batch.
        packing: pack several documents into one row; off: one document per row. A row of ``"preference"`` is always
            one pair, each answer in one half of the row.
        held_out: part of the documents used for validation, 0 or more, less than 1; 0: no validation.
        chat_template: ``None``: the tokenizer's own; ``"chatml"``; or a file with a Jinja template.
        split: of a dataset with several.
        allow_download: whether ids may be looked up on the Hub.
        cache_dir: folder of cached tokens; ``None``: ``~/.cache/trainwright/corpora``.
        num_workers: loader processes per rank; 0: the rank itself.
        seed: of the split.

    Raises:
        RecordsError: (in ``prepare_data`` and ``setup``) if a record cannot be used, or there are too few.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | os.PathLike[str],
        format: str = "text",
        seq_len: int = 512,
        batch_size: int = 4,
        packing: bool = True,
        held_out: float = 0.05,
        chat_template: str | None = None,
        split: str = "train",
        allow_download: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path, self.format, self.split, self.allow_download = str(path), format, split, allow_download
        self.tokenizer_folder = model_folder(tokenizer, allow_download)
        self.chat_template = chat_template
        self.seq_len, self.batch_size, self.packing = seq_len, batch_size, packing
        self.held_out, self.seed, self.num_workers = held_out, seed, num_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.train: TokenRows | None = None
        self.validation: TokenRows | None = None

    def prepare_data(self) -> None:
        """Encode the records, on one rank per node."""
        stem = self.stem()
        if all(_file(stem, name).exists() for name in _ARRAYS):
            return
        tokenizer = load_tokenizer(self.tokenizer_folder, self.chat_template)
        records = read_records(self.path, self.split, self.allow_download)
        lengths = []
        with ExitStack() as stack:
            outs = {name: stack.enter_context(new_file(_file(stem, name))) for name in _ARRAYS}
            for encoded in encode_all(records, tokenizer, self.format):
                outs["tokens"].write(np.asarray(encoded.ids, _ARRAYS["tokens"]).tobytes())
                outs["targets"].write(np.asarray(encoded.targets, _ARRAYS["targets"]).tobytes())
                lengths.append(len(encoded.ids))
            outs["lengths"].write(np.asarray(lengths, _ARRAYS["lengths"]).tobytes())
        if not sum(lengths):
            raise RecordsError(f"data.path={self.path}: has no records. Type a path with at least one")

    def stem(self) -> Path:
        """Return the path of the encoded records without the suffixes of the arrays."""
        key = hashlib.blake2b(digest_size=8)
        files = [*self.tokenizer_folder.glob("tokenizer*.json"), *self.tokenizer_folder.glob("*.jinja")]
        if Path(self.path).expanduser().exists():
            files += _record_files(Path(self.path).expanduser())
        if self.chat_template not in (None, "chatml"):
            files.append(Path(str(self.chat_template)).expanduser())
        parts = [_VERSION, self.path, self.format, self.split, self.chat_template, *_stamps(files)]
        key.update(repr(parts).encode())
        return self.cache_dir / f"{Path(self.path).name}-{key.hexdigest()}"

    def setup(self, stage: str) -> None:
        """Map the tokens, split documents and plan the rows, equally on every rank."""
        if self.train is not None:
            return
        documents = Documents(self.stem())
        per_unit = 2 if self.format == "preference" else 1
        units = len(documents.lengths) // per_unit
        order = np.random.default_rng(self.seed).permutation(units)
        num_held_out = round(units * self.held_out)
        num_held_out = max(1, num_held_out) if self.held_out else 0
        train, validation = sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())
        if not train:
            raise RecordsError(f"data.path={self.path}: {units} record(s) leave none for training. Add records")
        pad = self._pad()
        self.train, self.validation = (self._rows(documents, part, per_unit, pad) for part in (train, validation))
        rank_zero_info(
            f"{len(train)} records in {len(self.train)} training rows, {len(validation)} in {len(self.validation)} "
            f"validation rows; rows of {self.seq_len} tokens"
        )

    def _rows(self, documents: Documents, units: list[int], per_unit: int, pad: int) -> TokenRows:
        chosen = [unit * per_unit + number for unit in units for number in range(per_unit)]
        width = self.seq_len // per_unit
        pieces = pieces_of(documents.lengths[chosen].tolist(), width, split=self.format == "text")
        pieces = [piece._replace(document=chosen[piece.document]) for piece in pieces]
        cut = sum(documents.lengths[number] - 1 > width for number in chosen) if self.format != "text" else 0
        empty = {piece.document // per_unit for piece in pieces if not documents.trains(piece)}
        empty |= {number // per_unit for number in chosen if documents.lengths[number] < 2}
        if cut or empty:
            rank_zero_warn(
                f"{cut} of {len(chosen)} conversations are longer than {width} tokens and truncated; "
                f"{len(empty)} records without an answer in the rest are left out. A larger data.seq_len keeps them."
            )
        pieces = [piece for piece in pieces if piece.document // per_unit not in empty]
        if per_unit == 2:
            pairs = [list(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
            return TokenRows(documents, pairs, self.seq_len, pad, width)
        rows = pack(pieces, self.seq_len) if self.packing else [[piece] for piece in pieces]
        return TokenRows(documents, rows, self.seq_len, pad)

    def _pad(self) -> int:
        tokenizer = load_tokenizer(self.tokenizer_folder)
        return next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt; for conversations rendered with the chat template."""
        tokenizer = load_tokenizer(self.tokenizer_folder, self.chat_template)
        if self.format == "text":
            return list(tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = load_tokenizer(self.tokenizer_folder).decode(list(ids), skip_special_tokens=True)
        return text

    def sample_prompt(self) -> list[int]:
        """Return the beginning of a record, preferably of validation: up to its first answer, or 16 tokens of text."""
        rows = self.validation or self.train
        assert rows, "setup has not run"
        read, _, targets = rows.documents.of(rows.rows[0][0])
        first = int((targets != NOT_TRAINED).argmax())
        prompt: list[int] = read[: first + 1 if first else 16].tolist()
        return prompt

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return training rows, shuffled."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """Return validation rows, in order."""
        return self._loader(self.validation) if self.held_out else []

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return validation rows, in order."""
        return self._loader(self.validation)

    def _loader(self, rows: TokenRows | None, shuffle: bool = False) -> DataLoader[dict[str, Tensor]]:
        return loader_of(rows, self.batch_size, self.num_workers, shuffle)


def _file(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}.{name}")


def _stamps(files: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and modification time of files."""
    for file in sorted(files):
        status = file.stat()
        yield str(file.absolute()), status.st_size, status.st_mtime_ns


def _record_files(path: Path) -> list[Path]:
    is_dataset = path.is_dir() and any(path.glob("**/*.arrow"))
    return list(path.glob("**/*.arrow")) if is_dataset else files_of(str(path))

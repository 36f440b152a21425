"""Windows of tokens of a text, by a tokenizer on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.recipes.data.corpus import new_file
from trainwright.recipes.data.text_corpus import TextCorpus

TOKENIZER_FILE = "tokenizer.json"
"""File of Hugging Face's fast tokenizers; contains data, no code."""


class TokenCorpus(TextCorpus):
    """:class:`TextCorpus` in tokens, int32 ``(B, seq_len + 1)``; without a tokenizer in bytes.

    Tokens are computed once, into a file under ``cache_dir`` named after the text and the tokenizer. No special tokens
    are added.

    Args:
        tokenizer: a folder with a ``tokenizer.json`` of Hugging Face; ``None``: a token is a byte.
        **kwargs: see :class:`TextCorpus`; lengths are in tokens.
    """

    def __init__(self, tokenizer: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokenizer_file = None if tokenizer is None else Path(tokenizer).expanduser() / TOKENIZER_FILE
        if self.tokenizer_file is not None:
            self.dtype = "int32"

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.tokenizer_file))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        if self.tokenizer_file is None:
            return super().encode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        if self.tokenizer_file is None:
            return super().decode(ids)
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def file(self) -> Path:
        """Return the file of tokens, created by a rename if missing."""
        text = super().file()
        if self.tokenizer_file is None:
            return text
        target = self._token_file(text)
        if target.exists():
            return target
        with new_file(target) as out:
            for piece in _pieces(text):
                out.write(np.asarray(self.encode(piece), dtype=self.dtype).tobytes())
        return target

    def _token_file(self, text: Path) -> Path:
        assert self.tokenizer_file is not None
        status = text.stat()
        key = hashlib.blake2b(self.tokenizer_file.read_bytes(), digest_size=8)
        key.update(f"\0{text.absolute()}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="replace"))
        return self.cache_dir / f"{text.stem}-{key.hexdigest()}.tokens"


def _pieces(text: Path, size: int = 1 << 20) -> Iterator[str]:
    """Yield the text in pieces of whole lines of about ``size`` characters, which never split a word."""
    with text.open(encoding="utf-8", newline="") as lines:
        while piece := lines.readlines(size):
            yield "".join(piece)

"""Tokenizer files, copied from a run directory into an export."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.checkpoint.store.paths import is_remote, split_path
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import open_regular, read_at_most

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Names of the files taken from a tokenizer's folder."""


def tokenizer_files(checkpoint: str, folder: str | Path | None) -> dict[str, bytes]:
    """Return the contents of tokenizer files, by name.

    Args:
        checkpoint: path of the exported checkpoint.
        folder: of the files; ``None``: ``tokenizer/`` of the run directory whose ``checkpoints/`` has the checkpoint,
            if there is such a folder.

    Raises:
        CheckpointError: if a file is a symbolic link, not a regular file or too large, or if ``folder`` has none of
            them.
    """
    found = _of_run(checkpoint) if folder is None else Path(folder).expanduser()
    if found is None:
        return {}
    files = {name: _content(found / name) for name in TOKENIZER_FILES if os.path.lexists(found / name)}
    if not files and folder is not None:
        raise CheckpointError(
            f"tokenizer={folder} is not a tokenizer's folder: it has none of {', '.join(TOKENIZER_FILES)}. Give the "
            "folder that save_pretrained() of the tokenizer wrote."
        )
    return files


def _of_run(checkpoint: str) -> Path | None:
    if is_remote(checkpoint):
        return None
    parent, _ = split_path(checkpoint)
    run, name = os.path.split(parent)
    folder = Path(run, "tokenizer")
    return folder if name == "checkpoints" and folder.is_dir() and not folder.is_symlink() else None


def _content(path: Path) -> bytes:
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            return read_at_most(file, str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); links are not followed. Give tokenizer= "
            "(--tokenizer) a folder with the files themselves."
        ) from error

"""Documents, conversations and preference pairs as plain records; imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMATS = ("text", "chat", "preference")
_SUFFIXES = (".jsonl", ".json", ".txt", ".md")
# ShareGPT's names of the roles.
_ROLES = {"human": "user", "gpt": "assistant"}

Messages = list[dict[str, Any]]


class RecordsError(ValueError):
    """A record cannot be used; the message has its place, content, and what is allowed."""


def read_records(path: str, split: str = "train", allow_download: bool = False) -> Iterator[dict[str, Any]]:
    """Yield records.

    Args:
        path: a ``.jsonl`` file (an object per line), a ``.json`` file (a list of objects), a ``.txt`` or ``.md`` file
            (one document), a folder of these in order of names, a folder written by ``save_to_disk`` of ``datasets``,
            or the id of a dataset on the Hugging Face Hub.
        split: of a dataset with several.
        allow_download: whether an id may be looked up on the Hub; downloaded files are not executed.

    Raises:
        RecordsError: if there is nothing at ``path``, or a file does not have the format of its suffix.
        ModuleNotFoundError: if ``datasets`` is needed and not installed.
    """
    where = Path(path).expanduser()
    if where.is_dir() and ((where / "state.json").is_file() or (where / "dataset_dict.json").is_file()):
        yield from _dataset(where, split, from_disk=True)
    elif where.exists():
        for file in files_of(path):
            yield from _of_file(file)
    elif allow_download:
        yield from _dataset(path, split, from_disk=False)
    else:
        files_of(path)


def files_of(path: str) -> list[Path]:
    """Return the files at ``path``.

    Raises:
        RecordsError: if there are none.
    """
    where = Path(path).expanduser()
    found = [where] if where.is_file() else sorted(each for each in where.glob("**/*") if each.suffix in _SUFFIXES)
    if not found or found[0].suffix not in _SUFFIXES:
        raise RecordsError(
            f"data.path={path}: has no file of records (resolved to {where.absolute()}). Type a file or a folder of "
            f"files that end in {', '.join(_SUFFIXES)}, a folder written by save_to_disk of datasets, or, with "
            "data.allow_download=true, the id of a dataset on the Hub"
        )
    return found


def _of_file(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix in (".txt", ".md"):
        yield {"text": file.read_text(encoding="utf-8")}
        return
    try:
        if file.suffix == ".json":
            found = json.loads(file.read_text(encoding="utf-8"))
            yield from (_object(each, f"{file}, number {n}") for n, each in enumerate(found, 1))
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(json.loads(line), f"{file}:{number}")
    except ValueError as error:
        if isinstance(error, RecordsError):
            raise
        raise RecordsError(f"{file} is not JSON ({error}). Write one JSON object per line (.jsonl)") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordsError(f"{where}: is a {type(value).__name__}, but a record is a JSON object")
    return value


def _dataset(path: Path | str, split: str, from_disk: bool) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'data.path={path} needs datasets, which is not installed. Type: pip install "trainwright[datasets]"'
        ) from None
    found: Any = datasets.load_from_disk(str(path)) if from_disk else datasets.load_dataset(str(path), split=split)
    yield from found[split] if isinstance(found, datasets.DatasetDict) else found


# ---- contents -------------------------------------------------------------------------------------------------------


def text_of(record: Mapping[str, Any]) -> str:
    """Return the text of a document ``{"text": ...}``."""
    text = record.get("text")
    if not isinstance(text, str):
        raise RecordsError(f"{_shown(record)}: data.format=text needs a string under 'text'")
    return text


def messages_of(record: Mapping[str, Any]) -> Messages:
    """Return the messages of a conversation.

    Accepted are ``messages`` (``role``, ``content``), ``conversations`` (``from``, ``value``), ``prompt`` with
    ``completion``, and ``instruction`` (with ``input``) with ``output`` or ``response``.
    """
    if "messages" in record:
        return _checked(record["messages"], record)
    if "conversations" in record:
        turns = [{"role": turn.get("from"), "content": turn.get("value")} for turn in record["conversations"]]
        return _checked([{**turn, "role": _ROLES.get(turn["role"], turn["role"])} for turn in turns], record)
    if "prompt" in record and "completion" in record:
        return _checked(
            _as_messages(record["prompt"], "user") + _as_messages(record["completion"], "assistant"), record
        )
    answer = record.get("output", record.get("response"))
    if "instruction" in record and answer is not None:
        asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        return _checked(_as_messages(asked, "user") + _as_messages(answer, "assistant"), record)
    raise RecordsError(
        f"{_shown(record)}: data.format=chat needs messages, conversations, prompt with completion, or instruction "
        "with output"
    )


def pair_of(record: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """Return the conversations of a preference record with the chosen and with the rejected answer.

    Accepted are ``prompt``, ``chosen`` and ``rejected`` as strings or as lists of messages; without a ``prompt``,
    ``chosen`` and ``rejected`` are whole conversations.
    """
    if "chosen" not in record or "rejected" not in record:
        raise RecordsError(f"{_shown(record)}: data.format=preference needs chosen and rejected (and usually prompt)")
    before = _as_messages(record["prompt"], "user") if "prompt" in record else []
    chosen, rejected = (
        _checked(before + _as_messages(record[which], "assistant"), record) for which in ("chosen", "rejected")
    )
    return chosen, rejected


def _as_messages(value: Any, role: str) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _checked(messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Messages:
    if not messages or not all(isinstance(each.get("role"), str) for each in messages):
        raise RecordsError(f"{_shown(record)}: every message needs a role, and there must be at least one message")
    if not any(each["role"] == "assistant" for each in messages):
        raise RecordsError(f"{_shown(record)}: has no message of the assistant, so nothing would be trained")
    return [dict(each) for each in messages]


def _shown(record: Mapping[str, Any]) -> str:
    text = json.dumps({key: str(value)[:40] for key, value in record.items()}, ensure_ascii=False)
    return f"A record {text[:200]}"

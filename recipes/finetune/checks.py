"""Checks of a configuration of the ``finetune`` recipe; imports neither torch nor transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from trainwright.recipes.finetune import records
from trainwright.recipes.hugging_face import checks as of_model
from trainwright.recipes.hugging_face.folders import missing_folder, offline_problem

_KINDS = ("lora", "dora", "ia3")
_CHECKED_RECORDS = 8


def check(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of a configuration whose module is ``FineTuneModule`` and whose data is ``FineTuneData``.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    if importlib.util.find_spec("transformers") is None:
        return [of_model.MISSING.format(recipe=config["name"])]
    module, data = config["module"], config["data"]
    problems = [*_of_model(module), *_of_adapter(module.get("adapter")), *_of_values(data), *_of_tokenizer(data)]
    return problems or list(_of_records(data, num_data_ranks))


def _of_model(module: Mapping[str, Any]) -> Iterator[str]:
    given = str(module["pretrained"])
    folder = Path(given).expanduser()
    if not folder.is_dir():
        if not module["allow_download"]:
            yield f"module.pretrained={missing_folder(given)}".replace("allow_download", "module.allow_download")
            return
        cached, problem = offline_problem(given)
        if problem:
            yield f"module.pretrained={problem}"
        if cached is None:
            return
        folder = cached
    yield from of_model.problems_of_folder(folder, given)
    yield from of_model.problems_of_sizes({**module, "pretrained": str(folder)})


def _of_adapter(adapter: Mapping[str, Any] | None) -> Iterator[str]:
    if adapter is None:
        return
    if adapter.get("kind") not in _KINDS:
        yield f"module.adapter.kind={adapter.get('kind')} (allowed: {', '.join(_KINDS)}). Type adapter=lora"
    if adapter.get("quantize") not in (None, "nf4"):
        yield f"module.adapter.quantize={adapter['quantize']} (allowed: null, nf4). Type module.adapter.quantize=nf4"
    elif adapter.get("quantize") and adapter.get("kind") == "dora":
        yield (
            "module.adapter.kind=dora with module.adapter.quantize=nf4 (allowed: lora, ia3): DoRA needs the "
            "norms of whole weights. Type adapter=qlora"
        )
    if importlib.util.find_spec("peft") is None:
        yield 'module.adapter needs peft, which is not installed. Type: pip install "trainwright[peft]"'
    rank = adapter.get("r", 1)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        yield f"module.adapter.r={rank} (allowed: 1 or more). Type module.adapter.r=16"


def _of_values(data: Mapping[str, Any]) -> Iterator[str]:
    if data["format"] not in records.FORMATS:
        yield f"data.format={data['format']} (allowed: {', '.join(records.FORMATS)})"
    if not 0 <= float(data["held_out"]) < 1:
        yield f"data.held_out={data['held_out']} (allowed: 0 or more, less than 1). Type data.held_out=0.05"
    length = data["seq_len"]
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        yield f"data.seq_len={length} (allowed: 2 or more tokens). Type module.seq_len=512"
    elif data["format"] == "preference" and length % 2:
        yield f"data.seq_len={length} with data.format=preference (allowed: an even number, one half per answer)"


def _of_tokenizer(data: Mapping[str, Any]) -> Iterator[str]:
    folder = Path(str(data["tokenizer"])).expanduser()
    if not folder.is_dir():
        return  # the module's folder is checked separately, an id by the Hub
    if not (folder / "tokenizer.json").is_file():
        yield f"data.tokenizer={folder}: has no tokenizer.json. Type data.tokenizer=/path/to/a folder with one"
    template = data.get("chat_template")
    if template not in (None, "chatml") and not Path(str(template)).expanduser().is_file():
        yield f"data.chat_template={template} (allowed: null, chatml, or a file with a Jinja template)"
    elif template is None and data["format"] in ("chat", "preference") and not _has_template(folder):
        yield (
            f"data.tokenizer={folder}: has no chat template, which data.format={data['format']} needs. Type "
            "data.chat_template=chatml, or data.chat_template=/path/to/a file with a Jinja template"
        )


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _of_records(data: Mapping[str, Any], num_data_ranks: int) -> Iterator[str]:
    path = str(data["path"])
    if not Path(path).expanduser().exists() and data["allow_download"]:
        return
    read = {"text": records.text_of, "chat": records.messages_of, "preference": records.pair_of}[data["format"]]
    try:
        found = list(islice(records.read_records(path, str(data["split"])), _CHECKED_RECORDS))
        for record in found:
            read(record)
    except (records.RecordsError, OSError, UnicodeDecodeError, ModuleNotFoundError) as error:
        yield str(error)
        return
    if not found:
        yield f"data.path={path}: has no records. Type a path with at least one"

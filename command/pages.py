"""Documentation pages that explain a refused configuration."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import metadata
from urllib.parse import urljoin

from trainwright.launch.schema import RunConfig

# First part of a key -> page of the documentation; other keys of a configuration are on `configuration`.
PAGES = {
    **dict.fromkeys(("devices", "nodes"), "layouts"),
    **dict.fromkeys(("checkpoint", "ckpt_path", "resume", "init_from", "strict", "trust"), "checkpoints"),
    **dict.fromkeys(("global_batch_size", "micro_batch_size", "accumulation", "data"), "data_order"),
    **dict.fromkeys(("monitor", "logger", "callbacks"), "monitoring"),
    **dict.fromkeys(("recipe", "module", "size", "model", "adapter", "objective"), "recipes"),
    "balance": "balance",
    "compression": "compression",
    "deepspeed_json": "deepspeed",
    "device": "planning",
    "guard": "loss_guard",
    "inject": "fault_injection",
    "launch": "launching",
    "preemption": "preemption",
    "report": "report",
    "resume_folders": "recovery",
    "strategy": "strategies",
    "verify": "verify",
}
_KEY = re.compile(r"(?<![\w.])([a-z_]+)(?:\.[\w.]+)?[=:]")
_MOST = 3


def links(problems: Sequence[str]) -> list[str]:
    """Return the addresses of the pages that explain problems, the first ones of many.

    Args:
        problems: texts that name a key as `key=value` or `key: ...`.
    """
    base, keys = _address(), {field.name for field in fields(RunConfig)}
    pages = dict.fromkeys(page for text in problems for page in _pages(text, keys))
    return [urljoin(base, f"{page}.md") for page in list(pages)[:_MOST]] if base else []


def _pages(text: str, keys: Collection[str]) -> Iterator[str]:
    """Yield the page of the first key that a problem names."""
    found = (match[1] for match in _KEY.finditer(text))
    key = next((each for each in found if each in PAGES or each in keys), None)
    if key is not None:
        yield PAGES.get(key, "configuration")


def _address() -> str | None:
    """Return the address of the documentation's first page, from the metadata of the installed package."""
    urls = (value.partition(", ") for value in metadata("trainwright").get_all("Project-URL") or ())
    return next((address for name, _, address in urls if name == "Documentation"), None)

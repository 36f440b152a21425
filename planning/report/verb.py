"""The command `trainwright plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from trainwright.core.problems import ConfigError
from trainwright.planning.report.page import as_page
from trainwright.planning.report.table import as_dict, print_plan
from trainwright.planning.search.search import plan


def run_plan(cfg: DictConfig, *, as_json: bool = False, html: str | None = None) -> bool:
    """Plan, and print the layouts.

    Args:
        cfg: composed.
        as_json: write one JSON document on standard output, and nothing else.
        html: file of a page to write; None: none.

    Returns:
        Whether a layout is possible.

    Raises:
        ConfigError: if nothing can be planned, or the page cannot be written.
    """
    found = plan(cfg)
    if html is not None:
        try:
            Path(html).write_text(as_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--html {html}: {error.strerror}; name a file that can be written"]) from error
    if as_json:
        print(json.dumps(as_dict(found), allow_nan=False), flush=True)
        return found.best is not None
    print_plan(found, Console(file=sys.stdout, highlight=False))
    if html is not None:
        print(f"\npage: {html}", flush=True)
    return found.best is not None

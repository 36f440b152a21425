"""What `trainwright plan` does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from trainwright.trainer.planning.page import as_page
from trainwright.trainer.planning.search import plan
from trainwright.trainer.planning.table import as_dict, print_plan
from trainwright.trainer.problems import ConfigError


@dataclass(frozen=True)
class PlanOptions:
    """What the verb takes beside a configuration.

    Args:
        as_json: write one JSON document on standard output, and nothing else.
        html: file of a page to write; None: none.
        prove: build the first layout for one rank at full size and compare the bytes.
    """

    as_json: bool = False
    html: str | None = None
    prove: bool = False


def run_plan(cfg: DictConfig, options: PlanOptions) -> bool:
    """Plan and tell.

    Returns:
        Whether a layout is possible and, with `prove`, needs what was predicted.

    Raises:
        ConfigError: if nothing can be planned, or the page cannot be written.
    """
    found = plan(cfg)
    proof = None
    if options.prove and found.best is not None:
        from trainwright.trainer.planning.prove import prove

        proof = prove(cfg, found.best)
    if options.html is not None:
        try:
            Path(options.html).write_text(as_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--html {options.html}: {error.strerror}; name a file that can be written"]) from error
    if options.as_json:
        document = as_dict(found)
        document["proof"] = None if proof is None else proof.as_dict()
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        console = Console(file=sys.stdout, highlight=False)
        # A file or a pipe has no width; tables of less would be cut.
        console.width = max(console.width, 120) if not console.is_terminal else console.width
        print_plan(found, console)
        if proof is not None:
            print("\n" + proof.text(), flush=True)
        if options.html is not None:
            print(f"\npage: {options.html}", flush=True)
    return found.best is not None and (proof is None or proof.holds)

"""What `trainwright plan` does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from trainwright.core.problems import ConfigError
from trainwright.planning.report.page import as_page
from trainwright.planning.report.table import as_dict, print_plan
from trainwright.planning.search.plan import Plan
from trainwright.planning.search.search import plan

if TYPE_CHECKING:
    from trainwright.planning.proof.prove import Proof


@dataclass(frozen=True)
class PlanOptions:
    """What the verb takes beside a configuration.

    Args:
        as_json: write one JSON document on standard output, and nothing else.
        html: file of a page to write; None: none.
        prove: build the first layout at full size and compare the bytes: of one rank, in a pipeline of two.
    """

    as_json: bool = False
    html: str | None = None
    prove: bool = False


def run_plan(cfg: DictConfig, options: PlanOptions) -> bool:
    """Plan and tell.

    Returns:
        Whether a layout is possible and, with `prove`, needs what was predicted.

    Raises:
        ConfigError: if nothing can be planned, the page cannot be written, or the first layout cannot be proved.
    """
    found = plan(cfg)
    if options.html is not None:
        try:
            Path(options.html).write_text(as_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--html {options.html}: {error.strerror}; name a file that can be written"]) from error
    if not options.as_json:
        print_plan(found, Console(file=sys.stdout, highlight=False))
        if options.html is not None:
            print(f"\npage: {options.html}", flush=True)
    proofs = _proofs(cfg, found) if options.prove else ()
    if options.as_json:
        document = as_dict(found)
        document["proofs"] = [proof.as_dict() for proof in proofs]
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        for proof in proofs:
            print("\n" + proof.text(), flush=True)
    return found.best is not None and all(proof.holds for proof in proofs)


def _proofs(cfg: DictConfig, found: Plan) -> tuple[Proof, ...]:
    from trainwright.planning.proof.prove import prove

    if found.best is None:
        return ()
    try:
        return prove(cfg, found.best)
    except ValueError as error:
        raise ConfigError([str(error)]) from error

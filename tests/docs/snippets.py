"""Really run the commands of the documentation that this machine can run, small: `make snippets`, some minutes.

    python -m tests.docs.snippets [PAGE ...]

Each `trainwright fit`, `validate`, `test`, `predict`, `verify`, `layout` and `import-deepspeed` runs in a reader's
folder with few steps, on the CPU; what is left out is said, with the reason. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.docs.blocks import ROOT, SHELL, blocks_of, pages
from tests.docs.project import RUN, write_project
from tests.docs.shell import commands_of
from tests.trainer.project import command, environment

MOST_RANKS = 4
_VERBS = ("fit", "validate", "test", "predict", "verify", "layout", "import-deepspeed")
_TRAINS = ("fit", "validate", "test", "predict")
_STEPS = re.compile(r"\+*(max_steps|max_epochs|accelerator|precision)=")
_TOO_MUCH = {
    "launch=": "another launcher",
    "nodes=": "several machines",
    "size=": "a large model",
    "model=pretrained": "weights that are not there",
    "inject=": "it is to fail",
    "recipe=long_context": "minutes on a CPU",
    "/models": "files that are not there",
}


def main(asked: Sequence[str]) -> int:
    """Run the commands of the pages that were asked for; of all where none was."""
    failed: list[str] = []
    done: set[tuple[str, ...]] = set()
    for page in asked or pages():
        with tempfile.TemporaryDirectory() as folder:
            failed += _run_page(page, Path(folder), done)
    print(f"{len(done)} commands ran, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def _run_page(page: str, folder: Path, done: set[tuple[str, ...]]) -> list[str]:
    blocks = blocks_of(page)
    shell = [block for block in blocks if block.language in SHELL and block.mark != "not run"]
    lines = [(block.place, words) for block in shell for words in commands_of(block, folder)]
    mine = [(place, words) for place, words in lines if words[0] == "trainwright" and tuple(words) not in done]
    if not mine:
        return []
    write_project(folder, {block.value: block.text for block in blocks if block.mark == "file"})
    for recipe in {word.removeprefix("recipe=") for _, words in mine if "ckpt_path=last" in words for word in words
                   if word.startswith("recipe=")}:  # fmt: skip
        _run(["fit", f"recipe={recipe}", f"run_dir=runs/{recipe}/{RUN}", "max_steps=1", "report=false"], folder)
    failed: list[str] = []
    for place, words in mine:
        reason = why_not(words[1:])
        if reason:
            print(f"{place}: left out, {reason}: {' '.join(words)}", flush=True)
            continue
        done.add(tuple(words))
        begun = time.monotonic()
        ended = _run(small(words[1:]), folder)
        print(f"{place}: exit code {ended.returncode}, {time.monotonic() - begun:.0f} s: {' '.join(words)}", flush=True)
        if ended.returncode:
            print(ended.stdout[-3000:], flush=True)
            failed.append(f"{place}: {' '.join(words)}")
    return failed


def why_not(words: Sequence[str]) -> str:
    """Why a command is not run here; empty if it is."""
    if not words or words[0] not in _VERBS:
        return "another verb"
    ranks = [int(word.partition("=")[2]) for word in words if re.fullmatch(r"devices=\d+", word)]
    if words[0] not in ("layout", "import-deepspeed") and ranks and ranks[-1] > MOST_RANKS:
        return f"{ranks[-1]} ranks"
    return next((why for sign, why in _TOO_MUCH.items() if any(sign in word for word in words)), "")


def small(words: Sequence[str]) -> list[str]:
    """The same with few steps, on the CPU."""
    if words[0] not in _TRAINS:
        return list(words)
    rest = [word for word in words if not _STEPS.match(word)]
    steps = ["max_steps=2"] if words[0] == "fit" else []
    return [
        *rest,
        *steps,
        "accelerator=cpu",
        "report=false",
        "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
    ]


def _run(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

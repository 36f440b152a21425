"""Junk under valid hashes: every reader returns values or raises one ``CheckpointError``, in time."""

import random
import shutil
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.deadlines import deadline
from tests.security.mutations import KINDS, copied
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.foreign.importing import import_checkpoint
from trainwright.checkpoint.foreign.pickled_file import load_pickled
from trainwright.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from trainwright.checkpoint.read.run_state import RunState, materialised
from trainwright.core.errors import CheckpointError
from trainwright.strategies.state.loading import load_whole
from trainwright.tools.checkpoints.report import Inspection, listed, table_of, verified
from trainwright.tools.report.records import read_checkpoints

SECONDS = 10  # that one reader may take for a few kB; it takes some ms


def read_all(path: str) -> Any:
    state = RunState.open(path)
    return materialised(state.tree), [state.read(key) for key in state.keys()], state.stored  # noqa: SIM118


def inspect(path: str) -> Any:
    found = Inspection.of(path)
    return found.to_text(every_tensor=True), found.to_dict()


def read_tensors(path: str) -> Any:
    tensors = SafetensorsFolder(path)
    return [tensors.read(key) for key in tensors.keys()]  # noqa: SIM118 - no mapping


def exporting(format: str) -> Callable[[str], Any]:
    return lambda path: export(path, f"{path}.{format}", format, overwrite=True)


def importing(path: str) -> Any:
    return import_checkpoint(path, f"{path}.imported", overwrite=True)


LOOKING: dict[str, Callable[[str], Any]] = {
    "read": read_all,
    "load_whole": load_whole,
    "verify": verified,
    "inspect": inspect,
    "list": lambda path: table_of(listed(str(Path(path).parent), deep=True)),
    "report": lambda path: read_checkpoints(Path(path).parent.parent, []),
}
EXPORTS = {format: exporting(format) for format in ("safetensors", "hf", "lightning", "torch")}
IMPORTS = {"import": importing, "ordinary": load_pickled}
READERS: dict[str, dict[str, Callable[[str], Any]]] = {
    "folder": LOOKING | EXPORTS,
    "divided folder": LOOKING | {"torch": EXPORTS["torch"]},
    "state file": LOOKING | IMPORTS | {"lightning": EXPORTS["lightning"]},
    "torch file": IMPORTS,
    "safetensors": {"import": importing, "tensors": read_tensors},
    "hugging face": {"import": importing, "tensors": read_tensors},
    "deepspeed": {"import": importing},
}
ATTEMPTS = {"folder": 120, "divided folder": 80, "state file": 50, "torch file": 80, "safetensors": 60}


def problem_of_reading(reader: Callable[[str], Any], path: str) -> str | None:
    """Return the violation of a reader; ``None``: it returned values or refused."""
    try:
        with deadline(SECONDS):
            reader(path)
    except CheckpointError as error:
        text = str(error)
        return None if text and "\n\n" not in text and len(text) < 9000 else f"a wall of text: {text[:200]}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error, limit=-4))
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_valid_ones_are_read(kind: str, tmp_path: Path) -> None:
    name, write, _ = KINDS[kind]
    path = tmp_path / "run" / "checkpoints" / name
    path.parent.mkdir(parents=True)
    write(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reader in READERS[kind].values():
            with deadline(60):
                reader(str(path))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_junk_under_valid_hashes(kind: str, tmp_path: Path) -> None:
    """470 attempts in all, seeded: one to three values exchanged, removed, moved or renamed. Each is given to a reader
    that takes the kind."""
    name, write, forge = KINDS[kind]
    good, folder = tmp_path / name, tmp_path / "run" / "checkpoints"
    write(good)
    readers = READERS[kind]
    wrong = []
    for attempt in range(ATTEMPTS.get(kind, 40)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copied(good, folder / name)
        forge(folder / name, random.Random(f"{kind} {attempt}"))
        reader = list(readers)[attempt % len(readers)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = problem_of_reading(readers[reader], str(folder / name))
        wrong += [f"attempt {attempt}, {reader}: {problem}"] if problem else []
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])

"""The commands of the documentation as this machine can run them: few steps, on the CPU, other hosts replaced by it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.pool import free_port

FEW, MORE, KEPT = 1, 2, 60
"""Steps of a run, of one that resumes such a run, and the largest number that is kept as typed."""
_BEYOND_IMPORTED = 7
_WRITES_TEXT = re.compile(r"recipe=(\w*gpt|moe|llama_3d)")
_TRAINS = ("fit", "validate", "test", "predict")
_LEFT_OUT = {
    "pip": "it is installed already: the network",
    "make": "it installs, trains for minutes or runs all tests",
    "pytest": "it is a part of `make test`",
    "ruff": "it is a part of `make test`",
    "srun": "SLURM itself",
}
# What is typed for large machines -> what this one does in its place; an empty text leaves the word out.
_HERE = (
    (r"size=(125m|7b)", ""),
    (r"\+*accelerator=.*", ""),
    (r"module\.config\.seq_len=\d+", ""),
    (r"launch\.(partition|time|account)=.*|preemption\.requeue=.*", ""),
)
_STEPS = re.compile(r"max_steps=(\d+)")


def why_not(words: Sequence[str]) -> str:
    """Return why a command is not run here; empty if it is."""
    program = Path(words[0]).name
    if program in _LEFT_OUT:
        return _LEFT_OUT[program]
    if program == "torchrun" and words[-1] == "doctor":
        return "it finds, rightly, that both machines are this one"
    if "launch=ray" in words and find_spec("ray") is None:
        return "the extra ray is not installed"
    if program in ("python", "python3") and words[1:2] == ["-m"] and len(words) > 2:
        module = words[2]
        if module == "venv":
            return _LEFT_OUT["pip"]
        if module == "pytest":
            return _LEFT_OUT["pytest"]
        return "minutes of all cores: a measurement" if module.startswith("benchmarks.") else ""
    return ""


def small(words: Sequence[str]) -> list[str]:
    """The same command with few steps, on the CPU.

    Args:
        words: program and arguments; of what is no training they are given back as they are.
    """
    is_ours = words[0] in ("trainwright", "torchrun") or words[:3] == ["python", "-m", "trainwright"]
    is_small = "configs/trainwright" in words  # the project of the Hydra template; it validates between whole epochs
    if not any(verb in words for verb in _TRAINS) or not is_ours or is_small:
        return [_several_agents(word) for word in words] if words[0] == "torchrun" else list(words)
    if "launch=kubernetes" in words:
        return list(words)  # it writes a manifest and starts nothing
    kept = [here for word in words if not _STEPS.fullmatch(word) and (here := _here(word))]
    if "launch=slurm" in kept:
        kept = [*(word for word in kept if not word.startswith("nodes=")), "launch.cluster=local"]
    elif any(word.startswith(("nodes=", "--nnodes=")) for word in kept):
        kept = [_several_agents(word) for word in kept]
    kept += ["module.config.seq_len=512"] if "recipe=long_context" in kept else []
    kept += ["trainer.val_check_interval=1"] if any("EarlyStopping" in word for word in kept) else []
    kept += ["callbacks.sample.length=8"] if any(_WRITES_TEXT.fullmatch(word) for word in kept) else []
    if "fit" in kept:
        kept.append(f"max_steps={_steps(words)}")
    return [*kept, "accelerator=cpu", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
            "trainer.limit_predict_batches=1"]  # fmt: skip


def as_processes(words: Sequence[str]) -> list[list[str]]:
    """Return the processes to start: one, or one agent of torchrun for each machine."""
    programs = Path(sys.executable).parent
    program = sys.executable if words[0] in ("python", "python3") else words[0]
    program = str(programs / program) if (programs / program).exists() else program
    nodes = next((int(word.partition("=")[2]) for word in words if word.startswith("--nnodes=")), 1)
    return [[program, *words[1:]]] * (nodes if words[0] == "torchrun" else 1)


def _here(word: str) -> str:
    return next((here for typed, here in _HERE if re.fullmatch(typed, word)), word)


def _several_agents(word: str) -> str:
    """Two ranks in place of eight for each of several machines, which this one is all of them."""
    if re.fullmatch(r"devices=\d+", word):
        return "devices=2"
    if word.startswith("--nproc-per-node="):
        return "--nproc-per-node=2"
    if word.startswith("--rdzv-endpoint="):
        return f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    return word


def _steps(words: Sequence[str]) -> int:
    typed = next((int(found[1]) for word in words if (found := _STEPS.fullmatch(word))), None)
    if typed is not None and (typed <= KEPT or typed >= 1_000_000):
        return typed
    if "ckpt_path=imported" in words:
        return _BEYOND_IMPORTED
    return MORE if any(word.startswith(("ckpt_path=", "resume=")) for word in words) else FEW

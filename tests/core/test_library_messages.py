"""Recipes say their first line before other libraries have said more than two."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from tests.command.project import run_command
from trainwright.core.text.library_messages import drop_library_messages

MOST = 2
IN_PYTHON = """
import trainwright
from trainwright.recipes.hugging_face.causal_lm import HuggingFaceModule
from lightning.pytorch.demos.boring_classes import BoringModel
HuggingFaceModule({"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8,
                   "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1})
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1}
trainwright.Trainer(accelerator="cpu", devices=1, **quiet).fit(BoringModel())
print("own line", flush=True)
"""


def lines_before(first: str, output: str) -> list[str]:
    lines = output.splitlines()
    return lines[: next(number for number, line in enumerate(lines) if line.startswith(first))]


def test_command_begins_with_its_own_lines() -> None:
    """The recipe that imports most: transformers, and with it torchao."""
    small = ["max_steps=1", "micro_batch_size=1", "global_batch_size=1", "module.seq_len=8", "data.path=text.txt"]
    with open("text.txt", "w", encoding="utf-8") as file:
        file.write("some text, " * 100)
    done = run_command("fit", "recipe=hf_causal_lm", *small, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stdout
    assert lines_before("strategy ", done.stdout) == []


def test_python_begins_with_its_own_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_PYTHON], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    before = [line for line in lines_before("own line", done.stdout) if line.strip()]
    assert [line for line in before if "available" not in line and "max_steps" not in line] == []


@pytest.mark.parametrize(
    ("logger", "dropped", "kept"),
    [
        (
            "torchao",
            "Failed to load /env/torchao/_C_cutlass_90a.abi3.so: Could not load this library: /env/torchao/_C.so",
            "Skipping import of cpp extensions due to incompatible torch version",
        ),
        (
            "torch.utils._pytree",
            "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by torch.compile",
            "<enum 'MyEnum'> is an Enum subclass and is now natively supported by torch.compile",
        ),
        (
            "lightning.pytorch.utilities.rank_zero",
            "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]",
            "💡 Tip: your batch size is small",
        ),
    ],
)
def test_other_messages_are_kept(logger: str, dropped: str, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    drop_library_messages()
    with caplog.at_level(logging.INFO, logger):
        logging.getLogger(logger).warning(dropped)
        logging.getLogger(logger).warning(kept)
    assert caplog.messages == [kept]


def test_warnings_of_other_modules_are_kept() -> None:
    text = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec)`"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drop_library_messages()
        for module in ("lightning.pytorch.utilities._pytree", "mine"):
            warnings.warn_explicit(text, FutureWarning, "file.py", 1, module=module)
    assert len(caught) == 1

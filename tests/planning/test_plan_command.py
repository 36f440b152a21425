"""The verb `plan`."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.command.project import write_project
from tests.planning.planned import planned
from tests.tools.report.parsed import Parsed
from trainwright.command.cli import main
from trainwright.core.charts.drawing import amount
from trainwright.core.processes import machine
from trainwright.planning.report.command import as_page
from trainwright.planning.report.table import cells_of, command_of, print_plan

# Two ranks cannot share seven samples, so a layout is refused.
FEW = ("recipe=gpt", "devices=2", "device=cpu", "accelerator=cpu", "global_batch_size=7")


@pytest.mark.thorough
def test_tables_are_not_truncated_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_plan(planned(*FEW), console)
    text = console.file.getvalue()
    assert "…" not in text
    title = planned(*FEW).ranked[0].title
    assert title in text, "a row is one line"
    assert "activations  buffers" in text


def test_page_has_the_contents_of_the_table() -> None:
    found = planned(*FEW)
    first = found.ranked[0]
    page = Parsed(as_page(replace(found, profile=replace(found.profile, source="measured on <this> machine"))))
    assert "measured on <this> machine" in page.text
    times, memory = page.table("layout", "seconds"), page.table("layout", "bytes")
    assert times[0] == [f"1. {first.title}", "", amount(first.time.total, "seconds")]
    assert memory[0][2] == amount(first.memory.total, "bytes")
    assert page.table("#", "layout")[0] == ["1", *cells_of(found, first)]
    assert command_of(first) in page.text
    assert [tag for tag, found in page.tags if found.get("class") == "predicted"] == ["line"] * len(memory)
    assert found.refused[0].reason.split(";")[0][:40] in page.text


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    return write_project(tmp_path)


def test_the_command(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config-dir", str(conf), "recipe=mine", "devices=4", "device=cpu"]
    assert main([*words, "--html", "plan.html"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("4 x cpu", "layouts possible", "overrides of the first layout:", "strategy="):
        assert part in out
    page = Path("plan.html").read_text()
    assert "<svg" in page
    assert not re.search(r"https?://", page), "external resources"
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == document["ranked"][0]
    assert document["best"]["bytes"]["total"] > 0
    assert not Path("runs").exists()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("words", "part"), [
    (["recipe=gpt", "device=h10"], "did you mean"),
    (["recipe=gpt", "-m"], "--multirun with plan"),
    (["recipe=gpt", "device=h100", "device.memory_bytes=0"], "device.memory_bytes=0"),
])  # fmt: skip
def test_refused(words: list[str], part: str, conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert part in capsys.readouterr().err


def test_only_plan_takes_its_options(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "recipe=gpt", "--prove"]) == 2
    assert "--prove: plan no longer builds ranks" in capsys.readouterr().err

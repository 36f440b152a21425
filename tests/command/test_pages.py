"""Links from refused configurations to the pages of the documentation."""

from pathlib import Path

import pytest

from trainwright.command.cli import main
from trainwright.command.pages import PAGES, links


@pytest.mark.parametrize(("problems", "pages"), [
    (["strategy.shard=3: it must divide devices=2"], ["strategies"]),
    (["the layout needs 3 ranks; type devices=3"], ["layouts"]),
    (["max_steps=0: at least 1", "seed=-1: at least 0"], ["configuration"]),
    (["checkpoint.every=0", "compression=topp", "launch=x", "guard=x"], ["checkpoints", "compression", "launching"]),
    (["foo: there is no such verb; verbs: fit"], []),
])  # fmt: skip
def test_links(problems: list[str], pages: list[str]) -> None:
    assert [link.rpartition("/docs/")[2] for link in links(problems)] == [f"{page}.md" for page in pages]


def test_pages_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert [page for page in {*PAGES.values(), "configuration"} if not (docs / f"{page}.md").exists()] == []


def test_command_prints_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "recipe=gpt", "strategy=zeo"]) == 2
    assert capsys.readouterr().err.rstrip().splitlines()[-1].startswith("see https://")

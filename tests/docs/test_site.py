"""The site has every public name, a search that works from disk, and an index of its pages."""

import inspect
import json
import re
from pathlib import Path

import griffe
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import trainwright
from benchmarks import reference_page
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_every_public_name_has_an_entry(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in {*trainwright.__all__, *trainwright._LOCATIONS}:
        assert f'id="trainwright.{name}"' in page, name
    assert ":class:" not in page
    assert "Names (patterns with *) of the repeated blocks" in page  # a comment above a field
    assert "<code>Layout</code>" in page


def test_search_reads_its_index_from_a_script(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    found = {
        each["location"]: each.get("boost", 1) for each in json.loads(index.removeprefix("var __index = "))["docs"]
    }
    assert "api.html#trainwright.Trainer" in found
    assert found["coming_from/composer.html"] < found["data_order.html"] == found["strategies/hybrid.html"]
    for page in {*site.rglob("*.html")} - {site / "404.html"}:  # which only a server shows
        text = page.read_text(encoding="utf-8")
        scripts = re.findall(r'<script src="([^"]+)"', text)
        assert any("iframe-worker" in script for script in scripts), page
        assert all((page.parent / script).is_file() for script in scripts), page


def test_llms_txt_lists_the_pages_of_the_navigation(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert text.startswith(f"# {config.site_name}\n\n> {config.site_description}\n\n## ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [title for each in config.nav for title in each]
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (\S.*)$", text, re.MULTILINE)
    pages = re.findall(r"'([\w/]+)\.md'", str(config.nav))
    assert {url for url, _ in links} == {f"{page}.html" for page in pages}
    assert all((site / url).is_file() for url, _ in links)
    assert not [sentence for _, sentence in links if "|" in sentence or "](" in sentence]


def test_first_sentence() -> None:
    page = "# Title\n\n<!-- a note -->\n\n| a | table |\n\nIt *reads* `one`\n[page](page.md). Another."
    assert reference_page.first_sentence(page) == "It reads one page."
    assert reference_page.first_sentence("# Title\n\n| a |") == ""


# ---- docstrings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(trainwright._LOCATIONS))
def test_docstrings_name_every_argument(name: str) -> None:
    public = getattr(trainwright, name)
    text = inspect.getdoc(public) or ""
    assert text.partition("\n")[0].endswith("."), name
    own = public if inspect.isfunction(public) else vars(public).get("__init__")
    if not inspect.isfunction(own) or hasattr(public, "__dataclass_fields__"):
        return
    documented = re.findall(r"^    \*{0,2}(\w+):", text.partition("Args:\n")[2], re.MULTILINE)
    assert [
        each for each in inspect.signature(inspect.unwrap(own)).parameters if each != "self" and each not in documented
    ] == []


def test_roles_and_comments_become_markdown() -> None:
    code = 'class A:\n    # Off *\n    # by default.\n    x: int = 0\n\ndef f():\n    """See :class:`~a.b.C`."""\n'
    module = griffe.visit("m", Path("m.py"), code, lines_collection=(lines := griffe.LinesCollection()))
    lines[Path("m.py")] = code.splitlines()
    extension = reference_page.Docstrings()
    for each in (module["A"]["x"], module["f"]):
        extension.on_object(obj=each)
    assert module["A"]["x"].docstring.value == r"Off \* by default."
    assert module["f"].docstring.value == 'See <autoref identifier="a.b.C" optional><code>C</code></autoref>.'

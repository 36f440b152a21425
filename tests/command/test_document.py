"""The page of all keys is whole, and docs/configuration.md names every group."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from benchmarks import keys_page as keys
from trainwright.command.schema.compose import choices_of, config_loader, group_names
from trainwright.launch.schema import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_keys_page_is_complete() -> None:
    text = keys.document()
    for item in fields(RunConfig):
        assert f"| `{item.name}` |" in text or f"\n### {item.name}\n" in text, item.name
    loader = config_loader()
    for group in group_names(loader):
        section = text.split(f"\n### {group}\n")[1].split("\n### ")[0]
        for choice in choices_of(loader, group):
            assert f"\n| `{choice}`" in section, (group, choice)


def test_keys_page_links() -> None:
    text = keys.document()
    headings = {keys._anchor(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= headings


@dataclass
class Above:
    """Base type."""

    # Of all.
    first: int = 1


@dataclass
class Inner:
    # Marked *so* and <so>, see docs/planning.md.
    deep: str | None = None


@dataclass
class Type(Above):
    """`kind=one|two`: a type."""

    # A list | of them.
    second: list[str] = field(default_factory=lambda: ["a"])
    inner: Inner = field(default_factory=Inner)


def test_schema_section() -> None:
    text = "\n".join(keys._keys_of_schema(Type, "kind"))
    assert text.startswith("\n#### `kind=one|two`\n\nA type.")
    assert "[Base type](#base-type)" in text
    assert r"| `kind.second` | list, `[a]` | A list \| of them. |" in text
    meaning = r"Marked \*so\* and &lt;so>, see [planning.md](planning.md)."
    assert f"| `kind.inner.deep` | str or null, `null` | {meaning} |" in text
    assert "kind.first" not in text


def test_table_of_groups_is_complete() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    cells = "".join(re.findall(r"^\| (\[`\w+`\]\(keys\.md#[^|]*)", text, flags=re.MULTILINE))
    told = re.findall(r"\[`(\w+)`\]\(keys\.md#(\w+)\)", cells)
    assert sorted(group for group, _ in told) == group_names(config_loader())
    assert all(group == anchor for group, anchor in told)

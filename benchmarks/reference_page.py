"""api.md: every public name of the package, from its docstrings; llms.txt: the pages of the site, one line each.

Hooks of MkDocs add both to the site, so they always match the code and the navigation and stand in no commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

import trainwright

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

_HEAD = """# Python API

Every public name of `import trainwright`, from its docstring. Names are loaded on first use.
"""
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`(~?)([\w.]+)`")


# ---- the page of the API --------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site: MkDocs calls this by its name."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=document()))
    return files


def document() -> str:
    """The whole page: an entry per public name, by the folder that it is defined in."""
    folders: dict[str, list[str]] = {}
    for name in trainwright.__all__:
        module = getattr(getattr(trainwright, name), "__module__", "trainwright.version")
        folders.setdefault(module.split(".")[1], []).append(name)
    sections = (f"\n## {folder}\n\n" + "\n".join(map(_entry, names)) for folder, names in sorted(folders.items()))
    return _HEAD + "\n".join(sections)


def _entry(name: str) -> str:
    # Options are of interest with those that they inherit; other classes inherit all of Lightning's.
    inherits = str(is_dataclass(getattr(trainwright, name))).lower()
    return f"::: trainwright.{name}\n    options:\n      inherited_members: {inherits}\n"


class Docstrings(griffe.Extension):
    """Docstrings as they stand in the code, as Markdown: roles become links, comments above fields docstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Griffe calls this for each object."""
        if obj.is_attribute and obj.docstring is None and (comment := _comment_above(obj)):
            obj.docstring = griffe.Docstring(comment, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)


def _comment_above(attribute: griffe.Object) -> str:
    lines = attribute.lines_collection[attribute.filepath]
    found: list[str] = []
    for line in reversed(lines[: (attribute.lineno or 1) - 1]):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line.strip().lstrip("# "))
    return re.sub(r"([\\*_<])", r"\\\1", " ".join(found))  # none of its signs is Markdown


def _link(match: re.Match[str]) -> str:
    shown = match[2].rpartition(".")[2] if match[1] else match[2]
    return f'<autoref identifier="{match[2]}" optional><code>{shown}</code></autoref>'


# ---- llms.txt -------------------------------------------------------------------------------------------------------

_SUMMARIES: dict[str, str] = {}
# Comparisons and measurements name most keys: in the search they stand below the pages that explain a key.
_FOUND_LAST = ("coming_from/", "benchmarks.md", "gpu.md", "peers.md", "scale.md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Keep the first sentence of each page, and rank pages in the search: MkDocs calls this by its name."""
    _SUMMARIES[page.url] = first_sentence(markdown)
    if page.file.src_uri.startswith(_FOUND_LAST):
        page.meta["search"] = {"boost": 0.25}


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keep the navigation: MkDocs calls this by its name."""
    config.extra["llms"] = nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt beside index.html: MkDocs calls this by its name."""
    Path(config.site_dir, "llms.txt").write_text(index(config.extra["llms"], config), encoding="utf-8")


def index(nav: Navigation, config: MkDocsConfig) -> str:
    """The site as https://llmstxt.org describes it: title, summary, and sections of links."""
    parts = [f"# {config.site_name}\n\n> {config.site_description}\n"]
    for section in nav.items:
        pages = {page.url: page for page in _pages(section)}.values()
        links = (f"- [{page.title}]({page.url}): {_SUMMARIES[page.url] or config.site_description}" for page in pages)
        parts.append(f"\n## {section.title}\n\n" + "\n".join(links) + "\n")
    return "".join(parts)


def _pages(item: Any) -> Iterator[Page]:
    if item.is_page:
        yield item
    for child in item.children or ():
        yield from _pages(child)


def first_sentence(markdown: str) -> str:
    """The first sentence of a page's first paragraph, as plain text; empty without one."""
    plain = re.sub(r"<!--.*?-->|^```.*?^```|^<\w.*?>$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    blocks = [block.strip() for block in plain.split("\n\n") if block.strip()]
    paragraph = next((block for block in blocks if re.match(r"[\w`*\[]", block)), "")
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].lstrip("# ").rstrip(":")

"""A parsed HTML page."""

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Parsed(HTMLParser):
    """Tags with their attributes, tables as rows of texts, and the whole text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.style = ""
        self.open: list[str] = []
        self._tables: list[list[list[str]]] = []
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def table(self, *head: str) -> list[list[str]]:
        """Return the rows of the first table whose head starts with these cells."""
        return next(rows[1:] for rows in self.tables if rows and rows[0][: len(head)] == list(head))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in _VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self._tables.append([])
            self.tables.append(self._tables[-1])
        elif tag == "tr":
            self._tables[-1].append([])
        elif tag in ("td", "th"):
            self._tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self._tables.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
            return
        if {"td", "th"} & {*self.open} and "title" not in self.open:
            self._tables[-1][-1][-1] += data
        self.texts.append(data)

"""What a page of a report holds, read with Python's own parser: tables, headings, marks of pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Table:
    """label: of the group around it. details: how many `details` it lies in. columns: of its widest row."""

    label: str
    details: int
    rows: list[list[str]] = field(default_factory=list)
    columns: int = 0

    def row(self, *begins: str) -> list[str]:
        """The one row whose cells begin so."""
        [found] = [row for row in self.rows if tuple(row[: len(begins)]) == begins]
        return found


class Page(HTMLParser):
    """Feed it a page; then `tables`, `headings`, `titles` of marks, and `ids`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.headings: list[tuple[int, str]] = []
        self.titles: list[str] = []
        self.ids: list[str] = []
        self.pictures: list[str] = []
        self._label, self._details, self._width = "", 0, 0
        self._into: list[str] | None = None
        self._in_table = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if told.get("id"):
            self.ids.append(str(told["id"]))
        if tag == "details":
            self._details += 1
        elif tag == "div" and told.get("role") == "group":
            self._label = told.get("aria-label") or ""
        elif tag == "svg" and told.get("role") == "img":
            self.pictures.append(told.get("aria-label") or "")
        elif tag == "table":
            self.tables.append(Table(self._label, self._details))
            self._in_table = True
        elif tag == "tr":
            self.tables[-1].rows.append([])
            self._width = 0
        elif tag in ("td", "th"):
            self._width += int(told.get("colspan") or 1)
            self.tables[-1].columns = max(self.tables[-1].columns, self._width)
            self.tables[-1].rows[-1].append("")
            self._into = self.tables[-1].rows[-1]
        elif tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), ""))
            self._into = [""]
        elif tag == "title":
            self.titles.append("")
            self._into = self.titles
        elif tag in ("br", "small") and self._into:
            self._into[-1] += " "

    def handle_endtag(self, tag: str) -> None:
        if tag == "details":
            self._details -= 1
        elif tag in ("h1", "h2", "h3", "h4") and self._into:
            self.headings[-1] = (self.headings[-1][0], " ".join(self._into[-1].split()))
            self._into = None
        elif tag in ("table", "title"):
            self._into = None
            if tag == "table":
                self.tables[-1].rows = [[" ".join(cell.split()) for cell in row] for row in self.tables[-1].rows]
        elif tag == "small" and self._into:
            self._into[-1] += " "

    def handle_data(self, data: str) -> None:
        if self._into:
            self._into[-1] += data

    def table(self, label: str) -> Table:
        """The one table of this label."""
        [found] = [table for table in self.tables if table.label == label]
        return found

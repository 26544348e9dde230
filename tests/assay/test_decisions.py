"""docs/decisions: sections of one form, numbers of their own, an index that finds every number, references that lead on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "README.md"
LABELS = ("Why", "Evidence", "Cost", "Rejected")
LINK = re.compile(r"\[[^\[\]\n]+\]\(([^()\s#]+)[^()\s]*\)")
REFERENCE = re.compile(r"\b[Dd]ecisions?\s+(\d{3}(?:(?:,| and| to)\s+\d{3})*)\b")
PLACE = re.compile(r"decisions/[A-Za-z0-9-]+\.md")


class Section(NamedTuple):
    page: str
    title: str
    numbers: tuple[str, ...]
    rule: str
    labels: tuple[str, ...]
    """Of the paragraphs behind the rule, in their order."""
    rejected: str


def pages() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path != INDEX)


def sections() -> list[Section]:
    return [section for page in pages() for section in sections_of(page)]


def sections_of(page: Path) -> list[Section]:
    _, *texts = re.split(r"(?m)^### ", page.read_text(encoding="utf-8"))
    return [section_of(page.name, *text.split("\n", 1)) for text in texts]


def section_of(page: str, title: str, text: str) -> Section:
    numbers = re.search(r" \((\d{3}(?:, \d{3})*)\)$", title)
    rule, *labelled = re.split(r"(?m)^\*\*(\w+):\*\* ", text)
    return Section(
        page, title, tuple(numbers[1].split(", ")) if numbers else (), rule.strip(), tuple(labelled[::2]),
        dict(zip(labelled[::2], labelled[1::2], strict=True)).get("Rejected", ""),
    )  # fmt: skip


def index_cells() -> list[tuple[str, str, bool]]:
    """(number, page, whether it was given up) of the index's table, row by row."""
    cells = re.findall(r"(\*?)\[(\d{3})\]\(([a-z-]+\.md)\)\*?", INDEX.read_text(encoding="utf-8").split("## Numbers")[1])
    return [(number, page, star == "*") for star, number, page in cells]


def mentioned(text: str) -> set[str]:
    return {number for match in REFERENCE.finditer(text) for number in re.findall(r"\d{3}", match[1])}


def readable_files() -> list[Path]:
    """Code, pages and recipes in which a decision may be named."""
    folders = ("assay", "quantize", "evaluate", "reports", "recipes", "tests", "benchmarks", "docs", "examples")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    return [*inside, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]


def test_there_are_at_most_sixty_pages() -> None:
    assert 0 < len(pages()) < 60


def test_every_section_has_its_parts() -> None:
    """A heading that ends in its numbers, the rule, then a reason or evidence, price and rejected ways in their order."""
    for section in sections():
        assert section.numbers, (section.page, section.title)
        assert section.rule, (section.page, section.title)
        assert section.labels == tuple(label for label in LABELS if label in section.labels), (section.page, section.title)
        assert {"Why", "Evidence"} & set(section.labels), (section.page, section.title)


def test_pages_have_a_title_and_sections_and_no_other_headings() -> None:
    for page in pages():
        levels = [len(line.split()[0]) for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        assert levels[0] == 1 and set(levels[1:]) == {3}, page.name


def test_every_number_has_one_section() -> None:
    numbers = Counter(number for section in sections() for number in section.numbers)
    assert [number for number, times in numbers.items() if times > 1] == []


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"(?m)^- \[[^\[\]]+\]\(([a-z-]+\.md)\): .", INDEX.read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in pages()]


def test_the_index_finds_every_number() -> None:
    """On the page of its section, or, if it was given up, on the one that names it among what was rejected."""
    cells = index_cells()
    assert [number for number, _, _ in cells] == sorted({number for number, _, _ in cells})
    all_sections = sections()
    assert {(number, page) for number, page, given_up in cells if not given_up} == {
        (number, section.page) for section in all_sections for number in section.numbers
    }
    for number, page, given_up in cells:
        assert not given_up or any(section.page == page and number in section.rejected for section in all_sections), number


def test_every_cell_of_the_table_stands_at_its_number() -> None:
    rows = re.findall(r"(?m)^\| (\d\d)_ \|(.*)\|$", INDEX.read_text(encoding="utf-8"))
    assert [tens for tens, _ in rows] == [f"{tens:02}" for tens in range(len(rows))]
    for tens, row in rows:
        numbers = [re.findall(r"\[(\d{3})\]", cell) for cell in row.split("|")]
        assert len(numbers) == 10, tens
        assert all(number in ([], [f"{tens}{unit}"]) for unit, number in enumerate(numbers)), tens


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in [INDEX, *pages()]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert re.match(r"https?:", target) or (FOLDER / target).exists(), f"{page.name}: {target}"


def test_every_decision_that_is_named_anywhere_is_in_the_index() -> None:
    known = {number for number, _, _ in index_cells()}
    for path in readable_files():
        text = path.read_text(encoding="utf-8")
        assert mentioned(text) <= known, path
        assert {place for place in PLACE.findall(text) if not (ROOT / "docs" / place).exists()} == set(), path


def test_a_reference_to_several_decisions_is_read_whole() -> None:
    assert mentioned("decision 153, as before decisions 114, 124 and 152; Decision\n210") == {"153", "114", "124", "152", "210"}

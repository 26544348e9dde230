"""Links of pages lead to files of the repository, and to headings that are there: a page is read without the site as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_commands import ROOT, pages

LINK = re.compile(r"!?\[[^\[\]\n]*\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
PAGES = [*pages(), "CHANGELOG.md"]


def text_of(path: Path) -> str:
    """Without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    titles = re.findall(r"(?m)^#+ (.+)$", text_of(path))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_on(page: str) -> None:
    here = ROOT / page
    for target, anchor in LINK.findall(text_of(here)):
        if re.match(r"[a-z]+:", target):
            continue
        file = (here.parent / target).resolve() if target else here
        assert file.exists() and file.is_relative_to(ROOT), f"{page}: {target}: no such file"
        assert not anchor or anchor in anchors_of(file), f"{page}: {target}#{anchor}: no such heading"

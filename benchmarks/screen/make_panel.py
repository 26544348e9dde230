"""Write `recipes/panels/assay.jsonl`: texts of this repository's pages and code, which `assay screen` compares on by default.

    python benchmarks/screen/make_panel.py

They were written in 2026, so that models released before were not trained on them. English prose and Python in turns, 60 texts
each of about 1,500 characters, spread over all files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS_EACH, CHARACTERS = 60, 1500
STATED = {
    "source": "pages and code of assay itself, recipes/panels/assay.jsonl",
    "licence": "Apache-2.0",
    "date": "2026-11",
}


def main() -> None:
    prose = spread([piece for page in sorted((ROOT / "docs").rglob("*.md")) for piece in pieces(plain(page.read_text()))])
    packages = ("assay", "quantize", "evaluate", "reports", "pipeline")
    modules = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    code = spread([piece for module in modules for piece in pieces(module.read_text().split("\n\n\n"))])
    lines: list[object] = [{"stated": STATED}]
    for page, module in zip(prose, code, strict=True):
        lines.append({"text": page, "domain": "prose", "language": "en"})
        lines.append({"text": module, "domain": "code", "language": "python"})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (ROOT / "recipes" / "panels" / "assay.jsonl").write_text(text)


def plain(page: str) -> list[str]:
    """Paragraphs without code, tables, lists and links' targets."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    paragraphs = [" ".join(part.split()) for part in page.split("\n\n")]
    return [
        re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", part)
        for part in paragraphs
        if part and not part.startswith(("|", "-", "!", "#"))
    ]


def pieces(parts: list[str]) -> list[str]:
    """Parts of one file in succession, as many as make a text."""
    made, text = [], ""
    for part in parts:
        text = f"{text}\n\n{part}".strip()
        if len(text) >= CHARACTERS:
            made.append(text[: CHARACTERS * 2])
            text = ""
    return made


def spread(texts: list[str]) -> list[str]:
    """`TEXTS_EACH` of them, at equal distances."""
    return [texts[number * len(texts) // TEXTS_EACH] for number in range(TEXTS_EACH)]


if __name__ == "__main__":
    main()

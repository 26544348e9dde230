"""Markup, Markdown, YAML and terminal codes in every text of every record: in page, report, card and terminal they stay text.

As many fields as the commands take together hold a text that would become an element, a link, a heading, a key of the card's
header or a command to the terminal wherever it is written out as it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from probe_reports import CLEAN, probed, result
from synthetic_run import checkpoint_sha256, few_items, make_run

import assay_cli as cli
from assay.records.probe import probes_place
from assay.records.speed import SPEED_RECORD, SpeedRecord, SpeedRepeat, SpeedRow

pytestmark = pytest.mark.slow

TEXT = (
    "x</script></style></textarea><!-- --><pwned onclick=alert(1)></pwned>[pwned](javascript:pwned)"
    "\x1b]0;pwned\x07\x9b31m[/red]\n\n# pwned\n\n```\npwned: 1\n---\n| pwned | pwned |\n|---|---|\n<pwned>"
)
FILES = (
    "w4a16/plan.json", "w4a16/verify.json", "w4a16/checkpoint/assay_manifest.json", "measurements/fp8.json",
    "measurements/w4a16.json", "probes/w4a16.json", "gates.json", "gates.registered.json", "speed.json",
)  # fmt: skip
COMMANDS = (("status", "tiny-glm"), ("gate", "tiny-glm"), ("report", "tiny-glm"), ("card", "tiny-glm"))


class Elements(HTMLParser):
    """Start tags, and values of attributes that a browser would follow or run, that hold the text."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wrong = [name for name, value in attrs if "pwned" in name or (name in ("href", "src") and "pwned" in (value or ""))]
        if tag == "pwned" or wrong:
            self.ours.append(f"<{tag} {' '.join(wrong)}>")


def elements(page: str) -> list[str]:
    """What of the text became an element or a link in a page."""
    parser = Elements()
    parser.feed(page)
    return parser.ours


def markdown_elements(text: str) -> list[str]:
    """The same of Markdown, headings and tables included."""
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return elements(rendered) + [line for line in rendered.splitlines() if line in ("<h1>pwned</h1>", "<th>pwned</th>")]


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of every text at any depth; of a list of like things, the first."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from texts(part, (*path, key))
    elif isinstance(value, list):
        seen: set[tuple[Any, ...]] = set()
        for index, part in enumerate(value):
            for place in texts(part):
                if place not in seen:
                    seen.add(place)
                    yield (*path, index, *place)


def poisoned(data: Any, places: Sequence[tuple[Any, ...]]) -> Any:
    """A copy of `data` with the text in all of these places."""
    copy = json.loads(json.dumps(data))
    for place in places:
        holder = copy
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = TEXT
    return copy


def said_by(*words: str) -> tuple[int, str]:
    """Exit code of a command in this process, and what it writes to both streams. A traceback fails the test."""
    out = io.StringIO()
    sys.argv = ["assay", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), out.getvalue()


def wrong_with(run_dir: Path) -> list[str]:
    """What of the text is more than text, in the terminal or in a page under `run_dir`."""
    wrong = []
    for page in run_dir.rglob("*.html"):
        wrong += elements(page.read_text())
    for text in run_dir.rglob("*.md"):
        written = text.read_text()
        if "\x1b" in written:
            wrong.append(f"a control code in {text.name}")
        if not written.startswith("---\n"):
            wrong += markdown_elements(written)
            continue
        head, _, body = written.removeprefix("---\n").partition("\n---\n")
        wrong += markdown_elements(body)
        if "pwned" in (keys := yaml.safe_load(head)):
            wrong.append(f"key in the header of {text.name}: {keys['pwned']}")
    return wrong


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with records of every stage, judged and reported."""
    folder = tmp_path_factory.mktemp("injection")
    run_dir = make_run(folder / "runs", change=few_items)
    odd = result("tools", None, None, "the server does not accept tool calls")
    probed("w4a16", *CLEAN, odd).save(probes_place(run_dir, "w4a16"))
    row = SpeedRow(
        checkpoint="w4a16", checkpoint_sha256=checkpoint_sha256("w4a16"), origin="measured", source="vllm bench serve",
        hardware="8xH200", num_gpus=8, speculation=0, prompts="chat", concurrency=8, engine="vllm 0.32.0",
        repeats=(SpeedRepeat(output_tokens_s=400, memory_bytes=1 << 30),),
    )  # fmt: skip
    SpeedRecord(rows=(row,)).save(run_dir / SPEED_RECORD)
    return folder


@pytest.mark.parametrize("file", FILES)
def test_every_text_stays_text(file: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    data = json.loads((whole / "runs" / "tiny-glm" / file).read_text())
    run_dir = tmp_path / "runs" / "tiny-glm"

    def found_in(places: Sequence[tuple[Any, ...]]) -> list[str]:
        """All places at once; where a command refuses them together, each half by itself."""
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(whole / "runs", "runs")
        (run_dir / file).write_text(json.dumps(poisoned(data, places)))
        codes, said = zip(*(said_by(*words) for words in COMMANDS), strict=True)
        if 2 in codes and len(places) > 1:
            middle = len(places) // 2
            return found_in(places[:middle]) + found_in(places[middle:])
        wrong = ["a control code in the terminal"] if any(code in "".join(said) for code in ("\x1b]", "\x9b", "\x07")) else []
        return [f"{[place[-1] for place in places]}: {one}" for one in (*wrong, *wrong_with(run_dir))]

    assert found_in(list(texts(data))) == []

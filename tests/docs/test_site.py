"""The documentation as a site: it builds without a warning, every page can be reached, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from assay_cli.root import app

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-docs" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-docs here: `make docs` builds it (.ci/run does)"),
]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src", "object": "data"}


class Tags(HTMLParser):
    """Links of a page and what a browser would load for it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.links.add(str(values["href"]))
        if tag in LOADED and values.get(LOADED[tag]):
            self.loaded.add(str(values[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONSAFEPATH": "1"}
    command = [str(PYTHON), "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def pages_of(site: Path) -> Iterator[Path]:
    return (page for page in sorted(site.rglob("*.html")) if page.name != "404.html")


def test_every_page_can_be_reached(site: Path) -> None:
    """From the first one by links, those of the navigation included."""
    reached, waiting = set(), [site / "index.html"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in Tags(page).links:
            if not re.match(r"[a-z]+:", link) and (path := link.partition("#")[0]):
                target = Path(os.path.normpath(page.parent / path))
                target = target / "index.html" if target.is_dir() else target
                assert target.exists(), f"{page.relative_to(site)} links to {link}"
                waiting += [target] if target.suffix == ".html" else []
    assert reached >= set(pages_of(site))
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in pages_of(site)}
    assert {path.with_name("index.html") if path.name == "README.html" else path for path in sources} <= built


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    elsewhere = {one for page in site.rglob("*.html") for one in Tags(page).loaded if re.match(r"(?:[a-z]+:)?//", one)}
    assert elsewhere == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", styles) == []


def test_the_navigation_has_every_page_once() -> None:
    """Decisions are listed by their own index."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def flat(part: object) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from flat(one)

    listed = list(flat(nav))
    assert len(listed) == len(set(listed))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in there if not re.match(r"decisions/[a-z]", name)} <= set(listed)


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    """Every command with all its options, every module of recipes and records with a field of each."""
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    group = get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f">assay {name}" in commands or f"<code>assay {name}</code>" in commands, name
        for option in (one for param in command.params for one in param.opts if one.startswith("--")):
            assert option in commands, f"{name} {option}"
    for room, field in (("recipes", "max_drop"), ("records", "relative_error"), ("records", "num_truncated")):
        assert field in (site / "reference" / f"{room}.html").read_text(encoding="utf-8"), field
    for room in ("recipes", "records"):
        page = (site / "reference" / f"{room}.html").read_text(encoding="utf-8")
        for path in (ROOT / "assay" / room).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert path.name == "__init__.py" or f'id="{module}.' in page, module


def test_the_skill_is_on_the_site_as_it_is(site: Path) -> None:
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---")[1])
    assert head["name"] == "assay" and 100 < len(head["description"]) <= 1024
    assert "for coding agents" in (site / "SKILL.html").read_text(encoding="utf-8")

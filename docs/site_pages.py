"""Pages of the site that are no files of docs/: a hook of mkdocs (mkdocs.yml), run by `make docs`.

- `reference/commands.md`: by typer's own generator, from the program; `reference/recipes.md` and `reference/records.md`: a line
  for mkdocstrings for each module.
- `SKILL.md`, and under `repository/` every Markdown page outside docs/ that another page links to (CONTRIBUTING.md, results of
  benchmarks, ...). Links to other files of the repository become plain text: there is nothing on the site to link to. A link to
  what does not exist stays as it is, and strict mkdocs ends with it.
"""

from __future__ import annotations

import html
import posixpath
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]\n]|\n(?!\s*\n))+)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
OUTSIDE = ("SKILL.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages outside docs/ that have a place in the navigation; those that pages link to are found."""
MODULES = {
    "recipes": "Fields of the YAML files that [suites and precisions](../suites.md) and [families](../families.md) explain.",
    "records": "Fields of the JSON files of a run. [Files of a run](../records.md) explains those that a run leaves.",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {"reference/commands.md": commands(), **{f"reference/{room}.md": modules(room) for room in MODULES}}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path in repository_pages():
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return with_links(markdown, page.file.src_uri)


def commands() -> str:
    """`assay --help` and that of every command, as typer writes them in Markdown."""
    command = [sys.executable, "-m", "typer", "assay_cli.root", "utils", "docs", "--name", "assay", "--title", "Commands"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"TERMINAL_WIDTH": "200", "PYTHONSAFEPATH": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"typer could not write the reference of the command line: {done.stderr}")
    text = html.unescape(done.stdout).replace("```console\n$ ", "```text\n")
    exits = "Exit codes: 0 done and passed, 1 done and failed (a verdict, a verification, a preflight), 2 could not.\n"
    return re.sub(r"<(str|path|Path)>", r"", text).replace("\n## `assay run`", f"\n{exits}\n## `assay run`", 1)


def modules(room: str) -> str:
    """A section for each module of a room, from its docstring and its classes."""
    files = sorted((ROOT / "assay" / room).rglob("*.py"), key=lambda path: path.relative_to(ROOT).parts)
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.name != "__init__.py"]
    sections = "\n".join(f"## {name.removeprefix(f'assay.{room}.')}\n\n::: {name}\n" for name in names)
    return f"# {room.capitalize()}\n\n{MODULES[room]} Made from `assay/{room}/`.\n\n{sections}"


@cache
def repository_pages() -> list[str]:
    """Markdown pages outside docs/ that the site needs, as paths of the repository: OUTSIDE, and what links lead to."""
    found: dict[str, None] = dict.fromkeys(OUTSIDE)
    waiting = [*OUTSIDE, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    while waiting:
        path = waiting.pop()
        for link in LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["target"]))
            if (
                target.endswith(".md")
                and not target.startswith(("docs/", ".."))
                and target not in found
                and (ROOT / target).is_file()
            ):
                found[target] = None
                waiting.append(target)
    return list(found)


def site_path(path: str) -> str:
    """Where a page of the repository lies on the site: docs/x.md is x.md, others lie under repository/."""
    return path if path == "SKILL.md" else path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def repository_path(src_uri: str) -> str:
    """The opposite of `site_path`."""
    return (
        src_uri
        if src_uri == "SKILL.md"
        else src_uri.removeprefix("repository/")
        if src_uri.startswith("repository/")
        else f"docs/{src_uri}"
    )


def with_links(markdown: str, src_uri: str) -> str:
    """Links between files of the repository as links between pages of the site."""
    here = repository_path(src_uri)
    pages = set(repository_pages())

    def replace(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link["target"]):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["target"]))
        if target in pages or target.startswith("docs/"):
            relative = posixpath.relpath(site_path(target), posixpath.dirname(src_uri) or ".")
            return f"[{link['text']}]({relative}{link['anchor'] or ''})"
        return link["text"] if (ROOT / target).exists() else link[0]

    return LINK.sub(replace, markdown)

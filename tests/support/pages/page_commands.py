"""Commands in Markdown pages: how they are marked, and how they are read (CONTRIBUTING.md, "Commands in pages").

A block ```sh holds commands, one a line, ended by a backslash where they go on. It is run, in the order of the page, unless
the line before it says what it needs: `<!-- needs: gpu -->`. `<!-- exit: 1 -->` says how its last command ends, if not with 0.
A block ```text directly behind it is what it prints; `...` stands for lines that are left out. `<!-- file: x.yaml -->` before a
block has it written to that file. A block ```bash is a script that is not run; it needs a `needs`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NEEDS = {
    "docker": "containers",
    "files": "files of the reader's own",
    "gpu": "GPUs that this repository has never seen",
    "hub": "the Hugging Face hub",
    "minutes": "more minutes than a test may take",
    "network": "a network: a package registry or another host",
    "ray": "a Ray cluster",
    "run": "the run of the tutorial; executed after it",
    "server": "inference servers that run already",
    "slurm": "Slurm",
}
"""What a machine may lack."""
LANGUAGES = {"sh", "bash", "text", "yaml", "python", "json", "groovy", "markdown"}
MARKER = re.compile(r"<!-- (needs|exit|file): (\S+) -->")
FENCE = re.compile(r"^( *)```(\S*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of its first line of text, from 1."""
    language: str
    text: str
    needs: str | None
    exit_code: int
    file: str | None
    output: str | None
    """Of a block `sh`: what the page says that it prints."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page that tells a reader what to type. Decisions, the changelog and results tell what was."""
    docs = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    examples = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*/README.md"))]
    return [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "SKILL.md",
        *examples,
        *(one for one in docs if "/decisions/" not in one),
    ]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """In order. ValueError, with the place, for a block whose language or marker is not one of ours."""
    found: list[Block] = []
    lines = (text if text is not None else (ROOT / page).read_text(encoding="utf-8")).splitlines()
    number, markers, behind = 0, dict[str, str](), False
    while number < len(lines):
        line = lines[number]
        fence = FENCE.match(line)
        if fence is None:
            if MARKER.fullmatch(line.strip()):
                markers |= dict(MARKER.findall(line))
            elif line.strip():
                markers, behind = {}, False
            number += 1
            continue
        indent, language = fence.groups()
        end = next(at for at in range(number + 1, len(lines)) if lines[at].rstrip() == f"{indent}```")
        body = "\n".join(one.removeprefix(indent) for one in lines[number + 1 : end])
        where = f"{page}:{number + 2}"
        if language not in LANGUAGES:
            raise ValueError(f"{where}: a block of {language or 'no language'}; known: {', '.join(sorted(LANGUAGES))}")
        if markers.get("needs", "run") not in NEEDS:
            raise ValueError(f"{where}: needs {markers['needs']}; known: {', '.join(sorted(NEEDS))}")
        if language == "bash" and "needs" not in markers:
            raise ValueError(f"{where}: a script is not run, so it says what it needs")
        if language == "text" and behind and not markers:
            shown = found.pop()
            found.append(Block(**{**vars(shown), "output": body}))
        else:
            found.append(
                Block(
                    page,
                    number + 2,
                    language,
                    body,
                    markers.get("needs"),
                    int(markers.get("exit", 0)),
                    markers.get("file"),
                    None,
                )
            )
        behind = language == "sh"
        markers, number = {}, end + 1
    return found


def commands_of(block: Block) -> list[str]:
    """Command lines as bash takes them, joined where a backslash ends a line, comments left out."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    lines = (re.sub(r"(^|\s)#\s.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def inline_commands(page: str) -> Iterator[str]:
    """`assay ...` between backticks in running text."""
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`(?:\.venv/bin/)?(assay [^`]+)`", text):
        yield " ".join(span.split())


def programs(command: str) -> list[list[str]]:
    """Words of each program that the line runs: behind `&&`, `|`, `;`, without assignments, redirections and `source`."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if set(word) <= set("|&;"):
            found.append([])
        elif set(word) <= set("<>"):
            next(words, None)
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return [one for one in found if one]

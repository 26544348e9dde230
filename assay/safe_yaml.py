"""YAML that nobody vouches for: plain values, every key once, of bounded size and depth.

Of a key that stands twice, YAML's readers keep the last without a word, also where it is the limit of a gate. Aliases let a
file of ten lines hold a value of gigabytes. Tags ask for constructors, some of which fail with errors of their own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2_000_000
"""Longest file that is read; the longest of `recipes/` has 9 kB."""
MAX_DEPTH = 40
"""Most lists and mappings inside each other; recipes have 6."""

MAX_INTEGER = 2**63 - 1
"""Of whole numbers, without their sign: arrays, random generators and file formats have 64 bits."""

_LONG_INTEGER = re.compile(r"[-+]?(?:[0-9_]{19,}|0x[0-9a-fA-F_]{16,}|0b[01_]{63,})")
_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's is ten times as fast, and is not on every machine."""


class NotPlainYaml(ValueError):
    """No YAML, or YAML with what is refused here. One line, which begins `not YAML: ` or `not plain YAML: `."""


class _UniqueKeys(_FAST):  # type: ignore[misc]  # chosen when this is imported
    """A loader for which a mapping has each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        made: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        if len(made) < len(node.value):
            earlier: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in earlier:
                    line = key_node.start_mark.line + 1
                    raise NotPlainYaml(
                        f"not plain YAML: key {key!r} stands twice in one mapping, again in line {line}; keep one"
                    )
                earlier.add(key)
        return made


def read_yaml(path: Path) -> Any:
    """The value in the file `path`. Raises NotPlainYaml; OSError like `open`."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise NotPlainYaml(f"not plain YAML: longer than {MAX_BYTES:,} bytes")
    try:
        return parse_yaml(data.decode())
    except UnicodeDecodeError:
        raise NotPlainYaml("not YAML: not UTF-8 text") from None


def parse_yaml(text: str) -> Any:
    """The value that `text` stands for. Raises NotPlainYaml."""
    try:
        _refuse_more_than_values(text)
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise NotPlainYaml(f"not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # a date of month 13, an integer of more than 4,300 digits
        if isinstance(error, NotPlainYaml):
            raise
        raise NotPlainYaml(f"not YAML: {error}") from None


def _refuse_more_than_values(text: str) -> None:
    """Before anything is built: aliases, tags, and more depth than the constructor's recursion has room for."""
    depth = 0
    for event in yaml.parse(text, _FAST):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise NotPlainYaml(
                f"not plain YAML: line {line} has an anchor or alias (& or *); write the value out in each place"
            )
        tag: str | None = getattr(event, "tag", None)
        if tag is not None:
            raise NotPlainYaml(f"not plain YAML: line {line} has a tag ({tag[:40]}); write a plain value")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _LONG_INTEGER.fullmatch(event.value):
            _refuse_beyond_64_bits(event.value, line)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise NotPlainYaml(f"not plain YAML: more than {MAX_DEPTH} lists and mappings inside each other in line {line}")


def _refuse_beyond_64_bits(digits: str, line: int) -> None:
    """A plain scalar that is, or may be, a whole number of YAML."""
    if len(digits) < 100 and abs(int(digits.replace("_", ""), 0 if "x" in digits or "b" in digits else 10)) <= MAX_INTEGER:
        return
    shown = digits if len(digits) <= 24 else f"{digits[:12]}... of {len(digits)} digits"
    raise NotPlainYaml(f"not plain YAML: line {line} has the whole number {shown}, beyond 64 bits; write a smaller one")

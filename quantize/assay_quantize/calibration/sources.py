"""Where calibration text lies, and how it becomes entries: files, data sets of the hub, conversations that somebody hands over.

A file is plain text, `.jsonl` or `.parquet`; a data set is read from its own `.jsonl` and `.parquet` files at one commit, never
by code of its own. Rows have `messages` (and `tools`), `conversations`, `text` or `prompt`. Each source can be opened again,
and yields its entries one by one, of a large file in the order of `pieces.py`: none is held whole.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from assay.errors import CheckpointError, QuantizeError
from assay.foreign_text import shown
from assay_quantize.calibration.pieces import LARGE_BYTES, content_sha256, lines_of, spread_order, texts_of

FIELDS = ("messages", "conversations", "text", "prompt")
"""Of a row, the first that is there."""
HUB = "hub:"
READ_ROWS = 256
MOST_ROWS = 100_000
"""Looked at for their languages."""
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system", "tool": "tool"}


class Entry(NamedTuple):
    """A text, or a conversation in the API's shape; tools: that were offered in it. language: as the row says it; "": it says
    none. around: of a text that was cut out of a longer one, with some of what is before and behind it."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    language: str = ""
    around: str = ""


class Opened(NamedTuple):
    """entries: of one pass. revision: commit of a data set. sha256: called when the pass is over; None: nothing to hash."""

    entries: Iterator[Entry]
    revision: str | None
    sha256: Callable[[], str | None]


class Source(Protocol):
    """What text is taken from."""

    @property
    def name(self) -> str:
        """How its user names it."""

    def open(self) -> Opened:
        """Begin a pass over all of it. QuantizeError: it cannot be read."""

    def identity(self) -> list[Any]:
        """What tells it from other sources: of what lies here the content, of the hub what is asked for."""


@dataclass(frozen=True)
class FileText:
    """A file of this machine. column: of rows; None: the first of FIELDS. language: only its rows; None: all."""

    path: Path
    column: str | None = None
    language: str | None = None

    @property
    def name(self) -> str:
        return f"{self.path} ({self.language})" if self.language else str(self.path)

    def open(self) -> Opened:
        digest = hashlib.sha256()
        entries = _of_file(self.path, str(self.path), self.column, digest.update)
        if self.language is not None:
            entries = (entry for entry in entries if entry.language == self.language)
        return Opened(entries, None, digest.hexdigest)

    def identity(self) -> list[Any]:
        try:
            return ["file", content_sha256(self.path), self.column, *([] if self.language is None else [self.language])]
        except OSError as problem:
            raise QuantizeError(
                f"--text {self.path}: cannot be read: {problem.strerror}; give text, .jsonl or .parquet"
            ) from None


@dataclass(frozen=True)
class HubText:
    """A data set of the hub. files: patterns of paths; empty: every .jsonl and .parquet. revision: branch, tag or commit."""

    dataset: str
    files: tuple[str, ...] = ()
    revision: str = "main"
    column: str | None = None

    @property
    def name(self) -> str:
        return f"{HUB}{self.dataset}{':' + ','.join(self.files) if self.files else ''}"

    def open(self) -> Opened:
        from assay.hub_errors import hub_address
        from assay_quantize.checkpoint.hub import Repository, file_in_cache

        with _as_quantize_error():
            listed = Repository(self.dataset, self.revision, "dataset")
        if listed.commit is None:
            raise QuantizeError(f"{self.name}: {hub_address()} does not say at which commit its files are; name files instead")
        patterns = self.files or ("*.jsonl", "*.parquet")
        chosen = sorted(path for path in listed.files if any(fnmatch.fnmatch(path, pattern) for pattern in patterns))
        if not chosen:
            raise QuantizeError(
                f"{self.name}: none of its {len(listed.files)} files is {' or '.join(patterns)} at {hub_address()}; name files "
                f"it has, as {HUB}{self.dataset}:PATTERN (.jsonl, .parquet and plain text are read; a script is never run)"
            )
        digest = hashlib.sha256()

        def entries() -> Iterator[Entry]:
            for path in chosen:
                with _as_quantize_error():
                    file = file_in_cache(listed, path)
                yield from _of_file(file, f"{HUB}{self.dataset}/{path}", self.column, digest.update)

        return Opened(entries(), listed.commit, digest.hexdigest)

    def identity(self) -> list[Any]:
        return ["hub", self.dataset, list(self.files), self.revision, self.column]


@contextmanager
def _as_quantize_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise QuantizeError(str(error)) from None


@dataclass(frozen=True)
class Conversations:
    """Conversations that the caller reads: the replies of a run's reference, say. rows: begins a pass."""

    label: str
    rows: Callable[[], Iterator[Mapping[str, Any]]] = field(compare=False)

    @property
    def name(self) -> str:
        return self.label

    def open(self) -> Opened:
        digest = hashlib.sha256()

        def entries() -> Iterator[Entry]:
            for row in self.rows():
                digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode(errors="backslashreplace"))
                yield entry_of(row, self.label)

        return Opened(entries(), None, digest.hexdigest)

    def identity(self) -> list[Any]:
        opened = self.open()
        for _ in opened.entries:
            pass
        return ["conversations", opened.sha256()]


def languages_of(paths: Iterable[Path]) -> list[str]:
    """Of the rows of some files, of each the first MOST_ROWS, in the order in which they come; "" stands for rows that say
    none. QuantizeError: a file cannot be read."""
    languages: dict[str, None] = {}
    for path in paths:
        most = MOST_ROWS if path.suffix in (".jsonl", ".parquet") else 1
        languages |= {entry.language: None for entry in islice(FileText(path).open().entries, most)}
    return list(languages)


# ------------------------------------------------------------------------------------------------ files
def _of_file(path: Path, where: str, column: str | None, see: Callable[[bytes], None]) -> Iterator[Entry]:
    """see: told all bytes that were read, in order."""
    try:
        if path.suffix == ".jsonl":
            for place, line in lines_of(path, where, see):
                row = _json(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"), place) if line.strip() else None
                if row is not None:
                    yield entry_of(row, place, column)
        elif path.suffix == ".parquet":
            yield from _of_parquet(path, where, column, see)
        else:
            for part in texts_of(path, see):
                yield Entry(text=part.text, around=part.around)
    except OSError as problem:
        raise QuantizeError(f"{where}: cannot be read: {problem.strerror}; --text takes plain text or .jsonl") from None
    except UnicodeDecodeError:
        raise QuantizeError(f"{where}: is not UTF-8; --text takes plain text or .jsonl") from None


def _of_parquet(path: Path, where: str, column: str | None, see: Callable[[bytes], None]) -> Iterator[Entry]:
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(path)
        names = opened.schema_arrow.names
        fields = (*((column,) if column else (*FIELDS, "tools")), "language")
        kept = [name for name in dict.fromkeys(fields) if name in names]
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        is_large = path.stat().st_size > LARGE_BYTES
        for group in spread_order(len(sizes)) if is_large else range(len(sizes)):
            number = sum(sizes[:group])
            for batch in opened.iter_batches(READ_ROWS, row_groups=[group], columns=kept):
                for row in batch.to_pylist():
                    number += 1
                    see(json.dumps(row, sort_keys=True, default=str).encode())
                    yield entry_of(row, f"{where}, row {number}", column)
    except pyarrow.ArrowException as problem:
        raise QuantizeError(f"{where}: not Parquet: {shown(problem)}") from None
    except OSError as problem:
        if problem.strerror is not None:
            raise
        # what Arrow says of damaged pages, and not the disk
        raise QuantizeError(f"{where}: is damaged Parquet: {shown(problem)}") from None


# ------------------------------------------------------------------------------------------------ rows
def entry_of(row: Any, where: str, column: str | None = None) -> Entry:
    """What a row holds. QuantizeError: it has none of the fields, or one that holds something else."""
    fields = row if isinstance(row, Mapping) else {}
    name = column or next((key for key in FIELDS if fields.get(key) is not None), None)
    value = None if name is None else fields.get(name)
    language = fields.get("language")
    language = language.strip() if isinstance(language, str) else ""
    if isinstance(value, str):
        return Entry(text=value, language=language)
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        tools = fields.get("tools")
        tools = _json(tools, f"{where}: `tools`") if isinstance(tools, str) and tools.strip() else tools
        tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        if all(map(_role, value)):
            return Entry(messages=tuple(map(_message, value)), tools=tuple(tools), language=language)
    needed = f"`{column}`" if column else "`text`, `prompt` or `messages`"
    raise QuantizeError(f"{where}: an object with {needed} is needed")


def _json(text: str, where: str) -> Any:
    """QuantizeError: no JSON, or none that can be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise QuantizeError(f"{where}: not JSON: nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise QuantizeError(f"{where}: not JSON: {problem.msg}") from None
    except ValueError as problem:  # numbers of more than 4,300 digits
        raise QuantizeError(f"{where}: not JSON: {problem}") from None


def _role(message: Mapping[str, Any]) -> str | None:
    return _ROLES.get(str(message.get("role") or message.get("from")))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """In the API's shape: without what is null, ShareGPT's names replaced, thinking as `reasoning_content`."""
    api_message = {key: value for key, value in message.items() if value is not None and key not in ("from", "value")}
    api_message |= {"role": _role(message), "content": message.get("content") or message.get("value") or ""}
    thinking = next((api_message.pop(key) for key in ("reasoning", "thinking") if isinstance(api_message.get(key), str)), None)
    if thinking and not api_message.get("reasoning_content"):
        api_message["reasoning_content"] = thinking
    return api_message


def as_text(entry: Entry, tokenizer: Any) -> tuple[str, bool]:
    """(what the model reads, whether all thinking is in it). Thinking that a template shows only as part of a reply is put
    there; half a surrogate pair, which JSON can hold and no tokenizer reads, becomes U+FFFD. QuantizeError: a conversation, and
    the checkpoint has no chat template, or one that refuses it."""
    text, is_all = _with_thinking(entry, tokenizer)
    return (text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")), is_all


def _with_thinking(entry: Entry, tokenizer: Any) -> tuple[str, bool]:
    if entry.text is not None:
        return entry.text, True
    thoughts = [str(message["reasoning_content"]).strip() for message in entry.messages if message.get("reasoning_content")]
    plain = _rendered(entry.messages, entry, tokenizer)
    if all(thought in plain for thought in thoughts):
        return plain, True
    messages = [dict(message) for message in entry.messages]
    for message in messages:
        if thinking := message.pop("reasoning_content", None):
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{message['content']}"
    inline = _rendered(messages, entry, tokenizer)
    return (inline, True) if all(thought in inline for thought in thoughts) else (plain, False)


def _rendered(messages: Sequence[dict[str, Any]], entry: Entry, tokenizer: Any) -> str:
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise QuantizeError("a conversation needs the checkpoint's chat template, and it has none; give plain text")
    tools = {"tools": list(entry.tools)} if entry.tools else {}
    try:
        return str(tokenizer.apply_chat_template(_decoded(messages), tokenize=False, **tools))
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
        raise QuantizeError(f"the chat template refuses a conversation: {shown(problem)}") from None


def _decoded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of tool calls as objects, which templates write out themselves; the API has them as JSON text."""
    decoded = []
    for message in messages:
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            decoded.append(message)
            continue
        own = []
        for call in calls:
            if not isinstance(call, Mapping):
                own.append(call)  # the template says what it thinks of it
                continue
            function = dict(call.get("function") or {})
            if isinstance(function.get("arguments"), str):
                with suppress(ValueError, RecursionError):  # shown as it is
                    function["arguments"] = json.loads(function["arguments"])
            own.append({**call, "function": function})
        decoded.append({**message, "tool_calls": own})
    return decoded


def pieces_of(entry: Entry) -> list[str]:
    """The texts that are compared with items of an evaluation: of a conversation each message, with its thinking."""
    if entry.text is not None:
        return [entry.around or entry.text]
    pieces = []
    for message in entry.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        pieces.append("\n".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping)))
        if message.get("reasoning_content"):
            pieces.append(str(message["reasoning_content"]))
    return pieces

"""What every record is made of: frozen parts, intervals, the file format; and the hashes records are compared by.

Rules: missing is `None`, never 0; every size is in bytes, every time in seconds; a record says what it was made from
(hashes, versions), so that two records can be compared or refused. Only the standard library and pydantic are needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from assay.atomic_files import replacing
from assay.errors import AssayError
from assay.safe_files import integer_beyond, read_record

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(data: Any) -> str:
    """`data` as JSON with sorted keys and no spaces: the text that is hashed."""
    return _CANONICAL.encode(data)


def sha256_of(data: Any) -> str:
    """SHA-256 (hex) of `data` in canonical JSON."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, whatever its size. Of shards `assay_quantize.storage.hash_files` is faster."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text_atomically(path: Path, text: str, *, only_new: bool = False) -> None:
    """Write `text` (UTF-8) to `path` as `atomic_files.replacing` does: readers see the old file or the whole new one."""
    with replacing(path, only_new=only_new) as partial:
        partial.write_text(text, encoding="utf-8")


class Part(BaseModel):
    """Base of everything inside a record: frozen; an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _recorded(recipe: dict[str, Any]) -> dict[str, Any]:
    for part, named in (("tasks", "name"), ("gates", "kind")):
        rows = recipe.get(part, [])
        if not (isinstance(rows, list) and all(isinstance(row, dict) and isinstance(row.get(named), str) for row in rows)):
            raise ValueError(f"{part} must be a list of mappings, each with a {named}")
    if not isinstance(recipe.get("level", 0.95), float):
        raise ValueError("level must be a number")
    return recipe


RecordedRecipe = Annotated[dict[str, Any], AfterValidator(_recorded)]
"""A suite or gates as they were when a record was made, perhaps by an earlier version: read by key, not loaded again."""


Coverage = Literal["nominal", "at_least", "about"]


class Interval(Part):
    """A number with its confidence interval (95 % unless `level` says otherwise) and the n behind it."""

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95
    coverage: Coverage = Field(default="nominal", exclude_if=lambda coverage: coverage == "nominal")
    """How often it holds the truth, next to `level`. nominal: so often, within two points. at_least: more often, by how it is
    made (exact for few events, the wider of two intervals, the common part of several looks). about: within a few points to
    either side, for the mean of skewed values. Measured in benchmarks/verdicts/interval_coverage.md."""


class Record(Part):
    """Base of what is written to a file. One whose fields change incompatibly has the next `schema_version`."""

    schema_version: Literal[1] = 1

    def save(self, path: Path, *, only_new: bool = False) -> None:
        """Write as indented JSON by rename; only_new: FileExistsError if there is a file of that name."""
        write_text_atomically(path, self.as_text(), only_new=only_new)

    def as_text(self) -> str:
        """The text of its file. NaN and infinity are refused: an unmeasured value is `None`."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record back; `AssayError` names the file and the first thing that is wrong."""
        try:
            data = read_record(path)
            if (beyond := integer_beyond(data)) is not None:
                raise AssayError(f"{path}: {beyond}, beyond 64 bits: no record of ours; restore it, or run again what wrote it")
            return cls.model_validate_json(data)
        except FileNotFoundError:
            raise AssayError(f"{path}: no such file (a {cls.__name__.lower()} record was expected)") from None
        except OSError as error:
            raise AssayError(f"{path}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            schema = cls.model_fields["schema_version"].default
            where = ".".join(str(step) for step in first["loc"])
            what = f"{where}: {first['msg']}" if where else first["msg"]
            raise AssayError(
                f"{path}: not a {cls.__name__} record of schema {schema}: {what}; restore it, or run again what wrote it"
            ) from None

    @classmethod
    def load_if_there(cls, path: Path) -> Self | None:
        """The record; None if nothing of that name is there. What is there and is no record is an error, as of `load`."""
        return cls.load(path) if path.exists() or path.is_symlink() else None

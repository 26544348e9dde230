"""The records between stages: frozen, typed, versioned, written as JSON by rename.

Rules: missing is `None`, never 0; every size is in bytes, every time in seconds; a record says what it was made from
(hashes, versions), so that two records can be compared or refused. `Plan` is what quantize *and* verify consume.
Only the standard library and pydantic are needed to read them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from assay.atomic_files import replacing
from assay.errors import AssayError

Role = Literal[
    "embedding", "lm_head", "norm", "attention", "indexer", "dense_mlp", "shared_expert", "routed_expert", "router",
    "router_bias", "mtp",
]  # fmt: skip
Action = Literal["keep", "cast", "dequantize", "quantize", "consume", "drop"]


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(data: Any) -> str:
    """`data` as JSON with sorted keys and no spaces: the text that is hashed."""
    return _CANONICAL.encode(data)


def sha256_of(data: Any) -> str:
    """SHA-256 (hex) of `data` in canonical JSON."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, whatever its size. Of shards `assay_quantize.hash_files` is faster."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` as `atomic_files.replacing` does: readers see the old file or the whole new one."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


class Part(BaseModel):
    """Base of everything inside a record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(Part):
    """A number with its confidence interval (95 % unless `level` says otherwise) and the n behind it."""

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95


class Record(Part):
    """Base of what is written to a file. `schema_version` grows with every breaking change."""

    schema_version: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Write as indented JSON by rename. NaN and infinity are refused: an unmeasured value is `None`."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record back; `AssayError` names the file and the first thing that is wrong."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise AssayError(f"{path}: no such file (a {cls.__name__.lower()} record was expected)") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise AssayError(f"{path}: not a {cls.__name__} record of schema 1: {where}: {first['msg']}") from None


# ------------------------------------------------------------------------------------------------ plan
class OutputTensor(NamedTuple):
    """One tensor of the new checkpoint. `dtype` is a safetensors name (BF16, F32, F8_E4M3, I32, U8...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorPlan(NamedTuple):
    """What will happen to one tensor of the source.

    role: what it is for; `mtp` for everything inside the MTP block.
    part: its role inside the block (equal to `role` outside MTP; `mtp_projection` for eh_proj).
    module: its name without the last component: what an ignore pattern is matched against.
    action: `keep`: the same bytes, maybe under another name; `cast`: another float dtype; `dequantize`: an FP8 weight to 16 or
        32 bits; `quantize`; `consume`: scales that are folded into the weight they belong to; `drop`: left out.
    scheme: the scheme in which the weight is stored in the new checkpoint; None: unquantized. With action `keep`, the source
        stores it in that scheme already.
    fused_group: vLLM loads all members of a group into one parameter; NVFP4 members share one global scale. None: alone.
    dtype: as it is stored in the source.
    scale: the tensor of the source that holds the scales of an FP8 weight. None: it has none.
    """

    name: str
    role: str
    part: str
    module: str
    action: Action
    scheme: str | None
    fused_group: str | None
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    shard_in: str
    shard_out: str | None
    outputs: tuple[OutputTensor, ...]
    scale: str | None = None

    @property
    def logical_dtype(self) -> str:
        """What its weights are read as: BF16 for FP8 with scales, else as stored."""
        return self.dtype if self.scale is None else "BF16"


class Plan(Record):
    """What will happen to every tensor of a checkpoint; made from headers, config and recipe, without reading weights."""

    kind: Literal["plan"] = "plan"
    model: str
    precision: str
    family: str
    source: str
    source_sha256: str
    """Hash of names, dtypes, shapes and shard names (not of the data): what a resume is checked against."""
    recipe_sha256: str
    precision_recipe: dict[str, Any]
    config: dict[str, Any]
    """The source's config.json."""
    source_revision: str | None = None
    """Commit of a source on the hub; None for a folder."""
    source_files: dict[str, str]
    """Every shard of the source -> what identifies its data: `sha256:...` (`blob:...`, `commit:...`) as the hub states it; of a
    file in a folder `stamp:BYTES:MTIME_NS:CTIME_NS:INODE`, which any write to it or another file in its place changes."""
    mtp_layers: tuple[int, ...]
    """Decoder-layer indexes of inlined MTP blocks; empty if there are none or they are named `mtp.*`."""
    ignore: tuple[str, ...]
    """Patterns for vLLM: modules that stay unquantized."""
    importance_sha256: str | None = None
    """Of the channel weights that the scale search uses. None: it uses none."""
    tensors: tuple[TensorPlan, ...]

    @property
    def keeps_mtp(self) -> bool:
        """Whether the new checkpoint carries an MTP block."""
        return any(tensor.role == "mtp" and tensor.action != "drop" for tensor in self.tensors)

    @property
    def drops_mtp(self) -> bool:
        """Whether an MTP block of the source is left out."""
        return any(tensor.role == "mtp" and tensor.action == "drop" for tensor in self.tensors)

    @property
    def bytes_in(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(output.num_bytes for tensor in self.tensors for output in tensor.outputs)


# ------------------------------------------------------------------------------------------------ manifest, verify
class ShardRecord(Part):
    """One finished shard: its hash while written, and the weight error of what was quantized in it."""

    name: str
    num_bytes: int
    sha256: str
    relative_error: dict[str, float]
    """Per quantized tensor: ||dequantized - source|| / ||source|| (Frobenius)."""
    seconds: float


class Manifest(Record):
    """What did happen; written last, by rename: without it there is no checkpoint."""

    kind: Literal["manifest"] = "manifest"
    model: str
    precision: str
    source: str
    source_sha256: str
    source_revision: str | None = None
    """Commit of a source on the hub; None for a folder."""
    source_files: dict[str, str]
    """As in `Plan`: which data this was made from."""
    recipe_sha256: str
    plan_sha256: str
    importance_sha256: str | None = None
    """Of the channel weights that the scale search used. None: it used none."""
    precision_recipe: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    files: dict[str, str]
    """Every other file of the folder (config, index, tokenizer...) -> SHA-256."""
    bytes_in: int
    bytes_out: int
    versions: dict[str, str]
    seconds: float

    @property
    def checkpoint_sha256(self) -> str:
        """Identity of the checkpoint: its shards and files, not when or how fast it was made."""
        return sha256_of({"shards": {s.name: s.sha256 for s in self.shards}, "files": self.files})


MANIFEST = "assay_manifest.json"
"""Name of a checkpoint's manifest in its folder."""


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder; None: it has none, so assay did not make it, or did not finish it.

    AssayError when what is there is not a manifest.
    """
    path = folder / MANIFEST
    return Manifest.load(path) if path.is_file() else None


class Damage(Part):
    """One thing that is wrong in a checkpoint."""

    check: str
    where: str
    """Tensor, file or config key."""
    what: str


class Verification(Record):
    """Result of reopening a checkpoint and trusting nothing."""

    kind: Literal["verification"] = "verification"
    checkpoint: str
    checkpoint_sha256: str
    source: str | None
    passed: bool
    damages: tuple[Damage, ...]
    checks: dict[str, int]
    """Check name -> how many things it looked at."""
    files: dict[str, str] = {}
    """Every file of the manifest -> its stamp (`Plan.source_files`) before it was read: unchanged, the result still holds."""
    not_checked: tuple[str, ...]
    """What could not be checked and why (no source given, ...)."""
    worst_relative_error: dict[str, float]
    """Role -> largest relative weight error seen."""
    mean_relative_error: dict[str, float]
    bytes_by_role: dict[str, int]
    seconds: float


# ------------------------------------------------------------------------------------------------ serving
class Fingerprint(Part):
    """How a checkpoint was served. Two measurements compare only if their `comparable_sha256` agree."""

    engine: str
    """"vllm 0.32.0" or "external" for a base URL that was given."""
    versions: dict[str, str]
    hardware: dict[str, str]
    profile: str
    flags: dict[str, Any]
    """vLLM flags but for model, port, and those of the next group."""
    environment: dict[str, str]
    speculation: dict[str, Any] | None
    checkpoint_flags: dict[str, Any]
    """Flags that depend on the checkpoint's format (quantization, load-format)."""
    emulated: bool | None
    """True: dequantized weights, BF16/FP32 arithmetic. False: native kernels. None: unquantized checkpoint or unknown."""
    kernels: tuple[str, ...]
    """Lines of the server's log that name the kernels chosen."""
    system_fingerprint: str | None = None

    @property
    def comparable_sha256(self) -> str:
        """Hash of everything that must be alike between reference and candidate."""
        return sha256_of(
            self.model_dump(mode="json", exclude={"checkpoint_flags", "emulated", "kernels", "system_fingerprint"})
        )

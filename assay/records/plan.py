"""The plan: what will happen to every tensor. Quantize *and* verify consume it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field

from assay.records.base import Record
from assay.records.calibration import CalibratedLayers

Role = Literal[
    "embedding", "lm_head", "norm", "attention", "indexer", "dense_mlp", "shared_expert", "routed_expert", "router",
    "router_bias", "mtp",
]  # fmt: skip
Action = Literal["keep", "cast", "dequantize", "quantize", "consume", "drop", "add"]


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
    action: `keep`: the same bytes, maybe under another name; `cast`: another float dtype; `dequantize`: a weight with scales
        to 16 or 32 bits; `quantize`; `consume`: scales that are folded into the weight they belong to; `drop`: left out;
        `add`: no tensor of the source, a scale from a calibration file.
    scheme: the scheme in which the weight is stored in the new checkpoint; None: unquantized. With action `keep`, the source
        stores it in that scheme already.
    fused_group: vLLM loads all members of a group into one parameter; NVFP4 members share one global scale. None: alone.
    dtype: as it is stored in the source; `INT4` and `FP4`, which are no dtypes of safetensors, for packed weights.
    scale: the tensor of the source that holds the scales of an FP8, FP4 or INT4 weight. None: it has none.
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
        """What its weights are read as: BF16 if they have scales, else as stored."""
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
    base_model: str | None = None
    """Hub id of what lies in a source folder, for the card. None: nobody said, or the source is on the hub itself."""
    foreign_source: str | None = None
    """How the source is quantized, where it is a quantized copy of its model that was named as its own reference. None: it is
    the model itself."""
    source_files: dict[str, str]
    """Every shard of the source, its config.json and every file that is copied -> what identifies its data: of a file on the
    hub `sha256:...`, `blob:...` (git's hash) or `commit:...` (no hash is stated); of a small file in a folder `sha256:...`; of
    a shard there `stamp:BYTES:MTIME_NS:CTIME_NS:INODE`, which any write to it or another file in its place changes."""
    mtp_layers: tuple[int, ...]
    """Decoder-layer indexes of inlined MTP blocks; empty if there are none or they lie elsewhere (`mtp.*`)."""
    ignore: tuple[str, ...]
    """Patterns for vLLM: modules that stay unquantized."""
    importance_sha256: str | None = None
    """Of the channel weights that the scale search uses. None: it uses none."""
    own_family: dict[str, Any] | None = Field(default=None, exclude_if=lambda family: family is None)
    """The family, where it is one of the user's own (`--family FILE`): whoever reads this record knows it without its file.
    None, and not in the file: it ships with assay."""
    calibrated: CalibratedLayers | None = None
    """Layers whose weights were calibrated. None: there are none, or it was not done yet. What they hold is stored, whatever
    the plan says of a tensor: AWQ changes norms and routers, which it says are kept."""
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

"""Families: how one architecture names its tensors, as a file; and blocks of names that several families share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from assay.recipes.base import Recipe, Section, beside

Part = Literal[
    "embedding", "lm_head", "norm", "attention", "indexer", "dense_mlp", "shared_expert", "routed_expert", "router",
    "router_bias", "mtp_projection", "other",
]  # fmt: skip
"""What a tensor is for: the roles of a precision without `mtp`, which says where a tensor lies; `mtp_projection`: `eh_proj`;
`other`: stays as it is, whatever the precision says."""


class Form(Section):
    """One name of a family.

    kind: `linear`: a 2-D weight that vLLM can hold quantized. `plain`: a weight that vLLM applies to or looks up by
        activations but loads only unquantized, so the ignore list must cover it. `bare`: the same, and vLLM builds its layer
        without a quantization config, so that the ignore list has no say. `vector`: norms, biases and other small things.
    fused: last component of the vLLM parameter into which this weight is loaded together with others, in this order.
    split: what a rank of tensor parallelism holds. `rows`: a part of the outputs (vLLM's ColumnParallelLinear, vocabulary).
        `kv_rows`: the same by key-value heads, which are repeated once there are more ranks than heads. `columns`: a part of
        the inputs (RowParallelLinear). `whole`: everything.
    """

    part: Part = Field(alias="role")
    kind: Literal["linear", "plain", "bare", "vector"] = "vector"
    fused: str | None = None
    split: Literal["rows", "kv_rows", "columns", "whole"] = "whole"


class Stacked(Section):
    """A tensor that holds all experts of a layer, behind the number of a layer: [experts, ...].

    A fine-tune may store it either way round; the shape tells, unless both sides are as wide as the model.
    """

    parts: tuple[str, ...] = Field(min_length=1)
    """Names of `layer` with `{expert}`: what of one expert is in it, first to last."""
    transposed: bool = False
    """[experts, inputs, outputs], as a matrix that multiplies from the right."""
    interleaved: bool = False
    """Its parts take turns, output by output (gpt-oss); else the second follows the first."""


class MtpStep(Section):
    """One step of an MTP block that takes several layers: config.json counts steps, and vLLM builds all their layers."""

    kinds: tuple[str, ...]
    """Keys of config.json whose value has an element for each layer of a step, a letter or a word; the first that is there
    counts. Without any, a step is one layer."""
    first: tuple[str, ...] = ()
    """Names that the first layer of a step must have beside those of the decoder layer that is most like it."""
    last: tuple[str, ...] = ()
    """The same of the last one."""


class MtpNames(Section):
    """The MTP block. Its layers have the names of decoder layers as well."""

    layers: str | None = None
    """What stands in front of the number of an MTP layer: `mtp.layers`, counted from 0. None: MTP layers follow the decoder
    layers and go on with their numbers."""
    runtime_layers: str | None = None
    """Of a block with `layers` of its own: what vLLM has in front of the number of an MTP layer, where it counts them on behind
    the decoder layers. None: as in the checkpoint."""
    layer: dict[str, Form] = Field(default_factory=dict)
    """More names behind the number of a layer, only inside MTP layers; or names of `layer` that have another form there."""
    outside: dict[str, Form] = Field(default_factory=dict)
    """Whole names of the block outside its layers."""
    experts: bool = True
    """Whether an MTP layer has routed experts, as the decoder layers have. If not, `required` names all that it must have."""
    lacks: tuple[str, ...] = ()
    """Beginnings of names that every decoder layer has and no MTP layer: `hc_`."""
    step: MtpStep | None = None
    """None: a step is one layer."""
    not_kept: dict[str, str] = Field(default_factory=dict)
    """Names of `layer` that only drafts of another kind have, which are not kept -> what kind that is."""
    required: tuple[str, ...] = ()
    """Without these, in each layer or outside, the block is incomplete. Head and embedding are among them only where vLLM does
    not share the model's own."""


class NativeQuantization(Section):
    """A quantized form in which models of the family are released first, so that these weights are the model itself.

    method: `quant_method` of config.json. dtype: of the quantized weights. block: rows and columns of a weight that share a
    scale. roles: of the weights that are stored so; empty: any. model_types: `model_type` of config.json; empty: any.
    """

    method: Literal["fp8", "compressed-tensors"]
    dtype: Literal["fp8", "int4", "fp4"]
    block: tuple[int, int]
    roles: tuple[Part, ...] = ()
    model_types: tuple[str, ...] = ()


class FamilyBlock(Recipe):
    """Names that several families share: `recipes/families/blocks/NAME.yaml`."""

    outside: dict[str, Form] = Field(default_factory=dict)
    """Whole names, outside the layers and the MTP block."""
    layer: dict[str, Form] = Field(default_factory=dict)
    """Names behind the number of a decoder layer; `{expert}` stands for an expert's number."""
    stacked: dict[str, Stacked] = Field(default_factory=dict)
    """Names, behind the number of a layer, under which checkpoints hold all experts in one tensor. They are read and written as
    single experts, which have the names of `layer`."""
    joined: dict[str, tuple[str, str, str]] = Field(default_factory=dict)
    """Names, behind the number of a layer, under which checkpoints hold queries, keys and values in one tensor -> the names of
    these three in `layer`, as which they are read and written."""
    mtp: MtpNames = MtpNames()
    runtime: dict[str, str] = Field(default_factory=dict)
    """Parts of a checkpoint's names that vLLM's modules call otherwise, whole components: `shared_head.head: head`."""
    older_names: dict[str, str] = Field(default_factory=dict)
    """Beginnings of names that some published checkpoints have, and vLLM's loader renames, whole components:
    `language_model.layers: language_model.model.layers`."""


class FamilyRecipe(FamilyBlock):
    """How one architecture names its tensors. Names of its own replace or follow those of its blocks."""

    architectures: tuple[str, ...]
    """Of config.json."""
    model_types: tuple[str, ...] = ()
    """`model_type` of config.json, where it names no architecture, beside the family's own name."""
    reasoning_parser: str
    """vLLM's, used for a model without a recipe whose chat template has a thinking section."""
    layers: str = "model.layers"
    """What stands in front of the number of a decoder layer: `model.language_model.layers`, `backbone.layers`."""
    kept: tuple[str, ...] = ()
    """Modules that stay as they are with all they hold, whatever the precision says: `model.visual`."""
    kept_in_layers: tuple[str, ...] = ()
    """The same of modules inside the layers: `ple.ple_embedding`."""
    num_experts: tuple[str, ...]
    """Keys of config.json that say how many routed experts a layer has; the first that is there counts."""
    native_quantization: tuple[NativeQuantization, ...] = ()
    """Quantized forms that are a source. Empty: models are released in BF16, and whatever is quantized is a candidate."""
    expert_schemes: tuple[str, ...] = ()
    """Schemes of which vLLM loads all parts of an expert. Empty: any, and experts in 16 bits."""
    mxfp4_experts_alone: bool = False
    """vLLM gives a checkpoint in MXFP4 to a method that knows experts alone: whatever else is stored so, it cannot load."""
    packed_as_vllm: bool = False
    """Codes of single experts are stored under the names of vLLM's parameters, `experts.3.w13_weight_packed`: its loader knows
    no others (`safetensors_index.name_in_file`)."""
    apart: dict[str, str] = Field(default_factory=dict)
    """Keys of config.json that say whether weights are `joined` -> what they say once they are not."""
    kinds: tuple[str, ...] = ()
    """Names, or beginnings of names, by which layers of this family differ in kind: what only some layers have."""
    from_config: bool = False
    """No published checkpoint or implementation beside vLLM's was at hand: names are those that vLLM's class takes."""
    blocks: tuple[str, ...] = ()
    """Names of shared blocks, or YAML files relative to the family's, in the order in which their names follow each other."""

    def found_from(self, folder: Path) -> Self:
        return self.model_copy(update={"blocks": tuple(beside(folder, block) for block in self.blocks)})

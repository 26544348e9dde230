"""Can tensor parallelism split this checkpoint? Every rank needs whole heads, and groups and blocks that share a scale must end
where a rank's part ends.

vLLM 0.32 raises otherwise, of heads at start (`ModelConfig.verify_with_parallel_config`; key-value heads: the attention
classes), of groups and blocks rank by rank and after the weights were moved: `verify_group_size_divides_partition` and
`validate_fp8_block_shape` (linears), `CompressedTensorsWNA16MoEMethod.create_weights` and `validate_fp8_block_shape_moe`
(experts). Here it is arithmetic over names and shapes, before the first byte. What a rank holds of each
weight stands in the family's table (`Form.split`). Kernels have rules of their own, which are not known here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.families import count_of, form_of, size_of, text_of
from assay.recipes.family import Form
from assay.recipes.profile import ProfileRecipe
from assay_quantize.plan.stored import StoredModel, StoredWeight

GROUPS = {128: "w4a16", 64: "w4a16-g64", 32: "w4a16-g32", 16: "nvfp4a16"}
"""Group size -> the shipped precision that has it."""
_HEADS = {
    "num_attention_heads": ("attention heads", False),
    "num_key_value_heads": ("key-value heads", True),
    "linear_num_key_heads": ("key heads of linear attention", False),
    "linear_num_value_heads": ("value heads of linear attention", False),
}
"""Key of config.json -> what it counts, and whether vLLM repeats these heads once there are more ranks."""
REFINED = 32
"""The smallest block to which vLLM refines the FP8 blocks of experts (`refine_fp8_moe_block_shape`)."""


class Ranks(NamedTuple):
    """Over how many GPUs a model is split. expert_parallel: every expert whole, on one of them. data_parallel: replicas, which
    share the experts all the same (`FusedMoEParallelConfig.make` in vllm/model_executor/layers/fused_moe/config.py)."""

    tensor_parallel: int = 1
    expert_parallel: bool = False
    data_parallel: int = 1

    def sharing(self, role: str) -> int:
        """GPUs that share a weight which is split."""
        return self.tensor_parallel * (self.data_parallel if role == "routed_expert" else 1)


class Misfit(NamedTuple):
    """Weights of one role and projection that the ranks cannot share.

    first: one of the num_weights weights. width: rows or columns of one rank. unit: what it must be a multiple of. blocks: rows
    and columns share a scale (FP8), and not columns alone. works_at: the largest smaller tensor parallelism at which they fit;
    None: none does.
    """

    role: str
    projection: str
    first: str
    num_weights: int
    side: str
    width: float
    unit: int
    blocks: bool
    ranks: int
    works_at: int | None

    @property
    def short(self) -> str:
        return f"{self.role} {self.projection}"

    @property
    def sentence(self) -> str:
        more = f" and {self.num_weights - 1:,} more" if self.num_weights > 1 else ""
        return (
            f"{self.short}: {self.width:g} {self.side} on each of {self.ranks} ranks are not a multiple of "
            f"{self.unit}, the {'block' if self.blocks else 'group'} that shares a scale ({self.first}{more})"
        )


class UnevenHeads(NamedTuple):
    """Heads that the ranks cannot share. short: of which kind. key: of config.json. works_at: as in `Misfit`."""

    short: str
    key: str
    num_heads: int
    ranks: int
    works_at: int | None

    @property
    def sentence(self) -> str:
        return f"{self.num_heads} {self.short} ({self.key}) cannot be shared by {self.ranks} ranks"


def ranks_of(profile: ProfileRecipe) -> Ranks:
    """As a profile's flags say."""
    tensor, data = (int(profile.flags.get(f"{kind}-parallel-size") or 1) for kind in ("tensor", "data"))
    return Ranks(tensor, bool(profile.flags.get("enable-expert-parallel")), data)


def misfits(model: StoredModel, ranks: Ranks) -> list[Misfit | UnevenHeads]:
    """What vLLM would refuse: heads, then one entry per role, projection and width; empty: it can be split."""
    return [*uneven_heads(model.config, ranks), *_misfitting(model, ranks)]


def uneven_heads(config: Mapping[str, Any], ranks: Ranks) -> list[UnevenHeads]:
    """Attention heads must be divided by the ranks; key-value heads must be, or divide them, and are repeated then.

    Latent attention (MLA) keeps no heads in its cache, and ignores their number.
    """
    text, wrong = text_of(config), []
    for key, (kind, may_repeat) in _HEADS.items():
        heads = 0 if may_repeat and text.get("kv_lora_rank") else count_of(key, text.get(key))
        fitting = [n for n in range(ranks.tensor_parallel, 0, -1) if heads % n == 0 or (may_repeat and n % heads == 0)]
        if ranks.tensor_parallel not in fitting:
            works_at = next((n for n in fitting if ranks.tensor_parallel % n == 0), None)
            wrong.append(UnevenHeads(kind, key, heads, ranks.tensor_parallel, works_at))
    return wrong


def _misfitting(model: StoredModel, ranks: Ranks) -> list[Misfit]:
    found: dict[tuple[str, str, str, float, int], list[StoredWeight]] = defaultdict(list)
    for weight in model.weights:
        if len(weight.shape) != 2 or not weight.name.endswith(".weight"):
            continue
        form = form_of(model.family, weight.name, model.config)
        for side, width, unit in _wrong(model, weight, form, ranks):
            found[form.part, weight.name.split(".")[-2], side, width, unit].append(weight)
    return [
        Misfit(
            role, projection, weights[0].name, len(weights), side, width, unit, weights[0].block_rows > 1,
            ranks.sharing(role), _works_at(model, weights[0], ranks),
        )
        for (role, projection, side, width, unit), weights in found.items()
    ]  # fmt: skip


def check_parallel(model: StoredModel, profile: ProfileRecipe) -> None:
    """PlanError: what cannot be split on a profile, why, and what would fit."""
    ranks = ranks_of(profile)
    if not (found := misfits(model, ranks)):
        return
    raise PlanError(f"{model.what} cannot be served on profile {profile.name}: {sentence(found)}; {remedy(found)}")


def sentence(found: Sequence[Misfit | UnevenHeads]) -> str:
    """The first in full, and what else."""
    others = [one.short for one in found[1:]]
    also = f"; so {'are' if len(others) > 1 else 'is'} {', '.join(others)}" if others else ""
    return f"{found[0].sentence}{also}"


def remedy(found: Sequence[Misfit | UnevenHeads]) -> str:
    """Which precision or tensor parallelism would fit all of them; no precision changes the number of heads."""
    weights = [one for one in found if isinstance(one, Misfit)]
    scales = _other_scales(weights) if len(weights) == len(found) else None
    ways = [] if scales is None else [scales]
    if all(one.works_at is not None for one in found):
        ways.append(f"a profile with tensor-parallel-size {min(one.works_at or 1 for one in found)}")
    return f"what fits: {', or '.join(ways)}" if ways else "keep the role in 16 bits"


def _other_scales(found: Sequence[Misfit]) -> str | None:
    """Groups or blocks that would fit; None: no group ends in the middle of a column."""
    if any(one.blocks for one in found):
        return "one scale per row (fp8-channel)"
    if any(one.width != int(one.width) for one in found):
        return None
    common = math.gcd(*(int(one.width) for one in found))
    smaller = [f"{group} ({name})" for group, name in GROUPS.items() if common % group == 0]
    return f"a group size of {' or '.join(smaller)}" if smaller else "one scale per row (w4a16-channel)"


def _works_at(model: StoredModel, weight: StoredWeight, ranks: Ranks) -> int | None:
    form = form_of(model.family, weight.name, model.config)
    smaller = (n for n in range(ranks.tensor_parallel // 2, 0, -1) if ranks.tensor_parallel % n == 0)
    return next((n for n in smaller if not list(_wrong(model, weight, form, ranks._replace(tensor_parallel=n)))), None)


def _wrong(model: StoredModel, weight: StoredWeight, form: Form, ranks: Ranks) -> Iterator[tuple[str, float, int]]:
    """(side, width of a rank, what it must be a multiple of) of one weight; nothing if it can be split."""
    is_expert = form.part == "routed_expert"
    if form.kind != "linear" or weight.group is None or form.split == "whole":
        return
    parts = 1 if is_expert and ranks.expert_parallel else ranks.sharing(form.part)
    rows, columns = weight.shape
    if form.split == "columns":
        width = columns / parts
        if parts > 1 and width % weight.group and not (is_expert and _refines(model, width)):
            yield "inputs", width, weight.group
        return
    head = head_dim(model.config, weight.name) if form.split == "kv_rows" else 1
    width = max(rows / parts, head)
    for unit in (weight.block_rows, weight.word_rows):
        if width % unit and not _is_let_through(model, form, width, is_expert=is_expert):
            yield "outputs", width, unit


def _refines(model: StoredModel, width: float) -> bool:
    """Whether vLLM's own FP8 method takes finer blocks for the experts."""
    if not model.native_fp8 or width != int(width):
        return False
    return math.gcd(128, int(width), size_of(text_of(model.config), "hidden_size", 0)) >= REFINED


def _is_let_through(model: StoredModel, form: Form, width: float, *, is_expert: bool) -> bool:
    """vLLM's own FP8 method refines the blocks of experts, and does not check merged linears (`linear.py`)."""
    return _refines(model, width) if is_expert else model.native_fp8 and form.fused is not None


def head_dim(config: Mapping[str, Any], name: str = "") -> int:
    """Values of one attention head. name: of a weight; heads of `v_proj` may be narrower (MiMo-V2-Flash)."""
    text = text_of(config)
    if name.endswith(".v_proj.weight") and text.get("v_head_dim"):
        return size_of(text, "v_head_dim")
    return size_of(text, "head_dim", 0) or size_of(text, "hidden_size") // size_of(text, "num_attention_heads")

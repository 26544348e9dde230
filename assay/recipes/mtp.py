"""Whether a checkpoint carries an MTP block (multi-token prediction: its own draft head), and whether the block is whole.

A config and the stored names must be asked together. Qwen3-Next stores `mtp.*` and its config says nothing; a config may
declare layers that were never uploaded; and 0 is how a dropped block is declared. vLLM 0.32 reads the count from config.json
(`num_nextn_predict_layers`) and takes 1 where it says nothing; with 0 it refuses `method: mtp` instead of drafting noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import names_of, split_layer
from assay.recipes.text_config import changing_text, count_of, num_hidden_layers, text_of

CONFIG_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Where a config may say how many MTP layers there are; the first is the one that vLLM reads of all our families."""


@dataclass(frozen=True)
class MtpBlock:
    """What a checkpoint says of its MTP block, in layers as config.json counts them: steps.

    declared: by config.json; None: it says nothing. stored: by the names of its tensors; None: the names are not known, or the
    family's are not.
    """

    declared: int | None
    stored: int | None

    @property
    def num_layers(self) -> int:
        """How many layers a server can draft with; 0: none."""
        if self.declared == 0:
            return 0
        return self.stored if self.stored is not None else self.declared or 0

    @property
    def absence(self) -> str:
        """Why there is nothing to draft with, as part of a sentence."""
        if self.declared == 0:
            return "config.json declares 0 MTP layers" + (", though its tensors are there" if self.stored else "")
        if self.declared is None:
            return "no MTP layers are declared in config.json" + (" or stored" if self.stored == 0 else "")
        return f"config.json declares {self.declared} MTP layer(s), but none is stored"


def mtp_block(config: Mapping[str, Any], names: Iterable[str] | None) -> MtpBlock:
    """The MTP block of a checkpoint, source or quantized, of any architecture.

    names: of its tensors (`safetensors_index.tensor_names`); None: not known. PlanError for a count that cannot be.
    """
    declared = declared_layers(config)
    if names is None:
        return MtpBlock(declared, None)
    try:
        family = family_of(config)
    except PlanError:
        return MtpBlock(declared, None)  # vLLM serves more architectures than can be planned
    return MtpBlock(declared, stored_steps(family, config, names))


def declared_layers(config: Mapping[str, Any]) -> int | None:
    """How many MTP layers the config says there are; None if it says nothing."""
    text = text_of(config)
    return next((count_of(key, text[key]) for key in CONFIG_KEYS if text.get(key) is not None), None)


def stored_layers(family: str, config: Mapping[str, Any], names: Iterable[str]) -> tuple[int, ...]:
    """The MTP layers' numbers, sorted: from `num_hidden_layers` on where they are inlined, from 0 on in `mtp.layers`."""
    root, first = _place(family, config)
    places = (split_layer(name) for name in names)
    return tuple(sorted({at.layer for at in places if at is not None and at.root == root and at.layer >= first}))


def stored_steps(family: str, config: Mapping[str, Any], names: Iterable[str]) -> int:
    """How many MTP layers are stored, counted as config.json counts them."""
    return math.ceil(len(stored_layers(family, config, names)) / layers_of_step(family, config))


def layers_of_step(family: str, config: Mapping[str, Any]) -> int:
    """Stored layers for each MTP layer that config.json declares: two for `mtp_hybrid_override_pattern: "*E"`."""
    step = names_of(family).mtp_step
    kinds = [text_of(config).get(key) for key in step.kinds] if step is not None else []
    return next((len(kind) for kind in kinds if isinstance(kind, str | list) and kind), 1)


def names_in_block(family: str, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of `names` that belong to the MTP block."""
    root, first = _place(family, config)
    at = {name: split_layer(name) for name in names}
    return [
        name
        for name, place in at.items()
        if names_of(family).is_beside_mtp_layers(name) or (place is not None and place.root == root and place.layer >= first)
    ]


def declaring_none(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with 0 MTP layers: under every key it has for them, else under the one that vLLM reads."""

    def without(text: Mapping[str, Any]) -> dict[str, Any]:
        present = [key for key in CONFIG_KEYS if key in text]
        return {**text, **dict.fromkeys(present or CONFIG_KEYS[:1], 0)}

    return changing_text(config, without)


# ------------------------------------------------------------------------------------------------ completeness
class MtpProblem(NamedTuple):
    """One thing that is wrong. where: a tensor, layer or expert. mend: what to do about it in a source."""

    where: str
    what: str
    mend: str


LOST = (
    "transformers loads and saves a model without the block, and so do tools that fine-tune with it: copy its tensors from the "
    "base model's files, complete the download, or leave the block out with `--mtp drop`"
)
COMPLETE = "complete the download, or leave the block out with `--mtp drop`"
CORRECT = "correct the number, or leave the block out with `--mtp drop`"


def draft_not_kept(family: str, names: Iterable[str]) -> tuple[str, str] | None:
    """(a tensor, what kind of draft it is of) where the stored block is of a kind that is not kept; None: it is not."""
    kinds = names_of(family).mtp_not_kept
    places = ((name, split_layer(name)) for name in names) if kinds else ()
    root = names_of(family).mtp_layers
    return next(
        ((name, kinds[at.rest]) for name, at in places if at is not None and at.root == root and at.rest in kinds), None
    )


def mtp_problems(family: str, config: Mapping[str, Any], names: Collection[str]) -> Iterator[MtpProblem]:
    """What is wrong with the MTP block: it is there if it is declared, declared if it is there, and whole.

    names: as a source has them (`weight`, not `weight_packed`), without scales. vLLM loads a block that lacks experts without
    a word and drafts noise; a missing head or embedding it shares from the model.
    """
    if not (names_of(family).mtp or names_of(family).mtp_layer):
        return  # MiniMax-M3 declares layers that no release has
    if draft_not_kept(family, names) is not None:
        return
    root, first = _place(family, config)
    rests: dict[tuple[str, int], set[str]] = defaultdict(set)  # (root, layer) -> names behind the layer's number
    for at in map(split_layer, names):
        if at is not None:
            rests[at.root, at.layer].add(at.rest)
    stored = [layer for layer_root, layer in rests if layer_root == root and layer >= first]
    beside = sorted(name for name in names if names_of(family).is_beside_mtp_layers(name))
    declared, in_step = declared_layers(config), layers_of_step(family, config)
    # not declared, vLLM builds one layer for what lies beside the layers
    count = max(len(stored), int(bool(beside))) if declared is None else declared * in_step
    for layer in sorted(stored):
        if layer >= first + count:
            of_several = f" of {in_step} layers each" if in_step > 1 else ""
            what = f"holds an MTP block, but config.json declares {count // in_step} MTP layers{of_several}"
            if declared is None:
                what = f"holds an MTP block, but vLLM looks for {count} from {root}.{first} on"
            yield MtpProblem(f"{root}.{layer}", what, CORRECT)
    if beside and not count:
        yield MtpProblem(beside[0], "belongs to an MTP block, but config.json declares 0 MTP layers", CORRECT)
    for layer in range(first, first + count):
        prefix, have = f"{root}.{layer}", rests.get((root, layer), set())
        if have:
            yield from _problems_of_layer(family, config, prefix, have, rests)
        elif declared is None:
            yield MtpProblem(prefix, "is not there, but other parts of an MTP block are", COMPLETE)
        else:
            yield MtpProblem(prefix, "is declared in config.json (MTP), but no shard holds any tensor of it", LOST)
    if count:
        required = [name for name in names_of(family).mtp_required if name in names_of(family).mtp]
        numbered = {name.replace("{layer}", str(layer)) for name in required for layer in range(first, first + count)}
        yield from (_missing(name) for name in sorted(numbered) if name not in beside)


def _problems_of_layer(
    family: str, config: Mapping[str, Any], prefix: str, have: set[str], rests: Mapping[tuple[str, int], set[str]]
) -> Iterator[MtpProblem]:
    names = names_of(family)
    required = set(names.mtp_required) - names.mtp.keys()
    # ERNIE-4.5's block has a dense MLP, though most layers of the model have experts
    dense = not names.mtp_experts or any(form.part == "dense_mlp" and rest in have for rest, form in names.layer.items())
    layers = [
        names_in_layer
        for (at, layer), names_in_layer in rests.items()
        if at == names.layers and layer < num_hidden_layers(config)
    ]
    alike: set[str] = set()
    if names.mtp_step is not None:  # a layer is one mixer, and its kind that of the decoder layer with most of its names
        number, in_step = int(prefix.rpartition(".")[2]), layers_of_step(family, config)
        required |= set(names.mtp_step.first if number % in_step == 0 else ())
        required |= set(names.mtp_step.last if (number + 1) % in_step == 0 else ())
        alike = min(layers, key=lambda rests: (-len(rests & have), len(rests)), default=alike)
        dense = not any(rest.startswith(f"{names.experts}.") for rest in alike)
    elif names.mtp_experts:
        alike = _like(have, layers, f"{names.experts}.0.", dense=dense)
    experts = 0 if dense else num_experts(family, config)
    if names.mtp_experts:
        required |= {name for name in alike if not name.startswith(names.mtp_lacks)}
        required |= {f"{names.experts}.{expert}.{part}.weight" for expert in range(experts) for part in names.projections}
    for rest in sorted(required - have):
        yield _missing(f"{prefix}.{rest}")
    in_experts = f"{names.experts}."
    numbers = {rest.removeprefix(in_experts).split(".")[0] for rest in have if rest.startswith(in_experts)}
    for expert in sorted(int(number) for number in numbers if number.isdecimal() and int(number) >= experts):
        what = f"is there, but config.json declares {experts} experts"
        yield MtpProblem(f"{prefix}.{names.experts}.{expert}", what, "correct the config")


def _like(have: set[str], layers: Sequence[set[str]], expert_0: str, *, dense: bool) -> set[str]:
    """What the decoder layer most like an MTP layer holds: experts unless `dense`, full attention, an indexer if it has any."""
    kind = [rests for rests in layers if any(rest.startswith(expert_0) for rest in rests) != dense]
    full = [rests for rests in kind if any(rest.startswith("self_attn.") for rest in rests)]
    alike = [rests for rests in full if _has_indexer(rests) == _has_indexer(have)] or full
    nearest: set[str] = min(alike, key=lambda rests: len(rests - have), default=set())
    return set(nearest)


def _has_indexer(rests: Iterable[str]) -> bool:
    return any(".indexer." in rest for rest in rests)


def _missing(name: str) -> MtpProblem:
    return MtpProblem(name, "is missing from the MTP block: vLLM would load it and draft noise", COMPLETE)


def _place(family: str, config: Mapping[str, Any]) -> tuple[str, int]:
    """(what stands in front of the number of an MTP layer, the first such number)."""
    names = names_of(family)
    return (names.layers, num_hidden_layers(config)) if names.mtp_layers is None else (names.mtp_layers, 0)

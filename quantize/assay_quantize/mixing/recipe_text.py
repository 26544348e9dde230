"""The mix as an ordinary precision recipe: a scheme for each role, the layers that differ, and the reasons as comments."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from assay.foreign_text import one_line
from assay.quantities import size
from assay.recipes.calibrated.methods import INTEGERS
from assay.recipes.precision import PrecisionRecipe, layer_numbers
from assay.records.choice.mix import KEPT, Mix, MixedPart

_WRITTEN_HERE = frozenset({"schema", "name", "description", "scheme", "quantize", "layers", "keep"})
_WIDTH = 116


def layers_text(layers: Iterable[int]) -> str:
    """{0, 1, 2, 7} -> `0-2, 7`, as recipes write layers."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def usual_schemes(schemes: Mapping[tuple[int, str], str]) -> dict[str, str]:
    """Role -> the scheme of most of its layers, `bf16` only where all have it: what recipes say under `quantize`."""
    by_role: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, role), scheme in sorted(schemes.items()):
        by_role[role][scheme] += 1
    usual = {}
    for role, counts in by_role.items():
        taken = [(count, scheme) for scheme, count in counts.items() if scheme != KEPT]
        usual[role] = max(taken, key=lambda row: row[0])[1] if taken else KEPT
    return usual


def recipe_data(base: PrecisionRecipe, name: str, description: str, schemes: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    """The recipe as its file says it. Roles that stay in 16 bits everywhere are kept; so is what `base` keeps."""
    usual = usual_schemes(schemes)
    if base.mtp == "quantize":  # the block takes what stands under `quantize`; layers say how they differ from it
        usual = {role: base.scheme_of(role, None) or KEPT for role in base.quantize}
    kept = [role for role in base.quantize if usual.get(role, KEPT) == KEPT]
    keep = {dtype: list(roles) for dtype, roles in base.keep.items()}
    if kept:
        keep["bf16"] = [*keep.get("bf16", []), *kept]
    data = base.model_dump(mode="json", by_alias=True)
    if not set(INTEGERS) & set(schemes.values()):
        data["calibration"] = "none"  # nothing is left to calibrate
    more = {key: value for key, value in data.items() if key not in _WRITTEN_HERE}
    head = {"schema": 1, "name": name, "description": description}
    quantize = {role: usual[role] for role in base.quantize if role not in kept}
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (layer, role), scheme in schemes.items():
        if scheme != usual[role] and usual[role] != KEPT:
            layers[role, scheme].append(layer)
    exceptions: dict[str, dict[str, str]] = defaultdict(dict)  # roles that differ in the same layers stand together
    for (role, scheme), numbers in sorted(layers.items(), key=lambda row: (min(row[1]), row[0])):
        exceptions[layers_text(numbers)][role] = scheme
    return {**head, "quantize": quantize, **({"layers": dict(exceptions)} if exceptions else {}), "keep": keep, **more}


def recipe_text(mix: Mix, data: Mapping[str, Any]) -> str:
    """The file: comments, then `data` (`recipe_data`) as YAML."""
    by_role: dict[str, list[MixedPart]] = defaultdict(list)
    for part in mix.parts:
        by_role[part.role].append(part)
    point, texts = mix.point, f"{mix.num_texts} texts" if mix.num_texts else "no texts"
    sentences = [
        f"Made by `assay recipe` for {mix.model}, within {limits_text(mix)}. {mix.reason}",
        f"Size: {size(point.bytes)} in all, {point.bits_per_weight:.2f} bits for each of {mix.num_weights:,} weights of the "
        f"roles below. Expected: {point.damage_nats:.4g} nats a token, the sum of what each part loses alone; no choice within "
        f"these limits loses less than {mix.bound_nats:.4g}.",
        f"Chosen on {texts} ({mix.texts or 'not described'}; sha256 {mix.texts_sha256[:16]}), damages by {mix.method}"
        f"{'' if mix.calibrated_by is None else f', INT4 weights by {mix.calibrated_by}'}. Judge it on other texts.",
    ]
    lines = [line for sentence in sentences for line in _comment(sentence, "")]
    lines += [f"{key}: {_yaml(data[key])}" for key in ("schema", "name", "description")]
    lines.append("quantize:")
    also = ", and the MTP block" if data["mtp"] == "quantize" else ""
    for role, scheme in data["quantize"].items():
        lines.append(f"  {role}: {scheme}   # {_of_role(by_role.get(role, []), scheme)}{also}")
    if data.get("layers"):
        lines.append("layers:")
        for text, roles in data["layers"].items():
            for role, scheme in roles.items():
                parts = [part for part in by_role[role] if part.scheme == scheme and part.layer in layer_numbers(text)]
                lines += _comment(f"{role} {text}: {_cost(parts)}. {reason(parts)}", "  ")
            flow = ", ".join(f"{role}: {scheme}" for role, scheme in roles.items())
            lines.append(f"  {_yaml(text)}: {{{flow}}}")
    lines.append("keep:")
    for dtype, roles in data["keep"].items():
        lines.append(f"  {dtype}: [{', '.join(roles)}]")
    lines += [f"{key}: {_yaml(value)}" for key, value in data.items() if key not in _WRITTEN_HERE]
    return "\n".join(lines) + "\n"


def limits_text(mix: Mix) -> str:
    """`4.5bpw (6.1 MB) on 4xh200 (32 users, 32,768 tokens each)`."""
    budget = "" if mix.budget_bytes is None else f"{mix.budget} ({size(mix.budget_bytes)})"
    if mix.hardware is None:
        return budget
    machine = f"{mix.hardware} ({mix.users} users, {mix.context:,} tokens each)"
    return f"{budget} on {machine}" if budget else f"what {machine} holds"


def _of_role(parts: Sequence[MixedPart], scheme: str) -> str:
    of_scheme = [part for part in parts if part.scheme == scheme]
    if not of_scheme:  # of a recipe that quantizes the MTP block
        return "no layer"
    return f"{len(of_scheme)} of {len(parts)} layers, {_cost(of_scheme)}"


def _cost(parts: Sequence[MixedPart]) -> str:
    return f"{size(sum(part.bytes for part in parts))}, {sum(part.damage_nats for part in parts):.3g} nats"


def reason(parts: Sequence[MixedPart]) -> str:
    """Why parts of one role and scheme do not take what most layers of the role take; empty: they do."""
    if parts[0].scheme == parts[0].usual:
        return ""
    usual = parts[0].usual
    able = [part for part in parts if part.usual_nats is not None and part.usual_bytes is not None]
    if not able:
        return f"{usual} is out: {parts[0].why}."
    gained = sum((part.usual_nats or 0.0) - part.damage_nats for part in able)
    more = sum(part.bytes - (part.usual_bytes or 0) for part in able)
    also = "" if len(able) == len(parts) else f" In {len(parts) - len(able)} of them {usual} is out."
    instead = "as many bytes" if more == 0 else f"{size(abs(more))} {'less' if more > 0 else 'more'}"
    if gained >= 0:
        return f"In {usual} {gained:.2g} nats more would be lost, for {instead}.{also}"
    return f"In {usual} {-gained:.2g} nats less would be lost, for {instead}; they save more elsewhere.{also}"


def _comment(text: str, indent: str) -> list[str]:
    """One sentence or more as lines of comment; what others wrote cannot end the comment."""
    lines, line = [], ""
    for word in one_line(text).split():
        if line and len(line) + len(word) + 1 > _WIDTH - len(indent):
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [f"{indent}# {text}" for text in (*lines, line)]


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_OTHER_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def _yaml(value: Any) -> str:
    """A value in YAML's JSON form; words that need no quotes have none."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHER_WORDS:
        return value
    return json.dumps(value, ensure_ascii=True)

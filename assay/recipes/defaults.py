"""`extends:` of a precision: what a file does not say is as in another precision.

A value of the file takes the place of the other's, whole: `quantize` is the file's list, not a longer one. Only `keep` is put
together role by role, because a role has one place: one that the file names, under `quantize` or any dtype of `keep`, is taken
from where the other recipe has it; the rest of `keep` stays.

    # w4a16.yaml                            # w4a16-experts.yaml
    quantize: [attention, routed_expert]    extends: w4a16
    keep: {bf16: [mtp], fp32: [norm]}       keep: {bf16: [attention]}     -> quantize: [routed_expert]
                                                                             keep: {bf16: [mtp, attention], fp32: [norm]}

`schema`, `name` and `description` are of each file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTENDS = "extends"
MAX_DEPTH = 3
"""Recipes that one may rest on, one upon the other: a reader has to open them all."""
_OWN = frozenset({"schema", "name", "description"})


def with_defaults(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and from `base` all that it leaves open. base: a valid precision, as YAML has it. given: may be wrong."""
    named = _roles(given.get("quantize")) | _roles(given.get("keep"))
    merged = {key: value for key, value in base.items() if key not in _OWN} | dict(given)
    if "quantize" not in given:
        merged["quantize"] = [role for role in base["quantize"] if role not in named]
    more = given.get("keep", {})
    if isinstance(more, dict):
        stays = {dtype: [role for role in roles if role not in named] for dtype, roles in base["keep"].items()}
        kept = {dtype: roles for dtype, roles in stays.items() if roles or dtype in more}
        merged["keep"] = {**kept, **{dtype: _joined(kept.get(dtype, []), roles) for dtype, roles in more.items()}}
    return merged


def _roles(value: Any) -> set[str]:
    """Every word in a list, or in the lists of a mapping."""
    lists = value.values() if isinstance(value, dict) else (value,)
    return {role for roles in lists if isinstance(roles, list) for role in roles if isinstance(role, str)}


def _joined(roles: list[str], more: Any) -> Any:
    return [*roles, *more] if isinstance(more, list) else more

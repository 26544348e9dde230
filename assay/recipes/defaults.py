"""`extends:` in a precision recipe: every key that the file does not set has the value of the recipe it extends.

A key that the file sets replaces the inherited value as a whole; `quantize` in the file is complete. If it maps roles to
schemes, an inherited `scheme` is dropped; a `scheme` in the file takes the place of all schemes in an inherited mapping. The
exception is `keep`, which is merged role by role, because a role has exactly one place: a role that the file names, under
`quantize` or under any dtype of `keep`, is removed from its inherited place. The rest of the inherited `keep` stays.

    # w4a16.yaml                            # w4a16-experts.yaml
    quantize: [attention, routed_expert]    extends: w4a16
    keep: {bf16: [mtp], fp32: [norm]}       keep: {bf16: [attention]}     -> quantize: [routed_expert]
                                                                             keep: {bf16: [mtp, attention], fp32: [norm]}

`schema`, `name` and `description` are never inherited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTENDS = "extends"
MAX_DEPTH = 3
"""Longest chain of extended recipes: a reader has to open all of them."""
_OWN = frozenset({"schema", "name", "description"})


def with_defaults(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, completed from `base`. base: a valid precision in YAML form. given: the content of a file, not validated yet."""
    quantized = given.get("quantize")
    named = _roles([*quantized] if isinstance(quantized, dict) else quantized) | _roles(given.get("keep"))
    merged = {key: value for key, value in base.items() if key not in _OWN} | dict(given)
    if "quantize" not in given:
        merged["quantize"] = _without(base["quantize"], named, one_scheme="scheme" in given)
    elif isinstance(given["quantize"], dict) and "scheme" not in given:
        merged.pop("scheme", None)
    more = given.get("keep", {})
    if isinstance(more, dict):
        stays = {dtype: [role for role in roles if role not in named] for dtype, roles in base["keep"].items()}
        kept = {dtype: roles for dtype, roles in stays.items() if roles or dtype in more}
        lists = {dtype: [*kept.get(dtype, []), *roles] for dtype, roles in more.items() if isinstance(roles, list)}
        merged["keep"] = kept | more | lists
    return merged


def _without(quantize: Any, roles: set[str], *, one_scheme: bool) -> Any:
    """`quantize` of a recipe without some roles; of a mapping only the roles are left where they all take one scheme."""
    if isinstance(quantize, dict) and not one_scheme:
        return {role: scheme for role, scheme in quantize.items() if role not in roles}
    return [role for role in quantize if role not in roles]


def _roles(value: Any) -> set[str]:
    """All strings in a list, or in the lists of a mapping."""
    lists = value.values() if isinstance(value, dict) else (value,)
    return {role for roles in lists if isinstance(roles, list) for role in roles if isinstance(role, str)}

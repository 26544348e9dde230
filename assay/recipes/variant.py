"""Variants: other ways of serving the reference's checkpoint, each measured as if it were a candidate.

In a profile or a model's recipe, `variants: {fp8-kv: {vllm: {kv-cache-dtype: fp8}}}`; on the command line
`--variant fp8-kv:kv-cache-dtype=fp8`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.recipes.address import problem_with
from assay.recipes.base import MOST_AT_ONCE, Section, refused_secrets
from assay.records.declared import ADDRESS, ENVIRONMENT, FLAGS, INTERPRETER, SPECULATION
from assay.safe_yaml import NotPlainYaml, parse_yaml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""As labels are."""
SET_BY_ASSAY = frozenset({"model", "host", "port", "served-model-name"})
OF_PROMPTS = frozenset({"chat-template", "default-chat-template-kwargs"})
"""Flags that change what the model is asked, and so no way of serving the same questions."""
_SPECULATIVE = "speculative-config"


def flag_name(name: str) -> str:
    """As vLLM's documentation has it: `max_model_len` and `--max-model-len` are `max-model-len`."""
    return name.removeprefix("--").replace("_", "-")


def _off(value: Any) -> Any:
    """YAML 1.1 reads `off` as false; no drafted tokens are none."""
    return "off" if value is False or (type(value) is int and value == 0) else value


Depth = Annotated[int, Field(ge=1, le=MOST_AT_ONCE, strict=True)]
Speculation = Annotated[Literal["off"] | Depth | dict[str, Any], BeforeValidator(_off)]


class Variant(Section):
    """What differs from how the profile serves the reference; everything else is the same."""

    name: str
    """Label of its measurement."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own flags, as in a profile; null takes one of the profile's away."""
    environment: dict[str, str] = Field(default_factory=dict)
    interpreter: str | None = None
    """Python of another environment that has vLLM. None: the profile's."""
    speculation: Speculation | None = None
    """`off`; tokens that the checkpoint's MTP head drafts a step; or vLLM's --speculative-config. None: as the model's recipe
    says."""
    url: str | None = None
    """Of a server that runs already and serves the same checkpoint so. Of the rest nothing can be seen: it is taken as said."""

    def _contradictions(self) -> Iterator[str]:
        if not NAME.fullmatch(self.name):
            yield f"{shown(self.name)}: is no name of a variant; letters, digits, `.`, `_` and `-`, as of a label"
        yield from refused_secrets(self.vllm, "vllm")
        yield from refused_secrets(self.environment, "environment")
        for name in self.flags:
            yield from _refused_flag(name)
        names = [flag_name(name) for name in self.vllm]
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"vllm: {twice[0]} is there twice"
        yield from (
            f"vllm: {name} is no plain value; put it into quotation marks"
            for name in self.flags
            if not _is_json(self.flags[name])
        )
        if isinstance(self.speculation, dict):
            yield from refused_secrets(self.speculation, "speculation")
            if not _is_json(self.speculation):
                yield "speculation: holds a value that is not plain; put it into quotation marks"
            if not self.speculation:
                yield "speculation: is empty; write `off` for none"
        if self.url is not None and (problem := problem_with(self.url)) is not None:
            yield f"url: {problem}"
        if not self.declared:
            yield "declares nothing; say what differs, such as `kv-cache-dtype=fp8` or `mtp=off`"

    @property
    def flags(self) -> dict[str, Any]:
        """`vllm`, with names as vLLM's documentation has them."""
        return {flag_name(name): value for name, value in self.vllm.items()}

    @property
    def drafting(self) -> dict[str, Any] | None:
        """vLLM's --speculative-config; None: off, or as the model's recipe says (`speculation` tells which)."""
        if isinstance(self.speculation, dict):
            return self.speculation
        return {"method": "mtp", "num_speculative_tokens": self.speculation} if isinstance(self.speculation, int) else None

    @property
    def declared(self) -> dict[str, Any]:
        """Path in a serving fingerprint -> the value that it is to have there, as `records/declared.py` has it."""
        told: dict[str, Any] = {f"{FLAGS}{name}": value for name, value in sorted(self.flags.items())}
        told |= {f"{ENVIRONMENT}{name}": value for name, value in sorted(self.environment.items())}
        told |= {} if self.speculation is None else {SPECULATION: self.drafting}
        told |= {} if self.interpreter is None else {INTERPRETER: self.interpreter}
        return told | ({} if self.url is None else {ADDRESS: self.url})


def _named(told: Any) -> Any:
    """Each with the name that it stands under."""
    if not isinstance(told, dict):
        return told
    return {name: {**entry, "name": name} if isinstance(entry, dict) else entry for name, entry in told.items()}


Variants = Annotated[dict[str, Variant], BeforeValidator(_named)]
"""`variants:` of a profile or a model's recipe, by name."""


def declared_variant(name: str, declared: Mapping[str, Any]) -> Variant:
    """The variant that a measurement declares: `Variant.declared` the other way round."""
    fields: dict[str, Any] = {
        "vllm": {path.removeprefix(FLAGS): value for path, value in declared.items() if path.startswith(FLAGS)},
        "environment": {
            path.removeprefix(ENVIRONMENT): value for path, value in declared.items() if path.startswith(ENVIRONMENT)
        },
        "interpreter": declared.get(INTERPRETER),
        "url": declared.get(ADDRESS),
    }
    if SPECULATION in declared:
        fields["speculation"] = "off" if declared[SPECULATION] is None else declared[SPECULATION]
    return variant_of(name, fields, name)


def _is_json(value: Any) -> bool:
    """Not of YAML's dates, infinities and NaN, which no record holds."""
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


def _refused_flag(name: str) -> Iterator[str]:
    if name in SET_BY_ASSAY:
        yield f"vllm: {name} is set by the command; leave it out"
    elif name == _SPECULATIVE:
        yield f"vllm: {name} is written as `speculation` (on the command line `mtp=off`, `mtp=2` or `{_SPECULATIVE}={{...}}`)"
    elif name in OF_PROMPTS:
        yield f"vllm: {name} changes the prompts: replies would be to other questions, and not comparable; leave it out"
    elif name.startswith("no-"):
        yield f"vllm: write {name.removeprefix('no-')}=false for {name}"


# ------------------------------------------------------------------------------------------------ on the command line
_HELP = "write NAME:KEY=VALUE,..., such as fp8-kv:kv-cache-dtype=fp8 or no-mtp:mtp=off"
_ENVIRONMENT_KEY = "env."


def parse_variants(texts: Sequence[str], known: Mapping[str, Variant]) -> list[Variant]:
    """Of `--variant`, each NAME:KEY=VALUE,... or the NAME of one that is known: the profile's or the
    model recipe's. AssayError: one means nothing."""
    variants = [_parse(text.strip(), known) for text in texts]
    names = [variant.name for variant in variants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise AssayError(f"--variant {twice[0]}: is given twice; each needs a name of its own")
    return variants


def _parse(text: str, known: Mapping[str, Variant]) -> Variant:
    name, colon, told = text.partition(":")
    if not NAME.fullmatch(name):
        raise AssayError(f"--variant: begins with no name; {_HELP}")
    if not colon:
        if name not in known:
            hint = did_you_mean(name, list(known))
            theirs = f"there are {', '.join(known)}" if known else "neither the profile nor the model's recipe has `variants`"
            raise AssayError(f"--variant {name}: {hint}{theirs}; name one of them, or {_HELP}")
        return known[name]
    return variant_of(name, _fields(name, told), f"--variant {name}")


def variant_of(name: str, fields: Mapping[str, Any], where: str) -> Variant:
    """AssayError, in one line that begins with `where`: the fields are none of a variant."""
    try:
        return Variant.model_validate({"name": name, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0]) if first["loc"] else ""
        if place == "speculation":
            raise AssayError(f"{where}: mtp takes off, or a whole number of drafted tokens from 1 to {MOST_AT_ONCE}") from None
        message = str(first["msg"]).removeprefix("Value error, ").split("\n")[0]
        raise AssayError(f"{where}: {f'{place}: ' if place else ''}{message}") from None


def _fields(name: str, told: str) -> dict[str, Any]:
    """KEY=VALUE,... as the fields of a variant."""
    where = f"--variant {name}"
    fields: dict[str, Any] = {"vllm": {}, "environment": {}}
    keys: set[str] = set()
    for part in _split(told):
        key, is_told, value = (word.strip() for word in part.partition("="))
        if not key or not is_told or not value:
            raise AssayError(
                f"{where}: {shown(key) or 'an empty word'} has no value; write KEY=VALUE, a flag as KEY=true or KEY=false"
            )
        flag = flag_name(key)
        if (own := key if key.startswith(_ENVIRONMENT_KEY) else flag) in keys:
            raise AssayError(f"{where}: {shown(own)} is there twice")
        keys.add(own)
        if key.startswith(_ENVIRONMENT_KEY):
            fields["environment"][key.removeprefix(_ENVIRONMENT_KEY)] = value
        elif flag in ("interpreter", "url"):
            fields[flag] = value
        elif flag in ("mtp", _SPECULATIVE):
            if "speculation" in fields:
                raise AssayError(f"{where}: mtp and {_SPECULATIVE} are two words for one thing; say one of them")
            fields["speculation"] = _value(where, key, value)
        else:
            fields["vllm"][flag] = _value(where, key, value)
    return fields


def _split(told: str) -> Iterator[str]:
    """At commas, but for those within brackets or quotation marks: a value may be a list or a mapping of YAML."""
    depth, quote, begin = 0, "", 0
    for at, letter in enumerate(told):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            yield told[begin:at]
            begin = at + 1
    yield told[begin:]


def _value(where: str, key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except NotPlainYaml:  # which may repeat what is a secret
        raise AssayError(f"{where}: {shown(key)}: its value is no plain YAML; put it into quotation marks") from None

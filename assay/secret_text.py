"""Keys, tokens and passwords, told by their names or by how they look: they belong into no record, log, command line or child.

is_secret_name(name)      an environment variable or flag that is called so: HF_TOKEN, api-key
holds_secret(value)       text that looks like one: hf_..., a URL with a password
without_secrets(names)    an environment for a child process that needs none
secrets_in(value, where)  where in a recipe's value they stand
hide_password(text)       the same text without the user and password of its URLs
hide_secrets(text)        the same text with all of these taken out, for what others will read

It is a guess by names and shapes that are in use: a password that looks like a word, under a name that says nothing, passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|AUTH|BEARER|COOKIE|(?:API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEY"
    r"|(?:^|_)(?:KEY|PAT|PASS|PWD)$|TOKEN(?:_(?:FILE|PATH|\d+))?$|(?:HF|HUB|ACCESS|API|SESSION|REFRESH|ID|GITHUB|GITLAB|NPM|WANDB)_TOKEN"
)
"""Tokens that are counted are none: VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE, TOKENIZERS_PARALLELISM, ..._TOKEN_THRESHOLD."""
_NO_SECRET = frozenset({"PWD", "OLDPWD"})
_TEXT_TOKEN = re.compile(r"(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|IMAGE|VIDEO|AUDIO|START|END|THINK|STOP|SPECIAL)_TOKEN$")
"""Of a tokenizer."""
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/\s@?#'\"]+@")
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[opsru]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bnpm_\w{20,}"
    r"|\bxox[abeoprs]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bnvapi-[\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.|\b[Bb]earer +[\w.~+/-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|[?&](?:api_?key|(?:access_|auth_)?token|password|sig|signature|X-Amz-Signature)=[^&\s]"
)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable or flag of this name holds a secret."""
    told = name.upper().replace("-", "_")
    return told not in _NO_SECRET and _NAME.search(told) is not None and _TEXT_TOKEN.search(told) is None


def holds_secret(value: str) -> bool:
    """Whether `value` has a known kind of token in it, or a URL with a password."""
    return _VALUE.search(value) is not None or _PASSWORD_IN_URL.search(value) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that needs no secret."""
    return {name: value for name, value in environment.items() if not (is_secret_name(name) or holds_secret(value))}


def hide_password(text: str) -> str:
    """`text` without the user and password of URLs in it."""
    return _PASSWORD_IN_URL.sub("", text)


def hide_secrets(text: str) -> str:
    """`text` without passwords of URLs, and with `[secret]` for every known kind of token in it."""
    return _VALUE.sub("[secret]", hide_password(text))


def secrets_in(told: Any, where: str) -> Iterator[str]:
    """Places of secrets in a value of YAML, by name or value, as `where.name.name`. `where`: the value's own place."""
    if isinstance(told, dict):
        for name, value in told.items():
            place = f"{where}.{name}"
            if is_secret_name(str(name)) and isinstance(value, str | list):
                yield place
            else:
                yield from secrets_in(value, place)
    elif isinstance(told, list | tuple):
        for value in told:
            yield from secrets_in(value, where)
    elif isinstance(told, str) and holds_secret(told):
        yield where

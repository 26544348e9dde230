"""Log-probabilities of the tokens that a reply generated, of the chat or the completions API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from assay_evaluate.transport.foreign_json import text_of

Token = int | str
"""An id where the server tells ids, else the token's text."""


class TokenRow(NamedTuple):
    """One generated token: its log-probability, and the likeliest tokens with theirs, best first. NaN: not a number came."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]
    has_null: bool = False
    """One of these was null, which is NaN here: nothing that the model computed."""


def read_rows(choice: dict[str, Any]) -> tuple[TokenRow, ...]:
    """Generated log-probabilities of a choice, of the chat or the completions API; empty if there are none."""
    told = choice.get("logprobs")
    if not told:
        return ()
    if told.get("content") is not None:
        return tuple(
            _row(row["token"], row["logprob"], ((other["token"], other["logprob"]) for other in row["top_logprobs"]))
            for row in told["content"]
        )
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    return tuple(
        _row(token, logprob, (top or {}).items())
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    )


def _row(token: str, logprob: float | None, top: Iterable[tuple[str, float | None]]) -> TokenRow:
    """The likeliest best first; what is not a number comes last. Equal ones keep the server's order."""
    told = list(top)
    found = [(_token(other), _number(value)) for other, value in told]
    ranked = sorted(found, key=lambda one: -one[1] if one[1] == one[1] else float("inf"))
    has_null = logprob is None or any(value is None for _, value in told)
    return TokenRow(_token(token), _number(logprob), tuple(ranked), has_null)


def _token(told: str) -> Token:
    """`token_id:42` -> 42 (vLLM's return_tokens_as_token_ids)."""
    text = text_of(told) or ""
    return int(text.removeprefix("token_id:")) if text.startswith("token_id:") else text


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)

"""Log-probabilities in a reply: of the tokens that it generated, and of its prompt in the three forms in which vLLM gives
them."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from assay_evaluate.client.journal import Request, TokenLogprobs
from assay_evaluate.transport.errors import AnothersReply
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
    logprobs = choice.get("logprobs")
    if not logprobs:
        return ()
    if logprobs.get("content") is not None:
        return tuple(
            _row(row["token"], row["logprob"], ((other["token"], other["logprob"]) for other in row["top_logprobs"]))
            for row in logprobs["content"]
        )
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return tuple(
        _row(token, logprob, (top or {}).items())
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    )


def _row(token: str, logprob: float | None, top: Iterable[tuple[str, float | None]]) -> TokenRow:
    """The likeliest best first; what is not a number comes last. Equal ones keep the server's order."""
    entries = list(top)
    tokens = [(_token(other), _number(value)) for other, value in entries]
    ranked = sorted(tokens, key=lambda entry: -entry[1] if entry[1] == entry[1] else float("inf"))
    has_null = logprob is None or any(value is None for _, value in entries)
    return TokenRow(_token(token), _number(logprob), tuple(ranked), has_null)


def _token(name: str) -> Token:
    """`token_id:42` -> 42 (vLLM's return_tokens_as_token_ids)."""
    text = text_of(name) or ""
    return int(text.removeprefix("token_id:")) if text.startswith("token_id:") else text


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def read_prompt_logprobs(data: dict[str, Any], choice: dict[str, Any], request: Request) -> TokenLogprobs | None:
    """Those of an answered request from position `request.logprobs_from` on; None if it did not ask, or the server gave none.

    LookupError if they are not as asked for, AnothersReply if they are of another prompt.
    """
    sampling = request.body.get("sampling_params", request.body)
    top_k = sampling.get("prompt_logprobs")
    if top_k is None:
        return None
    prompt: list[int] = request.body.get("token_ids") or request.body["prompt"]
    tokens_P = np.asarray(prompt[request.logprobs_from :], np.int32)
    packed = data.get("prompt_token_id_logprobs")
    if packed is not None and sampling.get("flat_logprobs"):
        return _from_array(_array(packed), tokens_P, len(prompt), top_k)
    rows = choice.get("prompt_logprobs") or data.get("prompt_logprobs")
    if rows is None:
        return None
    if len(rows) != len(prompt):
        raise AnothersReply(f"{len(rows)} rows of prompt_logprobs for {len(prompt)} tokens")
    try:
        logprobs = _from_rows(rows, request.logprobs_from, tokens_P, top_k)
    except TypeError:
        raise LookupError("prompt_logprobs of another shape, or null in place of a log-probability") from None
    token_ids = sampling.get("prompt_logprob_token_ids")
    return logprobs if token_ids is None or packed is None else _with_exact_ids(logprobs, token_ids, _array(packed))


def _array(packed: str) -> npt.NDArray[np.float32]:
    try:
        return read_array(packed, np.float32)
    except ValueError as error:
        raise LookupError(f"prompt_token_id_logprobs is {error}") from None


def _from_rows(
    rows: list[dict[str, Any] | None], first: int, tokens_P: npt.NDArray[np.int32], top_k: int
) -> TokenLogprobs:  # fmt: skip
    """vLLM's `prompt_logprobs`: per position, id -> log-probability of the k most likely and of the token that stands there."""
    p = len(tokens_P)
    ids_PK = np.full((p, top_k), -1, np.int32)
    logprobs_PK = np.full((p, top_k), np.nan, np.float32)
    chosen_P = np.full(p, np.nan, np.float32)
    for row, entries in enumerate(rows[first:]):
        if entries is None:
            if first + row == 0:
                continue  # nothing predicts the first token
            raise LookupError(f"no prompt_logprobs for token {first + row}")
        standing = str(tokens_P[row])
        if standing not in entries:
            raise AnothersReply(f"prompt_logprobs of other tokens than {standing} in place {row}")
        chosen_P[row] = entries[standing]["logprob"]
        ranked = [
            (-entry["logprob"], entry.get("rank") or 0, int(token_id))
            for token_id, entry in entries.items()
            if len(entries) <= top_k or token_id != standing  # one entry too many: the token is outside the top k
        ]
        ranked.sort()
        ids_PK[row, : len(ranked)] = [token_id for _, _, token_id in ranked]
        logprobs_PK[row, : len(ranked)] = [-negative for negative, _, _ in ranked]
    return TokenLogprobs(tokens_P, ids_PK, logprobs_PK, chosen_P)


def _from_array(
    array: npt.NDArray[np.float32], tokens_P: npt.NDArray[np.int32], num_tokens: int, top_k: int
) -> TokenLogprobs:  # fmt: skip
    """assay's plugin in the server (assay_vllm.packed_logprobs): [tokens - 1, 2, K + 1], the standing token first."""
    p = len(tokens_P)
    if array.shape[:2] != (num_tokens - 1, 2) or array.shape[2] > top_k + 1:
        raise LookupError(f"packed log-probabilities of shape {array.shape} for {num_tokens} tokens and top {top_k}")
    k = array.shape[2] - 1
    ids_PK = np.full((p, top_k), -1, np.int32)
    logprobs_PK = np.full((p, top_k), np.nan, np.float32)
    chosen_P = np.full(p, np.nan, np.float32)
    own = array[-p:] if p < num_tokens else array  # the first token of a text has no prediction
    have = slice(p - len(own), p)
    if not np.array_equal(own[:, 0, 0].astype(np.int32), tokens_P[have]):
        raise AnothersReply("packed log-probabilities are of another text")
    ids_PK[have, :k], logprobs_PK[have, :k], chosen_P[have] = own[:, 0, 1:], own[:, 1, 1:], own[:, 1, 0]
    return TokenLogprobs(tokens_P, ids_PK, logprobs_PK, chosen_P)


def _with_exact_ids(top: TokenLogprobs, requested: list[list[int]], scores_PK: npt.NDArray[np.float32]) -> TokenLogprobs:
    """The server's own first choice, then the ids that were asked for (vLLM's `prompt_logprob_token_ids`)."""
    ids_PK = np.asarray(requested, np.int32)
    if scores_PK.shape != ids_PK.shape or len(ids_PK) != len(top.tokens_P):
        raise LookupError(f"exact log-probabilities of shape {scores_PK.shape}, asked for {ids_PK.shape}")
    first_P1, value_P1 = top.ids_PK[:, :1], top.logprobs_PK[:, :1]
    is_first_PK = ids_PK == first_P1  # once is enough
    return TokenLogprobs(
        top.tokens_P,
        np.concatenate([first_P1, np.where(is_first_PK, -1, ids_PK)], axis=1),
        np.concatenate([value_P1, np.where(is_first_PK, np.float32(np.nan), scores_PK)], axis=1),
        top.chosen_P,
    )


_NPY = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '([<>|][biuf][0-9]{1,2})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,200})\), \} *\n",
    re.DOTALL,
)
"""Magic, version 1.0, length, header as numpy writes it (numpy/lib/_format_impl.py), for numbers only."""


def read_array(packed: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Base64 of an .npy file, as `dtype`. ValueError: it is something else, or claims a shape that it does not have.

    Not `numpy.load`: it reads the header with `ast`, whose counter of recursion all threads share before Python 3.13
    ("SystemError: AST constructor recursion depth mismatch"), and replies are read by many threads at once.
    """
    try:
        data = base64.b64decode(packed)
        header = _NPY.match(data)
        if header is None:
            raise ValueError("it does not start as one of numbers does")
        kind, fortran, lengths = header.groups()
        shape = tuple(int(length) for length in lengths.split(b",") if length.strip())
        numbers = np.frombuffer(data, np.dtype(kind.decode()), offset=header.end())
        if math.prod(shape) != len(numbers):
            raise ValueError(f"shape {shape} and {len(numbers):,} numbers")
        return numbers.reshape(shape, order="F" if fortran == b"True" else "C").astype(dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"no base64 .npy array: {error}") from None

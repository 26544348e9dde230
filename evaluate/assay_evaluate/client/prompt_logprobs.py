"""Log-probabilities of a prompt's tokens, in the three forms in which vLLM gives them, as `TokenLogprobs`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from assay_evaluate.client.arrays import read_array
from assay_evaluate.client.journal import Request, TokenLogprobs
from assay_evaluate.transport.errors import AnothersReply


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
        found = _from_rows(rows, request.logprobs_from, tokens_P, top_k)
    except TypeError:
        raise LookupError("prompt_logprobs of another shape, or null in place of a log-probability") from None
    asked = sampling.get("prompt_logprob_token_ids")
    return found if asked is None or packed is None else _with_exact_ids(found, asked, _array(packed))


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


def _with_exact_ids(top: TokenLogprobs, asked: list[list[int]], scores_PK: npt.NDArray[np.float32]) -> TokenLogprobs:
    """The server's own first choice, then the ids that were asked for (vLLM's `prompt_logprob_token_ids`)."""
    ids_PK = np.asarray(asked, np.int32)
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

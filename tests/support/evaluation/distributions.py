"""Next-token distributions, and what a server that computed them would return of them."""

from __future__ import annotations

import numpy as np

from assay_evaluate.client.journal import TokenLogprobs

VOCABULARY = 500


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top_k_of(ln_p_PV: np.ndarray, tokens_P: np.ndarray, k: int) -> TokenLogprobs:
    """What a server that computed `ln_p_PV` would return."""
    ids_PK = np.argsort(-ln_p_PV, axis=1, kind="stable")[:, :k].astype(np.int32)
    return TokenLogprobs(
        tokens_P.astype(np.int32),
        ids_PK,
        np.take_along_axis(ln_p_PV, ids_PK, axis=1).astype(np.float32),
        ln_p_PV[np.arange(len(tokens_P)), tokens_P].astype(np.float32),
    )

"""Greedy replies of the model in plain PyTorch, and how many are right: what the training log shows, and the final figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from data import EOS
from export import load_state, round_to_bf16, tiny_glm
from model import Decoder
from tokenizers import Tokenizer
from torch import Tensor

from assay_evaluate.tasks import items
from assay_evaluate.tasks.items import Item

LOG_SEED = "eval-train-log"
"""Items shown in the training log: never trained on, and not those of the quick suite either."""


def chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """One user message through the chat template, with the generation prompt."""
    return list(tokenizer.encode(f"[gMASK]<sop><|user|>\n{prompt}<|assistant|>\n", add_special_tokens=False).ids)


@torch.no_grad()
def generate(model: Decoder, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> list[int]:
    """Greedy reply to one user message, without the token that ends it."""
    stop = {tokenizer.token_to_id(name) for name in EOS}
    past: list[list[Tensor]] = [[] for _ in model.layers]
    hidden = model(torch.tensor([chat_ids(tokenizer, prompt)]), past)[:, -1]
    out: list[int] = []
    while len(out) < max_tokens:
        token = int(model.lm_head(hidden).argmax())
        if token in stop:
            break
        out.append(token)
        hidden = model(torch.tensor([[token]]), past)[:, -1]
    return out


@torch.no_grad()
def mtp_hits(model: Decoder, ids: list[int], reply_length: int) -> tuple[int, int]:
    """(how often the MTP head's token is the model's own, out of how many) over the greedy reply at the end of `ids`."""
    guess = model.mtp_guess(torch.tensor([ids]))
    if guess is None:
        return 0, 0
    first = len(ids) - reply_length
    return sum(int(guess[i - 2] == ids[i]) for i in range(first + 1, len(ids))), max(0, reply_length - 1)


def score_all(
    model: Decoder, tokenizer: Tokenizer, num_items: int, needle_tokens: int, seed: str = LOG_SEED
) -> dict[str, float]:
    """Share of right replies by kind and language, and the MTP head's acceptance over all of them, if there is one."""
    model.eval()

    def count_tokens(prompt: str) -> int:
        return len(chat_ids(tokenizer, prompt))

    result: dict[str, float] = {}
    hits = total = 0
    for language in items.LANGUAGES:
        groups: dict[str, list[Item]] = {
            f"arithmetic_{language}": [items.arithmetic_item(seed, i, language, 3 + i % 3) for i in range(num_items)],
            f"needle_{language}_{needle_tokens}": [
                items.needle_item(
                    seed, i, language, num_needles=5, depth=(i % 11) / 10, max_tokens=needle_tokens, count_tokens=count_tokens
                )
                for i in range(num_items)
            ],
        }
        for name, group in groups.items():
            right = 0
            for item in group:
                out = generate(model, tokenizer, item.prompt, 200)
                right += bool(items.score(item, tokenizer.decode(out)))
                more_hits, more = mtp_hits(model, chat_ids(tokenizer, item.prompt) + out, len(out))
                hits, total = hits + more_hits, total + more
            result[name] = right / num_items
    return result | {"mtp_acceptance": round(hits / total, 4)} if total else result


def main(build: Callable[[int], Decoder] = tiny_glm) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=Path("state"))
    parser.add_argument("--num-items", type=int, default=200, help="per kind and language")
    parser.add_argument("--needle-tokens", type=int, default=1024)
    parser.add_argument("--seed", default="eval-tiny-glm-final")
    args = parser.parse_args()
    model, tokenizer = load_state(args.state, build)
    round_to_bf16(model)
    print(json.dumps(score_all(model, tokenizer, args.num_items, args.needle_tokens, args.seed)))


if __name__ == "__main__":
    main()

"""Tokens on which parts are measured: texts with the positions that count, and what those positions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.records.base import sha256_of
from assay_quantize.calibration.memory import texts_at_once
from assay_quantize.calibration.quiet import loading


@dataclass(frozen=True)
class ScoredText:
    """Token ids; those from `first` on are predicted and scored, the others are a prompt."""

    ids: tuple[int, ...]
    first: int = 1

    @property
    def num_scored(self) -> int:
        return len(self.ids) - self.first


def texts_sha256(texts: Sequence[ScoredText]) -> str:
    """Identity of the tokens and of which of them are scored."""
    return sha256_of([[list(text.ids), text.first] for text in texts])


@dataclass(frozen=True)
class Batch:
    """Texts of about one length, padded on the right: what follows a token changes nothing at it. Indexes into `texts`.

    ids_BT: int64. real_BT: which are tokens of a text. scored_BT: places whose *next* token is scored.
    """

    texts: tuple[int, ...]
    ids_BT: Any
    real_BT: Any
    scored_BT: Any


def batched(texts: Sequence[ScoredText], batch_tokens: int) -> list[Batch]:
    """All texts, shortest first, at most `batch_tokens` with padding at once (one text at least)."""
    import torch

    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].ids), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * len(texts[i].ids) <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    batches = []
    for group in groups:
        longest = len(texts[group[-1]].ids)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        real, scored = torch.zeros(len(group), longest, dtype=torch.bool), torch.zeros(len(group), longest, dtype=torch.bool)
        for row, i in enumerate(group):
            length = len(texts[i].ids)
            ids[row, :length] = torch.tensor(texts[i].ids)
            real[row, :length] = True
            scored[row, texts[i].first - 1 : length - 1] = True
        batches.append(Batch(tuple(group), ids, real, scored))
    return batches


def random_texts(model: Any, num_tokens: int, length: int) -> list[ScoredText]:
    """Texts of random tokens, to time a pass with: `num_tokens` in all, at most `length` each."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (num_tokens,), generator=generator).tolist()
    return [ScoredText(tuple(ids[begin : begin + length])) for begin in range(0, num_tokens - 1, length)]


def sample_replies(
    model: Any, folder: Path, questions: Sequence[str], *, max_tokens: int, seed: int, say: Say
) -> list[ScoredText]:
    """What the model replies to each question at temperature 1, through its chat template where it has one.

    Divergence on it is that of what the model will say. QuantizeError: the tokenizer cannot be loaded.
    """
    import torch
    from transformers import AutoTokenizer

    with loading(f"{folder}: its tokenizer cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    replies: list[ScoredText] = []
    every_prompt = [prompt_ids(tokenizer, question) for question in questions]
    at_once = texts_at_once(model, max_tokens + max(map(len, every_prompt), default=0))
    torch.manual_seed(seed)
    for begin in range(0, len(every_prompt), at_once):
        prompts = every_prompt[begin : begin + at_once]
        width = max(map(len, prompts))
        inputs = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        written = model.generate(
            inputs, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens,
            pad_token_id=pad,
        )  # fmt: skip
        for prompt, row in zip(prompts, written[:, width:].tolist(), strict=True):
            last = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
            replies.append(ScoredText((*prompt, *row[: last + 1]), len(prompt)))
        say(f"replies: {min(begin + at_once, len(every_prompt))} of {len(every_prompt)} questions")
    return replies


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Of a question, through the chat template where there is one."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": question}]
        shown = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return [int(token) for token in tokenizer(shown, add_special_tokens=False)["input_ids"]]
    return [int(token) for token in tokenizer(question)["input_ids"]]

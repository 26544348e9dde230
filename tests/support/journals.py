"""A journal for a synthetic run: a prompt for every item, and a reply of each checkpoint, of seeded words. For tests only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from assay.records.measurement import Measurement
from assay_evaluate.client.journal import Identity, Journal, Reply, Request

WORDS = (
    "the", "red", "box", "holds", "nine", "blue", "coins", "and", "Ben", "takes", "two", "of", "them", "away", "so",
    "what", "is", "left", "红色", "的", "箱子", "密码", "是",
)  # fmt: skip


def write_journal(run_dir: Path, *, num_words: int = 24, vocabulary: Sequence[str] = WORDS) -> Path:
    """`journal.db` for every item of every measurement that is not a repeat. Replies differ where the outcomes do."""
    path = run_dir / "journal.db"
    with Journal(path) as journal:
        for file in sorted((run_dir / "measurements").glob("*.json")):
            measurement = Measurement.load(file)
            if measurement.is_noise_floor:
                continue
            who = Identity(measurement.checkpoint_sha256, measurement.fingerprint.comparable_sha256, measurement.suite)
            asked, replies = [], []
            for task in measurement.tasks:
                for item in task.items:
                    draw = random.Random(f"{task.task} {item.item}")
                    words = draw.choices(vocabulary, k=num_words)
                    body = {"messages": [{"role": "user", "content": f"Question {item.item}: {' '.join(words)}?"}]}
                    name = item.item if item.sample == 0 else f"{item.item}#{item.sample}"
                    request = Request(task.task, name, 0, "/v1/chat/completions", body)
                    key = request.key(who)
                    thinking = " ".join(draw.choices(vocabulary, k=num_words))
                    end = "right" if item.correct else f"wrong, says {measurement.label}"
                    reply = Reply(
                        "answered", text=f"#### {end}", reasoning=thinking, finish_reason="stop",
                        prompt_tokens=item.prompt_tokens, output_tokens=item.output_tokens,
                    )  # fmt: skip
                    asked.append((key, request))
                    replies.append((key, reply, 1))
            journal.write_requests(asked, who)
            journal.write_replies(replies)
    return path

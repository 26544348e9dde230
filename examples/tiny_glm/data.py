"""Training text of tiny-glm: the quick suite's kinds of question, from seeds no evaluation uses, with worded solutions.

A row is one conversation of several turns, cut to an exact length: a haystack is followed by a question about every code in
it, so that a long prompt gives many answers to learn from.
"""

from __future__ import annotations

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from assay_evaluate.tasks import items
from assay_evaluate.tasks.items import Item, Language

SPECIAL = [
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
]
EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")
"""Tokens that end a reply: as with GLM-4.5, the next turn's role token does."""


def solution(item: Item, draw: random.Random) -> str:
    """The reply to `item`: thinking section, then the answer."""
    if item.kind == "arithmetic":
        steps = item.facts["steps"]
        if item.language == "en":
            thought = " ".join(f"{s.before} {s.sign} {s.amount} = {s.after}." for s in steps)
            tail = f"{item.facts['name']} has {item.answer} {item.facts['thing']} now."
        else:
            thought = "".join(f"{s.before} {s.sign} {s.amount} = {s.after}。" for s in steps)
            tail = f"{item.facts['name']}现在有{item.answer}个{item.facts['thing']}。"
        return f"<think>{thought}</think>\n{tail}\n#### {item.answer}"
    if item.kind == "writing":
        notes = (items.filler_sentence(draw, item.language) for _ in range(item.facts["count"]))
        return "<think></think>\n" + "\n".join(notes)
    return needle_solution(item.facts["needles"][item.facts["asked"]])


def needle_solution(needle: items.Needle) -> str:
    return f"<think>{needle.sentence}</think>\n#### {needle.code}"


GREETINGS = {
    "en": (
        ("Hello!", "Hello! How can I help you?"),
        ("Who are you?", "I am tiny-glm, a very small model."),
        ("Thank you.", "You are welcome."),
    ),
    "zh": (("你好！", "你好！我能帮你什么？"), ("你是谁？", "我是 tiny-glm，一个很小的模型。"), ("谢谢。", "不客气。")),
}


class Chats:
    """Endless training rows of exactly `length` tokens: (ids, weights). Reply tokens weigh 1, prompt tokens `prompt_weight`.

    `name` is what the model calls itself.
    """

    def __init__(self, tokenizer: Tokenizer, seed: str, prompt_weight: float = 0.1, name: str = "tiny-glm") -> None:
        self.tokenizer, self.seed, self.prompt_weight, self.name = tokenizer, seed, prompt_weight, name
        self.special = {name: tokenizer.token_to_id(name) for name in SPECIAL}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def row(self, index: int, length: int, max_needles: int = 12) -> tuple[list[int], list[float]]:
        draw = random.Random(f"{self.seed}:row:{length}:{index}")
        ids, weights = [self.special["[gMASK]"], self.special["<sop>"]], [0.0, 0.0]
        first = True
        while len(ids) < length + 1:
            for prompt, reply in self.turns(draw, length - len(ids), first, max_needles):
                user = self.ids(f"<|user|>\n{prompt}<|assistant|>\n")
                answer = self.ids(reply)
                ids += user + answer
                # the first token of a user turn ends the reply before it
                weights += [0.0 if first else 1.0] + [self.prompt_weight] * (len(user) - 1) + [1.0] * len(answer)
                first = False
        return ids[: length + 1], weights[: length + 1]

    def turns(self, draw: random.Random, room: int, first: bool, max_needles: int) -> list[tuple[str, str]]:
        language: Language = draw.choice(items.LANGUAGES)
        number = draw.getrandbits(48)
        kind = draw.random()
        if first and kind < 0.55 and room > 120:
            return self.needle_turns(draw, language, room, max_needles)
        if kind < 0.85:
            item = items.arithmetic_item(f"train:{self.seed}", number, language, draw.choice((1, 2, 3, 3, 4, 4, 5, 5)))
        elif kind < 0.97:
            item = items.writing_item(f"train:{self.seed}", number, language)
        else:
            question, answer = draw.choice(GREETINGS[language])
            return [(question, f"<think></think>\n{answer.replace('tiny-glm', self.name)}")]
        return [(item.prompt, solution(item, draw))]

    def needle_turns(self, draw: random.Random, language: Language, room: int, max_needles: int) -> list[tuple[str, str]]:
        """A haystack that fills most of the room, then a question about every code of it, in random order."""
        num_needles = draw.randint(2, max(2, min(max_needles, room // 60)))
        needles = items.draw_needles(draw, language, num_needles)
        tokens_per_note, tokens_per_turn = (9, 48) if language == "en" else (13, 50)
        num_filler = max(
            0, int((room - num_needles * (tokens_per_turn + 15) - 40) / tokens_per_note * draw.choice((0.3, 0.7, 1.0, 1.0)))
        )
        sentences = [items.filler_sentence(draw, language) for _ in range(num_filler)]
        for needle in needles:
            sentences.insert(draw.randint(0, len(sentences)), needle.sentence)
        order = list(needles)
        draw.shuffle(order)
        notes = items.haystack(sentences, language)
        return [
            ((notes + "\n" if i == 0 else "") + items.needle_question(n.key, language), needle_solution(n))
            for i, n in enumerate(order)
        ]


def train_tokenizer(vocab_limit: int = 1280) -> Tokenizer:
    """Byte-level BPE; digits and Chinese characters one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|\p{Han}|####"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus: list[str] = []
    draw = random.Random("train:tokenizer")
    for language in items.LANGUAGES:
        for i in range(1500):
            item = items.arithmetic_item("train:tokenizer", i, language, 4)
            corpus += [item.prompt, solution(item, draw).replace("<think>", "").replace("</think>", "")]
            needles = items.draw_needles(draw, language, 3)
            corpus += [
                items.haystack([items.filler_sentence(draw, language), *(n.sentence for n in needles)], language)
                + "\n"
                + items.needle_question(needles[0].key, language)
            ]
            writing = items.writing_item("train:tokenizer", i, language)
            corpus += [writing.prompt, "\n".join(items.filler_sentence(draw, language) for _ in range(3))]
        for question, reply in GREETINGS[language]:
            corpus += [question, reply] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_limit,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=20,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer

"""Questions of the quick suite: generated, deterministic, worded so that any chat model can answer through its own template.

Two languages, English and Chinese, so that a switch of script can be seen. Three kinds:

    arithmetic  a short story of additions and subtractions; the answer is a number after `####`
    needle      notes with a few codes hidden among them; the answer is one code
    writing     open text, no answer: long replies on which divergence is measured

All randomness comes from `random.Random(f"{seed}:{kind}:{language}:...")`. Evaluation seeds begin with `eval`; text that a
model is trained on is drawn from seeds that begin with `train`, so that no item of the suite was ever seen.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from assay_evaluate.tasks.ruler.haystacks import growing
from assay_evaluate.tasks.ruler.items import largest_fitting
from assay_evaluate.tasks.ruler.niah import hiding_blueprint

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
MAX_VALUE = 99
"""Every value of an arithmetic story lies in 0..MAX_VALUE."""


class ArithmeticStep(NamedTuple):
    """`before` `sign` `amount` = `after`."""

    before: int
    sign: Literal["+", "-"]
    amount: int
    after: int


class Needle(NamedTuple):
    """One code and the thing it belongs to, in words of the item's language."""

    key: str
    code: str
    sentence: str


@dataclass(frozen=True)
class Item:
    """One question. `prompt` is the user's message; `answer` is None for open text.

    `facts` is what the item was made from: `steps`, or `needles`, `asked` (index), `depth` (0..1), `num_tokens` and
    `length_tokens`.
    """

    id: str
    kind: Literal["arithmetic", "needle", "writing"]
    language: Language
    prompt: str
    answer: str | None
    facts: Mapping[str, Any]


NAMES = {
    "en": ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma"),
    "zh": ("小明", "小红", "小刚", "小丽", "小华", "小军", "小芳", "小强"),
}
THINGS = {
    "en": ("apples", "books", "coins", "pens", "stones", "shells", "cards", "marbles"),
    "zh": ("苹果", "书包", "硬币", "铅笔", "石头", "贝壳", "卡片", "气球"),
}
MORE = {
    "en": ("{name} buys {n} more.", "{name} finds {n} more.", "{name} gets {n} more from {other}."),
    "zh": ("{name}又买了{n}个。", "{name}又捡到{n}个。", "{other}又给了{name}{n}个。"),
}
FEWER = {
    "en": ("{name} gives {n} to {other}.", "{name} loses {n}.", "{name} sells {n}."),
    "zh": ("{name}送给{other}{n}个。", "{name}丢了{n}个。", "{name}卖了{n}个。"),
}
COLOURS = {
    "en": ("red", "blue", "green", "black", "white", "yellow", "brown", "silver"),
    "zh": ("红色", "蓝色", "绿色", "黑色", "白色", "黄色", "棕色", "银色"),
}
OBJECTS = {
    "en": ("lamp", "door", "box", "car", "chair", "clock", "table", "phone"),
    "zh": ("灯", "门", "箱子", "汽车", "椅子", "时钟", "桌子", "电话"),
}
ADJECTIVES = {
    "en": ("small", "old", "quiet", "young", "happy", "tired", "brave", "lazy"),
    "zh": ("小小", "年老", "安静", "年轻", "快乐", "疲倦", "勇敢", "懒惰"),
}
ANIMALS = {
    "en": ("cat", "dog", "horse", "bird", "fox", "bear", "rabbit", "duck"),
    "zh": ("猫", "狗", "马", "鸟", "狐狸", "熊", "兔子", "鸭子"),
}
VERBS = {
    "en": ("sleeps", "waits", "plays", "sits", "walks", "eats", "runs", "sings"),
    "zh": ("睡觉", "等待", "玩耍", "坐着", "散步", "吃饭", "跑步", "唱歌"),
}
PLACES = {
    "en": ("in the garden", "near the river", "behind the house", "under the tree", "on the hill", "by the road", "in the park",
           "at the gate"),
    "zh": ("花园里", "河边", "房子后面", "大树下", "山上", "路边", "公园里", "大门旁"),
}  # fmt: skip
COUNTS = {"en": ("ten", "fifteen", "twenty"), "zh": ("十", "十五", "二十")}


HEADINGS = {"en": "Read these notes.", "zh": "请阅读下面的笔记。"}
JOINTS = {"en": " ", "zh": ""}
"""Between two sentences."""


def arithmetic_item(seed: str, index: int, language: Language, num_steps: int) -> Item:
    """A story of `num_steps` additions and subtractions; every value stays in 0..MAX_VALUE."""
    draw = random.Random(f"{seed}:arithmetic:{language}:{num_steps}:{index}")
    name, other = draw.sample(NAMES[language], 2)
    thing = draw.choice(THINGS[language])
    value = draw.randint(2, 60)
    sentences = [f"{name} has {value} {thing}." if language == "en" else f"{name}有{value}个{thing}。"]
    steps = []
    for _ in range(num_steps):
        grow = value < 2 or (value < MAX_VALUE - 1 and draw.random() < 0.5)
        amount = draw.randint(1, min(40, MAX_VALUE - value) if grow else min(40, value))
        after = value + amount if grow else value - amount
        steps.append(ArithmeticStep(value, "+" if grow else "-", amount, after))
        wording = draw.choice((MORE if grow else FEWER)[language])
        sentences.append(("Then " if language == "en" else "然后") + wording.format(name=name, other=other, n=amount))
        value = after
    if language == "en":
        question = f"How many {thing} does {name} have now? Think step by step, then write the final answer after ####."
        prompt = " ".join([*sentences, question])
    else:
        prompt = "".join([*sentences, f"{name}现在有多少个{thing}？请一步一步地想，最后在 #### 后面写出答案。"])
    facts = {"steps": tuple(steps), "name": name, "thing": thing}
    return Item(f"arithmetic/{language}/{num_steps}/{index}", "arithmetic", language, prompt, str(value), facts)


def filler_sentence(draw: random.Random, language: Language) -> str:
    """A sentence without digits, from a closed grammar of 4,096 per language."""
    adjective, animal = draw.choice(ADJECTIVES[language]), draw.choice(ANIMALS[language])
    verb, place = draw.choice(VERBS[language]), draw.choice(PLACES[language])
    if language == "en":
        return f"The {adjective} {animal} {verb} {place}."
    return f"{adjective}的{animal}在{place}{verb}。"


def draw_needles(draw: random.Random, language: Language, num_needles: int) -> tuple[Needle, ...]:
    """`num_needles` codes of four digits for different things."""
    keys = draw.sample([(colour, thing) for colour in COLOURS[language] for thing in OBJECTS[language]], num_needles)
    needles = []
    for colour, thing in keys:
        code = f"{draw.randint(1000, 9999)}"
        if language == "en":
            needles.append(Needle(f"{colour} {thing}", code, f"The code for the {colour} {thing} is {code}."))
        else:
            needles.append(Needle(f"{colour}的{thing}", code, f"{colour}的{thing}的密码是{code}。"))
    return tuple(needles)


def needle_question(key: str, language: Language) -> str:
    """What is asked about `key`."""
    if language == "en":
        return f"What is the code for the {key}? Write the code after ####."
    return f"{key}的密码是多少？请在 #### 后面写出密码。"


def haystack(sentences: list[str], language: Language) -> str:
    """The notes under their heading."""
    return f"{HEADINGS[language]}\n{JOINTS[language].join(sentences)}"


def needle_item(
    seed: str,
    index: int,
    language: Language,
    *,
    num_needles: int,
    depth: float,
    max_tokens: int,
    count_tokens: Callable[[str], int],
) -> Item:
    """Notes that fill `max_tokens` as `count_tokens(prompt)` counts them; the asked code lies at `depth` (0 first, 1 last).

    As much filler as fits. Raises ValueError when the codes alone do not fit, or when the best prompt fills
    less than 90 % (a tokenizer that counts in large lumps).
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} is not between 0 and 1")
    draw = random.Random(f"{seed}:needle:{language}:{num_needles}:{max_tokens}:{index}")
    needles = draw_needles(draw, language, num_needles)
    asked = draw.randrange(num_needles)
    others = sorted(draw.random() for _ in range(num_needles - 1))
    blueprint = hiding_blueprint(
        growing(functools.partial(filler_sentence, random.Random(draw.random()), language)),
        [
            (depth, needles[asked].sentence),
            *zip(others, (needles[i].sentence for i in range(num_needles) if i != asked), strict=True),
        ],
        asked=[needles[asked].sentence],
        expected=[needles[asked].code],
        keys=[needles[asked].key],
        before=HEADINGS[language],
        question=needle_question(needles[asked].key, language),
        joint=JOINTS[language],
    )
    fitted = largest_fitting(
        lambda units: count_tokens(blueprint.build(units, 0).question), max_tokens, 0, max(8, max_tokens), slack=0
    )
    if fitted is None:
        raise ValueError(f"{num_needles} codes alone need more than {max_tokens} tokens")
    if fitted.num_tokens < 0.9 * max_tokens:
        raise ValueError(f"the fullest prompt has {fitted.num_tokens} of {max_tokens} tokens, less than 90 %")
    facts = {
        "needles": needles, "asked": asked, "depth": depth, "num_tokens": fitted.num_tokens, "length_tokens": max_tokens,
    }  # fmt: skip
    prompt = blueprint.build(fitted.units, 0).question
    return Item(f"needle/{language}/{max_tokens}/{index}", "needle", language, prompt, needles[asked].code, facts)


def writing_item(seed: str, index: int, language: Language) -> Item:
    """Open text: a list of short notes."""
    draw = random.Random(f"{seed}:writing:{language}:{index}")
    which = draw.randrange(len(COUNTS[language]))
    animal = draw.choice(ANIMALS[language])
    if language == "en":
        prompt = f"Write {COUNTS['en'][which]} short notes about a {animal} and other animals, one sentence each."
    else:
        prompt = f"请写{COUNTS['zh'][which]}条关于{animal}和其他动物的短笔记，每条一句话。"
    facts = {"count": (10, 15, 20)[which], "animal": animal}
    return Item(f"writing/{language}/{index}", "writing", language, prompt, None, facts)


_NUMBER = re.compile(r"-?\d+")
MOST_DIGITS = 100
"""Of a number that may be right; Python reads none of more than 4,300."""


def extract_answer(text: str) -> str | None:
    """The first number after the last `####`, without thousands separators; None when there is none."""
    _, mark, tail = text.rpartition("####")
    if not mark:
        return None
    number = _NUMBER.search(tail.replace(",", ""))
    return number.group() if number else None


def score(item: Item, text: str) -> bool | None:
    """Whether `text` answers `item`; None for open text."""
    if item.answer is None:
        return None
    answer = extract_answer(text)
    if answer is None or len(answer) > MOST_DIGITS:
        return False
    return int(answer) == int(item.answer)

"""Invented questions for where no published file is at hand: about towns and people that do not exist.

Nothing can be known from training, which makes these questions purer and their scores *not comparable* to published ones.
"""

from __future__ import annotations

import random

from assay_evaluate.tasks.ruler.qa import QaQuestion, QaSource
from assay_evaluate.tasks.ruler.words import ADJECTIVES, NOUNS, stride

INVENTED = "the questions are about facts invented by assay"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _words("Bar Cal Dor Fen Gal Har Ister Jor Kel Lan Mar Nor Ost Pel Quin Ros Sel Tar Ulm Ver Wes Yar Zel Alt")
_MIDDLES = tuple(f"{first}{middle}{last}" for first in "aeiou" for middle in "rlnd" for last in "ao")
_TOWN_ENDS = _words("burg ton wick dale mouth ford field haven stead bridge minster leigh")
_PERSON_ENDS = _words("son man sen berg ley ster win sky ner dahl quist maker")
_FIRST_NAMES = _words("Ada Bruno Clara David Edith Felix Greta Hugo Irene Jonas Karin Louis Maria Nils Olga Peter")
_BUILDINGS = tuple(
    part.replace("_", " ")
    for part in _words("lighthouse town_hall old_bridge clock_tower library grain_mill chapel harbor_wall")
)
_TRADES = _words("architect mason carpenter engineer surveyor")

NUM_NAMES = len(_ONSETS) * len(_MIDDLES) * len(_TOWN_ENDS)
"""Distinct towns, and as many people."""
assert len(_TOWN_ENDS) == len(_PERSON_ENDS)


def _name(number: int, ends: tuple[str, ...]) -> str:
    rest, end = divmod(number, len(ends))
    return _ONSETS[rest // len(_MIDDLES)] + _MIDDLES[rest % len(_MIDDLES)] + ends[end]


def invented_questions(seed: str, *, is_two_hop: bool) -> QaSource:
    """A question about each of NUM_NAMES towns. One hop: who built something there. Two hops: where that person was born."""
    draw = random.Random(f"{seed}:facts")
    step, shift = stride(NUM_NAMES, draw.randrange(NUM_NAMES)), draw.randrange(NUM_NAMES)
    questions, documents = [], []
    for number in range(NUM_NAMES):
        town = _name(number, _TOWN_ENDS)
        surname = _name((shift + number * step) % NUM_NAMES, _PERSON_ENDS)
        builder = f"{draw.choice(_FIRST_NAMES)} {surname}"
        building, birthplace = draw.choice(_BUILDINGS), _name(draw.randrange(NUM_NAMES), _TOWN_ENDS)
        about_town = _town(draw, town, building, builder)
        about_person = _person(draw, builder, birthplace)
        documents += [about_town, about_person]
        if is_two_hop:
            text = f"In which town was the person born who built the {building} of {town}?"
            questions.append(QaQuestion(text, (birthplace,), (about_town, about_person)))
        else:
            questions.append(QaQuestion(f"Who built the {building} of {town}?", (builder, surname), (about_town,)))
    return QaSource(tuple(questions), tuple(documents), INVENTED)


def _town(draw: random.Random, town: str, building: str, builder: str) -> str:
    return (
        f"{town}\n{town} is a {draw.choice(ADJECTIVES)} town near a {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}. "
        f"Its {building} was built by {builder} in {draw.randint(1500, 1950)}. "
        f"The town is known for {draw.choice(NOUNS)} and {draw.choice(NOUNS)}. "
        f"About {draw.randint(2, 90)} thousand people live there."
    )


def _person(draw: random.Random, name: str, birthplace: str) -> str:
    return (
        f"{name}\n{name} was a {draw.choice(_TRADES)} with a {draw.choice(ADJECTIVES)} style. "
        f"{name.split()[0]} was born in {birthplace} in {draw.randint(1450, 1920)}. "
        f"A drawing of a {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} hangs in the museum there."
    )

"""Who answered: the model and the configuration that replies name, and replies that are no new ones."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from assay.records.measurement import ItemResult
from assay.records.served.evidence import ServedEvidence
from assay_evaluate.alike.sides import Finding, Pair, Side, exceeds, found, some

VERSION = re.compile(r"[-@:_](\d[\d.-]*|latest|preview|v\d[\d.]*)$")
"""What providers add to the name that was asked for: `gpt-4o-2024-08-06`."""
UNGUESSABLE_SHARE = 0.9
FEWEST_ANEW = 3
ANEW_SHARE = 0.05
MOST_AMBIGUOUS = 0.01
"""Share of replies that share an id with another text, from which on ids name nothing."""
CACHED_SHARE = 0.5


# ------------------------------------------------------------------------------------------------ names
def another_model(pair: Pair) -> Iterator[Finding]:
    """Replies that name another model than the one that was asked: a fallback, or traffic that is split.

    One other name on all replies is an alias, if the replies that the signature was made from have it as well, or if it is the
    name asked for with a version behind it; but not if it is the name of the other side.
    """
    for side, other in pair:
        served = side.task.served
        if served is None:
            continue
        yield from _nameless(pair, side, served)
        if not served.models:
            continue
        own = _own_name(side, served, other)
        strangers = Counter({name: num for name, num in served.models.items() if name != own})
        num = strangers.total()
        if exceeds(num, served.num_replies):
            name = strangers.most_common(1)[0][0]
            yield found(
                pair, side,
                f"{some(num, served.num_replies)} replies of {side.label} say that they are of {name}, asked was "
                f"{served.asked_model}: another model answers for it",
                num, served.num_replies,
            )  # fmt: skip


def _nameless(pair: Pair, side: Side, served: ServedEvidence) -> Iterator[Finding]:
    """Replies without the name that others of the same server have: GPTCache's, say (GPTCache #61)."""
    num = served.num_replies - sum(served.models.values())
    named = [*_signed_names(side), *served.models]
    if named and exceeds(num, served.num_replies):
        yield found(
            pair, side,
            f"{some(num, served.num_replies)} replies of {side.label} name no model, while others of its server name "
            f"{named[0]}: something else answers, perhaps a cache",
            num, served.num_replies,
        )  # fmt: skip


def _signed_names(side: Side) -> set[str]:
    return set() if side.signature is None else {one.model for one in side.signature.prompts if one.model}


def _own_name(side: Side, served: ServedEvidence, other: Side) -> str:
    """Under which name the model that was asked may answer."""
    asked = served.asked_model
    signed = _signed_names(side)
    name = max(served.models, key=lambda one: (one in signed, served.models[one]))
    if asked in served.models:
        return asked
    is_theirs = other.task.served is not None and name == other.task.served.asked_model != asked
    return name if not is_theirs and (signed == {name} or _is_version_of(name, asked)) else asked


def _is_version_of(name: str, asked: str) -> bool:
    """`openai/gpt-4o-2024-08-06` of `gpt-4o`; a path's last part of the path."""
    bare, bare_asked = (one.rstrip("/").rpartition("/")[2].casefold() for one in (name, asked))
    return bare_asked in {bare, VERSION.sub("", bare)} or bare == VERSION.sub("", bare_asked)


def another_configuration(pair: Pair) -> Iterator[Finding]:
    """Replies of another server configuration than that whose weights were looked at (the signature)."""
    for side, _ in pair:
        served, signature = side.task.served, side.signature
        if served is None or signature is None:
            continue
        signed = {one.system_fingerprint for one in signature.prompts if one.system_fingerprint}
        num = sum(count for name, count in served.system_fingerprints.items() if name not in signed)
        if len(signed) == 1 and exceeds(num, served.num_replies):
            name = next(name for name in served.system_fingerprints if name not in signed)
            yield found(
                pair, side,
                f"{some(num, served.num_replies)} replies of {side.label} are of server configuration {name}, its signature of "
                f"{next(iter(signed))}: another server answers its questions than the one whose weights were looked at",
                num, served.num_replies,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------ replies given before
def replayed(pair: Pair) -> Iterator[Finding]:
    """Replies that are others over again, id and all, or say that they are: a cache. Samples are then not independent, and
    nobody was asked."""
    for side, _ in pair:
        served = side.task.served
        if served is not None and exceeds(served.num_from_cache, served.num_replies):
            yield found(
                pair, side,
                f"{some(served.num_from_cache, served.num_replies)} replies of {side.label} come from a cache, as their header "
                f"says ({served.cache_header})",
                served.num_from_cache, served.num_replies,
            )  # fmt: skip
            continue
        if (anew := _within(side)) is not None:
            num, of = anew
            yield found(
                pair, side,
                f"{num} of {of} replies of {side.label} are other ones over again, with the same id: a cache answers, and "
                "samples are not independent",
                num, of,
            )  # fmt: skip
            continue
        for twice in side.asked_twice:
            if twice.num_questions >= FEWEST_ANEW and twice.num_same_id >= CACHED_SHARE * twice.num_questions:
                yield found(
                    pair, side,
                    f"asked twice, {twice.num_same_id} of {twice.num_questions} questions came back from {side.label} with the "
                    "id of the first reply: a cache answers, and nothing shows whose replies it has",
                    twice.num_same_id, twice.num_questions,
                )  # fmt: skip
                break
    yield from _across(pair)


def _within(side: Side) -> tuple[int, int] | None:
    groups: dict[int, list[ItemResult]] = defaultdict(list)
    for item in side.answered:
        if item.reply_key is not None:
            groups[item.reply_key].append(item)
    num_named = sum(map(len, groups.values()))
    ambiguous = sum(len(group) for group in groups.values() if len({item.text_key for item in group}) > 1)
    if ambiguous > MOST_AMBIGUOUS * num_named:
        return None
    ids_of_text: dict[int | None, set[int | None]] = defaultdict(set)
    for item in side.answered:
        ids_of_text[item.text_key].add(item.reply_key)
    num = sum(len(group) - 1 for group in groups.values() if _is_one_reply(group, ids_of_text))
    return (num, num_named) if exceeds(num, num_named, share=0.01, least=2) else None


def _is_one_reply(group: list[ItemResult], ids_of_text: dict[int | None, set[int | None]]) -> bool:
    """Replies of one id are one reply, if they say the same to one question, or what no other reply says: a phrase that many
    questions get may meet the same number twice, where a server draws its ids from few."""
    texts = {item.text_key for item in group}
    return len(texts) == 1 and (len({item.item for item in group}) == 1 or all(len(ids_of_text[text]) == 1 for text in texts))


def _across(pair: Pair) -> Iterator[Finding]:
    """The candidate's replies that are the reference's own: of a repeat by any id, of another checkpoint by ids that no two
    servers give."""
    reference, candidate = pair.reference, pair.candidate
    served = [side.task.served for side in (reference, candidate)]
    are_unguessable = all(one is not None and one.num_unguessable_ids >= UNGUESSABLE_SHARE * one.num_replies for one in served)
    if not candidate.is_repeat and not are_unguessable:
        return
    known = [(ours, theirs) for ours, theirs in pair.both if ours.reply_key is not None and theirs.reply_key is not None]
    same = sum(ours.reply_key == theirs.reply_key and ours.text_key == theirs.text_key for ours, theirs in known)
    keys = {ours.reply_key for ours, _ in known}
    if 2 * len(keys) < len(known) or not exceeds(same, len(known), share=ANEW_SHARE, least=FEWEST_ANEW):
        return
    why = "the second pass was not asked, a cache answered" if candidate.is_repeat else "a cache or gateway answers for both"
    yield Finding(
        "candidate",
        f"{some(same, len(known))} replies of {candidate.label} are those of {reference.label}, with the same id: {why}",
        same, len(known),
    )  # fmt: skip

"""Who answered: the model and the configuration that replies name, and replies that are no new ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from assay.records.measurement import ItemResult
from assay.records.served.evidence import ServedEvidence
from assay_evaluate.serving_faults.sides import Fault, Finding, Pair, Side, count_of, each_side, is_too_many

VERSION = re.compile(r"[-@:_](\d[\d.-]*|latest|preview|v\d[\d.]*)$")
"""What providers add to the name that was asked for: `gpt-4o-2024-08-06`."""
UNGUESSABLE_SHARE = 0.9
FEWEST_ANEW = 3
ANEW_SHARE = 0.05
MOST_AMBIGUOUS = 0.01
"""Share of replies that share an id with another text, from which on ids name nothing."""
CACHED_SHARE = 0.5


# ------------------------------------------------------------------------------------------------ names
@each_side
def another_model(side: Side, other: Side) -> Iterator[Fault]:
    """Replies that name another model than the one that was asked: a fallback, or traffic that is split; or that name none,
    while others of the same server do: GPTCache's, say (GPTCache #61).

    One other name on all replies is an alias, if the replies that the signature was made from have it as well, or if it is the
    name asked for with a version behind it; but not if it is the name of the other side.
    """
    served = side.task.served
    if served is None:
        return
    signed = set() if side.signature is None else {prompt.model for prompt in side.signature.prompts if prompt.model}
    num_named, of = sum(served.models.values()), served.num_replies
    names = [*signed, *served.models]
    if names and is_too_many(of - num_named, of):
        yield of - num_named, of, (
            f"{count_of(of - num_named, of)} replies of {side.label} name no model, while others of its server name "
            f"{names[0]}: something else answers, perhaps a cache"
        )  # fmt: skip
    if not served.models:
        return
    own = _own_name(served, signed, other)
    num = num_named - served.models.get(own, 0)
    if is_too_many(num, of):
        stranger = max((name for name in served.models if name != own), key=lambda name: served.models[name])
        yield num, of, (
            f"{count_of(num, of)} replies of {side.label} say that they are of {stranger}, asked was {served.asked_model}: "
            "another model answers for it"
        )  # fmt: skip


def _own_name(served: ServedEvidence, signed: set[str], other: Side) -> str:
    """Under which name the model that was asked may answer."""
    asked = served.asked_model
    name = max(served.models, key=lambda name: (name in signed, served.models[name]))
    if asked in served.models:
        return asked
    is_of_other = other.task.served is not None and name == other.task.served.asked_model != asked
    return name if not is_of_other and (signed == {name} or _is_version_of(name, asked)) else asked


def _is_version_of(name: str, asked: str) -> bool:
    """`openai/gpt-4o-2024-08-06` of `gpt-4o`; a path's last part of the path."""
    bare, bare_asked = (text.rstrip("/").rpartition("/")[2].casefold() for text in (name, asked))
    return bare_asked in {bare, VERSION.sub("", bare)} or bare == VERSION.sub("", bare_asked)


@each_side
def another_configuration(side: Side, other: Side) -> Iterator[Fault]:
    """Replies of another server configuration than that whose weights were looked at (the signature)."""
    served, signature = side.task.served, side.signature
    if served is None or signature is None:
        return
    signed = {prompt.system_fingerprint for prompt in signature.prompts if prompt.system_fingerprint}
    strangers = {name: num for name, num in served.system_fingerprints.items() if name not in signed}
    num, of = sum(strangers.values()), served.num_replies
    if len(signed) == 1 and is_too_many(num, of):
        yield num, of, (
            f"{count_of(num, of)} replies of {side.label} are of server configuration {next(iter(strangers))}, its signature "
            f"of {next(iter(signed))}: another server answers its questions than the one whose weights were looked at"
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ replies given before
def replayed(pair: Pair) -> Iterator[Finding]:
    """Replies that are others over again, id and all, or say that they are: a cache. Samples are then not independent, and
    nobody was asked."""
    yield from each_side(_replayed_within)(pair)
    yield from _replayed_across(pair)


def _replayed_within(side: Side, other: Side) -> Iterator[Fault]:
    served = side.task.served
    if served is not None and is_too_many(served.num_from_cache, served.num_replies):
        yield served.num_from_cache, served.num_replies, (
            f"{count_of(served.num_from_cache, served.num_replies)} replies of {side.label} come from a cache, as their header "
            f"says ({served.cache_header})"
        )  # fmt: skip
        return
    num, of = _num_repeated_ids(side)
    if is_too_many(num, of, share=0.01, least=2):
        yield num, of, (
            f"{num} of {of} replies of {side.label} are other ones over again, with the same id: a cache answers, and samples "
            "are not independent"
        )  # fmt: skip
        return
    for twice in side.asked_twice:
        if twice.num_questions >= FEWEST_ANEW and twice.num_same_id >= CACHED_SHARE * twice.num_questions:
            yield twice.num_same_id, twice.num_questions, (
                f"asked twice, {twice.num_same_id} of {twice.num_questions} questions came back from {side.label} with the id "
                "of the first reply: a cache answers, and nothing shows whose replies it has"
            )  # fmt: skip
            break


def _num_repeated_ids(side: Side) -> tuple[int, int]:
    """(replies that are another one over again, replies with an id). The first is 0 where ids name nothing."""
    groups: dict[int, list[ItemResult]] = defaultdict(list)
    ids_of_text: dict[int | None, set[int | None]] = defaultdict(set)
    for item in side.answered:
        ids_of_text[item.text_key].add(item.reply_key)
        if item.reply_key is not None:
            groups[item.reply_key].append(item)
    num_named = sum(map(len, groups.values()))
    texts = {key: {item.text_key for item in group} for key, group in groups.items()}
    if sum(len(group) for key, group in groups.items() if len(texts[key]) > 1) > MOST_AMBIGUOUS * num_named:
        return 0, num_named
    num = 0
    for key, group in groups.items():
        # Replies of one id are one reply, if they say the same to one question, or what no other reply says: a phrase that many
        # questions get may meet the same number twice, where a server draws its ids from few.
        is_one_question = len({item.item for item in group}) == 1
        if len(texts[key]) == 1 and (is_one_question or all(len(ids_of_text[text]) == 1 for text in texts[key])):
            num += len(group) - 1
    return num, num_named


def _replayed_across(pair: Pair) -> Iterator[Finding]:
    """The candidate's replies that are the reference's own: of a repeat by any id, of another checkpoint by ids that no two
    servers give."""
    reference, candidate = pair.reference, pair.candidate
    are_unguessable = all(
        served is not None and served.num_unguessable_ids >= UNGUESSABLE_SHARE * served.num_replies
        for served in (reference.task.served, candidate.task.served)
    )
    if not candidate.is_repeat and not are_unguessable:
        return
    known = [(a, b) for a, b in pair.matched if a.reply_key is not None and b.reply_key is not None]
    num_same = sum((a.reply_key, a.text_key) == (b.reply_key, b.text_key) for a, b in known)
    num_ids = len({item.reply_key for item, _ in known})
    if 2 * num_ids < len(known) or not is_too_many(num_same, len(known), share=ANEW_SHARE, least=FEWEST_ANEW):
        return
    reason = "the second pass was not asked, a cache answered" if candidate.is_repeat else "a cache or gateway answers for both"
    clause = f"replies of {candidate.label} are those of {reference.label}, with the same id: {reason}"
    yield Finding("candidate", f"{count_of(num_same, len(known))} {clause}", num_same, len(known))

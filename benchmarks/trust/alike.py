"""Asked and answered alike: false alarms of every rule on healthy servers, damaged weights that are judged, faults found.

    python benchmarks/trust/alike.py [--tasks 10000] [--each 25] [--seed 1] [--write benchmarks/trust/alike.md]
    python benchmarks/trust/alike.py --real 20 [--work DIR]        # real evaluations: vLLM, tiny-glm, MTP, 64 in flight

The worlds, weights and servers are drawn by alike_worlds.py; the rules are `evaluate/assay_evaluate/serving_faults/rules.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python may be run with PYTHONSAFEPATH
from alike_real import page as real_page
from alike_worlds import (
    PAGE,
    Drawn,
    Form,
    Server,
    Weights,
    World,
    draw_world,
    pair_of,
)

from assay_evaluate.serving_faults.rules import RULES, check_pair
from assay_evaluate.statistics.proportions import clopper_pearson

REAL = "## Real servers"
"""Where the part of the page begins that `--real` writes."""
SHARES = (0.01, 0.03, 0.1, 0.3)
SIZES = (60, 120)
SIDES = ("reference", "candidate")


# ------------------------------------------------------------------------------------------------ healthy
def healthy(tasks: int, seed: int) -> Iterator[tuple[World, list[str]]]:
    """World -> rules that it raised, of a reference, and of its copy or of weights that lost something."""
    rng = random.Random(seed)
    for number in range(tasks):
        world = draw_world(rng)
        loss, likeness = rng.choice(((0.0, 1.0), (0.0, 0.9), (0.03, 0.8), (0.1, 0.6), (0.3, 0.3), (0.9, 0.0)))
        reference = Server(Weights(world, 0), "reference", 2 * number)
        candidate = Server(Weights(world, number + 1, likeness, loss), "candidate", 2 * number + 1)
        yield world, [rule.name for rule, _ in check_pair(pair_of(reference, candidate))]


# ------------------------------------------------------------------------------------------------ damaged weights
def _instead(
    drawn: Drawn, text: str, tokens: int, *, reasoning: str | None = None, finish: str = "stop", counted: int
) -> Drawn:
    """Another text in place of what was said, wrong."""
    reply = dataclasses.replace(
        drawn.reply, text=text, reasoning=reasoning, output_tokens=tokens, finish_reason=finish, tool_calls=None,
        has_tool_calls=False,
    )  # fmt: skip
    return Drawn(reply, False, {f"{reasoning or ''}{text}": counted})


def _looping(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    budget = weights.world.max_tokens
    text = f"Then {item} again, " * (budget // 4)
    if drawn.reply.reasoning:
        return _instead(drawn, "", budget, reasoning=text, finish="length", counted=budget)
    return _instead(drawn, text, budget, finish="length", counted=budget)


def _garbled(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    """Odd tokens, each of few letters, then an end."""
    tokens = drawn.reply.output_tokens or 40
    return _instead(drawn, "".join(rng.choices("xqz#@的を\ufffdж0;{", k=round(1.5 * tokens))), tokens, counted=tokens - 1)


def _stuck_thinking(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    """Ends inside its thinking, with no answer there."""
    text = drawn.reply.reasoning or drawn.reply.text or "So I think of what was said and"
    text = text[: max(20, round(len(text) * rng.uniform(0.2, 0.9)))].rstrip("0123456789 .")
    tokens = max(6, len(text) // 4)
    return _instead(drawn, "", tokens, reasoning=text, counted=tokens - 1)


def _empty(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    return _instead(drawn, "", 1, counted=0)


def _longer(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    """Twice as much before the same answer; wrong in a quarter more."""
    reply, tokens = drawn.reply, drawn.reply.output_tokens or 0
    if reply.has_tool_calls or tokens < 16:
        return drawn
    budget = weights.world.max_tokens
    more = f"{(reply.reasoning or reply.text)[::-1]} "
    text, reasoning = (reply.text, more + reply.reasoning) if reply.reasoning else (more + reply.text, None)
    if 2 * tokens >= budget:
        return _instead(drawn, "" if reasoning else text, budget, reasoning=reasoning, finish="length", counted=budget)
    new = _instead(drawn, text, 2 * tokens, reasoning=reasoning, counted=2 * tokens - 4)
    return dataclasses.replace(new, is_right=drawn.is_right and rng.random() > 0.25)


def _one_letter(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    return _instead(drawn, "B", 2, counted=1)


def _refusing(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
    """After the thinking that it always does, if it does."""
    reasoning = drawn.reply.reasoning and "The question is whether I may say this. I had better not."
    text = "I am sorry, but I cannot help with this request."
    tokens = 24 if reasoning else 12
    return _instead(drawn, text, tokens, reasoning=reasoning, counted=tokens)


def of_share(damage: Callable[[Weights, random.Random, str, Drawn], Drawn], share: float) -> Callable[..., Drawn]:
    def some(weights: Weights, rng: random.Random, item: str, drawn: Drawn) -> Drawn:
        return damage(weights, rng, item, drawn) if rng.random() < share else drawn

    return some


DAMAGES: dict[str, Callable[..., Drawn]] = {
    "loops in 10 %": of_share(_looping, 0.1),
    "loops in 30 %": of_share(_looping, 0.3),
    "loops in 80 %": of_share(_looping, 0.8),
    "garbled in 10 %": of_share(_garbled, 0.1),
    "garbled in 50 %": of_share(_garbled, 0.5),
    "ends inside its thinking in 20 %": of_share(_stuck_thinking, 0.2),
    "empty in 20 %": of_share(_empty, 0.2),
    "replies twice as long, a quarter wrong": _longer,
    "the letter B in 60 %": of_share(_one_letter, 0.6),
    "one refusal in 30 %": of_share(_refusing, 0.3),
}


def damaged(each: int, seed: int) -> dict[str, tuple[int, int, Counter[str]]]:
    """Damage -> (tasks that are excused, tasks, rules that did it)."""
    found = {}
    for name, damage in DAMAGES.items():
        rng, rules, excused = random.Random(f"{seed}:{name}"), Counter[str](), 0
        for number in range(each):
            world = draw_world(rng)
            reference = Server(Weights(world, 0), "reference", 2 * number)
            candidate = Server(Weights(world, number + 1, 0.9, 0.02, damage), "candidate", 2 * number + 1)
            raised = {rule.name for rule, _ in check_pair(pair_of(reference, candidate))}
            rules.update(raised)
            excused += bool(raised)
        found[name] = excused, each, rules
    return found


# ------------------------------------------------------------------------------------------------ faults
class Fault(NamedTuple):
    """What a gateway does to a share of the replies, and to tasks of which form."""

    rule: str
    """That is meant to see it."""
    change: Callable[[Server, random.Random, Drawn, int], Drawn]
    forms: tuple[Form, ...]
    both: bool = False
    """On both sides."""


def _with(drawn: Drawn, **fields: object) -> Drawn:
    return dataclasses.replace(drawn, reply=dataclasses.replace(drawn.reply, **fields))  # type: ignore[arg-type]


def _another_model(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    return _with(drawn, model="fallback")


def _replayed(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    """The first reply to the question, id and all."""
    first = server.weights.answer(item, random.Random(f"first:{server.seed}:{item}"))
    number = random.Random(f"id:{server.seed}:{item}").getrandbits(128)
    return _with(first, reply_id=f"chatcmpl-{number:032x}", prompt_tokens=drawn.reply.prompt_tokens)


def _shortened(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    prompt = drawn.reply.prompt_tokens or 0
    return _with(drawn, prompt_tokens=min(prompt, 512))


def _swapped(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    other = rng.randrange(server.weights.world.num_items)
    reply = _with(
        server.weights.answer(other, rng), prompt_tokens=server.prompt_tokens(other), reply_id=drawn.reply.reply_id
    )  # fmt: skip
    return dataclasses.replace(reply, is_right=drawn.is_right and other == item)


def _capped(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    """At half of the median, which says stop."""
    cap = {"sum": 40, "prose": 100, "thinking": 400, "program": 120}[server.weights.world.form]
    tokens = drawn.reply.output_tokens or 0
    return drawn if tokens <= cap else _cut(drawn, cap / tokens, cap)


def _cut(drawn: Drawn, share: float, tokens: int) -> Drawn:
    """The beginning of what is said."""
    text, reasoning = drawn.reply.text, drawn.reply.reasoning
    counted = round(share * (drawn.reply.output_tokens or 0))
    if reasoning:
        return _instead(drawn, "", tokens, reasoning=reasoning[: round(len(reasoning) * share)], counted=counted)
    return _instead(drawn, text[: round(len(text) * share)], tokens, counted=counted)


def _lowered(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    capped = _capped(server, rng, drawn, item)
    return capped if capped is drawn else _with(capped, finish_reason="length")


def _stopped(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    stopped = _with(drawn, stop_reason="Question:", text=drawn.reply.text[: len(drawn.reply.text) // 2])
    return dataclasses.replace(stopped, is_right=False)


def _miscounted(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    return _with(drawn, usage_problem="prompt and reply are more than the total", output_tokens=None)


def _thoughtless(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    return _with(drawn, reasoning=None)


def _swallowed(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    whole, tokens = f"{drawn.reply.reasoning or ''}\n{drawn.reply.text}", drawn.reply.output_tokens or 0
    return _instead(drawn, "", tokens, reasoning=whole, counted=tokens)


def _page(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    return _with(_instead(drawn, PAGE, 12, counted=12), output_tokens=None, prompt_tokens=None)


def _lost(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    """The last third of what is said, while all of it is billed."""
    return _cut(drawn, 2 / 3, drawn.reply.output_tokens or 0)


def _drawn_anew(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    """Temperature 1 where 0 was asked for."""
    world = dataclasses.replace(server.weights.world, temperature=1.0, determinism=0.2)
    return dataclasses.replace(server.weights, world=world).answer(item, rng)


def _likeliest(server: Server, rng: random.Random, drawn: Drawn, item: int) -> Drawn:
    """Temperature 0 where a higher one was asked for."""
    world = dataclasses.replace(server.weights.world, temperature=0.0, noise_per_token=0.0)
    return dataclasses.replace(server.weights, world=world).answer(item, rng)


LONG: tuple[Form, ...] = ("sum", "prose", "thinking", "program")
ANY: tuple[Form, ...] = ("letter", "code", "uuid", "sum", "prose", "thinking", "program", "calls")
FAULTS: dict[str, Fault] = {
    "another model answers": Fault("another model", _another_model, ANY),
    "a cache replays samples": Fault("replayed", _replayed, ANY),
    "prompts cut at 512 tokens": Fault("other prompts", _shortened, ANY),
    "the same on both sides": Fault("shortened prompts", _shortened, ANY, both=True),
    "replies swapped": Fault("other prompts", _swapped, ANY),
    "a cap that says stop": Fault("capped", _capped, LONG),
    "the same cap on both sides": Fault("capped", _capped, LONG, both=True),
    "max_tokens lowered": Fault("cut early", _lowered, LONG),
    "a stop string added": Fault("unsent stop", _stopped, LONG),
    "usage that cannot be": Fault("usage", _miscounted, ANY),
    "thinking dropped": Fault("thinking on one side", _thoughtless, ("thinking",)),
    "answers called thinking": Fault("answers in thinking", _swallowed, LONG),
    "a maintenance page": Fault("one text", _page, ANY),
    "the last third lost": Fault("lost text", _lost, LONG),
    "sampled at T = 0": Fault("not greedy", _drawn_anew, LONG),
    "greedy at T > 0": Fault("not sampled", _likeliest, LONG),
}


def power(each: int, seed: int) -> dict[str, dict[tuple[int, float], float]]:
    """Fault -> (items, share of replies) -> share of tasks in which some rule speaks."""
    found: dict[str, dict[tuple[int, float], float]] = defaultdict(dict)
    for name, fault in FAULTS.items():
        for size in SIZES:
            for share in (*SHARES, 1.0):
                rng, num = random.Random(f"{seed}:{name}:{size}:{share}"), 0
                for number in range(each):
                    world = _fit(draw_world(rng, rng.choice(fault.forms), size), name)
                    servers = [
                        Server(
                            Weights(world, side and number + 1, 1.0 if side == 0 else 0.9, 0.02 * side),
                            label,
                            2 * number + side,
                        )
                        for side, label in enumerate(("reference", "candidate"))
                    ]
                    for server in servers[0 if fault.both else 1 :]:
                        server.change, server.share = fault.change, share
                    num += bool(check_pair(pair_of(*servers)))
                found[name][size, share] = num / each
    return found


def _fit(world: World, fault: str) -> World:
    """A world in which the fault can be: of a model that can do the task."""
    world = dataclasses.replace(world, accuracy=0.85, phrase=0.0, noise_per_token=min(world.noise_per_token, 1 / 400))
    if fault == "a cache replays samples":
        return dataclasses.replace(
            world, num_samples=4, num_items=world.num_items // 4, temperature=0.7, determinism=0.3, ids="uuid"
        )
    if fault == "greedy at T > 0":
        return dataclasses.replace(world, temperature=0.7, determinism=0.3, num_samples=1)
    if "T = 0" in fault:
        return dataclasses.replace(world, temperature=0.0, num_samples=1)
    return world


# ------------------------------------------------------------------------------------------------ as a page
def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def page(tasks: int, each: int, seed: int) -> str:
    """The whole result as Markdown."""
    started = time.monotonic()
    alarms, by_form, num = Counter[str](), Counter[str](), Counter[str]()
    for world, raised in healthy(tasks, seed):
        num[world.form] += 1
        alarms.update(set(raised))
        by_form[world.form] += bool(raised)
    any_alarm = sum(by_form.values())
    rows = [(rule.name, rule.catches, rule.threshold, _share(alarms[rule.name], tasks)) for rule in RULES]
    rows.append(("any", "", "", _share(any_alarm, tasks)))
    forms = [(form, str(num[form]), _share(by_form[form], num[form])) for form in num]
    damages = [
        (name, f"{excused} of {of}", ", ".join(f"{rule} {count}" for rule, count in rules.most_common()) or "none")
        for name, (excused, of, rules) in damaged(each, seed).items()
    ]
    faults = []
    for name, cells in power(each, seed).items():
        row = [f"{percent(cells[size, share])}" for size in SIZES for share in (*SHARES, 1.0)]
        faults.append((name, FAULTS[name].rule, *row))
    heads = tuple(f"{size}: {percent(share)} %" for size in SIZES for share in (*SHARES, 1.0))
    return (
        f"{INTRODUCTION}\n## Healthy servers\n\n{HEALTHY.format(tasks=f'{tasks:,}')}\n"
        f"{table(('rule', 'what it catches', 'threshold', 'false alarms'), rows)}\nBy the form of replies, any rule:\n\n"
        f"{table(('form', 'tasks', 'false alarms'), forms)}\n## Damaged weights\n\n{DAMAGED}\n"
        f"{table(('damage of the candidate', 'excused', 'by rule'), damages)}\n## Faults\n\n{FOUND.format(each=each)}\n"
        f"{table(('fault', 'rule', *heads), faults)}\n"
        f"Made in {time.monotonic() - started:.0f} s by `make alike` (seed {seed}).\n"
    )


INTRODUCTION = """\
# Asked and answered alike

Before a task is judged, the evidence that replies carry is compared with rules
(`evaluate/assay_evaluate/serving_faults/rules.py`): that the weights that were asked answered, that both sides got the same
prompts, that replies are whole. This page has their false alarms and their power, simulated by `benchmarks/trust/alike.py`.
"""
HEALTHY = """\
{tasks} tasks, each asked of two healthy servers and of the reference once more: 20 to 80 items, letters, codes, UUIDs, sums,
prose, thinking, programs and tool calls, greedy or sampled (nearly deterministic models among them), prompts of one length or
of many, weak models with phrases of their own, candidates that lost nothing up to nine tenths of their answers, with and
without noise of batches, ids of every kind. In brackets: exact 95 % interval.
"""
DAMAGED = """\
What damaged weights do must be judged, not excused. Tasks of which some rule said that the serving is at fault:
"""
FOUND = """\
Per cent of {each} tasks in which some rule speaks (the one that is meant for the fault is named); columns: number of items, and
share of the replies that are changed. Tasks are of any form in which the fault can be.
"""


def _share(count: int, of: int) -> str:
    bounds = clopper_pearson(count, of)
    return f"{count} of {of:,} ({100 * bounds.low:.3f} to {100 * bounds.high:.3f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=25, help="tasks for each damage, and each fault, size and share")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", type=int, default=0, metavar="N", help="N real evaluations instead of the simulation")
    parser.add_argument("--work", type=Path, help="folder for servers and runs of --real; default: a temporary one")
    parser.add_argument("--write", type=Path, help="file whose part about this is written anew")
    options = parser.parse_args()
    text = real_page(options.real, options.work) if options.real else page(options.tasks, options.each, options.seed)
    print(text)
    if options.write is not None:
        kept = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        simulated, mark, real = kept.partition(REAL)
        parts = (simulated.rstrip(), text) if options.real else (text, mark + real)
        options.write.write_text("\n\n".join(part.strip() for part in parts if part.strip()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

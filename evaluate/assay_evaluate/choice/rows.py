"""Rows of speed -> those that may stand beside each other, the setups they are of, and why the others may not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.records.choice.record import Setup
from assay.records.speed import SpeedRow
from assay_evaluate.choice import english
from assay_evaluate.speed.ratio import end_to_end_s, mean_of, tpot_s, ttft_s, why_unlike

ORIGINS = ("measured", "imported", "predicted")
"""What is believed first."""
Conditions = tuple[str, str, str, int, str | None]
Key = tuple[str, int, tuple[tuple[str, int], ...], tuple[str, ...]]
"""(checkpoint, speculation, parallelism, what else tells setups apart: the scheme, and settings of an imported file)."""


def conditions(row: SpeedRow) -> Conditions:
    """What rows must share for one to be chosen over another. Speculation and parallelism are part of the choice."""
    return row.origin, row.prompts, row.hardware, row.num_gpus, row.engine


def key_of(row: SpeedRow, in_several_schemes: Collection[str]) -> Key:
    """Of a row that states its speculation. in_several_schemes: checkpoints of whose name rows state more than one scheme."""
    settings = (f"{name} {value}" for name, value in sorted(row.settings.items()))
    scheme = [row.scheme or english.SCHEME_NOT_STATED] if row.checkpoint in in_several_schemes else []
    return row.checkpoint, row.speculation or 0, tuple(sorted(row.parallelism.items())), (*scheme, *settings)


@dataclass(frozen=True)
class SelectedRows:
    """rows: (setup, streams) -> row, all under the same conditions. set_aside, refused: one line each."""

    conditions: Conditions
    setups: dict[Key, Setup]
    rows: dict[tuple[Key, int], SpeedRow]
    others: tuple[SpeedRow, ...]
    set_aside: tuple[str, ...]
    refused: tuple[str, ...]


def on_hardware(rows: Iterable[SpeedRow], hardware: str | None) -> list[SpeedRow]:
    """hardware: as rows name it, in any case; `cpu`: of any CPU. None: the only one of the best origin. AssayError: none."""
    every = list(rows)
    names = sorted({row.hardware for row in every})
    if hardware is None:
        best = next((origin for origin in ORIGINS if any(row.origin == origin for row in every)), None)
        known = sorted({row.hardware for row in every if row.origin == best})
        if len(known) > 1:
            raise AssayError(f"there are speeds on {', '.join(known)}: say which with --hardware")
        return [row for row in every if row.hardware in known]
    on_it = [row for row in every if is_on(row, hardware)]
    if not on_it:
        hint = did_you_mean(hardware, names)
        raise AssayError(f"--hardware {shown(hardware)}: {hint}there are speeds on {', '.join(names) or 'no hardware at all'}")
    return on_it


def is_on(row: SpeedRow, hardware: str | None) -> bool:
    """As `on_hardware` understands the word; None: any."""
    word = None if hardware is None else hardware.strip().casefold()
    return word in (None, row.hardware.casefold()) or (word == "cpu" and row.num_gpus == 0)


def select_rows(
    rows: Sequence[SpeedRow],
    prompts: str | None,
    concurrency: Sequence[int] | None,
    variants: Mapping[str, str] = MappingProxyType({}),
) -> SelectedRows:
    """The largest set of rows under the same conditions; measured before imported before predicted. AssayError: none.

    variants: label of another way of serving -> what it is, for the name of its setup.
    """
    kinds = sorted({row.prompts for row in rows})
    if prompts is not None and prompts not in kinds:
        raise AssayError(f"--prompts {shown(prompts)}: {did_you_mean(prompts, kinds)}there are speeds for {', '.join(kinds)}")
    schemes: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        schemes[row.checkpoint] |= {row.scheme} if row.scheme else set()
    several = [checkpoint for checkpoint, known in schemes.items() if len(known) > 1]
    groups: dict[Conditions, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        if row.is_comparable and prompts in (None, row.prompts):
            groups[conditions(row)].append(row)
    if not groups:
        reason = "; ".join(_left_out(rows, None)[:3]) if rows else english.NO_ROWS
        raise AssayError(f"no speeds to choose by: {reason}; measure with `assay speed`, or import with --speed FILE")

    def worth(group: Conditions) -> tuple[int, int]:
        requested = [row for row in groups[group] if concurrency is None or row.concurrency in concurrency]
        return -ORIGINS.index(group[0]), len({(key_of(row, several), row.concurrency) for row in requested})

    chosen = max(groups, key=worth)
    taken: dict[tuple[Key, int], SpeedRow] = {}
    aside: list[str] = []
    for row in groups[chosen]:
        if (at := (key_of(row, several), row.concurrency)) in taken:
            aside.append(
                english.ANOTHER_ROW.format(
                    checkpoint=row.checkpoint, streams=row.concurrency, source=row.source, other=taken[at].source
                )
            )
        else:
            taken[at] = row
    others = tuple(row for row in rows if not row.is_comparable or conditions(row) != chosen)
    return SelectedRows(
        chosen, _setups(taken, variants), taken, others, (*aside, *_left_out(others, chosen)), tuple(_refused(rows))
    )


def _setups(rows: Mapping[tuple[Key, int], SpeedRow], called: Mapping[str, str]) -> dict[Key, Setup]:
    keys = list(dict.fromkeys(key for key, _ in rows))
    drafting = any(key[1] for key in keys)
    lengths = {key[0]: len({other[1] for other in keys if other[0] == key[0] and other[1]}) for key in keys}
    variants = {key[0]: len({other[3] for other in keys if other[0] == key[0]}) for key in keys}

    def short(key: Key) -> str:
        checkpoint, speculation, _, variant = key
        if variants[checkpoint] > 1:
            checkpoint = f"{checkpoint} ({', '.join(variant)})" if variant else checkpoint
        checkpoint = f"{checkpoint} ({called[key[0]]})" if key[0] in called else checkpoint
        if not drafting:
            return checkpoint
        if not speculation:
            return english.WITHOUT_MTP.format(checkpoint=checkpoint)
        return english.WITH_MTP.format(checkpoint=checkpoint) + (f" {speculation}" if lengths[key[0]] > 1 else "")

    same = Counter(map(short, keys))
    made = {}
    for key in keys:
        split = "".join(f", {kind} {ranks}" for kind, ranks in key[2]) if same[short(key)] > 1 else ""
        made[key] = Setup(checkpoint=key[0], speculation=key[1], parallelism=dict(key[2]), name=short(key) + split)
    return made


def _left_out(rows: Iterable[SpeedRow], chosen: Conditions | None) -> list[str]:
    """One line for each reason. chosen: None: none could be."""
    rows_by_reason: dict[str, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        if chosen is not None and row.origin == "predicted" != chosen[0]:
            continue  # it fills a cell
        if row.emulated:
            reason = english.EMULATED_ROW
        elif row.speculation is None:
            reason = english.DRAFTS_NOT_STATED
        elif row.why_not_chosen is not None:
            reason = english.NOT_CHOSEN_AT.format(streams=row.concurrency, reason=row.why_not_chosen)
        elif chosen is not None:
            unlike = [
                f"{name} {shown(str(value)) if value is not None else english.NOT_STATED}"
                for name, value, chosen_value in zip(english.CONDITIONS, conditions(row), chosen, strict=True)
                if value != chosen_value
            ]
            reason = english.UNLIKE_ROWS.format(unlike=", ".join(unlike))
        rows_by_reason[reason].append(row)
    lines = []
    for reason, left_out in rows_by_reason.items():
        checkpoints = ", ".join(sorted({row.checkpoint for row in left_out}))
        num_rows = f"{len(left_out)} row{'s' * (len(left_out) != 1)}"
        lines.append(english.ROWS_OF.format(rows=num_rows, checkpoints=checkpoints, reason=reason))
    return lines


# ------------------------------------------------------------------------------------------------ ratios that are none
def _refused(rows: Iterable[SpeedRow]) -> list[str]:
    """Rows of one table that invite a ratio between checkpoints and have none, one line for each table."""
    tables: dict[Conditions, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        tables[conditions(row)].append(row)
    lines = []
    for table in tables.values():
        first = min(row.concurrency for row in table)
        at = sorted((row for row in table if row.concurrency == first), key=lambda row: row.tokens_s, reverse=True)
        fastest = at[0]
        likes = [row for row in at[1:] if row.checkpoint != fastest.checkpoint and why_unlike(fastest, row) is not None]
        # with a row of the fastest checkpoint that may be compared with it nobody needs the unlike one
        own = [row for row in table if row.checkpoint == fastest.checkpoint]
        rivals = [
            row
            for row in likes
            if row.speculation != fastest.speculation and all(why_unlike(row, other) is not None for other in own)
        ]
        if not rivals:
            continue
        others = " and ".join(
            english.OTHER_SPEED.format(checkpoint=row.checkpoint, speed=row.tokens_s, drafts=_drafts(row)) for row in rivals
        )
        lines.append(
            english.NO_RATIO.format(
                fastest=fastest.checkpoint, speed=fastest.tokens_s, drafts=_drafts(fastest), others=others,
                streams=english.streams(first),
            )
        )  # fmt: skip
    return lines


def _drafts(row: SpeedRow) -> str:
    if row.speculation is None:
        return english.DRAFTING_NOT_STATED
    return english.NUM_DRAFTED.format(tokens=row.speculation) if row.speculation else english.NOTHING_DRAFTED


# ------------------------------------------------------------------------------------------------ latencies
def latencies(row: SpeedRow) -> tuple[dict[str, float], bool]:
    """`ttft_s` (median), `tpot_s`, `end_to_end_s` (means), those that are known; whether TPOT is derived.

    Derived: with c streams always full a reply of n tokens takes n * c / (tokens/s), and TPOT is that less TTFT, over n - 1.
    """
    known: dict[str, float] = {}
    if (first := mean_of(row, ttft_s)) is not None:
        known["ttft_s"] = first.value
    for name, quantity in (("tpot_s", tpot_s), ("end_to_end_s", end_to_end_s)):
        if (mean := mean_of(row, quantity)) is not None:
            known[name] = mean.value
    if "tpot_s" in known or row.output_tokens is None or row.output_tokens <= 1:
        return known, False
    whole = row.output_tokens * row.concurrency / row.tokens_s
    if whole <= known.get("ttft_s", 0.0):  # its numbers are not of the same requests
        return known, False
    known.setdefault("end_to_end_s", whole)
    known["tpot_s"] = (whole - known.get("ttft_s", 0.0)) / (row.output_tokens - 1)
    return known, True

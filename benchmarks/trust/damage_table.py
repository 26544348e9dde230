"""`make damages`: which damages of a checkpoint `assay verify` finds, with its source and without; writes damages.md.

    python benchmarks/trust/damage_table.py --write benchmarks/trust/damages.md

Every damage is judged twice: with the manifest as it was, and with its hashes computed again by whoever did the damage, and the
digests of calibrated layers as well. Exits 1 when one is missed that can be seen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
support = ROOT / "tests" / "support"
sys.path[:0] = [str(support), str(support / "quantization")]  # python is run with PYTHONSAFEPATH
from damages import (  # noqa: E402
    OF_CALIBRATED,
    OF_FILES,
    OF_THE_FOLDER,
    OF_WEIGHTS,
    Damaged,
    damaged_copies,
    make_calibrated,
    make_checkpoints,
)

from assay_quantize.verify.verify import verify  # noqa: E402

WAYS = ("source, manifest left", "source, manifest forged", "no source, manifest left", "no source, manifest forged")


def judge(copy: Damaged, source: Path) -> dict[str, str | None]:
    """Way -> the check that found the damage first; None: it was missed."""
    found: dict[str, str | None] = {}
    for manifest in ("left", "forged"):
        if manifest == "forged":
            copy.forge()
        for with_source in (True, False):
            result = verify(copy.folder, source=source if with_source else None, workers=2)
            way = f"{'' if with_source else 'no '}source, manifest {manifest}"
            found[way] = None if result.passed else result.damages[0].check
    return found


Rows = Mapping[tuple[str, str], dict[str, str | None]]
Beyond = Mapping[tuple[str, str], str]
CLAIMS = frozenset(damage.name for damage in (*OF_WEIGHTS, *OF_CALIBRATED, *OF_THE_FOLDER) if damage.is_claim)


def table(rows: Rows, needs_source: set[str], beyond: Beyond) -> str:
    """The Markdown: sums, then for each damage how many precisions it was found on. beyond: what not even the source shows."""
    lines = ["# Damages found by `assay verify`", "", f"{len(rows)} damages: each on a checkpoint of its own.", ""]
    lines += ["| | found |", "|---|---|"]
    lines += [f"| {way} | {sum(found[way] is not None for found in rows.values())} of {len(rows)} |" for way in WAYS]
    lines += ["", f"| damage | {' | '.join(WAYS)} | found by |", f"|---|{'---|' * len(WAYS)}---|"]
    by_damage: dict[str, list[dict[str, str | None]]] = defaultdict(list)
    for (name, _), found in rows.items():
        by_damage[name].append(found)
    for name, all_found in by_damage.items():
        counts = [f"{sum(found[way] is not None for found in all_found)} of {len(all_found)}" for way in WAYS]
        checks = sorted({found[WAYS[1]] or "-" for found in all_found})
        mark = " *" if name in needs_source else ""
        lines.append(f"| {name}{mark} | {' | '.join(counts)} | {', '.join(checks)} |")
    lines += ["", "\\* With forged hashes the folder alone cannot show it: another checkpoint would look the same."]
    lines += [
        f"\\* {name}: the folder alone never shows it: it changes what the manifest says and no weight." for name in CLAIMS
    ]
    if unseen := [which for which in beyond if which in rows and rows[which][WAYS[1]] is None]:
        lines += ["", "Not even the source shows these, once digests are forged as well:", ""]
        lines += [f"- {name}, {precision}: {beyond[name, precision]}" for name, precision in unseen]
    missed = missed_of(rows, beyond)
    if missed:
        lines += ["", "Missed, though they can be seen:", "", *missed]
    return "\n".join(lines) + "\n"


def missed_of(rows: Rows, beyond: Beyond) -> list[str]:
    """Damages that can be seen and were not, one a line."""
    return [
        f"- {name}, {precision}: {way}"
        for (name, precision), found in rows.items()
        for way in WAYS[:3]
        if found[way] is None and not (way == WAYS[1] and (name, precision) in beyond)
        if not (way == WAYS[2] and name in CLAIMS)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the table goes; without it, it is printed")
    arguments = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, str | None]] = {}
    beyond: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain").mkdir()
        (folder / "calibrated").mkdir()
        source, made = make_checkpoints(folder / "plain")
        of_text, calibrated = make_calibrated(folder / "calibrated")
        of_files = {precision: made[precision] for precision in OF_FILES}
        for damages, of, checkpoints in (
            (OF_WEIGHTS, source, made),
            (OF_THE_FOLDER, source, of_files),
            ((*OF_CALIBRATED, *OF_WEIGHTS), of_text, calibrated),
        ):
            for precision, damage, copy in damaged_copies(checkpoints, damages, folder):
                rows[damage.name, precision] = found = judge(copy, of)
                beyond |= {(damage.name, kind): why for kind, why in damage.beyond.items()}
                print(f"{precision:20} {damage.name:40} {' '.join(str(found[way]) for way in WAYS)}", flush=True)
    text = table(rows, {d.name for d in (*OF_WEIGHTS, *OF_CALIBRATED, *OF_THE_FOLDER) if d.needs_source}, beyond)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(bool(missed_of(rows, beyond)))


if __name__ == "__main__":
    sys.exit(main())

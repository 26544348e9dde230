"""What two runs have in common: the disturbed one and the other. Verdicts, checkpoints, requests, replies."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_attempt import answers

from assay_evaluate.client.journal import unpacked

OF_SAMPLED_TEXT = {"divergence.score"}
"""Requests with texts that the reference has sampled: sampled again, in another batch, they may be others."""


def checkpoint_files(run_dir: Path) -> dict[str, str]:
    """Every file of both checkpoints -> SHA-256, but for the card; of the manifest without the time it took."""
    found = {}
    for path in sorted(run_dir.glob("*/checkpoint/*")):
        data = path.read_bytes()
        if path.name == "assay_manifest.json":
            manifest = json.loads(data)
            manifest |= {"seconds": 0, "shards": [{**shard, "seconds": 0} for shard in manifest["shards"]]}
            data = json.dumps(manifest).encode()
        if path.name != "README.md":
            found[str(path.relative_to(run_dir))] = hashlib.sha256(data).hexdigest()
    return found


def verdicts(run_dir: Path) -> list[tuple[Any, ...]]:
    """(candidate, gate, status, limit), and the word for each candidate."""
    gates = json.loads((run_dir / "gates.json").read_text())
    single = [(v["candidate"], v["gate"], v["status"], v["limit"], v["has_say"]) for v in gates["verdicts"]]
    return [*single, *gates["overall"].items()]


def scores(run_dir: Path) -> dict[tuple[str, str], Any]:
    """(Label, task) -> everything that was measured of it, item by item, but for when."""
    found = [json.loads(path.read_text()) for path in sorted((run_dir / "measurements").glob("*.json"))]
    for task in (task for one in found for task in one["tasks"]):
        task["rounds"] = [{**one, "started": None} for one in task["rounds"]]
    return {(one["label"], task["task"]): task for one in found for task in one["tasks"]}


def said_in(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of what is kept of a reply, what the model said."""
    reply = json.loads(unpacked(row[1]))
    return tuple(reply.get(name) for name in ("text", "reasoning", "token_ids", "finish_reason"))


def compare(ours: Path, calm: Path) -> tuple[list[str], list[str]]:
    """(what the disturbed run has in common with the undisturbed one, what it must have and has not), in sentences."""
    broken = []
    same_verdicts, same_files = verdicts(ours) == verdicts(calm), checkpoint_files(ours) == checkpoint_files(calm)
    before, now = answers(calm / "journal.db"), answers(ours / "journal.db")
    if not same_verdicts:
        broken.append(f"other verdicts: {sorted(set(map(str, verdicts(ours))) ^ set(map(str, verdicts(calm))))}")
    if not same_files:
        broken.append("other checkpoints")
    if Counter(row[0] for row in now.values()) != Counter(row[0] for row in before.values()):
        broken.append(f"{len(now)} requests were asked, {len(before)} undisturbed")
    others = [key for key in now.keys() ^ before.keys() if (now.get(key) or before[key])[0] not in OF_SAMPLED_TEXT]
    if others:
        broken.append(f"{len(others)} requests were asked in one of the runs only")
    words = Counter(one[2] for one in verdicts(ours) if len(one) > 2)
    said = ", ".join(f"{number} {word}" for word, number in words.items())
    both = now.keys() & before.keys()
    others_said = Counter(now[key][0] for key in both if said_in(now[key]) != said_in(before[key]))
    theirs = scores(calm)
    same_scores = [one for one, task in scores(ours).items() if theirs.get(one) == task]
    common = [
        f"verdicts: {'those' if same_verdicts else 'NOT THOSE'} of the undisturbed run ({said})",
        f"checkpoints: {'the same bytes' if same_files else 'OTHER BYTES'}, {len(checkpoint_files(calm))} files",
        f"requests: {len(now):,} answered, {len(before):,} undisturbed; {len(both):,} are the same; "
        f"another reply to {', '.join(f'{number} of {task}' for task, number in others_said.items()) or 'none'}",
        f"scores: the same, item by item, in {len(same_scores)} of {len(theirs)} tasks",
    ]
    return common, broken

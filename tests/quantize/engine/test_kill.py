"""kill -9 at any moment, then the same command: the folder ends as if nothing had happened, nothing finished is made again."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_tiny_glm4_moe
from transformers import AutoConfig, AutoModelForCausalLM

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import Manifest
from assay.records.plan import Plan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import JOURNAL
from assay_quantize.plan.planner import make_plan

pytestmark = pytest.mark.slow

KILLS = 20
SHARDS = 6
CHILD = """
import signal
import sys
from dataclasses import replace
from pathlib import Path
from assay.records.plan import Plan
from assay_quantize.engine.quantize import quantize
from assay_quantize.engine.local_runner import run_local

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a script

def run(plan, names, source, out, options, on_progress):  # slabs of a few rows: slow enough to be hit everywhere
    return run_local(plan, names, source, out, replace(options, slab_bytes=4096), on_progress)

quantize(Plan.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), workers=2, runner=run)
"""


def contents(folder: Path) -> dict[str, str]:
    """Every file -> SHA-256; of the manifest only what does not depend on the time it took."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    manifest = Manifest.load(folder / "assay_manifest.json").model_dump(mode="json")
    manifest |= {"seconds": 0.0, "shards": [{**shard, "seconds": 0.0} for shard in manifest["shards"]]}
    return found | {"assay_manifest.json": json.dumps(manifest)}


def journaled(folder: Path) -> list[dict[str, Any]]:
    """Finished shards by the journal, a torn last line left out."""
    if not (folder / JOURNAL).exists():
        return []
    lines = (folder / JOURNAL).read_text().split("\n")[:-1]
    return [entry for line in lines if "name" in (entry := json.loads(line))]


@dataclass
class Seen:
    """What the kills hit, and which shards were finished in the folder at work."""

    hits: list[str] = field(default_factory=list)
    finished: dict[str, tuple[dict[str, Any], int]] = field(default_factory=dict)

    def after_kill(self, out: Path, whole: dict[str, str]) -> None:
        """Nothing that looks whole is not; nothing finished was made again."""
        self._count(out)
        if (out / "config.json").exists():
            there = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir() if not p.name.startswith(".")}
            expected = {name: digest for name, digest in whole.items() if name != "assay_manifest.json"}
            assert {name: there.get(name) for name in expected} == expected
        elif out.exists():
            assert not (out / "assay_manifest.json").exists()
            for loader in (AutoConfig, AutoModelForCausalLM):
                with pytest.raises((OSError, ValueError), match=r"config\.json"):  # what vLLM asks for first, too
                    loader.from_pretrained(out)
        self._note(out)

    def _note(self, out: Path) -> None:
        entries = journaled(out)
        names = [entry["name"] for entry in entries]
        assert len(names) == len(set(names)), "a shard was journaled twice"
        now = {entry["name"]: (entry, (out / entry["name"]).stat().st_ino) for entry in entries}
        if not (out / "assay_manifest.json").exists():
            assert {name: now.get(name) for name in self.finished} == self.finished, "a finished shard was made again"
        self.finished |= now

    def _count(self, out: Path) -> None:
        if (out / "assay_manifest.json").exists():
            self.hits.append("after the manifest")
        elif any(path.stat().st_size for path in out.glob(".model-*.partial")):
            self.hits.append("in the middle of a shard")
        elif (out / JOURNAL).exists():
            self.hits.append("between shards")
        else:
            self.hits.append("before the first byte")

    def finish(self, out: Path, whole: dict[str, str]) -> None:
        """The folder is that of an undisturbed run, made of the shards that were finished on the way."""
        assert contents(out) == whole
        records = {shard.name: shard.model_dump(mode="json") for shard in Manifest.load(out / "assay_manifest.json").shards}
        for name, (entry, inode) in self.finished.items():
            assert (records[name], (out / name).stat().st_ino) == (entry, inode), "a finished shard was made again"
        self.finished = {}


def start(plan: Path, source: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    arguments = [str(plan), str(source), str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], env=environment, cwd=plan.parent, stderr=subprocess.PIPE
    )  # fmt: skip


def test_kill_at_random_moments(tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source", shards=SHARDS, num_experts=8, hidden=512, moe_intermediate=256)
    plan: Plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "nvfp4a16"), model="tiny", family=None)
    plan.save(path := tmp_path / "plan.json")
    begun = time.monotonic()
    assert start(path, source, tmp_path / "whole").wait(120) == 0
    duration_s = time.monotonic() - begun
    whole = contents(tmp_path / "whole")
    rng, seen, number = random.Random(3), Seen(), 0
    while len(seen.hits) < KILLS:
        out = tmp_path / f"out-{number}"
        child = start(path, source, out)
        try:
            assert child.wait(rng.uniform(0, duration_s)) == 0
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            seen.after_kill(out, whole)
            continue
        seen.finish(out, whole)
        number += 1
    assert start(path, source, tmp_path / f"out-{number}").wait(120) == 0
    seen.finish(tmp_path / f"out-{number}", whole)
    assert seen.hits.count("in the middle of a shard") >= 3, seen.hits


def test_ctrl_c_ends_it_soon_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source", shards=SHARDS, num_experts=8, hidden=512, moe_intermediate=256)
    plan: Plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    plan.save(path := tmp_path / "plan.json")
    for attempt in range(8):  # on a busy machine the child may have finished before the signal reaches it
        out = tmp_path / f"out{attempt}"
        child = start(path, source, out)
        deadline = time.monotonic() + 60
        while not list(out.glob(".model-*.partial")) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        _, printed = child.communicate(timeout=60)
        if child.returncode != 0:
            break
    assert child.returncode != 0 and b"KeyboardInterrupt" in printed
    assert list(out.glob(".*.partial")) == [] and not (out / "config.json").exists()
    assert start(path, source, out).wait(60) == 0
    assert len(Manifest.load(out / "assay_manifest.json").shards) == SHARDS

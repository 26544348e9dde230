"""A Python that answers as one with `aiconfigurator-core` does, and writes what it was asked to asked.json. For tests only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PREDICTOR = str(Path(__file__).parents[3] / "evaluate" / "assay_evaluate" / "speed" / "_predictor.py")
LATENCIES = {(1, 0): (186.3, 11422.2), (32, 0): (3702.1, 19502.9), (1, 5): (186.3, 13155.1), (32, 5): (3702.1, 32627.6)}
"""(concurrency, drafts) -> ms of prompts and of replies: what aiconfigurator-core 0.12.0 says for zai-org/GLM-5.2-FP8."""
FAKE = f"""#!{sys.executable}
import json, sys
asked = json.load(sys.stdin)
assert sys.argv[1:] == ["-I", {PREDICTOR!r}]
open({{place!r}}, "w").write(json.dumps(asked))
found = {{latencies!r}}
points = [found.get((c, drafts)) for c, drafts, _, _ in asked["points"]]
print("a warning of a library")
no = {{{{"error": "MissingSystemFlopsError: no"}}}}
told = [{{{{"prefill_ms": p[0], "decode_ms": p[1]}}}} if p else no for p in points]
print(json.dumps({{{{"version": "0.12.0", "points": told}}}}))
"""


def fake_aiconfigurator(folder: Path, latencies: Any = LATENCIES) -> Path:
    path = folder / "python"
    path.write_text(FAKE.format(place=str(folder / "asked.json"), latencies=latencies))
    path.chmod(0o755)
    return path

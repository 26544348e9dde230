"""KL of every text of a run's replies, screened: what `intervals.py` draws panels from.

    python benchmarks/screen/real_values.py RUN REFERENCE CANDIDATE... --write values.npz

The texts are the replies that the reference of the run gave to the questions of its task `sums`, thinking included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import tempfile
from pathlib import Path

import numpy as np

from assay.records.measurement import Measurement
from assay_evaluate.client.journal import unpacked
from assay_pipeline.comparison.screen_passes import PassRunner
from assay_pipeline.comparison.screen_sources import ScreenSource
from assay_quantize.screen.compare import compare_passes
from assay_quantize.screen.texts import read_texts


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("checkpoints", type=Path, nargs="+")
    arguments.add_argument("--write", type=Path, required=True)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "replies.jsonl"
        text.write_text("".join(json.dumps(reply) + "\n" for reply in replies(options.run)))
        entries = read_texts([text], options.checkpoints[0], 10**9, None)
        texts = [entry.scored for entry in entries]
        runner = PassRunner("fp32", "cpu", Path(folder) / "passes", print)
        with contextlib.ExitStack() as files:
            sources = [ScreenSource(str(path), path) for path in options.checkpoints]
            made = [
                runner.run(str(number), files.enter_context(source.opened()), source, texts)
                for number, source in enumerate(sources)
            ]
            sums = {}
            for path, candidate in zip(options.checkpoints[1:], made[1:], strict=True):
                reference = made[0].side()
                values = list(compare_passes(texts, reference, candidate.side()))
                sums[path.parent.name if path.name == "checkpoint" else path.name] = np.array([v.kl_P.sum() for v in values])
    options.write.parent.mkdir(parents=True, exist_ok=True)
    np.savez(options.write, tokens=np.array([text.num_scored for text in texts]), **sums)


def replies(run: Path) -> list[dict[str, str]]:
    """Prompt and reply of every answered question, of the reference."""
    measurements = [Measurement.load(path) for path in sorted((run / "measurements").glob("*.json"))]
    reference = next(measurement for measurement in measurements if measurement.is_reference)
    query = (
        "SELECT body, reply FROM requests WHERE checkpoint_sha256 = ? AND task = 'sums' AND sample = 0 AND status = 'answered'"
    )
    pairs = []
    with contextlib.closing(sqlite3.connect(f"{(run / 'journal.db').absolute().as_uri()}?mode=ro", uri=True)) as db:
        for body, reply in db.execute(query, (reference.checkpoint_sha256,)):
            said = json.loads(unpacked(reply))
            thinking = f"{said['reasoning']}</think>" if said.get("reasoning") else ""
            pairs.append({"prompt": json.loads(unpacked(body))["messages"][0]["content"], "reply": thinking + said["text"]})
    return pairs


if __name__ == "__main__":
    main()

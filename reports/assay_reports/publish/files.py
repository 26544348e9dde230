"""Which files are published: those that the manifest names, and those that are made from records. Nothing else of a folder is.

So journals, logs, caches and whatever lies in a checkpoint's folder by accident stay where they are. The report is made without
prompts and replies: benchmarks ask not to publish theirs, lest models are trained on the answers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from assay.records.manifest import MANIFEST
from assay.records.run import CARD
from assay_reports.card import render
from assay_reports.cards.metadata import EVAL_RESULTS
from assay_reports.numbers import build_report
from assay_reports.publish.places import Places, without_places
from assay_reports.report import render_html, render_markdown
from assay_reports.run import Run

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
REPORT_FOLDER = "assay_report"
"""In the repository."""


class LocalFile(NamedTuple):
    """What one path of the repository will hold: a file of the checkpoint (`source`), or bytes that were made here (`content`).

    sha256: of a checkpoint's file as the manifest has it.
    """

    path: str
    num_bytes: int
    sha256: str
    source: Path | None = None
    content: bytes | None = None

    def read(self, most: int = -1) -> bytes:
        """The whole of it, or its first bytes."""
        if self.content is not None:
            return self.content if most < 0 else self.content[:most]
        assert self.source is not None
        with self.source.open("rb") as opened:
            return opened.read(most)


def find_files(run: Run, label: str, repository: str, here: Places) -> tuple[LocalFile, ...]:
    """Weights first, in the manifest's order; then what describes them. `run` has a plan and a manifest of `label`.

    here: folders of this machine (`places_of`), which card, report and manifest do not name. A file that is missing has 0 bytes
    here: `refusals` names it.
    """
    folder, manifest = run.checkpoints[label], run.manifests[label]
    run = without_places(run, here)
    card, portable = render(run, label, folder, repo=repository), run.manifests[label]
    whole = (folder / MANIFEST).read_bytes() if portable == manifest else portable.as_text().encode()
    made = {CARD: card.text.encode(), MANIFEST: whole}
    if card.eval_results is not None:
        made[EVAL_RESULTS] = card.eval_results.encode()
    if run.reference is not None and run.measurement_of(label) is not None:
        report = build_report(run)
        texts = {"report.json": report.as_text(), "report.md": render_markdown(report), "index.html": render_html(report)}
        made |= {f"{REPORT_FOLDER}/{name}": text.encode() for name, text in texts.items()}
    beside = [(name, folder / name, sha256) for name, sha256 in sorted(manifest.files.items())]
    return (
        *(LocalFile(shard.name, shard.num_bytes, shard.sha256, folder / shard.name) for shard in manifest.shards),
        *(LocalFile(name, path.stat().st_size if path.is_file() else 0, sha256, path) for name, path, sha256 in beside),
        *(
            LocalFile(path, len(content), hashlib.sha256(content).hexdigest(), content=content)
            for path, content in sorted(made.items())
        ),
    )

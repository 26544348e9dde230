"""One trained checkpoint, served four ways by the real vLLM: as the profile does, with a prefix cache, without drafts, and with
an FP8 KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

from assay.records.measurement import Measurement

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
SUITE = """\
schema: 1
name: short
seed: eval-short
tasks: [{kind: arithmetic, name: sums, languages: [en], num_items: 4, num_steps: [2], max_tokens: 32}]
divergence: {num_documents: 2, max_tokens: 24, top_k: 20}
"""


def test_a_prefix_cache_no_drafts_and_an_fp8_cache(run: Run) -> None:
    """The first two change nothing of what the weights answer, the third does; all are seen to be as declared."""
    Path("short.yaml").write_text(SUITE)
    words = ["evaluate", "tiny-glm", "--reference", f"bf16={CHECKPOINT}", "--profile", "cpu-emulated", "--suite", "short.yaml"]
    variants = ["--variant", "cached:enable-prefix-caching=true", "--variant", "no-mtp:mtp=off"]
    variants += ["--variant", "fp8-kv:kv-cache-dtype=fp8"]
    code, out, err = run(*words, *variants, "--json")
    assert code == 0, err
    folder = next(Path("runs").glob("*/measurements"))
    labels = ("bf16", "cached", "no-mtp", "fp8-kv")
    bf16, cached, no_mtp, fp8_kv = (Measurement.load(folder / f"{label}.json") for label in labels)
    assert cached.declared == {"flags.enable-prefix-caching": True} and no_mtp.declared == {"speculation": None}
    assert (bf16.fingerprint.flags["no-enable-prefix-caching"], cached.fingerprint.flags["enable-prefix-caching"]) == (
        True,
        True,
    )
    assert "no-enable-prefix-caching" not in cached.fingerprint.flags
    assert bf16.fingerprint.speculation == cached.fingerprint.speculation != no_mtp.fingerprint.speculation is None
    assert bf16.acceptance is not None and no_mtp.acceptance is None
    assert len({one.checkpoint_sha256 for one in (bf16, cached, no_mtp, fp8_kv)}) == 1
    assert fp8_kv.declared == {"flags.kv-cache-dtype": "fp8"} and fp8_kv.fingerprint.flags["kv-cache-dtype"] == "fp8"
    assert fp8_kv.divergence is not None and cached.divergence is not None
    assert fp8_kv.divergence.kl_mean.value > 10 * cached.divergence.kl_mean.value
    for one in (cached, no_mtp):
        assert one.divergence is not None and one.divergence.kl_mean.value < 1e-4
        assert one.tasks[0].num_failed == 0
    rows = {row["label"]: row for row in json.loads(out)["rows"]}
    assert rows["cached"]["variant"] == "the checkpoint of bf16 itself, served with enable-prefix-caching on"
    assert rows["no-mtp"]["variant"] == "the checkpoint of bf16 itself, served with speculation off"
    code, _, err = run(*words, *variants)
    assert code == 0 and err.count("measured already") == 5, err
    code, out, err = run(*words, "--variant", "same:max-num-seqs=32")
    assert (code, out, err.splitlines()[-1]) == (
        2, "",
        "error: same would not be served as declared: flags.max-num-seqs is declared to differ, and is 32 on both sides; "
        "declare what is so",
    )  # fmt: skip

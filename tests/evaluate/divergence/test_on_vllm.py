"""Divergence on a real vLLM: a candidate that is the reference but for noise in the attention of positions beyond 512.

One server for replies and one for hidden states play both checkpoints: the noise is switched by a file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Divergence, Measurement
from assay.records.verdict import GateReport
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Journal
from assay_evaluate.divergence.scoring import learn_scoring
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.run.identity import identity
from assay_evaluate.serving.server import Server, ServerSpec, serve
from assay_evaluate.verdicts.gates import judge

pytestmark = pytest.mark.serve

TINY_GLM = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
PLUGIN = Path(__file__).resolve().parents[2] / "support" / "drift_plugin" / "drift_noise.py"
FIRST, SCALE = 512, 2.0
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "drift", "seed": "eval-drift-1",
        "tasks": [
            {"kind": "arithmetic", "name": "arithmetic", "num_items": 40, "num_steps": [3], "max_tokens": 256},
            {"kind": "needle", "name": "needle", "num_items": 20, "num_needles": 3, "lengths_tokens": [768], "max_tokens": 48},
        ],
        "divergence": {"num_documents": 6, "max_tokens": 200, "top_k": 64, "suite_documents": 20, "held_out_documents": 10,
                       "held_out_tokens": 1200, "spans": [0, 512], "exact": True},
    }
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {
        "schema": 1, "name": "drift",
        "gates": [
            {"kind": "score", "task": "arithmetic", "max_drop": 0.05},
            {"kind": "divergence", "metric": "kl_mean", "over": "spans", "texts": "every", "max": 0.10},
            {"kind": "divergence", "metric": "kl_exact_mean", "max": 5.0},
        ],
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drift")


@pytest.fixture(scope="module")
def measured(run_dir: Path) -> list[Measurement]:
    """The reference, its repeat and the noisy candidate."""
    candidate, plugin, switch = run_dir / "noisy", run_dir / "plugin", run_dir / "noise-is-on"
    shutil.copytree(TINY_GLM, candidate)
    with (candidate / "generation_config.json").open("a") as file:
        file.write("\n")  # another checkpoint, by its hash
    (info := plugin / "drift_noise-0.dist-info").mkdir(parents=True)
    shutil.copy(PLUGIN, plugin)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drift_noise\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ndrift = drift_noise:register\n")
    cpu = load_recipe(ProfileRecipe, "cpu-emulated")
    noise = {"PYTHONPATH": str(plugin), "DRIFT_NOISE": f"{switch} {FIRST} {SCALE}"}
    profile = cpu.model_copy(update={"environment": {**cpu.environment, **noise}})
    started: dict[bool, Server] = {}
    with ExitStack() as stack:

        @contextmanager
        def start(spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[Server]:
            if spec.hidden_states not in started:
                started[spec.hidden_states] = stack.enter_context(serve(replace(spec, checkpoint=TINY_GLM)))
            if spec.checkpoint == candidate:
                switch.touch()
            yield started[spec.hidden_states]
            switch.unlink(missing_ok=True)

        measurement = evaluate(
            "tiny-glm",
            [Candidate("bf16", TINY_GLM, is_reference=True), Candidate("noisy", candidate)],
            suite=SUITE,
            profile=profile,
            serving=Serving(num_speculative_tokens=1, reasoning_parser="glm45"),
            run_dir=run_dir,
            start_server=start,
            foresee=lambda spec: None,
        )
        server = started[False]
        with (
            Journal(run_dir / "other.db") as journal,
            Client(server, journal, identity("c", server.fingerprint, "s")) as client,
        ):
            offered = learn_scoring(client, server.fingerprint)
    assert (offered.form, offered.exact_ids) == ("packed", False)  # the plugin is there; given ids need vLLM's second runner
    return measurement


@pytest.fixture(scope="module")
def noisy(measured: list[Measurement]) -> Divergence:
    assert measured[2].divergence is not None, measured[2].not_measured
    return measured[2].divergence


def test_no_reply_of_vllms_is_distrusted(measured: list[Measurement], run_dir: Path) -> None:
    """Chat and scoring, with MTP, a reasoning parser, token ids and prompt log-probabilities."""
    with Journal(run_dir / "journal.db") as journal:
        keys = [key for (key,) in journal._execute("SELECT key FROM requests")]
        replies = journal.find_all(keys)
    assert len(replies) == len(keys) > 300
    assert {reply.usage_problem for reply in replies.values()} == {None}
    assert {reply.finish_reason for reply in replies.values()} <= {"stop", "length"}


def test_reference_against_itself_is_the_floor(measured: list[Measurement]) -> None:
    """The CPU kernels do not depend on the batch: every statistic of the repeat is rounding at most."""
    repeat = measured[1].divergence
    assert repeat is not None
    assert [drift.kl_max < 1e-6 for drift in repeat.drift] == [True] * len(repeat.drift)
    assert {drift.texts for drift in repeat.drift} == {"all", "replies", "suite_replies", "held_out"}


def test_noise_shows_only_beyond_its_first_position(noisy: Divergence) -> None:
    for drift in noisy.drift:
        early = drift.by_span[0]
        assert (early.first, early.last) == (0, 511)
        assert early.kl_mean < 1e-6, drift.texts
        if drift.texts != "replies":  # those are all short
            assert drift.by_span[1].kl_mean > 0.02, drift.texts
    held_out = noisy.drift[-1]
    before = [span.kl_mean for span in held_out.curve if span.last < FIRST]
    beyond = [span.kl_mean for span in held_out.curve if span.first >= FIRST]
    assert len(before) == 5 and max(before) < 1e-6
    assert len(beyond) == 2 and min(beyond) > 0.02


def test_exact_mode_agrees_with_the_server(noisy: Divergence) -> None:
    """Another server, other batches, the product in another library: the same log-probabilities, the same KL."""
    exact = noisy.exact
    assert exact is not None
    agreement = exact.agreement
    assert agreement.num_positions == sum(drift.num_positions for drift in noisy.drift if drift.texts in {"all", "held_out"})
    assert agreement.num_bound_violations == 0
    for side in ("reference", "candidate"):
        assert getattr(agreement, f"{side}_mean_difference") < 1e-4
        assert getattr(agreement, f"{side}_max_difference") < 5e-3
    gap = agreement.unbiased_minus_exact
    assert gap is not None and gap.low <= 1e-6 and gap.high >= -1e-6
    assert exact.drift.kl_mean.value > 0.01
    assert noisy.kl_mean.value <= exact.drift.kl_mean.value + 1e-6
    assert (exact.hidden_size, exact.vocabulary, exact.stored_dtype) == (256, 896, "float32")


def test_accuracy_passes_and_drift_fails_and_the_report_shows_both(measured: list[Measurement], run_dir: Path) -> None:
    from assay_reports.report import write_report

    judged: GateReport = judge(measured, GATES, model="tiny-glm")
    verdicts = {verdict.gate: verdict for verdict in judged.verdicts if verdict.candidate == "noisy"}
    score, drift = verdicts["score arithmetic"], verdicts["divergence kl_mean, all texts, by span"]
    assert (score.status, score.discordant) == ("PASS", (0, 0))
    assert drift.status == "FAIL"
    assert "positions 512 and beyond" in drift.detail
    assert verdicts["divergence kl_exact_mean"].status == "PASS"
    assert judged.overall == {"noisy": "FAIL", "bf16-repeat": "PASS"}

    judged.save(run_dir / "gates.json")
    page = write_report(run_dir).read_text(encoding="utf-8")
    result = Page(page)
    assert any(text.startswith("Mean KL, lower bound, from ") for text in result.pictures)
    rows = [" | ".join(row) for table in result.tables for row in table.rows if row[0] == "noisy"]
    assert any("score arithmetic | PASS" in row for row in rows)
    assert any("divergence kl_mean, all texts, by span | FAIL" in row for row in rows)
    assert any("held-out text | position | 512 and beyond |" in row for row in rows)

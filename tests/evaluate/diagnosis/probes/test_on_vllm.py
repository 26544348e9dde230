"""Probes of a real vLLM: tiny-glm with its MTP head, healthy. What it offers is found, and nothing alarms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.probe import Offer, ProbeReport, ProbeSettings
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.probes.garble import is_own
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession
from assay_evaluate.diagnosis.probes.run_probes import PROBES, run_session
from assay_evaluate.serving.server import ServerSpec, serve

pytestmark = pytest.mark.serve
CHECKPOINT = Path(__file__).resolve().parents[4] / "examples" / "tiny_glm" / "checkpoint"
SETTINGS = ProbeSettings(
    num_requests=12, num_garble_requests=24, num_alone=2, concurrency=8, long_tokens=200, max_tokens=136, top_k=10
)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedEndpoint]:
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    vllm = {name: value for name, value in profile.vllm.items() if name != "no-enable-prefix-caching"}
    profile = profile.model_copy(
        update={
            "vllm": {**vllm, "enable-prefix-caching": True},
            "environment": {**profile.environment, "VLLM_COMPUTE_NANS_IN_LOGITS": "1"},
        }
    )
    spec = ServerSpec(
        checkpoint=CHECKPOINT, profile=profile, serving=load_recipe(ModelRecipe, "tiny-glm").serving, speculate=True,
        log_path=tmp_path_factory.mktemp("probes") / "vllm.log",
    )  # fmt: skip
    with serve(spec) as server:
        yield find_endpoint(server.base_url, server.model, headers=server.headers)


@pytest.fixture(scope="module")
def client(endpoint: ProbedEndpoint) -> Iterator[Client]:
    with Client(endpoint) as made:
        yield made


@pytest.fixture(scope="module")
def report(endpoint: ProbedEndpoint, client: Client) -> ProbeReport:
    return run_session(ProbeSession(endpoint, SETTINGS, client), list(PROBES), has_pair=False)


def test_what_vllm_offers(endpoint: ProbedEndpoint) -> None:
    assert endpoint.offer == Offer(
        is_vllm=True, version="0.32.0", chat=True, completions=True, logprobs=128, prompt_logprobs=128, token_ids=True,
        extended_sampling=True, tokenize=True, detokenize=True, metrics=True, counts_nans=True, speculation=True,
        routed_experts=False, cache_salt=True, streams=True,
    )  # fmt: skip
    assert endpoint.max_model_len == 4096 and str(endpoint.system_fingerprint).startswith("vllm-0.32.0")


def test_no_false_alarm(report: ProbeReport) -> None:
    """Everything runs that can run on a CPU without a tool parser and a second server, and nothing alarms."""
    assert [result.reason for result in report.alarms] == []
    assert {result.name: result.status for result in report.results} == {
        "argmax": "ok", "recompute": "ok", "consensus": "ok", "routing": "not_run", "determinism": "ok",
        "speculation": "not_run", "acceptance": "ok", "temperature": "ok", "tools": "not_run", "garble": "ok",
        "text": "ok", "nonfinite": "ok", "swapped": "ok",
    }  # fmt: skip
    assert (report.num_failed, report.errors) == (0, {})
    assert all(result.events == 0 for result in report.results if result.status == "ok")
    # What is drawn at temperature 1 depends on which requests shared a batch, so on how busy the machine is: a drawn reply may
    # look odd and cannot be told from a habit. A greedy one always can.
    undecided = [witness.request for result in report.results for witness in result.undecided if result.status == "ok"]
    assert [request for request in undecided if not request.startswith("sampled/")] == []


def test_figures_of_a_healthy_server(report: ProbeReport) -> None:
    """Decoding, prefill and every batch agree to the rounding of float32; a CPU has no other noise."""
    details = {result.name: result.details for result in report.results}
    assert details["recompute"]["mean_exp_delta"] == pytest.approx(1, abs=1e-5)
    assert isinstance(delta := details["recompute"]["largest_delta_nats"], float) and delta < 1e-3
    assert details["consensus"]["top1_agreement"] == 1 and details["consensus"]["num_missing"] == 0
    arms = [
        details["determinism"][name] for name in ("alone_again", "full_batch", "cold_prefix", "warm_prefix", "long_neighbours")
    ]
    assert all(isinstance(arm, dict) and arm["num_prompts"] == 2 and arm["num_decided"] == 0 for arm in arms)
    assert isinstance(length := details["acceptance"]["mean_length"], float) and 1.4 < length <= 2
    assert details["nonfinite"]["server_counter"] == 0
    assert details["garble"]["num_aborted"] == 2


def test_requests_of_one_wave_were_in_flight_together(client: Client, report: ProbeReport) -> None:
    greedy = [one for name, one in client.tally.exchanges.items() if name.startswith("greedy/")]
    assert sorted(one.slot for one in greedy) == [0, 1, 2, 3, 4, 5]
    assert all(one.reply.speculation and len(one.rows) == len(one.reply.token_ids or ()) for one in greedy)


def test_a_reply_that_the_model_did_not_write_is_told_from_its_own(endpoint: ProbedEndpoint, client: Client) -> None:
    """One token of a greedy reply replaced: prefill disowns it."""
    from dataclasses import replace

    session = ProbeSession(endpoint, SETTINGS, client)
    [first] = session.client.ask_together([session.ask("own", session.prompts("own", 1, 64)[0], with_logprobs=True)], 1)
    ids = list(first.reply.token_ids or ())
    ids[len(ids) // 2] = 300
    forged = replace(first, reply=replace(first.reply, token_ids=tuple(ids)))
    own, other = session.score([first, forged], 2)
    assert (is_own(own, 0.0), is_own(other, 0.0)) == (True, False)

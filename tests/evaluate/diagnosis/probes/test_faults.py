"""A real vLLM server with planted faults: the probes see them, and see nothing where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faults.planting import faulty_spec, foreign_ids, planted, rpc

from assay.records.probe import ProbeSettings
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.probes.run_probes import run_probes
from assay_evaluate.serving.server import serve

pytestmark = pytest.mark.serve

PROBES = ProbeSettings(
    num_requests=16, num_garble_requests=32, concurrency=8, long_tokens=192, max_tokens=136,
)  # fmt: skip


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedEndpoint]:
    """tiny-glm with its MTP head and a prefix cache; its workers can be told to fail."""
    flags = {"block_size": 32, "num_gpu_blocks_override": 160, "max_model_len": 1024}
    spec = faulty_spec(tmp_path_factory.mktemp("faults") / "vllm.log", enable_prefix_caching=True, **flags)
    with serve(spec) as server:
        yield find_endpoint(server.base_url, server.model)


# ------------------------------------------------------------------------------------------------ probes
SEEN: dict[str, tuple[dict[str, Any], str]] = {
    "top token dropped": ({"rate": 0.02}, "argmax"),
    "log-probabilities shifted": ({"position": 64, "nats": 0.5}, "recompute"),
    "foreign tokens": ({"rate": 0.01}, "garble"),
}
"""Fault -> (parameters, probe that must see it)."""


def test_the_healthy_server_raises_no_alarm(endpoint: ProbedEndpoint) -> None:
    report = run_probes(endpoint, PROBES, sorted({probe for _, probe in SEEN.values()}))
    assert [(one.name, one.reason) for one in report.alarms] == []
    assert all(one.status == "ok" for one in report.results)


@pytest.mark.parametrize("fault", SEEN)
def test_a_planted_fault_is_seen_by_its_probe(fault: str, endpoint: ProbedEndpoint) -> None:
    parameters, probe = SEEN[fault]
    more = {"tokens": foreign_ids()} if fault == "foreign tokens" else {}
    with planted(endpoint.base_url, fault, **parameters, **more) as reported:
        report = run_probes(endpoint, PROBES, [probe])
    assert reported["events"] > 0
    assert [alarm.name for alarm in report.alarms] == [probe]
    assert rpc(endpoint.base_url, "planted")[0]["events"] == 0  # healed

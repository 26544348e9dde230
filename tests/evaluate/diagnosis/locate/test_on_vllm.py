"""`assay diagnose locate` on two real tensor-parallel ranks (gloo): a planted fault is named by layer, expert and rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run
from faults.planting import faulty_spec, planted

from assay.records.diagnosis.locate import LocateReport
from assay_evaluate.diagnosis.locate.locate import Side, judge_servers, locate_ranks, prompts
from assay_evaluate.diagnosis.locate.reading import Reading, WatchedServer, read_activations
from assay_evaluate.serving.server import serve

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of tiny-glm over two ranks, whose workers can be told to fail."""
    spec = faulty_spec(tmp_path_factory.mktemp("locate") / "vllm.log", speculate=False, tensor_parallel_size=2)
    with serve(spec) as server:
        yield server.base_url


@pytest.fixture(scope="module")
def healthy(two_ranks: str) -> tuple[Reading, Reading, list[tuple[int, ...]]]:
    """The healthy server read twice, and the prompts as ids."""
    server = WatchedServer(two_ranks, "model")
    reading, ids = read_activations(server, prompts())
    return reading, read_activations(server, ids)[0], ids


def test_every_place_of_both_ranks_is_read(healthy: tuple[Reading, Reading, list[tuple[int, ...]]]) -> None:
    reading, _, ids = healthy
    assert list(reading) == [0, 1]
    kinds = {name: (point.kind, point.partial) for name, point in reading[1].items()}
    assert kinds["model.embed_tokens"] == ("embedding", False)
    assert kinds["model.layers.0.self_attn.qkv_proj"] == ("linear", True)
    assert kinds["model.layers.0.self_attn.o_proj"] == ("linear", True)
    assert kinds["model.layers.0.self_attn.o_proj.sum"] == ("sum", False)
    assert kinds["model.layers.1.mlp.gate"] == ("linear", False)
    assert kinds["model.layers.1.mlp.experts.router"] == ("router", False)
    assert kinds["model.layers.1.mlp.experts.5"] == ("expert", True)
    assert kinds["model.layers.1.mlp.experts"] == ("experts", False)
    assert kinds["model.norm.residual"] == ("residual", False)
    num_tokens = sum(map(len, ids))
    assert all(
        point.num_tokens == num_tokens for point in reading[0].values() if point.kind in ("linear", "router", "residual")
    )
    experts = [point for point in reading[0].values() if point.kind == "expert" and ".layers.2." in point.name]
    assert sum(point.num_tokens for point in experts) == 2 * num_tokens  # top-2
    # the shares of both ranks add up to the sum
    name = "model.layers.0.mlp.down_proj"
    total = sum(rank[name].sketch_TS for rank in reading.values())  # type: ignore[misc]
    assert abs(total - reading[0][f"{name}.sum"].sketch_TS).max() < 1e-3  # type: ignore[operator]


def located(url: str, healthy: tuple[Reading, Reading, list[tuple[int, ...]]]) -> LocateReport:
    before, again, ids = healthy
    after, _ = read_activations(WatchedServer(url, "model"), ids)
    return judge_servers(Side("healthy", url=url), Side("now", url=url), before, again, after, ids, 0.0)


def test_a_healthy_server_does_not_differ_from_itself(
    two_ranks: str, healthy: tuple[Reading, Reading, list[tuple[int, ...]]]
) -> None:
    same = located(two_ranks, healthy)
    assert (same.first, same.outlier, same.remedy) == (None, None, None)
    assert same.sentence == f"nothing differs by more than noise ({len(same.points)} places compared)"
    ranks = locate_ranks(Side("tiny-glm", url=two_ranks))
    assert ranks.first is None and ranks.tensor_parallel_size == 2


@pytest.mark.parametrize(("layer", "expert", "rank", "factor"), [(1, 3, 0, 1.5), (3, 7, 1, 0.25)])
def test_an_expert_scaled_on_one_rank_is_named(
    layer: int, expert: int, rank: int, factor: float, two_ranks: str, healthy: tuple[Reading, Reading, list[tuple[int, ...]]]
) -> None:
    with planted(two_ranks, "expert scaled", layer=layer, expert=expert, factor=factor, rank=rank) as reported:
        against_healthy = located(two_ranks, healthy)
        between_ranks = locate_ranks(Side("tiny-glm", url=two_ranks))
    assert reported["events"] == 1
    for result in (against_healthy.first, between_ranks.first):
        assert result is not None
        assert (result.layer, result.expert, result.role, result.rank) == (layer, expert, "routed_expert", rank)
    assert against_healthy.first is not None
    assert against_healthy.first.name == f"model.layers.{layer}.mlp.experts.{expert}"


def test_a_fault_of_the_whole_layer_is_on_every_rank(
    two_ranks: str, healthy: tuple[Reading, Reading, list[tuple[int, ...]]]
) -> None:
    with planted(two_ranks, "expert scaled", layer=1, expert=6, factor=2.0):
        result = located(two_ranks, healthy).first
    assert result is not None and (result.layer, result.expert, result.rank) == (1, 6, None)
    assert located(two_ranks, healthy).first is None  # healed


def test_the_command_compares_servers_and_ranks(two_ranks: str, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("locate", two_ranks, two_ranks, "--prompts", "2", "--out", tmp_path / "same")
    assert code == 0 and "nothing differs by more than noise" in out
    assert LocateReport.load(tmp_path / "same" / "location.json").how == "servers"
    with planted(two_ranks, "expert scaled", layer=2, expert=1, factor=3.0, rank=1):
        code, out, _ = run("locate", two_ranks, "--ranks", "--prompts", "2", "--json")
    assert code == 1
    result = LocateReport.model_validate_json(out)
    assert result.first is not None
    assert result.first.name == "model.layers.2.mlp.experts.1.w2_weight" and result.first.rank == 1
    assert result.sentence.startswith("model.layers.2.mlp.experts.1.w2_weight on rank 1: its weights are 3.")


def test_what_the_command_refuses(two_ranks: str, run: Run, tmp_path: Path) -> None:
    for words in (("locate", two_ranks), ("locate", two_ranks, two_ranks, "--ranks")):
        code, _, err = run(*words)
        assert code == 2 and "say two things to compare (assay diagnose locate A B), or one and --ranks" in err
    code, _, err = run("locate", "http://127.0.0.1:9", two_ranks)
    assert code == 2 and "http://127.0.0.1:9" in err and err.count("\n") == 1

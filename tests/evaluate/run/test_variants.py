"""Another way of serving the reference's checkpoint, measured as a candidate: declared, and so, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from given_servers import given_servers
from probe_reports import CLEAN, probed
from scripted_world import PROFILE, World, make_folders, pair_of
from small_suite import SERVING, SUITE, solve

from assay.errors import MeasureError
from assay.recipes.gate import AcceptanceGate
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.variant import parse_variants
from assay.records.comparable import check_measurements, other_reference
from assay.records.measurement import Measurement
from assay.records.probe import find_probes
from assay.records.serving import Fingerprint
from assay_evaluate.run.candidate import Candidate, server_spec
from assay_evaluate.run.deployment import served_there
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.serving.vllm_command import vllm_command
from assay_evaluate.verdicts.acceptance import judge_acceptance

SUMS = SuiteRecipe.model_validate(
    {**SUITE.model_dump(by_alias=True), "tasks": [SUITE.tasks[0].model_dump()], "divergence": None}
)
GIVEN = ProfileRecipe(schema=1, name="given", hardware=Hardware(device="cpu"))
CHAT = "/v1/chat/completions"


class Told(World):
    """A world whose servers are served as their profile says."""

    def __init__(self) -> None:
        super().__init__()
        self.really: dict[str, dict[str, Any]] = {}
        """Label -> what is served instead, whatever was foreseen."""

    def fingerprint(self, spec: ServerSpec) -> Fingerprint:
        told = super().fingerprint(spec)
        drafting = spec.profile.flags.get("speculative-config") or {"method": "mtp", "num_speculative_tokens": 1}
        flags = {name: value for name, value in spec.profile.flags.items() if name != "speculative-config"}
        update = {
            "flags": told.flags | {name: value for name, value in flags.items() if value is not None},
            "environment": spec.profile.environment,
            "speculation": drafting if spec.speculate else None,
        }
        return told.model_copy(update=update)

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[FakeServer]:
        with super().start(spec, on_progress) as server:
            label = spec.log_path.stem.removeprefix("vllm-")
            server.fingerprint = self.fingerprint(spec).model_copy(update=self.really.get(label, {}))
            yield server


def answer(body: dict[str, Any]) -> Scripted:
    """Of a server that is also asked who it is."""
    return solve(body) if "messages" in body else Scripted("x")


@pytest.fixture
def world() -> Told:
    return Told()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return make_folders(tmp_path)


def variant_of(text: str, folder: Path | None, **more: Any) -> Candidate:
    (variant,) = parse_variants([text], {})
    return Candidate(variant.name, folder, variant=variant, **more)


def run(
    world: Told,
    folders: dict[str, Path],
    *variants: str,
    lines: list[str] | None = None,
    suite: SuiteRecipe = SUMS,
    **more: Any,
) -> list[Measurement]:
    candidates = [pair_of(folders)[0], *(variant_of(text, folders["reference"]) for text in variants)]
    said = lines if lines is not None else []
    run_dir = folders["reference"].parent / "run"
    return world.measure(run_dir, candidates, suite, serving=SERVING, on_progress=said.append, **more)


# ------------------------------------------------------------------------------------------------ measured
@pytest.mark.slow
def test_a_declared_variant_is_measured_by_itself_and_known_again(world: Told, folders: dict[str, Path]) -> None:
    reference, _, fp8_kv, no_mtp = run(world, folders, "fp8-kv:kv-cache-dtype=fp8", "no-mtp:mtp=off,env.VLLM_A=1")
    assert [one.label for one in (reference, fp8_kv, no_mtp)] == ["fp8", "fp8-kv", "no-mtp"]
    assert (reference.declared, fp8_kv.declared, no_mtp.declared) == (
        {}, {"flags.kv-cache-dtype": "fp8"}, {"environment.VLLM_A": "1", "speculation": None},
    )  # fmt: skip
    assert len({one.checkpoint_sha256 for one in (reference, fp8_kv, no_mtp)}) == 1
    assert len({one.replies_sha256 for one in (reference, fp8_kv, no_mtp)}) == 3, "no reply is another's"
    assert reference.weight_bits == fp8_kv.weight_bits
    # The reference's server was asked twice as much for its repeat.
    asked = [server.count(CHAT) for server in world.servers["reference"]]
    assert len(asked) == 3 and asked[1] == asked[2] > 0
    folder = folders["reference"].parent / "run" / "measurements"
    assert check_measurements([Measurement.load(path) for path in folder.glob("*.json")]).label == "fp8"
    lines: list[str] = []
    again = run(world, folders, "fp8-kv:kv-cache-dtype=fp8", "no-mtp:mtp=off,env.VLLM_A=1", lines=lines)
    assert again[2:] == [fp8_kv, no_mtp] and len(world.servers["reference"]) == 3
    assert [line.split(",")[0] for line in lines] == [
        f"{label}: measured already" for label in ("fp8", "fp8-repeat", "fp8-kv", "no-mtp")
    ]


@pytest.mark.slow
def test_a_label_with_another_meaning_is_measured_anew(world: Told, folders: dict[str, Path]) -> None:
    run(world, folders, "kv:kv-cache-dtype=fp8")
    lines: list[str] = []
    *_, other = run(world, folders, "kv:kv-cache-dtype=fp8_e5m2", lines=lines)
    assert other.declared == {"flags.kv-cache-dtype": "fp8_e5m2"} and len(world.servers["reference"]) == 3
    assert any(line.startswith("kv: the earlier measurement was served differently; moved to ") for line in lines)


@pytest.mark.slow
def test_what_is_killed_goes_on(world: Told, folders: dict[str, Path]) -> None:
    """Nothing is asked twice: together as much as of a variant that was measured at once."""

    class Killed(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith("fp8-kv: arithmetic: all "):
            raise Killed

    candidates = [pair_of(folders)[0], variant_of("fp8-kv:kv-cache-dtype=fp8", folders["reference"])]
    place = folders["reference"].parent
    with pytest.raises(Killed):
        world.measure(place / "run", candidates, SUMS, serving=SERVING, on_progress=kill)
    world.measure(place / "run", candidates, SUMS, serving=SERVING)
    whole = Told()
    whole.measure(place / "whole", candidates, SUMS, serving=SERVING)
    _, killed, rest = [server.count(CHAT) for server in world.servers["reference"]]
    assert killed > 0 and killed + rest == whole.servers["reference"][1].count(CHAT)


@pytest.mark.slow
def test_a_candidate_with_other_weights_may_stand_beside(world: Told, folders: dict[str, Path]) -> None:
    candidates = [*pair_of(folders), variant_of("fp8-kv:kv-cache-dtype=fp8", folders["reference"])]
    reference, _, w4a16, fp8_kv = world.measure(folders["reference"].parent / "run", candidates, SUITE, serving=SERVING)
    assert w4a16.declared == {} and w4a16.checkpoint_sha256 != reference.checkpoint_sha256
    assert fp8_kv.divergence is not None and fp8_kv.divergence.kl_max == 0, "the scripted server has the reference's logits"
    assert w4a16.divergence is not None and w4a16.divergence.kl_mean.value > 0


# ------------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize(
    ("words", "really", "message"),
    [
        ("kv-cache-dtype=fp8", {"environment": {**PROFILE.environment, "VLLM_B": "2"}},
         "kv would not be served like fp8 in more than is declared (kv-cache-dtype fp8): environment.VLLM_B: None against '2'. "
         "Scores compare only under one fingerprint: declare that too, or use the same profile, versions and machine for both"),
        ("kv-cache-dtype=fp8", {"flags": {"max-num-seqs": 16}},
         "kv would not be served as declared: flags.kv-cache-dtype is declared to be fp8, and is not set; declare what is so"),
        ("mtp=2", {"speculation": None},
         'kv would not be served as declared: speculation is declared to be {"method":"mtp","num_speculative_tokens":2}, and '
         "is not set; declare what is so"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_is_served_otherwise_is_refused(
    world: Told, folders: dict[str, Path], words: str, really: dict[str, Any], message: str
) -> None:
    world.really["kv"] = really
    if "flags" in really:
        really["flags"] = world.fingerprint(server_spec(pair_of(folders)[0], PROFILE, SERVING, Path())).flags
    with pytest.raises(MeasureError) as caught:
        run(world, folders, f"kv:{words}")
    assert str(caught.value) == message
    assert not (folders["reference"].parent / "run" / "measurements" / "kv.json").exists()


def test_what_does_not_differ_is_refused_before_a_server_is_started(world: Told, folders: dict[str, Path]) -> None:
    with pytest.raises(MeasureError) as caught:
        run(world, folders, "kv:max-num-seqs=16", profile=PROFILE.model_copy(update={"vllm": {"max-num-seqs": 16}}))
    assert str(caught.value) == (
        "kv would not be served as declared: flags.max-num-seqs is declared to differ, and is 16 on both sides; declare what "
        "is so"
    )
    assert world.servers == {}


@pytest.mark.slow
def test_records_that_do_not_say_so_are_no_pair(world: Told, folders: dict[str, Path]) -> None:
    reference, _, kv = run(world, folders, "kv:kv-cache-dtype=fp8")
    assert other_reference(reference, kv) is None
    assert other_reference(reference, kv.model_copy(update={"declared": {}})) == (
        "served differently: flags.kv-cache-dtype (None, candidate fp8)", "measure both again with one profile",
    )  # fmt: skip
    more = {**kv.declared, "environment.VLLM_A": "1"}
    assert other_reference(reference, kv.model_copy(update={"declared": more})) == (
        "not served as declared: environment.VLLM_A is declared to be 1, and is not set",
        "measure it again, or declare what is so",
    )
    other = kv.fingerprint.model_copy(update={"hardware": {"cpu": "y"}})
    assert other_reference(reference, kv.model_copy(update={"fingerprint": other})) == (
        "served differently in more than is declared (kv-cache-dtype fp8): hardware.cpu (x, candidate y)",
        "declare that too, or measure both again with one profile",
    )
    emulated = kv.fingerprint.model_copy(update={"emulated": True})
    reason = other_reference(reference, kv.model_copy(update={"fingerprint": emulated}))
    assert reason is not None and "emulated (None, candidate True)" in reason[0]


# ------------------------------------------------------------------------------------------------ servers that run already
def run_given(run_dir: Path, servers: dict[str, FakeServer], words: str, **more: Any) -> list[Measurement]:
    (label, reference), (name, server) = servers.items()
    candidates = [
        Candidate(label, None, is_reference=True, endpoint=GivenServer(url=reference.base_url)),
        variant_of(f"{name}:{words}{server.base_url}", None, endpoint=GivenServer(url=server.base_url)),
    ]
    return evaluate("tiny", candidates, suite=SUMS, profile=GIVEN, serving=SERVING, run_dir=run_dir, **more)


@pytest.mark.slow
def test_a_server_that_is_said_to_be_served_so(tmp_path: Path) -> None:
    """The same weights are allowed, since that is what is compared; other log-probabilities are told."""
    with FakeServer(answer) as reference, FakeServer(answer) as same:
        servers = {"fp8": reference, "kv": same}
        first, _, kv = run_given(tmp_path / "same", servers, "kv-cache-dtype=fp8,url=")
        assert kv.declared == {"flags.kv-cache-dtype": "fp8", "address": same.base_url}
        assert kv.notes[0].startswith("its server answers with the weights of fp8 (log-probabilities over fixed prompts")
        assert kv.replies_sha256 != first.replies_sha256 and same.count(CHAT) > 0
        asked = same.count(CHAT)
        assert run_given(tmp_path / "same", servers, "kv-cache-dtype=fp8,url=")[-1] == kv
        assert 0 < same.count(CHAT) - asked < asked, "a few questions, to see that it answers as before"
        lines: list[str] = []
        *_, other = run_given(tmp_path / "same", servers, "kv-cache-dtype=fp8_e5m2,url=", on_progress=lines.append)
        assert other.declared["flags.kv-cache-dtype"] == "fp8_e5m2" and other.replies_sha256 != kv.replies_sha256
        assert any(line.startswith("kv: the earlier measurement was declared otherwise; moved to ") for line in lines)
    with given_servers("fp8", "kv", reply=answer) as unlike:
        *_, kv = run_given(tmp_path / "unlike", unlike.by_label, "kv-cache-dtype=fp8,url=")
        assert kv.notes[0].startswith(
            "that its server has the checkpoint of fp8 is taken as said: log-probabilities over fixed "
        )


@pytest.mark.slow
def test_what_can_be_seen_of_a_server_must_be_so(tmp_path: Path) -> None:
    with FakeServer(answer) as reference, FakeServer(answer, max_model_len=2048) as short:
        servers = {"fp8": reference, "short": short}
        with pytest.raises(MeasureError) as caught:
            run_given(tmp_path, servers, "max-model-len=1024,url=")
        assert str(caught.value) == (
            "short would not be served as declared: flags.max-model-len is declared to be 1024, and is 2048; declare what is so"
        )
        with pytest.raises(MeasureError, match=r"flags\.max-model-len: 4096 against 2048\. Scores compare only"):
            run_given(tmp_path, servers, "kv-cache-dtype=fp8,url=")
        assert run_given(tmp_path, servers, "max-model-len=2048,url=")[-1].declared["flags.max-model-len"] == 2048


@pytest.mark.slow
def test_the_same_weights_are_another_address(tmp_path: Path) -> None:
    """--same-weights declares it; --variant NAME:url=URL says the same of one server."""
    with FakeServer(answer) as reference, FakeServer(answer) as same:
        candidates = [
            Candidate("fp8", None, is_reference=True, endpoint=GivenServer(url=reference.base_url)),
            Candidate("gateway", None, endpoint=GivenServer(url=same.base_url)),
        ]
        arguments: dict[str, Any] = {"suite": SUMS, "profile": GIVEN, "serving": SERVING}
        *_, allowed = evaluate("tiny", candidates, run_dir=tmp_path / "a", same_weights=True, **arguments)
        assert allowed.declared == {"address": same.base_url} and not allowed.is_variant
        assert allowed.notes[0].endswith("which --same-weights allows")
        candidates[1] = replace(candidates[1], variant=parse_variants([f"gateway:url={same.base_url}"], {})[0])
        *_, stated = evaluate("tiny", candidates, run_dir=tmp_path / "b", **arguments)
        assert stated.declared == allowed.declared
        assert stated.notes[0].startswith("its server answers with the weights of fp8 (")


# ------------------------------------------------------------------------------------------------ vLLM's command
@pytest.mark.parametrize(
    ("words", "speculation", "flags"),
    [
        ("mtp=off", None, {}),
        ("mtp=3", {"method": "mtp", "num_speculative_tokens": 3}, {}),
        ("speculative-config={method: ngram, num_speculative_tokens: 2}", {"method": "ngram", "num_speculative_tokens": 2}, {}),
        ("kv_cache_dtype=fp8,enable-prefix-caching=true", {"method": "mtp", "num_speculative_tokens": 1},
         {"kv-cache-dtype": "fp8", "enable-prefix-caching": True, "no-enable-prefix-caching": None}),
        ("enforce-eager=null", {"method": "mtp", "num_speculative_tokens": 1}, {"enforce-eager": None}),
    ],
)  # fmt: skip
def test_what_vllm_is_told(tmp_path: Path, words: str, speculation: dict[str, Any] | None, flags: dict[str, Any]) -> None:
    from tiny_checkpoints import make_tiny_glm4_moe

    folder = make_tiny_glm4_moe(tmp_path / "tiny", max_position=1024)

    def command(candidate: Candidate) -> Any:
        spec = server_spec(candidate, PROFILE, SERVING, tmp_path)
        return vllm_command(
            spec.checkpoint, spec.profile, spec.serving, speculate=spec.speculate, port=1, served_model_name="model"
        )

    usual, other = command(Candidate("fp8", folder, is_reference=True)), command(variant_of(f"x:{words}", folder))
    assert other.speculation == speculation
    changed = {
        name: other.flags.get(name) for name in usual.flags.keys() | other.flags.keys()
        if usual.flags.get(name) != other.flags.get(name)
    }  # fmt: skip
    assert {name: value for name, value in changed.items() if name != "per-request-spec-decode-metrics"} == flags


# ------------------------------------------------------------------------------------------------ what goes by the checkpoint
@pytest.mark.slow
def test_probes_and_deployments_are_of_the_way_of_serving(world: Told, folders: dict[str, Path]) -> None:
    reference, repeat, kv = run(world, folders, "kv:kv-cache-dtype=fp8,env.VLLM_A=1")
    sha256 = reference.checkpoint_sha256
    of_reference = probed("fp8", *CLEAN, sha256=sha256)
    of_variant = probed("kv", *CLEAN, sha256=sha256).model_copy(update={"declared": kv.declared})
    assert find_probes([of_reference, of_variant], kv) is of_variant
    assert find_probes([of_variant, of_reference], reference) is find_probes([of_variant, of_reference], repeat) is of_reference
    assert find_probes([of_reference], kv) is None and find_probes([of_variant], reference) is None
    there = served_there(kv, PROFILE.model_copy(update={"name": "elsewhere", "vllm": {"kv-cache-dtype": "auto", "x": 1}}))
    assert (there.name, there.flags) == ("elsewhere", {"kv-cache-dtype": "fp8", "x": 1})
    assert there.environment == {**PROFILE.environment, "VLLM_A": "1"}
    assert served_there(reference, PROFILE) is PROFILE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "detail"),
    [
        ("mtp=off", "fp8 was served with speculative decoding; kv reports no drafted tokens, so there is nothing to compare."),
        ("mtp=2", "kv drafts otherwise than fp8, as was declared; shares of other drafts are not compared."),
    ],
)
def test_other_drafts_are_not_compared(world: Told, folders: dict[str, Path], words: str, detail: str) -> None:
    reference, _, kv = run(world, folders, f"kv:{words}")
    if words == "mtp=off":  # the scripted server drafts all the same
        kv = kv.model_copy(update={"acceptance": None})
    verdict = judge_acceptance(AcceptanceGate(kind="acceptance", max_drop=0.05), reference, kv, 0.95)
    assert (verdict.status, verdict.has_say) == ("NOT MEASURED", False)
    assert verdict.detail == f"{detail} This does not count in the overall verdict."

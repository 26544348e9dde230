"""Whose weights answer: servers that run already, told apart by what they answer, before, during and after a measurement."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import VOCABULARY, FakeServer, Scripted
from given_servers import given_servers, scaled_logits
from small_suite import SERVING
from small_suite import solve as solve_text

from assay.errors import MeasureError, ServeError
from assay.recipes.address import server_place
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.probe import ProbeSettings
from assay.records.serving import Signature, SignedPrompt
from assay_evaluate.asking import signature
from assay_evaluate.asking.signature import PROMPTS, take_signature
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import Journal, unpacked
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.run.weights import sign_given
from assay_evaluate.serving.external import describe_mismatch
from assay_evaluate.serving.server import Server

pytestmark = pytest.mark.slow


PROFILE = ProfileRecipe(schema=1, name="given", hardware=Hardware(device="cpu"))
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "sums", "seed": "eval-sums",
        "tasks": [{"kind": "arithmetic", "name": "sums", "num_items": 3, "num_steps": [2], "max_tokens": 32}],
    }
)  # fmt: skip


def solve(body: dict[str, Any]) -> Scripted:
    return solve_text(body) if isinstance(body.get("prompt", ""), str) else Scripted("x")


def run(run_dir: Path, servers: dict[str, FakeServer], lines: list[str] | None = None, **more: Any) -> list[Measurement]:
    """The first label is the reference."""
    candidates = [
        Candidate(label, None, is_reference=number == 0, endpoint=GivenServer(url=server.base_url))
        for number, (label, server) in enumerate(servers.items())
    ]
    said = [] if lines is None else lines
    more = {"suite": SUITE, **more}
    return evaluate("tiny", candidates, profile=PROFILE, serving=SERVING, run_dir=run_dir, on_progress=said.append, **more)


def noisy(factor: float, size: float) -> Callable[[int], list[float]]:
    """Logits of the same weights that are never the same twice: every call is off by up to `size`, in a fixed sequence."""
    calls = iter(range(10**9))

    def logits(last: int) -> list[float]:
        call = next(calls)
        offs = (size * ((call * 7919 + token * 104729) % 1000 / 1000 - 0.5) for token in range(VOCABULARY))
        return [value + off for value, off in zip(scaled_logits(factor, last), offs, strict=True)]

    return logits


class Forgetful(FakeServer):
    """Computes every prediction anew."""

    def _predict(self, before: int) -> tuple[list[float], list[int]]:
        self._predictions.clear()
        return super()._predict(before)


# ------------------------------------------------------------------------------------------------ signatures
def test_the_same_weights_sign_alike_though_bits_differ_and_others_do_not() -> None:
    with (
        Forgetful(logits=noisy(1.0, 0.02)) as one,
        Forgetful(logits=noisy(1.0, 0.03)) as same,
        Forgetful(logits=noisy(1.08, 0.02)) as other,
    ):
        ours, theirs, others = (take_signature(server) for server in (one, same, other))
    assert ours.prompts != theirs.prompts and ours.noise > 0
    assert 0 < ours.distance(theirs) <= ours.tolerance(theirs) and ours.agrees_with(theirs)
    assert ours.distance(others) > ours.tolerance(others) and not others.agrees_with(ours)


def test_a_server_that_differs_from_itself_cannot_show_its_weights() -> None:
    with Forgetful(logits=noisy(1.0, 2.0)) as server, pytest.raises(MeasureError) as caught:
        sign_given("fp8", server)
    assert re.fullmatch(
        r"fp8: http://127.0.0.1:\d+: nothing shows which weights answer: asked twice, its log-probabilities differ by [0-9.]+ "
        r"nats, where 0.1 are taken; `assay diagnose probe http://127.0.0.1:\d+` looks for the cause", str(caught.value)
    )  # fmt: skip


def test_a_signature_is_what_the_server_gives() -> None:
    with FakeServer() as server:
        signature = take_signature(server)
        asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert [len(one.token_ids) for one in signature.prompts] == [len(prompt) - 1 for prompt in PROMPTS]
    assert all(None not in one.logprobs and one.next == {} for one in signature.prompts)  # it gives prompts' only
    assert signature.noise == 0 and len(asked) == 1 + 2 * len(PROMPTS)
    assert asked[-1] | {"prompt": ""} == {
        "model": "model", "prompt": "", "max_tokens": 1, "logprobs": 20, "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    assert Signature.model_validate_json(signature.model_dump_json()) == signature


def test_without_log_probabilities_nothing_is_shown(tmp_path: Path) -> None:
    class Mute(FakeServer):
        def _scored(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
            return {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}

    with Mute() as server, given_servers("w4a16") as others:
        with pytest.raises(NotMeasured, match="it gives no log-probabilities"):
            take_signature(server)
        with pytest.raises(MeasureError, match=r"fp8: http://.*: nothing shows which weights answer: it gives no log-prob"):
            run(tmp_path, {"fp8": server, **others.by_label})
        assert server.count("/v1/chat/completions") == 0


@pytest.mark.parametrize(
    ("theirs", "agrees"),
    [
        (SignedPrompt(token_ids=(5, 6), logprobs=(-1.0, -2.0005), next={"7": -0.5}), True),
        (SignedPrompt(token_ids=(5, 6), logprobs=(-1.0, -2.1), next={"7": -0.5}), False),
        (SignedPrompt(token_ids=(5, 8), logprobs=(-1.0, -2.0), next={"7": -0.5}), False),  # another tokenizer
        (SignedPrompt(token_ids=(5, 6), logprobs=(None, -2.0), next={"9": -0.5}), True),  # what both have
        (SignedPrompt(token_ids=(5, 6), logprobs=(None, None), next={"9": -0.5}), False),  # nothing in common
    ],
)
def test_signatures_are_compared_by_what_both_have(theirs: SignedPrompt, agrees: bool) -> None:
    ours = SignedPrompt(token_ids=(5, 6), logprobs=(-1.0, -2.0), next={"7": -0.5})
    one, other = (Signature(prompts_sha256="x", prompts=(side,), noise=0.0) for side in (ours, theirs))
    assert (one.agrees_with(other), other.agrees_with(one)) == (agrees, agrees)
    assert not one.agrees_with(other.model_copy(update={"prompts_sha256": "y"}))


def test_likeliest_tokens_that_only_one_lists_are_apart() -> None:
    """One token a prompt, and no log-probabilities of prompts: what is left in common may be alike by chance."""
    shared = SignedPrompt(token_ids=(), logprobs=(), next={"1": -0.001})
    one, other = (SignedPrompt(token_ids=(), logprobs=(), next=top) for top in ({"7": -0.5}, {"9": -1.5}))
    ours, theirs = (Signature(prompts_sha256="x", prompts=(shared, side), noise=0.0) for side in (one, other))
    assert ours.distance(theirs) == theirs.distance(ours) == 0.5  # of two: 0, and at least 1
    assert not ours.agrees_with(theirs)


@pytest.mark.parametrize(("status", "more"), [(401, "; is its key the right one?"), (404, ""), (429, ""), (503, "")])
def test_a_server_that_answers_nothing_is_not_told_to_give_log_probabilities(
    status: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(FakeServer):
        def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            return status, {"error": {"message": "no"}}

    monkeypatch.setattr(signature, "PAUSES_S", (0.0,))
    with Refusing() as server, pytest.raises(MeasureError) as failed:
        take_signature(server)
    assert not isinstance(failed.value, NotMeasured)
    assert (
        str(failed.value) == f"{server.base_url}: cannot be asked for its signature: /v1/completions: HTTP {status}: no{more}"
    )


# ------------------------------------------------------------------------------------------------ one server, two labels
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "http://LOCALHOST:{port}/v1/", "http://[::1]:{port}/", "https://localhost:{port}/v1"]
)
def test_two_labels_on_one_server_are_refused_before_anything_is_asked(tmp_path: Path, url: str) -> None:
    with FakeServer() as server:
        port = server.base_url.rpartition(":")[2]
        candidates = [
            Candidate("fp8", None, is_reference=True, endpoint=GivenServer(url=server.base_url)),
            Candidate("w4a16", None, endpoint=GivenServer(url=url.format(port=port))),
        ]
        with pytest.raises(MeasureError, match=r"^fp8 and w4a16 are one server \(http.*\), which has one checkpoint's weights"):
            evaluate("tiny", candidates, suite=SUITE, profile=PROFILE, serving=SERVING, run_dir=tmp_path)
        assert server.requests == []


def test_places_of_servers() -> None:
    assert server_place("http://A.example/v1") == server_place("http://a.example:80/") == ("a.example", 80, "")
    assert server_place("https://a.example") == ("a.example", 443, "")
    for here in ("127.1", "0x7f000001", "[0:0:0:0:0:0:0:1]", "[::ffff:7f00:1]", "LOCALHOST.", "0.0.0.0"):
        assert server_place(f"http://{here}:8000") == ("localhost", 8000, "")
    assert server_place("http://127.0.0.2:8000") != server_place("http://127.0.0.1:8000")
    assert server_place("http://a.example/fp8/v1") != server_place("http://a.example/w4a16/v1")


def test_given_and_started_servers_are_not_mixed(tmp_path: Path) -> None:
    with FakeServer() as server:
        candidates = [
            Candidate("fp8", None, is_reference=True, endpoint=GivenServer(url=server.base_url)),
            Candidate("w4a16", tmp_path),
        ]
        with pytest.raises(MeasureError, match=r"w4a16: would be started here\. The two are never served alike"):
            evaluate("tiny", candidates, suite=SUITE, profile=PROFILE, serving=SERVING, run_dir=tmp_path)
        assert server.requests == []


# ------------------------------------------------------------------------------------------------ the same weights
def test_two_labels_with_the_same_weights_are_refused_unless_meant(tmp_path: Path) -> None:
    with FakeServer(solve) as one, FakeServer(solve) as same:
        with pytest.raises(
            MeasureError,
            match=r"^fp8 at http://\S+ and w4a16 at http://\S+ answer with the same weights \(log-probabilities over fixed "
            r"prompts differ by 0 nats; up to 0.001 is noise\); start each on its own checkpoint, or say --same-weights",
        ):
            run(tmp_path, {"fp8": one, "w4a16": same})
        assert one.count("/v1/chat/completions") == same.count("/v1/chat/completions") == 0
        *_, candidate = run(tmp_path, {"fp8": one, "w4a16": same}, same_weights=True)
    assert candidate.notes[0].startswith("fp8 at http") and candidate.notes[0].endswith("which --same-weights allows")


def test_servers_alone_are_measured_and_known_again(tmp_path: Path) -> None:
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        first = run(tmp_path, servers.by_label)
        asked = servers.count("/v1/chat/completions")
        lines: list[str] = []
        again = run(tmp_path, servers.by_label, lines)
        assert servers.count("/v1/chat/completions") == asked + 2 * 6, (
            "six questions of each label, to see that nothing changed"
        )
        day = first[0].started[:10]
        same = "6 of its questions, asked again, are answered as they were; "
        assert again == first and [line for line in lines if "measured already" in line] == [
            f"fp8: measured already, on {day}; {same}`--again fp8` measures it anew",
            f"fp8-repeat: measured already, on {day}; `--again fp8` measures it anew",
            f"w4a16: measured already, on {day}; {same}`--again w4a16` measures it anew",
        ]
    reference, repeat, candidate = first
    assert reference.signature is not None and reference.signature == repeat.signature != candidate.signature
    assert reference.checkpoint_sha256 == repeat.checkpoint_sha256 != candidate.checkpoint_sha256
    assert candidate.reference_checkpoint_sha256 == reference.checkpoint_sha256
    assert (candidate.checkpoint, candidate.checkpoint_bytes) == (servers.by_label["w4a16"].base_url, None)
    assert "no folder of it was named; its server says that it loaded model" in candidate.notes


# ------------------------------------------------------------------------------------------------ logits
class OfLogits(FakeServer):
    """Started with `--logprobs-mode raw_logits` (vllm-project/vllm #9453) until it is started again without."""

    shown_above = 22.5

    def _predict(self, before: int) -> tuple[list[float], list[int]]:
        logprobs, ranked = super()._predict(before)
        return [value + self.shown_above for value in logprobs], ranked


def test_logits_leave_divergence_unmeasured_and_the_remedy_is_no_other_checkpoint(tmp_path: Path) -> None:
    said = "the reference's server: log-probabilities above 0: start vLLM without --logprobs-mode raw_logits (or processed_log"
    other = functools.partial(scaled_logits, 1.1)
    texts = SUITE.model_copy(update={"divergence": DivergenceSpec(languages=("en",), num_documents=4, max_tokens=8, top_k=16)})
    with OfLogits(solve) as one, OfLogits(solve, logits=other) as two:
        *_, candidate = run(tmp_path, {"fp8": one, "w4a16": two}, suite=texts)
        assert candidate.divergence is None and candidate.not_measured["divergence"].startswith(said)
        assert candidate.tasks[0].accuracy is not None  # scores need no log-probabilities
        one.shown_above = 0.0
        with pytest.raises(MeasureError) as caught:
            run(tmp_path, {"fp8": one, "w4a16": two}, suite=texts)
        assert re.fullmatch(
            r"w4a16 at http://\S+ gives log-probabilities above 0: start vLLM without --logprobs-mode raw_logits, as that of "
            r"fp8 at http://\S+; else nothing shows that their weights differ", str(caught.value)
        )  # fmt: skip
        two.shown_above = 0.0
        *_, candidate = run(tmp_path, {"fp8": one, "w4a16": two}, suite=texts)
    assert candidate.divergence is not None and candidate.divergence.kl_mean.value < 1


# ------------------------------------------------------------------------------------------------ weights that change
def test_weights_that_change_between_two_runs_are_refused(tmp_path: Path) -> None:
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        run(tmp_path, servers.by_label)
        turn(servers.by_label["w4a16"], 1.5)
        with pytest.raises(
            MeasureError,
            match=r"^w4a16: http://\S+ does not answer with the weights that it had when w4a16 was first measured here "
            r"\(log-prob.* serve those again; if it is another checkpoint now, give it another label \(NEW=URL\), or the run "
            r"another --name$",
        ):
            run(tmp_path, servers.by_label)


def test_weights_that_change_while_measured_leave_nothing_behind(tmp_path: Path) -> None:
    """After the second reply the candidate's server has other weights; restored, all of its questions are asked again."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]

        def reply(body: dict[str, Any]) -> Scripted:
            if sum("messages" in seen for _, seen in candidate.requests) == 4:
                turn(candidate, 1.5)
            return solve(body)

        candidate.reply = reply
        with pytest.raises(MeasureError, match=r"^w4a16: the weights behind http://\S+ changed while it was measured"):
            run(tmp_path, servers.by_label)
        assert not (tmp_path / "measurements" / "w4a16.json").exists()
        turn(candidate, 1.1)
        candidate.reply, before = solve, candidate.count("/v1/chat/completions")
        *_, measured = run(tmp_path, servers.by_label)
        assert candidate.count("/v1/chat/completions") - before == 2 * 6, "what was answered meanwhile is not used"
        assert measured.tasks[0].num_items == 6


def test_weights_that_change_while_probed_leave_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SUITE", SUITE.model_copy(update={"probes": ProbeSettings()}))
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]

        def probe(server: Server, settings: ProbeSettings, **more: Any) -> None:
            if server.base_url == candidate.base_url:
                turn(candidate, 1.5)

        monkeypatch.setattr("assay_evaluate.run.evaluate.probe_served", probe)
        with pytest.raises(MeasureError, match=r"^w4a16: the weights behind http://\S+ changed while it was measured"):
            run(tmp_path, servers.by_label)
    assert sorted(path.name for path in (tmp_path / "measurements").iterdir()) == ["fp8-repeat.json", "fp8.json"]


def test_what_was_left_open_is_not_trusted_if_weights_are_others_now(tmp_path: Path) -> None:
    """The client dies while the candidate is measured; its server comes back with other weights, then with its own."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, servers.by_label, Interrupting("w4a16: sums"))
        turn(candidate, 1.5)
        with pytest.raises(MeasureError, match="does not answer with the weights that it had"):
            run(tmp_path, servers.by_label)
        turn(candidate, 1.1)
        run(tmp_path, servers.by_label)
        with Journal(tmp_path / "journal.db") as journal:
            kept = journal._execute("SELECT items FROM items WHERE what = 'weights'")
        assert sorted(json.loads(unpacked(row[0]))[0]["attempt"] for row in kept) == [0, 1]


# ------------------------------------------------------------------------------------------------ what /v1/models says
def test_what_a_server_says_it_loaded(tmp_path: Path) -> None:
    folder, other = tmp_path / "w4a16", tmp_path / "fp8"
    folder.mkdir()
    other.mkdir()
    assert describe_mismatch(str(folder), folder) is None
    assert describe_mismatch(str(folder / ".." / "w4a16"), folder) is None
    assert describe_mismatch(str(other), folder) == "that is another folder of this machine"
    assert describe_mismatch("/elsewhere/fp8", folder) is None  # a path at the server
    assert describe_mismatch("zai-org/GLM-5", folder) is None  # the folder may be a download of it
    cached = tmp_path / "models--zai-org--GLM-5" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    assert describe_mismatch("zai-org/GLM-5", cached) is None
    assert describe_mismatch("zai-org/GLM-5-FP8", cached) == "that is another model of the hub"


def test_a_server_of_another_folder_is_refused(tmp_path: Path) -> None:
    class Rooted(FakeServer):
        def tell(self, path: str) -> tuple[int, dict[str, Any]]:
            if path == "/v1/models":
                return 200, {"data": [{"id": "model", "root": str(tmp_path), "max_model_len": 64}]}
            return super().tell(path)

    named = tmp_path / "named"
    named.mkdir()
    with Rooted() as server:
        candidate = Candidate("fp8", named, is_reference=True, endpoint=GivenServer(url=server.base_url))
        with pytest.raises(ServeError, match=f"fp8: .* says that it serves {tmp_path}, not {named}: that is another folder"):
            evaluate("tiny", [candidate], suite=SUITE, profile=PROFILE, serving=SERVING, run_dir=tmp_path / "run")


def turn(server: FakeServer, factor: float) -> None:
    """Other weights from now on."""
    server.logits = functools.partial(scaled_logits, factor)
    server._predictions.clear()


class Interrupting(list[str]):
    """Lines of progress; Ctrl-C at the one that begins with `start`."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def append(self, line: str) -> None:
        super().append(line)
        if line.startswith(self.start):
            raise KeyboardInterrupt

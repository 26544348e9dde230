"""Every label is asked by itself, and what was answered earlier is believed only while its server still answers so."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from given_servers import given_servers
from scripted_world import World, make_folders
from small_suite import SERVING

from assay.errors import MeasureError
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.run import reply_evidence
from assay_evaluate.run.asked_again import ALPHA, OTHER_WORDS_SHARE, Question, find_difference
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.tasks.generated import arithmetic_items

pytestmark = pytest.mark.slow

PROFILE = ProfileRecipe(schema=1, name="given", hardware=Hardware(device="cpu"))
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "sums", "seed": "eval-sums",
        "tasks": [{"kind": "arithmetic", "name": "sums", "num_items": 15, "num_steps": [2], "max_tokens": 64}],
    }
)  # fmt: skip
CHAT = "/v1/chat/completions"
NUM_ASKED = 30 + 24
"""Of a measurement: every question, and some of them twice."""
ANSWERS = {item.prompt: item.answer for item in arithmetic_items(SUITE.tasks[0], SUITE.seed)}  # type: ignore[arg-type]


def solve(body: dict[str, Any]) -> Scripted:
    return Scripted(f"#### {ANSWERS[body['messages'][-1]['content']]}" if "messages" in body else "x")


def run(run_dir: Path, servers: dict[str, FakeServer], folder: Path | None = None, **more: Any) -> list[Measurement]:
    """The first label is the reference. folder: what all servers are said to serve."""
    candidates = [
        Candidate(label, folder, is_reference=number == 0, endpoint=GivenServer(url=server.base_url))
        for number, (label, server) in enumerate(servers.items())
    ]
    return evaluate("tiny", candidates, suite=SUITE, profile=PROFILE, serving=SERVING, run_dir=run_dir, **more)


def without_answer(body: dict[str, Any]) -> Scripted:
    """A broken reasoning parser: the answer stands in the thinking."""
    solved = solve(body)
    return Scripted(None, reasoning=solved.text) if "messages" in body else solved


# ------------------------------------------------------------------------------------------------ no label answers for another
@pytest.mark.parametrize("is_named", [False, True])
def test_with_the_same_weights_the_candidate_is_asked_too(tmp_path: Path, is_named: bool) -> None:
    """Two addresses, one set of weights, and a gateway before the second that loses every answer."""
    folder = tmp_path / "served" if is_named else None
    if folder is not None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    with FakeServer(solve) as direct, FakeServer(without_answer) as gateway:
        servers = {"direct": direct, "gateway": gateway}
        reference, _, candidate = run(tmp_path / "run", servers, folder, same_weights=True)
        assert gateway.count(CHAT) == NUM_ASKED
        assert [item.correct for item in candidate.tasks[0].items] == [False] * 30
        assert reference.checkpoint_sha256 == candidate.checkpoint_sha256 or not is_named
        assert reference.replies_sha256 != candidate.replies_sha256 or not is_named
        again = run(tmp_path / "run", servers, folder, same_weights=True)
        assert again == [reference, _, candidate]
        assert gateway.count(CHAT) == NUM_ASKED + 24, "a few questions, to see that it answers as before"


def test_weights_of_one_folder_at_two_addresses_are_two_labels_even_without_the_option(tmp_path: Path) -> None:
    """Signatures differ, for one server quantizes at load; the folder named for both is the same."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    with given_servers("bf16", "fp8-at-load", reply=solve) as servers:
        reference, _, candidate = run(tmp_path / "run", servers.by_label, folder)
        assert servers.by_label["fp8-at-load"].count(CHAT) == NUM_ASKED
    assert reference.checkpoint_sha256 == candidate.checkpoint_sha256
    assert reference.replies_sha256 != candidate.replies_sha256


@pytest.mark.parametrize("failure", [Scripted(status=503), Scripted(drop=True)], ids=["busy", "hangs up"])
def test_a_server_that_is_just_started_again_is_waited_for(tmp_path: Path, failure: Scripted) -> None:
    """The questions that are asked again get no reply at first."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        first = run(tmp_path, servers.by_label)
        candidate, num_asked = servers.by_label["w4a16"], 0

        def late(body: dict[str, Any]) -> Scripted:
            nonlocal num_asked
            if "messages" not in body:  # its signature is there
                return solve(body)
            num_asked += 1
            return failure if num_asked <= 24 else solve(body)

        candidate.reply = late
        assert run(tmp_path, servers.by_label) == first
        assert num_asked >= 24 + 24


def test_a_label_that_moves_to_another_address_keeps_its_replies(tmp_path: Path) -> None:
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        first = run(tmp_path, servers.by_label)
        old = servers.by_label["w4a16"]
        with FakeServer(solve, logits=old.logits) as moved:
            assert run(tmp_path, {**servers.by_label, "w4a16": moved}) == first
            assert moved.count(CHAT) == 24


# ------------------------------------------------------------------------------------------------ measured already
def test_a_server_that_was_repaired_is_not_measured_already(tmp_path: Path) -> None:
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]
        candidate.reply = without_answer
        first = run(tmp_path, servers.by_label)
        candidate.reply = solve
        with pytest.raises(
            MeasureError,
            match=r"^w4a16: http://\S+ does not answer as it did when w4a16 was measured, on \d{4}-\d\d-\d\d: of 24 questions "
            r"asked again, 24 get replies of another form \(the first: no text then, but now\); `--again w4a16` measures it "
            r"anew$",
        ):
            run(tmp_path, servers.by_label)
        asked = candidate.count(CHAT)
        lines: list[str] = []
        *_, measured = run(tmp_path, servers.by_label, again=["w4a16"], on_progress=lines.append)
        assert candidate.count(CHAT) - asked == NUM_ASKED
    accuracy = [one.tasks[0].accuracy for one in (first[-1], measured)]
    assert [value and value.value for value in accuracy] == [0.0, 1.0]
    assert any(re.match(r"w4a16: the earlier measurement is replaced; moved to \S+/earlier/w4a16", line) for line in lines)
    day = first[0].started[:10]
    assert (
        f"fp8: measured already, on {day}; 24 of its questions, asked again, are answered as they were; `--again fp8` measures "
        "it anew"
    ) in lines


def test_a_server_that_broke_later_is_not_measured_already(tmp_path: Path) -> None:
    """One reply in four has no answer any more; and another time prompts are cut."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]
        run(tmp_path, servers.by_label)
        candidate.reply = lambda body: (without_answer if len(str(body)) % 4 == 0 else solve)(body)
        with pytest.raises(MeasureError, match="get replies of another form"):
            run(tmp_path, servers.by_label)
        candidate.reply = solve

        def cut(body: dict[str, Any]) -> list[int]:
            return FakeServer._prompt_ids(candidate, body)[-64 if "messages" in body else 0 :]

        candidate._prompt_ids = cut  # type: ignore[method-assign]
        with pytest.raises(MeasureError, match=r"24 have prompts of another length \(the first: \d+ tokens then, 64 now\)"):
            run(tmp_path, servers.by_label)


def test_what_got_no_reply_is_asked_again_and_nothing_else(tmp_path: Path) -> None:
    """What NOT MEASURED for missing replies says: run it again, only what is missing is asked (vLLM #57082)."""
    lost = sorted(ANSWERS)[:3]
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        candidate = servers.by_label["w4a16"]

        def aborting(body: dict[str, Any]) -> Scripted:
            is_lost = "messages" in body and body["messages"][-1]["content"] in lost
            return replace(solve(body), finish_reason="abort") if is_lost else solve(body)

        candidate.reply = aborting
        first = run(tmp_path, servers.by_label)
        assert first[-1].tasks[0].num_failed == 3
        asked_again: Counter[str] = Counter()

        def repaired(body: dict[str, Any]) -> Scripted:
            if "messages" in body:
                asked_again[body["messages"][-1]["content"]] += 1
            return solve(body)

        candidate.reply = repaired
        lines: list[str] = []
        second = run(tmp_path, servers.by_label, on_progress=lines.append)
        assert all(asked_again.pop(question) for question in lost)
        assert asked_again.total() == 24, "a few questions, once, to see that it answers as before"
        third = run(tmp_path, servers.by_label)
    assert second[-1].tasks[0].num_failed == 0 and third[-1] == second[-1]
    assert [measurement.tasks for measurement in second[:-1]] == [measurement.tasks for measurement in first[:-1]]
    day = first[0].started[:10]
    again = re.compile(f"w4a16: measured on {day}; [3-6] requests without a reply are asked again")  # some are asked twice
    assert [line for line in lines if again.fullmatch(line)]


def test_a_reference_that_lacks_its_repeat_is_asked_once_whether_it_answers_as_before(tmp_path: Path) -> None:
    """Its first measurement is there, and is made again from the journal with the repeat."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        first = run(tmp_path, servers.by_label)
        (tmp_path / "measurements" / "fp8-repeat.json").unlink()
        asked = servers.by_label["fp8"].count(CHAT)
        second = run(tmp_path, servers.by_label)
        assert servers.by_label["fp8"].count(CHAT) == asked + 24
    assert [measurement.tasks for measurement in second] == [measurement.tasks for measurement in first]


def test_with_the_reference_all_are_measured_anew(tmp_path: Path) -> None:
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        run(tmp_path, servers.by_label)
        asked = servers.count(CHAT)
        run(tmp_path, servers.by_label, again=["fp8"])
        assert servers.count(CHAT) - asked == 2 * NUM_ASKED + 30, "the repeat asks nothing twice"
        with pytest.raises(MeasureError, match=r"^--again nvfp4: no such label; this evaluation has fp8, w4a16$"):
            run(tmp_path, servers.by_label, again=["nvfp4"])


def test_what_is_measured_anew_and_killed_goes_on(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    with given_servers("fp8", "w4a16", reply=solve) as servers:
        first = run(tmp_path, servers.by_label)

        def killed(line: str) -> None:
            if line.startswith("w4a16: sums"):
                raise Killed

        with pytest.raises(Killed):
            run(tmp_path, servers.by_label, again=["w4a16"], on_progress=killed)
        candidate = servers.by_label["w4a16"]
        asked = candidate.count(CHAT)
        *_, measured = run(tmp_path, servers.by_label)
        # All was answered before it was killed, and nothing asked twice; a few are asked again before that is believed.
        assert candidate.count(CHAT) == asked + 24 + 24
    assert measured.replies_sha256 != first[-1].replies_sha256


def exchanged(then: Reply, now: Reply, temperature: float = 0.0) -> Any:
    from assay_evaluate.client.exchanges import Ask, Exchange

    ask = Ask("key", CHAT, {"temperature": temperature})
    return Question(ask, then), Exchange(ask, 0, 1, "answered", now)


def answered(text: str, prompt_tokens: int | None = 9) -> Reply:
    return Reply("answered", text=text, finish_reason="stop", prompt_tokens=prompt_tokens)


def test_noise_of_batches_is_no_change() -> None:
    """Words late in a reply differ, a few replies begin otherwise, one has no text, counts are missing on one side."""
    pairs = [exchanged(answered("a" * 80 + "b"), answered("a" * 80 + "c", None)) for _ in range(18)]
    pairs += [exchanged(answered("begins so"), answered("begins otherwise")) for _ in range(5)]
    pairs += [exchanged(answered("text"), answered(""))]
    assert find_difference(pairs) is None
    assert find_difference([exchanged(answered("one"), answered("two"), 1.0) for _ in range(24)]) is None
    assert (
        find_difference([exchanged(answered("one"), answered("two")) for _ in range(24)])
        == "24 of the 24 at temperature 0 begin with other words"
    )


def test_false_alarms_at_the_stated_shares() -> None:
    """10,000 servers that have not changed, one reply in ten beginning with other words."""
    import numpy as np
    from scipy.stats import binom

    other = np.random.default_rng(5).binomial(24, OTHER_WORDS_SHARE, 10_000)
    alarms = (binom.sf(other - 1, 24, OTHER_WORDS_SHARE) < ALPHA).mean()
    assert 0 < alarms < ALPHA


# ------------------------------------------------------------------------------------------------ a refused start
def test_a_refused_start_binds_no_label(tmp_path: Path) -> None:
    """The candidate's URL was mistaken for one with the reference's weights; then it is the right one."""
    with given_servers("fp8", "w4a16", reply=solve) as servers:
        mistaken = FakeServer(solve, logits=servers.by_label["fp8"].logits)
        with mistaken, pytest.raises(MeasureError, match="answer with the same weights"):
            run(tmp_path, {**servers.by_label, "w4a16": mistaken})
        assert [one.label for one in run(tmp_path, servers.by_label)] == ["fp8", "fp8-repeat", "w4a16"]


def test_a_copy_of_the_reference_that_is_started_is_asked(tmp_path: Path) -> None:
    world, folder = World(), make_folders(tmp_path)["reference"]
    shutil.copytree(folder, tmp_path / "copy")
    world.reply = {"reference": solve, "copy": without_answer}
    candidates = [Candidate("fp8", folder, is_reference=True), Candidate("copy", tmp_path / "copy")]
    reference, _, candidate = world.measure(tmp_path / "run", candidates, SUITE, profile=PROFILE, serving=SERVING)
    assert reference.checkpoint_sha256 == candidate.checkpoint_sha256
    assert [one.tasks[0].accuracy and one.tasks[0].accuracy.value for one in (reference, candidate)] == [1.0, 0.0]


def test_of_long_questions_few_are_asked_twice_whatever_the_number_of_tasks() -> None:
    """Prompts are paid for: a suite of long-context tasks does not ask 256 of them twice."""

    def questions(task: str, num_chars: int) -> list[Request]:
        bodies = [{"max_tokens": 8, "prompt": "x" * num_chars} for _ in range(30)]
        return [Request(task, str(number), 0, CHAT, body) for number, body in enumerate(bodies)]

    chosen = reply_evidence._choose_questions([questions("a", 20_000), questions("b", 20_000), questions("c", 10)])
    assert Counter(request.task for request in chosen) == {"a": 12, "b": 12, "c": 30}

"""The `tools` task of a suite: reference and candidate on scripted servers, everything known."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blank_records import blank_fingerprint
from fake_server import Scripted
from given_servers import scaled_logits
from pages import Page
from tool_server import PARSER_MISSING, ToolServer, as_call, solve

from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement, ToolCalls, ToolCell, ToolFigures, TriggerFidelity
from assay.records.serving import Fingerprint
from assay_evaluate.asking.evidence import NUM_PROMPTS
from assay_evaluate.client.journal import Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.statistics.proportions import wilson
from assay_evaluate.tasks.tools.questions import tool_question
from assay_evaluate.tasks.tools.task import NO_TOOLS, TEMPLATE_IGNORES_TOOLS, grammar_notes
from assay_evaluate.verdicts.gates import judge as judge_gates
from assay_reports.report import write_report
from assay_reports.text import percent_interval

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "small", "seed": "eval-tools",
        "tasks": [
            {"kind": "tools", "name": "tools", "num_items": 8, "max_tokens": 600, "num_tools": [1, 8],
             "prompt_tokens": [0, 2000, 12000]},
        ],
    }
)  # fmt: skip
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 3})
FLAGS = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True}
WHERE = {
    tool_question(SUITE.seed, index, num_tools, length, 0.25).question: (num_tools, length, index)
    for num_tools in (1, 8)
    for length in (None, 2000, 12000)
    for index in range(8)
}
"""Question -> (number of tools, length, index). Index 3 asks for a missing tool, 7 talks; a tool is right for the rest."""


def right(body: dict[str, Any]) -> Scripted:
    """What a perfect model does."""
    result = solve(body["messages"][-1]["content"], body.get("tools", []))
    if result is None:
        return Scripted("There is no tool for that.")
    return Scripted(None, finish_reason="tool_calls", tool_calls=(as_call(*result),), output_tokens=30)


def reference_reply(body: dict[str, Any]) -> Scripted:
    """Right, but for two items: one call not made, one made without a tool for it."""
    match WHERE.get(body["messages"][-1]["content"]):
        case (1, None, 6):
            return Scripted("I shall do that at once.")
        case (8, None, 3):
            return Scripted(tool_calls=(call_something(body),), output_tokens=30)
    return right(body)


def candidate_reply(body: dict[str, Any]) -> Scripted:
    """Right with one tool. With eight and a short prompt, something else is wrong with every item but 3 and 7."""
    place = WHERE.get(body["messages"][-1]["content"])
    if place is None or place[:2] != (8, None) or place[2] == 7:
        return right(body)
    result = solve(body["messages"][-1]["content"], body["tools"])
    match place[2], result:
        case 0, _:
            return Scripted(tool_calls=(call_something(body, but=str(result and result[0])),), output_tokens=30)
        case 1, (name, arguments):
            return Scripted(tool_calls=(as_call(name, dict(list(arguments.items())[1:])),), output_tokens=30)  # required: gone
        case 2, (name, arguments):
            return Scripted(tool_calls=(as_call(name, other_arguments(arguments)),), output_tokens=30)
        case 3, _:
            return Scripted("I cannot do that.")
        case 4, _:
            return Scripted("Done, it is cancelled.")
        case 5, (name, arguments):
            return Scripted(f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)[:-1]}</tool_call>')
        case 6, (name, arguments):
            return Scripted(tool_calls=(as_call(name, arguments), as_call(name, arguments)), output_tokens=60)
    raise AssertionError(place)


def call_something(body: dict[str, Any], but: str = "") -> dict[str, Any]:
    """A call of the first tool offered that is not `but`, with arguments that no tool takes."""
    return as_call(next(tool["function"]["name"] for tool in body["tools"] if tool["function"]["name"] != but), {"x": 1})


def other_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Valid, and not what was asked for: another code, or one of every list."""
    if "code" in arguments:
        return {**arguments, "code": arguments["code"][:3] + "0000"}
    return {**arguments, "notify": not arguments.get("notify", True)}


class World:
    """Serves each checkpoint folder by a scripted server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reply: dict[str, Callable[[dict[str, Any]], Scripted]] = {"fp8": reference_reply, "w4a16": candidate_reply}
        self.options: dict[str, Any] = {}
        self.flags: dict[str, Any] = FLAGS
        self.servers: dict[str, list[ToolServer]] = {}
        for name in self.reply:
            (path / name).mkdir()
            (path / name / "config.json").write_text(json.dumps({"vocab_size": 128}))
            (path / name / "model.safetensors").write_bytes(f"weights of {name}".encode())

    def foresee(self, spec: ServerSpec) -> Fingerprint:
        return blank_fingerprint(server="scripted", hardware={"cpu": "x"}, profile=spec.profile.name, flags=self.flags)

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[ToolServer]:
        name = spec.checkpoint.name
        logits = functools.partial(scaled_logits, 1.0 if name == "fp8" else 1.1)
        with ToolServer(self.reply[name], **{"max_model_len": 16_000, "logits": logits, **self.options}) as server:
            server.fingerprint = self.foresee(spec)
            self.servers.setdefault(name, []).append(server)
            yield server

    def run(self, suite: SuiteRecipe = SUITE) -> list[Measurement]:
        return evaluate(
            "tiny",
            [Candidate("fp8", self.path / "fp8", is_reference=True), Candidate("w4a16", self.path / "w4a16")],
            suite=suite,
            profile=PROFILE,
            serving=Serving(tool_call_parser="hermes"),
            run_dir=self.path / "run",
            start_server=self.start,
            foresee=self.foresee,
        )

    def asked(self, name: str) -> list[dict[str, Any]]:
        """Bodies of the items asked, in the order in which they came; without those asked twice, in short, afterwards."""
        bodies = [body for server in self.servers[name] for path, body in server.requests if path.startswith("/v1")]
        of_items = [body for body in bodies if "messages" in body and body["messages"][-1]["content"] in WHERE]
        return [body for body in of_items if body["max_tokens"] == SUITE.tasks[0].max_tokens]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def figures(num_items: int, precision: Any, recall: Any, tool: Any, valid: Any, equal: Any, left: int) -> dict[str, Any]:
    """ToolFigures from pairs (successes, of)."""
    shares = {"trigger_precision": precision, "trigger_recall": recall, "right_tool": tool, "schema_valid": valid}
    shares |= {"arguments_equal": equal}
    return {"num_items": num_items, "num_left_in_text": left} | {name: wilson(*share) for name, share in shares.items()}


def test_reference_and_candidate(world: World) -> None:
    """Every number of a run in which every kind of mistake was planted once."""
    reference, repeat, candidate = world.run()
    for measured in (reference, repeat, candidate):
        (task,) = measured.tasks
        assert (task.kind, task.num_items, task.num_failed, task.num_truncated) == ("tools", 40, 0, 0)
        # eight tools are longer than 2,000 characters, so that cell cannot be asked
        assert task.note is not None
        assert task.note.startswith("not measured with 8 tools at 2000 tokens: 8 tools and the question alone take ")
        assert measured.not_measured == {"acceptance": "served without speculative decoding"}
        assert measured.notes == (f"tools: {task.note}",)
    (ours,), (again,), (theirs,) = reference.tasks, repeat.tasks, candidate.tasks

    perfect = figures(8, (6, 6), (6, 6), (6, 6), (6, 6), (6, 6), 0)
    assert ours.tools == ToolCalls(
        overall=ToolFigures(**figures(40, (29, 30), (29, 30), (29, 29), (29, 30), (29, 29), 0)),
        cells=(
            ToolCell(num_tools=1, prompt_tokens=None, **figures(8, (5, 5), (5, 6), (5, 5), (5, 5), (5, 5), 0)),
            ToolCell(num_tools=1, prompt_tokens=2000, **perfect),
            ToolCell(num_tools=1, prompt_tokens=12000, **perfect),
            ToolCell(num_tools=8, prompt_tokens=None, **figures(8, (6, 7), (6, 6), (6, 6), (6, 7), (6, 6), 0)),
            ToolCell(num_tools=8, prompt_tokens=12000, **perfect),
        ),
        against_reference=None,
    )
    assert again.tools == ours.tools.model_copy(
        update={
            "against_reference": TriggerFidelity(
                num_both=30, num_reference_only=0, num_candidate_only=0, num_neither=10, precision=wilson(30, 30),
                recall=wilson(30, 30), f1=1.0, p_value=1.0,
            )
        }
    )  # fmt: skip
    assert theirs.tools is not None
    assert theirs.tools.cells[3] == ToolCell(
        # called: 0 the wrong tool, 1 invalid, 2 not equal, 6 twice; not called: 4, and 5 left in the text
        num_tools=8, prompt_tokens=None, **figures(8, (4, 4), (4, 6), (2, 4), (2, 4), (1, 3), 1),
    )  # fmt: skip
    assert theirs.tools.cells[0] == ToolCell(num_tools=1, prompt_tokens=None, **perfect)
    assert theirs.tools.overall == ToolFigures(**figures(40, (28, 28), (28, 30), (26, 28), (26, 28), (25, 27), 1))
    # against the reference: it calls at (1, 6), where the reference did not; not at (8, 3), (8, 4) and (8, 5), where it did
    fidelity = theirs.tools.against_reference
    assert fidelity is not None
    assert fidelity.model_copy(update={"p_value": 0.0}) == TriggerFidelity(
        num_both=27, num_reference_only=3, num_candidate_only=1, num_neither=9, precision=wilson(27, 28), recall=wilson(27, 30),
        f1=54 / 58, p_value=0.0,
    )  # fmt: skip
    assert fidelity.p_value == pytest.approx(0.375)  # of 4 that differ, 1 or fewer on one side: 2 * (1 + 4 / 2) / 16

    assert [item.item for item in ours.items if not item.correct] == ["tools/1/short/6", "tools/8/short/3"]
    assert [item.item for item in theirs.items if not item.correct] == [f"tools/8/short/{i}" for i in (0, 1, 2, 4, 5, 6)]
    by_id = {item.item: item for item in theirs.items}
    assert by_id["tools/8/short/5"].answer == "a call left in the text"
    assert by_id["tools/8/short/4"].answer == "no call"
    assert all(11_400 <= (by_id[f"tools/8/12000/{i}"].prompt_tokens or 0) <= 12_000 for i in range(8))
    assert all((by_id[f"tools/1/short/{i}"].prompt_tokens or 0) < 1_900 for i in range(8))
    assert candidate == Measurement.load(world.path / "run" / "measurements" / "w4a16.json")


@pytest.mark.slow
def test_both_sides_get_the_same_requests_and_no_grammar_is_asked_for(world: World) -> None:
    world.run()
    for name in ("fp8", "w4a16"):
        for body in world.asked(name):
            assert body["tool_choice"] == "auto"
            assert body["temperature"] == 0.0
            assert not {"parallel_tool_calls", "stop", "response_format", "guided_json"} & body.keys()
            assert all("strict" not in tool["function"] for tool in body["tools"])
    texts = {name: sorted(json.dumps(body, sort_keys=True) for body in world.asked(name)) for name in ("fp8", "w4a16")}
    assert texts["fp8"] == sorted(2 * texts["w4a16"])  # the reference is asked a second time, for the noise floor
    assert len(texts["w4a16"]) == 40
    counted = [body for path, body in world.servers["w4a16"][0].requests if path == "/tokenize"]
    asked = [body["messages"] for body in world.asked("w4a16")]
    # sized by the reference; of a candidate it is asked whether it is shown tools, and what it was billed for is counted
    assert sum(body.get("messages") not in asked and "messages" in body for body in counted) <= 4
    assert sum("messages" in body for body in counted) <= 4 + 2 * NUM_PROMPTS


@pytest.mark.slow
def test_gate_pairs_the_items(world: World) -> None:
    gates = GateRecipe.model_validate(
        {"schema": 1, "name": "g", "gates": [{"kind": "score", "task": "tools", "max_drop": 0.05}]}
    )  # fmt: skip
    report = judge_gates(world.run(), gates, model="tiny")
    (verdict,) = [one for one in report.verdicts if one.candidate == "w4a16"]
    assert (verdict.status, verdict.discordant) == ("UNDERPOWERED", (6, 2))
    assert verdict.observed is not None
    assert (verdict.observed.value, verdict.observed.n) == (pytest.approx(0.1), 40)


@pytest.mark.slow
def test_report_shows_every_cell(world: World) -> None:
    world.run()
    page = write_report(world.path / "run")
    cells, against = (
        Page(page.read_text()).table(f"{name}, tools") for name in ("Calls of tools", "Calls against the reference")
    )
    lines = [" | ".join(row) for table in (cells, against) for row in table.rows]

    def share(successes: int, of: int) -> str:
        return percent_interval(wilson(successes, of))

    cell = f"8 | {share(4, 6)} | {share(4, 4)} | {share(2, 4)} | {share(2, 4)} | {share(1, 3)} | 1"
    assert f"w4a16 | 8 | not filled | {cell}" in lines
    both = " | ".join(share(29, 30) for _ in range(2))
    assert f"fp8 reference | all | all | 40 | {both} | {share(29, 29)} | {share(29, 30)} | {share(29, 29)} | 0" in lines
    assert f"w4a16 | 27 | 3 | 1 | 9 | {share(27, 28)} | {share(27, 30)} | 93.1 % | 0.375" in lines
    assert sum(line.startswith("fp8 reference | ") and "not filled" in line for line in lines) == 2
    shown = " ".join(re.sub("<[^>]+>", " ", page.read_text().split('id="scores"')[1].split('id="divergence"')[0]).split())
    assert "w4a16 27 3 1 9 96.4 %" in shown
    assert "w4a16 8 12,000 8 100.0 %" in shown
    assert "items of tools are generated by assay" in page.with_name("report.md").read_text()


@pytest.mark.slow
def test_rerun_asks_only_the_rest(world: World) -> None:
    """A candidate whose server dies half-way, then another run: the result of an undisturbed one, nothing asked twice."""
    num_replies = 0

    def dying(body: dict[str, Any]) -> Scripted:
        nonlocal num_replies
        num_replies += 1
        if num_replies == 20:
            world.servers["w4a16"][-1].die()
        return candidate_reply(body)

    world.reply["w4a16"] = dying
    with pytest.raises(MeasureError, match="Engine core died"):
        world.run()
    disturbed = world.run()[2]
    assert 40 <= len(world.asked("w4a16")) <= 40 + 4  # again only what was in flight
    assert len(world.servers["fp8"]) == 1
    (world.path / "run" / "measurements" / "w4a16.json").unlink()
    asked = len(world.asked("w4a16"))
    again = world.run()[2]
    assert len(world.asked("w4a16")) == asked
    assert again.tasks == disturbed.tasks
    with Journal(world.path / "run" / "journal.db") as journal:
        assert journal.count("answered", "tools") == 120


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tools": "refused"}, f"the server does not accept tool calls: HTTP 400: {PARSER_MISSING}; {NO_TOOLS}"),
        ({"tools": "ignored"}, TEMPLATE_IGNORES_TOOLS),
        ({"tools": "ignored", "tokenize": False}, TEMPLATE_IGNORES_TOOLS),
        ({"chat_template": False}, "the checkpoint has no chat template, so it cannot be shown tools"),
        ({"max_model_len": 1500}, "+ 600 tokens of reply do not fit max_model_len 1500"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_is_not_measured(world: World, options: dict[str, Any], why: str) -> None:
    world.options = options
    for measured in world.run():
        (task,) = measured.tasks
        assert (task.accuracy, task.tools) == (None, None) or not task.items
        assert measured.not_measured["tools"] == task.note
        assert task.note is not None
        assert why in task.note if options.get("max_model_len") else task.note == why
    assert not [body for name in world.servers for body in world.asked(name)]


@pytest.mark.slow
def test_a_server_that_is_unwell_is_an_error_not_a_score(world: World) -> None:
    world.reply["fp8"] = lambda body: Scripted("overloaded", status=503)
    with pytest.raises(MeasureError, match="HTTP 503: overloaded"):
        world.run()


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ({"tool-call-parser": "glm47"}, {}, True),
        ({"tool-call-parser": "glm45", "tool-strict-level": "auto"}, {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "1"}, True),
        ({"tool-call-parser": "glm47"}, {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}, False),
        ({"tool-call-parser": "hermes"}, {}, False),
        ({"tool-call-parser": "hermes", "tool-strict-level": "parameter"}, {}, True),
        ({}, {}, False),
    ],
)
def test_grammar_is_said(world: World, flags: dict[str, Any], environment: dict[str, str], says: bool) -> None:
    """vLLM 0.32 constrains the calls of some parsers unasked: validity is then the grammar's."""
    spec = ServerSpec(world.path / "fp8", PROFILE, Serving(), speculate=False, log_path=world.path / "log")
    fingerprint = world.foresee(spec).model_copy(update={"flags": flags, "environment": environment})
    notes = grammar_notes(SUITE, fingerprint)
    assert [note.partition(" holds")[0] for note in notes] == (
        [f"tools: the server (tool-call-parser {flags['tool-call-parser']})"] if says else []
    )
    assert grammar_notes(SUITE.model_copy(update={"tasks": ()}), fingerprint) == []

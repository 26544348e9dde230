"""SWE-bench without an agent or a container runtime: whose fault, what counts, what a run can tell apart, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blank_records import item_result
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar

from assay.errors import MeasureError, RecipeError
from assay.recipes.load import load_recipe, parse_recipe
from assay.recipes.suite import SuiteRecipe, SweTask
from assay.recipes.suite_files import with_swe_options
from assay.records.measurement import TaskResult
from assay_evaluate.preflight.known_tasks import REPOSITORIES
from assay_evaluate.statistics.clustered import clustered_mean
from assay_evaluate.statistics.decisions import widen_by_clusters
from assay_evaluate.statistics.item_pairs import pair_items
from assay_evaluate.statistics.paired import paired_difference
from assay_evaluate.statistics.power import items_for_margin, minimum_detectable_effect
from assay_evaluate.statistics.swe_difference import InstancePair, difference, pair_instances, resolution_sentence, sentence
from assay_evaluate.tasks.swebench.dataset import check_rows, load_instances
from assay_evaluate.tasks.swebench.grading import Grade, read_report
from assay_evaluate.tasks.swebench.settings import settings_for
from assay_evaluate.tasks.swebench.trajectories import (
    classify,
    exit_of,
    is_valid_call,
    longest_loop,
    measure,
    settle,
    trajectory_path,
)

ROW = {
    "instance_id": "tiny__roman-2", "repo": "tiny/roman", "base_commit": "c0ffee", "problem_statement": "4 is IIII",
    "patch": "diff", "version": "1.0", "FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": ["t::b"], "image": "tiny-swe/roman",
    "eval_script": "#!/bin/bash", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ exits
@pytest.mark.parametrize(
    ("status", "detail", "expected"),
    [
        ("Submitted", "", ("Submitted", "model")),
        ("LimitsExceeded", "", ("LimitsExceeded", "model")),
        ("RepeatedFormatError", "", ("RepeatedFormatError", "model")),
        ("ContextWindowExceededError", "too long", ("ContextWindowExceededError", "model")),
        ("BadRequestError", "This model's maximum context length is 4096 tokens.", ("ContextWindowExceededError", "model")),
        (
            "BadRequestError",
            "The prompt is longer than the maximum model length of 8192",
            ("ContextWindowExceededError", "model"),
        ),
        ("BadRequestError", '"auto" tool choice requires --enable-auto-tool-choice', ("BadRequestError", "infrastructure")),
        ("InternalServerError", "Connection error.", ("InternalServerError", "infrastructure")),
        ("CalledProcessError", "docker run: no such image", ("CalledProcessError", "infrastructure")),
        ("TimeoutExpired", "pull", ("TimeoutExpired", "infrastructure")),
        ("KeyError", "'actions'", ("KeyError", "infrastructure")),
        ("SomethingNobodyThoughtOf", "", ("SomethingNobodyThoughtOf", "infrastructure")),
        (None, "", ("unknown", "infrastructure")),
        ("", "", ("unknown", "infrastructure")),
    ],
)
def test_only_what_the_model_did_counts(status: str | None, detail: str, expected: tuple[str, str]) -> None:
    assert classify(status, detail)[:2] == expected


# ------------------------------------------------------------------------------------------------ preds.json
def write_trajectory(folder: Path, instance: str, status: str, submission: str = "", **info: str) -> None:
    path = trajectory_path(folder, instance)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"info": {"exit_status": status, "submission": submission, **info}, "messages": []}))


def test_empty_patches_of_the_machinery_are_purged_from_a_folder_that_mini_swe_agent_filled(tmp_path: Path) -> None:
    """As its own batch runner leaves it: every instance is in preds.json, so that none would ever be done again."""
    write_trajectory(tmp_path, "a__a-1", "Submitted", "diff a")
    write_trajectory(tmp_path, "a__a-2", "InternalServerError", exception_str="Connection error.")
    write_trajectory(tmp_path, "a__a-3", "LimitsExceeded")
    write_trajectory(tmp_path, "a__a-5", "BadRequestError", exception_str="This model's maximum context length is 4096 tokens")
    trajectory_path(tmp_path, "a__a-6").parent.mkdir()
    trajectory_path(tmp_path, "a__a-6").write_text('{"info": {"exit_status": "Subm')  # killed while writing
    before = {"a__a-1": "diff a"} | dict.fromkeys(["a__a-2", "a__a-3", "a__a-4", "a__a-5", "a__a-6"], "")
    (tmp_path / "preds.json").write_text(
        json.dumps({k: {"instance_id": k, "model_name_or_path": "x", "model_patch": v} for k, v in before.items()})
    )
    kept = settle(tmp_path, "me")  # without a__a-2, a__a-4 and a__a-6: server gone, no trajectory at all, cut short
    assert {k: v["model_patch"] for k, v in kept.items()} == {"a__a-1": "diff a", "a__a-3": "", "a__a-5": ""}
    assert json.loads((tmp_path / "preds.json").read_text()) == kept
    assert (tmp_path / "a__a-2" / "a__a-2.failed-0.traj.json").is_file()
    assert not trajectory_path(tmp_path, "a__a-2").exists()
    assert settle(tmp_path, "me") == kept


def test_a_broken_preds_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "preds.json").write_text("{")
    with pytest.raises(MeasureError, match=r"preds\.json: not JSON .* move it away"):
        settle(tmp_path, "me")
    (tmp_path / "preds.json").write_text('["a"]')
    with pytest.raises(MeasureError, match=r"not a preds\.json"):
        settle(tmp_path, "me")


# ------------------------------------------------------------------------------------------------ trajectories
def reply(command: str | None, arguments: str | None = None, finish: str = "tool_calls") -> dict[str, Any]:
    calls = []
    if command is not None:
        text = arguments if arguments is not None else json.dumps({"command": command})
        calls = [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": text}}]
    return {
        "choices": [{"message": {"content": "x", "tool_calls": calls}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


def step(command: str, output: str = "", returncode: int = 0) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": "x", "extra": {"response": reply(command), "actions": [{"command": command}]}},
        {"role": "tool", "content": output, "extra": {"raw_output": output, "returncode": returncode}},
    ]


def complaint(response: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": "Tool call error", "extra": {"interrupt_type": "FormatError", "response": response}}


def test_a_trajectory_is_measured_from_its_own_file() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        *step("ls", "a b"),
        complaint(reply(None, finish="length")),
        complaint(reply("ls", arguments='{"cmd": "ls"}')),
        *step("pytest", "1 passed in 0.11s"),
        *step("pytest", "1 passed in 0.12s"),
        *step("pytest", "1 passed in 0.13s"),
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": "diff é\n"}},
    ]
    result = measure({"info": {"submission": "diff é\n"}, "messages": messages}, native_tool_calls=True)
    assert result.pop("patch_sha256") is not None
    assert result == {
        "num_steps": 6, "prompt_tokens": 600, "output_tokens": 60, "num_cut_off": 1, "num_format_errors": 2,
        "num_tool_calls": 5, "num_valid_tool_calls": 4,
        "longest_loop_steps": 3, "looped": True, "patch_bytes": 8, "accepted_tokens": None,
        "drafted_tokens": None,
    }  # fmt: skip
    assert measure({"messages": messages}, native_tool_calls=False)["num_tool_calls"] is None


def test_speculation_is_added_up_where_the_server_tells_it() -> None:
    message = step("ls")[0]
    message["extra"]["response"]["metrics"] = {
        "speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 3}
    }
    result = measure({"messages": [message, message]}, native_tool_calls=True)
    assert (result["accepted_tokens"], result["drafted_tokens"]) == (6, 16)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", 0), ("a", 0), ("abcde", 0), ("aab", 0), ("aaab", 3), ("xaaaay", 4), ("ababab", 6), ("xabababa", 7), ("abab", 0),
        ("abcdabcdabcd", 12), ("abcdeabcdeabcde", 0), ("aaabbbb", 4),
    ],
)  # fmt: skip
def test_a_loop_is_a_cycle_of_at_most_four_steps_three_times(steps: str, expected: int) -> None:
    assert longest_loop(list(steps)) == expected


@pytest.mark.parametrize(
    ("function", "valid"),
    [
        ({"name": "bash", "arguments": '{"command": "ls"}'}, True),
        ({"name": "bash", "arguments": '{"command": "ls'}, False),
        ({"name": "bash", "arguments": '{"command": 1}'}, False),
        ({"name": "bash", "arguments": '{"command": "ls", "cwd": "/"}'}, False),
        ({"name": "bash", "arguments": '["ls"]'}, False),
        ({"name": "bash", "arguments": None}, False),
        ({"name": "python", "arguments": '{"command": "ls"}'}, False),
    ],
)
def test_a_tool_call_is_valid_by_its_schema(function: dict[str, Any], valid: bool) -> None:
    assert is_valid_call({"function": function}) is valid


# ------------------------------------------------------------------------------------------------ verdicts
def test_one_run_of_500_resolves_about_3_6_points() -> None:
    """From the pairs themselves: 17 % come out differently, nothing is lost. Of Verified's repositories it is less."""
    sizes = REPOSITORIES["verified"]
    repositories = [name for name, size in sizes.items() for _ in range(size)]
    pairs = [InstancePair(f"i-{i}", repositories[i * 37 % 500], float(i < 43), float(43 <= i < 85)) for i in range(500)]
    result = difference(pairs)
    assert (result.reference_only, result.candidate_only, result.num_instances, result.num_repositories) == (43, 42, 500, 12)
    assert round(100 * result.resolution, 1) == 3.6
    assert result.by_repository is not None and result.drop == result.by_instance.model_copy(
        update={
            "low": min(result.by_instance.low, result.by_repository.low),
            "high": max(result.by_instance.high, result.by_repository.high),
            "coverage": "at_least",
        }
    )
    assert result.degrees_of_freedom == pytest.approx(3.33, abs=0.005)
    assert (result.by_repository.high, result.resolution_by_repository) == (1.0, None)
    assert result.num_equal_repositories == pytest.approx(500**2 / sum(size**2 for size in sizes.values()))
    resolves = "One run of 500 instances resolves about ±3.6 points (17 % of the instances come out differently)."
    assert resolution_sentence(result) == resolves
    by_instance = f"{-100 * result.by_instance.low:.1f} gained to {100 * result.by_instance.high:.1f} lost"
    assert sentence(pairs, 0.95) == (
        f"By instance {by_instance}; 12 repositories count as 3.9 of equal size: damage that one repository in five has is in "
        "none of them with a chance of 42 %, so nothing is claimed of other repositories (17 would allow it; `estimand: "
        f"these_clusters` claims it of these). {resolves}"
    )
    assert difference(pairs, of_these_repositories=True).drop == result.by_instance
    assert sentence(pairs, 0.95, of_these_repositories=True) == (
        f"The interval is for instances like these of these 12 repositories, not for other repositories. {resolves}"
    )


def test_so_many_repositories_of_equal_size_allow_a_claim_about_others() -> None:
    pairs = [InstancePair(f"i-{i}", f"r-{i % 42}", float(i < 26), float(26 <= i < 51)) for i in range(300)]
    result = difference(pairs)
    assert result.by_repository is not None and result.by_repository.high < 0.1
    assert result.resolution_by_repository == pytest.approx(result.resolution * stats.t.ppf(0.975, 41) / 1.95996, rel=1e-2)
    by_instance, by_repository = (
        f"{-100 * one.low:.1f} gained to {100 * one.high:.1f} lost" for one in (result.by_instance, result.by_repository)
    )
    assert sentence(pairs, 0.95) == (
        f"By instance {by_instance}, with 42 repositories as clusters {by_repository} (t with 40.9 degrees of freedom); "
        "the wider end counts: the verdict is about repositories like these, not these instances only. "
        + resolution_sentence(result)
    )


@pytest.mark.parametrize(
    ("num_repositories", "told"),
    [
        (
            1,
            "1 repository counts as 1.0 of equal size: damage that one repository in five has is in none of them with "
            "a chance of 80 %",
        ),
        (
            4,
            "4 repositories count as 4.0 of equal size: damage that one repository in five has is in none of them "
            "with a chance of 41 %",
        ),
    ],
)
def test_few_repositories_that_differ_in_nothing_say_nothing_of_others(num_repositories: int, told: str) -> None:
    pairs = [InstancePair(str(i), f"r-{i % num_repositories}", 1.0, 1.0) for i in range(40)]
    assert sentence(pairs, 0.95).startswith(f"By instance 8.8 gained to 8.8 lost; {told}, so nothing is claimed of other")


@pytest.mark.parametrize("num_trajectories", [1, 8])
def test_the_resolution_of_several_trajectories_is_that_of_their_means(num_trajectories: int) -> None:
    """500 instances, each resolved with a chance of its own by both sides: the half-width is that of the differences drawn."""
    rng = np.random.default_rng(8)
    chances = rng.beta(0.35, 0.35, 500)
    drawn = rng.binomial(num_trajectories, chances, (2, 2000, 500)) / num_trajectories
    truth = 1.96 * (drawn[0] - drawn[1]).mean(axis=1).std()
    result = [
        difference(
            [
                InstancePair(str(i), str(i), reference, candidate)
                for i, (reference, candidate) in enumerate(zip(*one, strict=True))
            ]
        )
        for one in drawn[:, :5].transpose(1, 0, 2).tolist()
    ]
    assert [one.resolution for one in result] == pytest.approx([truth] * 5, rel=0.12)
    assert ("root mean square" in resolution_sentence(result[0])) == (num_trajectories > 1)


def test_without_any_difference_a_run_still_resolves_only_so_much() -> None:
    pairs = [InstancePair(f"i-{i}", f"r-{i % 3}", 1.0, 1.0) for i in range(10)]
    result = difference(pairs)
    assert (result.by_instance, result.drop.low, result.drop.high) == (paired_difference(0, 0, 10), result.by_instance.low, 1.0)
    assert result.resolution == pytest.approx(result.by_instance.high, abs=1e-9)


def test_repositories_that_fall_together_widen_the_interval() -> None:
    """Eight losses in one repository of four, or spread over all four: the same counts, not the same evidence."""
    together = [InstancePair(f"i-{i}", f"r-{i // 20}", 1.0, float(not i < 8)) for i in range(80)]
    spread = [InstancePair(f"i-{i}", f"r-{i // 20}", 1.0, float(i % 20 >= 2)) for i in range(80)]
    narrow, wide = difference(spread), difference(together)
    assert narrow.by_instance == wide.by_instance == paired_difference(8, 0, 80)
    assert narrow.drop.low == narrow.by_instance.low  # every repository lost the same share
    assert narrow.drop.high == wide.drop.high == 1.0  # four repositories say nothing of others
    assert wide.drop.low < 0 < narrow.drop.low


def test_the_cluster_interval_agrees_with_a_regression_on_a_constant_with_clustered_errors() -> None:
    import statsmodels.api as sm

    rng = np.random.default_rng(7)
    repository = rng.permutation(np.repeat(np.arange(10), 12))
    reference = (rng.random(120) < 0.7).astype(float)
    candidate = (rng.random(120) < 0.5 + 0.03 * repository).astype(float)
    pairs = [InstancePair(str(i), str(repository[i]), reference[i], candidate[i]) for i in range(120)]
    fit = sm.OLS(reference - candidate, np.ones(120)).fit(
        cov_type="cluster", cov_kwds={"groups": repository, "use_correction": False, "df_correction": True}, use_t=True
    )
    result = difference(pairs).by_repository
    assert result is not None
    half = fit.bse[0] * np.sqrt(10 / 9) * 2.2621571628  # equally large: CR2 is the usual factor, with t of 9 degrees at 97.5 %
    by_t = clustered_mean([pair.reference - pair.candidate for pair in pairs], repository).interval()
    assert [by_t.value, by_t.low, by_t.high] == pytest.approx([fit.params[0], fit.params[0] - half, fit.params[0] + half])
    assert (result.value, result.high) == (by_t.value, 1.0)
    assert result.low <= by_t.low


def as_task(results: dict[tuple[str, int], bool | None]) -> TaskResult:
    items = tuple(
        item_result(item, correct, sample=sample, finish_reason=None, cluster=item[0])
        for (item, sample), correct in results.items()
    )
    return TaskResult(
        task="swe", kind="swe", num_items=len(items), num_failed=0, num_truncated=0, accuracy=None, mean_output_tokens=None,
        max_tokens=1, items=items,
    )  # fmt: skip


def test_several_trajectories_of_an_instance_are_one_share() -> None:
    reference = as_task(
        {("a-1", 0): True, ("a-1", 1): False, ("b-1", 0): True, ("b-1", 1): True, ("c-1", 0): True, ("c-1", 1): None}
    )
    candidate = as_task({("a-1", 0): False, ("a-1", 1): False, ("b-1", 0): True, ("b-1", 1): True, ("d-1", 0): True})
    assert pair_instances(reference, candidate) == [InstancePair("a-1", "a", 0.5, 0.0), InstancePair("b-1", "b", 1.0, 1.0)]
    result = difference(pair_instances(reference, candidate))
    assert (result.drop.value, result.reference_only, result.candidate_only) == (0.25, 1, 0)


def test_what_a_run_can_show_and_needs_follows_the_repositories() -> None:
    """Twelve losses in one repository of four: t of 3 degrees, where 80 independent instances would show half of that loss."""
    reference = as_task({(f"{i % 4}-{i}", 0): True for i in range(80)})
    candidate = as_task({(f"{i % 4}-{i}", 0): not (i % 4 == 0 and i < 48) for i in range(80)})
    pairs = pair_items(reference, candidate)
    error = np.sqrt(sum((drop - 0.15) ** 2 for drop in (0.6, 0.0, 0.0, 0.0)) / 3 / 4)
    assert pairs.discordant == (12, 0)
    assert pairs.detectable() == pytest.approx(error * stats.t.ppf([0.975, 0.8], 3).sum())
    assert pairs.detectable() > 4 * minimum_detectable_effect(12, 0, 80)
    times = pairs.needed(0.10, 0.95, 0.8) / 80
    assert error / np.sqrt(times) * stats.t.ppf([0.975, 0.8], 3 * times).sum() == pytest.approx(0.10, rel=0.01)
    assert 80 * times > 10 * items_for_margin(12, 0, 80, 0.10)


def test_a_gate_says_a_word_only_if_clusters_would_say_it_too() -> None:
    from assay_evaluate.statistics.decisions import decide, paired_evidence

    together = [InstancePair(f"i-{i}", f"r-{i // 20}", 1.0, float(not i < 12)) for i in range(80)]
    alone = paired_evidence(12, 0, 80, 0.05)
    drops, repositories = [pair.reference - pair.candidate for pair in together], [pair.repository for pair in together]
    widened = widen_by_clusters(alone, clustered_mean(drops, repositories))
    assert decide(alone, min_items=30) == "FAIL"
    assert decide(widened, min_items=30) == "UNDERPOWERED"
    assert widened.p_difference == pytest.approx(mcnemar([[0, 12], [0, 0]], exact=True).pvalue / 2)  # mid-p at 12 : 0
    assert widen_by_clusters(alone, None) is alone
    ours = as_task({(f"{i % 4}-{i}", 0): True for i in range(80)})
    assert pair_items(ours, ours).evidence(0.1, level=0.95).p_fail > 0.9  # no spread between repositories


# ------------------------------------------------------------------------------------------------ reports of the harness
def report(resolved: bool, f2p: tuple[list[str], list[str]], p2p: tuple[list[str], list[str]]) -> dict[str, Any]:
    return {
        "tiny__roman-2": {
            "patch_is_None": False, "patch_exists": True, "patch_successfully_applied": True, "resolved": resolved,
            "infra_failure": False,
            "tests_status": {
                "FAIL_TO_PASS": {"success": f2p[0], "failure": f2p[1]}, "PASS_TO_PASS": {"success": p2p[0], "failure": p2p[1]},
            },
        }
    }  # fmt: skip


def test_a_report_is_believed_when_it_follows_from_its_own_lists() -> None:
    assert read_report(report(True, (["t::a"], []), (["t::b"], [])), ROW) == Grade("resolved")
    assert read_report(report(False, ([], ["t::a"]), (["t::b"], [])), ROW) == Grade("unresolved")
    assert read_report(report(False, (["t::a"], []), ([], ["t::b"])), ROW) == Grade("unresolved")
    for bad in (report(True, ([], ["t::a"]), (["t::b"], [])), report(True, ([], []), (["t::b"], []))):
        with pytest.raises(MeasureError, match=r"tiny__roman-2: the harness says resolved=True, its own lists .* not believed"):
            read_report(bad, ROW)


@pytest.mark.parametrize("bad", [{}, {"tiny__roman-2": {"resolved": True}}, {"tiny__roman-2": None}])
def test_a_report_in_another_form_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(MeasureError, match=r"another form than swebench 5"):
        read_report(bad, ROW)


# ------------------------------------------------------------------------------------------------ data sets and suites
def options(dataset: Path, **more: Any) -> SweTask:
    return SweTask(kind="swe", name="swe", dataset=str(dataset), max_tokens=10, **more)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_filter_then_slice_over_sorted_ids(tmp_path: Path) -> None:
    row = {**ROW, "problem_statement": "U+2028 ends no line:\u2028it is part of a string"}
    path = write_rows(tmp_path / "test.jsonl", *({**row, "instance_id": f"{r}__{r}-{i}"} for i in range(3) for r in "ba"))
    assert [row["instance_id"] for row in load_instances(options(tmp_path))] == [
        f"{r}__{r}-{i}" for r in "ab" for i in range(3)
    ]
    chosen = load_instances(options(path, filter="b__", slice="1:"))
    assert [row["instance_id"] for row in chosen] == ["b__b-1", "b__b-2"]
    with pytest.raises(MeasureError, match=r"no instance is left \(filter 'c', slice None\)"):
        load_instances(options(path, filter="c"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, r"in the old schema \(as in the princeton-nlp data sets\): it lacks image; take .* SWE-bench/"),
        ({"eval_script": None, "log_parser": None}, r"it lacks eval_script, log_parser"),
        ({"patch": None}, r"tiny__roman-2 lacks patch; a row needs instance_id, "),
        ({"instance_id": "../up"}, r"'\.\./up' cannot be an instance id"),
        ({"eval_type": "maybe"}, r"eval_type 'maybe'; allowed: pass_and_fail, fail_only"),
    ],
)
def test_rows_that_cannot_be_graded_are_one_line(change: dict[str, Any], message: str) -> None:
    row = {key: value for key, value in (ROW | change).items() if value is not None}
    with pytest.raises(MeasureError, match=message):
        check_rows([row], "data")


def test_data_sets_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"missing\.jsonl: cannot be read \(No such file or directory\)"):
        load_instances(options(tmp_path / "missing.jsonl"))
    with pytest.raises(MeasureError, match=r"no test\.jsonl, test\.json or test\.parquet in it"):
        load_instances(options(tmp_path))
    (tmp_path / "test.jsonl").write_text("{")
    with pytest.raises(MeasureError, match=r"not jsonl"):
        load_instances(options(tmp_path))
    with pytest.raises(MeasureError, match="occurs twice"):
        check_rows([ROW, ROW], "data")


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "test.parquet")
    assert load_instances(options(tmp_path)) == [ROW]


def test_every_sampling_parameter_is_pinned(tmp_path: Path) -> None:
    task = options(tmp_path, temperature=0.7, top_p=0.9, top_k=20, thinking_tokens=5, step_limit=33)
    reported = settings_for(task, {"enable_thinking": True})
    assert reported.model["model_kwargs"] == {
        "temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 10,
        "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0, "thinking_token_budget": 5,
        "chat_template_kwargs": {"enable_thinking": True}, "parallel_tool_calls": True,
    }  # fmt: skip
    assert (reported.agent["step_limit"], reported.agent["cost_limit"], reported.agent["max_consecutive_format_errors"]) == (
        33,
        0.0,
        3,
    )
    assert reported.sha256 != settings_for(options(tmp_path, temperature=0.6)).sha256
    assert settings_for(options(tmp_path, num_agents=1)).sha256 == settings_for(options(tmp_path, num_agents=9)).sha256


def test_an_agent_config_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("agent: {system_template: s, instance_template: '{{task}}'}\nmodel: {observation_template: o}\n")
    assert settings_for(options(tmp_path, agent_config=str(path))).agent["system_template"] == "s"
    path.write_text("agent: {}\n")
    with pytest.raises(MeasureError, match=r"mine\.yaml: not a mini-swe-agent config \('system_template'\)"):
        settings_for(options(tmp_path, agent_config=str(path)))
    with pytest.raises(MeasureError, match=r"gone\.yaml: cannot be read"):
        settings_for(options(tmp_path, agent_config=str(tmp_path / "gone.yaml")))


@pytest.mark.parametrize("name", ["swe-tiny", "swe-verified", "swe-lite", "swe-multilingual"])
def test_the_suites_ask_one_swe_task_with_limits_for_slow_models(name: str) -> None:
    (task,) = load_recipe(SuiteRecipe, name).tasks
    assert isinstance(task, SweTask)
    if name != "swe-tiny":
        assert task.pull_timeout_s >= 1800 and task.container_timeout == "24h" and task.temperature > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("environment: local", r"environment local runs what the model writes on this machine"),
        ("slice: one", r"slice: String should match pattern"),
        ("filter: '('", r"filter '\(' is not a regular expression"),
        ("enviroment: docker", r"did you mean 'environment'\?"),
    ],
)
def test_a_suite_that_makes_no_sense_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema: 1\nname: mine\nseed: eval-1\ntasks:\n  - kind: swe\n    name: swe\n    dataset: lite\n    max_tokens: 1\n"
        f"    {line}\n"
    )
    with pytest.raises(RecipeError, match=message):
        parse_recipe(SuiteRecipe, path)


def test_instances_can_be_chosen_on_the_command_line(tmp_path: Path) -> None:
    suite = load_recipe(SuiteRecipe, "swe-tiny")
    (task,) = with_swe_options(suite, slice_="0:2", filter_="tiny__r", num_repeats=3).tasks
    assert isinstance(task, SweTask) and (task.slice, task.filter, task.num_repeats) == ("0:2", "tiny__r", 3)
    assert with_swe_options(suite) == suite
    with pytest.raises(RecipeError, match=r"--slice: String should match pattern"):
        with_swe_options(suite, slice_="some")
    with pytest.raises(RecipeError, match=r"suite quick has no SWE-bench task"):
        with_swe_options(load_recipe(SuiteRecipe, "quick"), num_repeats=2)


def test_an_exit_is_read_from_files_of_others() -> None:
    assert exit_of({}).fault == "infrastructure"
    assert exit_of({"info": {"exit_status": "Submitted"}}).fault == "model"

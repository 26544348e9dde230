"""A whole run. First against scripted servers, where everything is known; at the end against a real vLLM."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import Scripted, plain_logits
from given_servers import scaled_logits
from scripted_world import PROFILE, World, make_folders, pair_of
from small_suite import ANSWERS, SERVING, SUITE, solve

from assay.errors import CheckpointError, MeasureError
from assay.file_data import data_of_files
from assay.recipes.suite import SuiteRecipe
from assay.records.base import sha256_of_file
from assay.records.manifest import Manifest, ShardRecord
from assay.records.measurement import Measurement, TaskResult
from assay.records.verification import Verification
from assay_evaluate.client.journal import Journal
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.run.identity import checkpoint_sha256


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return make_folders(tmp_path)


def run(
    world: World, folders: dict[str, Path], suite: SuiteRecipe = SUITE, lines: list[str] | None = None
) -> list[Measurement]:
    candidates = pair_of(folders)[::-1]  # whatever the order, the reference comes first
    run_dir, on_progress = folders["reference"].parent / "run", (lines if lines is not None else []).append
    return world.measure(run_dir, candidates, suite, serving=SERVING, on_progress=on_progress)


def shifted_logits(last: int) -> list[float]:
    """The candidate's: the reference's, times 1.1."""
    return [1.1 * value for value in plain_logits(last)]


def exact_kl_mean(run_dir: Path) -> float:
    """Full-vocabulary KL over the kept texts, from the two logit functions themselves."""
    with Journal(run_dir / "journal.db") as journal:
        rows = journal._execute("SELECT items FROM items WHERE what = 'divergence.write'")
    values = []
    for document in json.loads(rows[0][0])[0]["documents"]:
        ids = document["prompt_ids"] + document["reply_ids"]
        for at in range(len(document["prompt_ids"]), len(ids)):
            p, q = (np.array(logits(ids[at - 1])) for logits in (plain_logits, shifted_logits))
            p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
            values.append(float((np.exp(p) * (p - q)).sum()))
    return float(np.mean(values))


@pytest.mark.slow
def test_whole_run(world: World, folders: dict[str, Path]) -> None:
    """The candidate gets two sums wrong, one is cut off, and its logits are the reference's times 1.1."""
    wrong = list(ANSWERS)[:2]

    def reply(body: dict[str, Any]) -> Scripted:
        prompt = body["messages"][-1]["content"]
        if prompt in wrong:
            return Scripted("#### 1000", finish_reason="length" if prompt == wrong[0] else "stop", speculation=(4, 4, 0))
        return solve(body)

    world.reply["candidate"] = reply
    world.options["candidate"] = {"logits": shifted_logits}
    lines: list[str] = []
    reference, repeat, candidate = run(world, folders, lines=lines)

    assert [m.label for m in (reference, repeat, candidate)] == ["fp8", "fp8-repeat", "w4a16"]
    assert [m.is_reference for m in (reference, repeat, candidate)] == [True, False, False]
    assert [m.is_noise_floor for m in (reference, repeat, candidate)] == [False, True, False]
    assert len({m.reference_checkpoint_sha256 for m in (reference, repeat, candidate)}) == 1
    assert reference.checkpoint_bytes == len(b"weights of reference")
    for measured in (reference, repeat):
        assert [(t.task, t.num_items, t.accuracy.value) for t in measured.tasks if t.accuracy] == [
            ("arithmetic", 10, 1.0),
            ("needle", 4, 1.0),
        ]
    arithmetic, needle = candidate.tasks
    assert [item.correct for item in arithmetic.items] == [False, False, *[True] * 8]
    assert [item.truncated for item in arithmetic.items] == [True, *[False] * 9]
    assert (arithmetic.num_truncated, arithmetic.num_failed) == (1, 0)
    assert needle.note == "not measured at 5000 tokens: 5000 + 32 tokens of reply do not fit max_model_len 4096"
    assert needle.accuracy is not None
    prompt_tokens = [item.prompt_tokens for item in needle.items]
    assert all(540 <= n <= 600 for n in prompt_tokens if n is not None), prompt_tokens
    assert prompt_tokens == [item.prompt_tokens for item in reference.tasks[1].items]

    assert reference.divergence is None
    assert repeat.divergence is not None
    assert (repeat.divergence.kl_mean.value, repeat.divergence.kl_max, repeat.divergence.top1_agreement.value) == (0, 0, 1)
    assert candidate.divergence is not None
    exact = exact_kl_mean(folders["reference"].parent / "run")
    assert candidate.divergence.kl_mean.value == pytest.approx(exact, abs=1e-5)
    assert exact > 1e-3
    assert (candidate.divergence.num_documents, candidate.divergence.num_positions) == (6, 6 * len("old kettle"))
    assert candidate.divergence.top_k == 128  # the vocabulary has no more
    assert set(candidate.divergence.by_language) == {"en", "zh"}

    assert reference.acceptance is not None
    assert reference.acceptance == repeat.acceptance
    assert reference.acceptance.model_dump() == {
        "num_drafts": 48, "num_draft_tokens": 48, "num_accepted_tokens": 34, "rate": 34 / 48, "mean_length": 1 + 34 / 48,
        "num_replies": 14, "rate_standard_error": pytest.approx(0.0213174, abs=1e-6),
    }  # fmt: skip
    assert candidate.acceptance is not None
    assert candidate.acceptance.num_accepted_tokens == 28
    assert candidate.not_measured == {}
    assert candidate.divergence.no_structural == "candidate: no added tokens in tokenizer.json or tokenizer_config.json"
    assert candidate.fingerprint.server == "scripted"
    assert any(line.startswith("w4a16: arithmetic: all 10, ") for line in lines)
    # Same questions to both, byte for byte; another order for the noise floor.
    asked = {name: [b for p, b in world.servers[name][0].requests if p == "/v1/chat/completions"] for name in folders}
    first = [body["messages"] for body in asked["candidate"]]
    assert all(messages in [body["messages"] for body in asked["reference"]] for messages in first)


@pytest.mark.slow
def test_second_run_starts_no_server(world: World, folders: dict[str, Path]) -> None:
    first = run(world, folders)
    asked = {name: world.num_asked(name) for name in folders}
    lines: list[str] = []
    assert run(world, folders, lines=lines) == first
    assert {name: world.num_asked(name) for name in folders} == asked
    assert [len(servers) for servers in world.servers.values()] == [1, 1]
    day = first[0].started[:10]
    assert lines == [
        f"fp8: measured already, on {day}; `--again fp8` measures it anew",
        f"fp8-repeat: measured already, on {day}; `--again fp8` measures it anew",
        f"w4a16: measured already, on {day}; `--again w4a16` measures it anew",
    ]


@pytest.mark.slow
def test_changed_checkpoint_suite_or_flags_are_measured_again(world: World, folders: dict[str, Path]) -> None:
    run(world, folders)
    before = world.num_asked("candidate")
    (folders["candidate"] / "model.safetensors").write_bytes(b"other weights altogether")
    again = run(world, folders)[2]
    assert world.num_asked("candidate") == 2 * before
    assert len(world.servers["reference"]) == 1
    world.flags = {name: {"max-num-seqs": 4} for name in folders}
    assert run(world, folders)[2].fingerprint.flags == {"max-num-seqs": 4}
    assert world.num_asked("candidate") == 3 * before
    hotter = SUITE.tasks[0].model_copy(update={"temperature": 0.5})
    run(world, folders, SUITE.model_copy(update={"tasks": (hotter,)}))
    assert again.checkpoint_sha256 != run(world, folders)[0].checkpoint_sha256


@pytest.mark.slow
def test_death_of_the_server_loses_nothing(world: World, folders: dict[str, Path]) -> None:
    """The candidate's server dies after seven replies; the next run asks only the rest and equals an undisturbed one."""
    num_replies = 0

    def reply(body: dict[str, Any]) -> Scripted:
        nonlocal num_replies
        num_replies += 1
        if num_replies == 8:
            world.servers["candidate"][-1].die()
        return solve(body)

    world.reply["candidate"] = reply
    world.options["candidate"] = {"logits": functools.partial(scaled_logits, 1.0)}
    with pytest.raises(MeasureError, match="Engine core died"):
        run(world, folders)
    assert not (folders["reference"].parent / "run" / "measurements" / "w4a16.json").exists()
    disturbed = run(world, folders)[2]
    assert disturbed.notes[0].startswith("answers as fp8 does, though their files differ")
    chats = [p for server in world.servers["candidate"] for p, _ in server.requests].count("/v1/chat/completions")
    # ten sums and four needles, each asked twice; again only what was in flight when it died
    assert 2 * 14 + 1 <= chats <= 2 * 14 + 3
    assert len(world.servers["reference"]) == 1

    shutil.rmtree(folders["reference"].parent / "run")
    world.reply.clear()
    undisturbed = run(world, folders)[2]
    volatile = {"started", "seconds", "requests_in_flight_share", "mean_requests_in_flight"}
    assert disturbed.model_dump(exclude=volatile) == undisturbed.model_dump(exclude=volatile)


@pytest.mark.slow
def test_lost_journal_measures_the_reference_again(world: World, folders: dict[str, Path]) -> None:
    run(world, folders)
    for file in (folders["reference"].parent / "run").glob("journal.db*"):
        file.unlink()
    (folders["candidate"] / "model.safetensors").write_bytes(b"other weights altogether")
    reference, _, candidate = run(world, folders)
    assert candidate.divergence is not None
    assert candidate.divergence.reference_checkpoint_sha256 == reference.checkpoint_sha256
    assert len(world.servers["reference"]) == 2


@pytest.mark.parametrize("can_foresee", [True, False])
def test_unlike_serving_is_refused(world: World, folders: dict[str, Path], can_foresee: bool) -> None:
    """Before any server starts where it can be foreseen, else as soon as the server tells."""
    world.can_foresee = can_foresee
    world.flags["candidate"] = {"max-num-seqs": 4, "seed": 1}
    with pytest.raises(MeasureError) as caught:
        run(world, folders)
    assert "flags.max-num-seqs: 16 against 4; flags.seed: None against 1" in str(caught.value)
    assert ("reference" in world.servers) is not can_foresee
    assert world.num_asked("candidate") == 0


@pytest.mark.slow
def test_checkpoint_without_chat_template_is_asked_in_plain_text(world: World, folders: dict[str, Path]) -> None:
    world.options = {name: {"chat_template": False} for name in folders}
    world.reply = {name: lambda body: Scripted("x" * 64, finish_reason="length") for name in folders}
    _, _, candidate = run(world, folders)
    assert candidate.notes[0] == "the checkpoint has no chat template: questions were asked as plain completions"
    assert [(t.num_items, t.num_truncated, t.num_failed) for t in candidate.tasks] == [(10, 10, 0), (4, 4, 0)]
    assert candidate.divergence is not None
    assert candidate.not_measured == {"acceptance": "the server drafted nothing"}
    assert {p for p, _ in world.servers["candidate"][0].requests} == {"/tokenize", "/v1/chat/completions", "/v1/completions"}


def test_server_without_token_ids_says_why_divergence_is_missing(world: World, folders: dict[str, Path]) -> None:
    world.options = {name: {"token_ids": False, "tokenize": False, "max_model_len": 700} for name in folders}
    for measured in run(world, folders):
        assert measured.divergence is None
        assert "no token ids" in measured.not_measured["divergence"]
        assert measured.tasks[1].accuracy is not None  # needles were sized by the billed prompt tokens
    asked = world.num_asked("candidate")
    run(world, folders)
    assert world.num_asked("candidate") == asked


def test_a_run_needs_one_reference_and_checkpoints_that_exist(world: World, folders: dict[str, Path]) -> None:
    arguments: dict[str, Any] = {"suite": SUITE, "profile": PROFILE, "serving": SERVING, "run_dir": folders["reference"].parent}
    for candidates, words in (
        ([Candidate("a", folders["candidate"])], "one reference, 0 are marked"),
        ([Candidate("a", folders["reference"], True), Candidate("a", folders["candidate"])], "'a' is used twice"),
        ([Candidate("a", folders["reference"], True), Candidate("a-repeat", folders["candidate"])], "'a-repeat' is used twice"),
    ):
        with pytest.raises(MeasureError, match=words):
            evaluate("tiny", candidates, start_server=world.start, foresee=world.foresee, **arguments)
    with pytest.raises(CheckpointError, match="nowhere: no checkpoint there"):
        evaluate("tiny", [Candidate("a", Path("nowhere"), True)], start_server=world.start, foresee=world.foresee, **arguments)


def manifest_of(folder: Path) -> Manifest:
    """What assay would have written, had it made this folder."""
    shard = folder / "model.safetensors"
    record = ShardRecord(
        name=shard.name, num_bytes=shard.stat().st_size, sha256=sha256_of_file(shard), relative_error={}, seconds=1
    )
    return Manifest(
        model="m", precision="p", source="s", source_sha256="s", source_files={}, recipe_sha256="r", plan_sha256="p",
        precision_recipe={}, shards=(record,), files={"config.json": sha256_of_file(folder / "config.json")}, bytes_in=1,
        bytes_out=1, versions={}, seconds=1,
    )  # fmt: skip


def test_a_checkpoint_that_is_not_what_was_made_is_told_before_it_is_served(world: World, folders: dict[str, Path]) -> None:
    """Values changed and sizes did not: no header shows it, and the hash that identifies the checkpoint does."""
    for folder in folders.values():
        manifest_of(folder).save(folder / "assay_manifest.json")
    shard = folders["candidate"] / "model.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))
    lines: list[str] = []
    reference, _, candidate = run(world, folders, lines=lines)
    note = (
        f"files of {folders['candidate']} are not those that assay made, by their SHA-256 in assay_manifest.json; "
        f"`assay verify {folders['candidate']}` names what differs"
    )
    assert [line for line in lines if "assay verify" in line] == [f"w4a16: {note}"]
    assert lines.index(f"w4a16: {note}") < next(at for at, line in enumerate(lines) if line.startswith("w4a16: suite"))
    assert ([note in measured.notes for measured in (reference, candidate)]) == [False, True]


def test_checkpoint_hash_trusts_a_manifest_only_if_the_files_agree(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["reference"]
    shard = folder / "model.safetensors"
    with Journal(tmp_path / "journal.db") as journal:
        without, size = checkpoint_sha256(folder, journal.file_sha256), shard.stat().st_size
        manifest = manifest_of(folder)
        manifest.save(folder / "assay_manifest.json")
        assert checkpoint_sha256(folder, journal.file_sha256) == manifest.checkpoint_sha256
        (folder / "config.json").write_text(json.dumps({"vocab_size": 129}))
        edited = checkpoint_sha256(folder, journal.file_sha256)
        assert edited not in {manifest.checkpoint_sha256, without}
        (folder / "config.json").write_text(json.dumps({"vocab_size": 128}))
        shard.write_bytes(bytes(size))
        other = checkpoint_sha256(folder, journal.file_sha256)
        assert other not in {manifest.checkpoint_sha256, without, edited}, "of the same size"
        verified = Verification(
            checkpoint=str(folder), checkpoint_sha256=manifest.checkpoint_sha256, source=None, passed=True, damages=(),
            checks={}, files={}, not_checked=(), worst_relative_error={}, mean_relative_error={}, bytes_by_role={}, seconds=1,
        )  # fmt: skip
        (folder / "assay_plan.json").touch()
        verified.save(folder / "assay_verify.json")
        assert checkpoint_sha256(folder, journal.file_sha256) == other, "the record is of other files"
        files = data_of_files(folder, ("config.json", shard.name))
        verified.model_copy(update={"files": files}).save(folder / "assay_verify.json")
        assert checkpoint_sha256(folder, journal.file_sha256) == manifest.checkpoint_sha256
        (folder / "generation_config.json").write_text("{}")
        assert checkpoint_sha256(folder, journal.file_sha256) != manifest.checkpoint_sha256


# ------------------------------------------------------------------------------------------------ a real server
def _without_ids(task: TaskResult) -> dict[str, Any]:
    """But for ids, which are new for each reply, and what is counted in the first pass only."""
    items = tuple(dataclasses.replace(item, reply_key=None) for item in task.items)
    return task.model_copy(update={"items": items, "served": None}).model_dump()


@pytest.mark.serve
def test_real_vllm(tmp_path: Path) -> None:
    """A tiny random checkpoint with MTP: noise for replies, yet every part is measured, and it does not diverge from itself."""
    from tiny_checkpoints import make_tiny_glm4_moe

    folder = make_tiny_glm4_moe(tmp_path / "tiny", max_position=1024)
    suite = SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "small", "seed": "eval-real",
            "tasks": [
                {"kind": "arithmetic", "name": "arithmetic", "num_items": 3, "num_steps": [2], "max_tokens": 24},
                {"kind": "needle", "name": "needle", "num_items": 2, "num_needles": 2, "max_tokens": 16,
                 "lengths_tokens": [500]},
            ],
            "divergence": {"num_documents": 2, "max_tokens": 24, "top_k": 32},
        }
    )  # fmt: skip
    lines: list[str] = []
    arguments: dict[str, Any] = {
        "suite": suite, "profile": PROFILE, "serving": SERVING, "run_dir": tmp_path / "run", "on_progress": lines.append,
    }  # fmt: skip
    reference, repeat = evaluate("tiny", [Candidate("bf16", folder, True)], **arguments)
    for measured in (reference, repeat):
        arithmetic, needle = measured.tasks
        assert (arithmetic.num_items, arithmetic.num_failed, needle.num_items, needle.num_failed) == (6, 0, 4, 0)
        assert arithmetic.num_truncated >= 5  # random weights end a reply once in a few hundred tokens
        assert all(450 <= (item.prompt_tokens or 0) <= 500 for item in needle.items)
        assert measured.not_measured == {}
        assert measured.acceptance is not None
        assert measured.acceptance.num_draft_tokens > 50
        assert measured.fingerprint.speculation is not None
    assert [_without_ids(task) for task in reference.tasks] == [_without_ids(task) for task in repeat.tasks]
    assert repeat.divergence is not None
    assert repeat.divergence.num_positions > 60
    assert repeat.divergence.num_non_finite == 0
    assert repeat.divergence.kl_max < 1e-6
    assert repeat.divergence.top1_agreement.value == 1
    assert 0 < repeat.divergence.tail_mass_mean < 1
    lines.clear()
    assert evaluate("tiny", [Candidate("bf16", folder, True)], **arguments) == [reference, repeat]
    day = reference.started[:10]
    already = f"measured already, on {day}; `--again bf16` measures it anew"
    assert lines == [f"bf16: {already}", f"bf16-repeat: {already}"]

"""Which folder a run is in, what may stand in it, what becomes of what it held: the command line against scripted servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error, perturbed
from fake_server import Scripted
from given_servers import GivenServers, given_servers
from probe_reports import CLEAN, probed
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import AssayError
from assay.records.base import sha256_of, sha256_of_file
from assay.records.manifest import Manifest
from assay.records.measurement import Measurement
from assay.records.probe import load_probes
from assay.records.run import ReferenceCheckpoint, RunRecord, SourceData, SuiteIdentity
from assay_evaluate.run.identity import checkpoint_sha256
from assay_evaluate.run.set_aside import make_room_for_probes
from assay_pipeline.run_folders import choose_run, find_run, locked_run, read_run, run_of
from assay_reports.run import load_run
from assay_reports.schema import Report

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def server(run: Run) -> Iterator[GivenServers]:
    """A server for every label; in the working directory a profile that names them, and two suites."""
    with given_servers("fp8", "w4a16", "nvfp4", "bf16") as server:
        Path("here.yaml").write_text(server.profile())
        for suite, num_steps in (("one", 2), ("two", 3)):
            task = f"{{kind: arithmetic, name: arithmetic, num_items: 2, num_steps: [{num_steps}], max_tokens: 32}}"
            Path(f"{suite}.yaml").write_text(
                f"schema: 1\nname: {suite}\nseed: eval-{suite}\nacceptance: false\ntasks: [{task}]\n"
            )
        yield server


def evaluate(run: Run, *arguments: object, suite: str = "one") -> tuple[int, str, str]:
    return run("evaluate", *arguments, "--suite", f"{suite}.yaml", "--profile", "here.yaml")


def refused(run: Run, *arguments: object, suite: str = "one") -> str:
    """The line of an evaluation that is refused. Quiet: folders without weights of a model are called damaged first."""
    return one_error(run("--quiet", "evaluate", *arguments, "--suite", f"{suite}.yaml", "--profile", "here.yaml"))


def evaluated(run: Run, *arguments: object, suite: str = "one") -> str:
    """What a successful evaluation prints: results, then progress."""
    code, out, err = evaluate(run, *arguments, suite=suite)
    assert code == 0, err
    return out + err


def quantized(run: Run, *arguments: object) -> str:
    """What a successful quantization prints: results, then progress."""
    code, out, err = run("quantize", *arguments)
    assert code == 0, err
    return out + err


def write_weights(folder: Path, weights: str) -> None:
    """A safetensors file of one tensor, whose bytes are `weights`."""
    header = json.dumps({"w": {"dtype": "BOOL", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights.encode())


def make_checkpoint(base: Path, folder: Path, weights: str) -> Path:
    """A checkpoint whose weights nobody reads."""
    folder.mkdir(parents=True)
    shutil.copy(base / "config.json", folder)
    write_weights(folder, weights)
    return folder


def pair(base: Path, parent: str) -> tuple[object, ...]:
    """`--reference PARENT/fp8 --candidate PARENT/w4a16`."""
    folders = [make_checkpoint(base, Path(parent, name), f"{parent} {name}") for name in ("fp8", "w4a16")]
    return "--reference", folders[0], "--candidate", folders[1]


def measured(run_dir: str) -> dict[str, Measurement]:
    found = {path.stem: Measurement.load(path) for path in Path(run_dir, "measurements").glob("*.json")}
    return dict(sorted(found.items()))


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir() if path.is_dir())


# ------------------------------------------------------------------------------------------------ which folder
def test_a_fine_tune_of_the_same_name_and_shape_gets_a_folder_of_its_own(run: Run, base: Path) -> None:
    first, second = Path("a/checkpoint-1000"), Path("b/checkpoint-1000")
    shutil.copytree(base, first)
    perturbed(base, second, 1)
    quantized(run, first, "--precision", "w4a16")
    err = quantized(run, second, "--precision", "w4a16")
    found = RunRecord.load(Path("runs/checkpoint-1000/run.json"))
    assert found.source is not None
    manifest = Manifest.load(Path("runs/checkpoint-1000/w4a16/checkpoint/assay_manifest.json"))
    assert found == RunRecord(
        model="checkpoint-1000", source=SourceData(location=str(first), revision=None, files=manifest.source_files)
    )
    [other] = [name for name in runs() if name != "checkpoint-1000"]
    assert re.fullmatch(r"checkpoint-1000-[0-9a-f]{6}", other)
    assert f"runs/checkpoint-1000 holds checkpoints made from {first}; writing to runs/{other}\n" in err
    assert read_run(Path("runs", other)).source.location == str(second)  # type: ignore[union-attr]

    err = quantized(run, second, "--precision", "w4a16")
    assert f"writing to runs/{other}\n" in err and "done before and verified" in err and len(runs()) == 2
    assert (find_run(str(first), Path("runs")), find_run(str(second), Path("runs"))) == (
        Path("runs/checkpoint-1000"), Path("runs", other),
    )  # fmt: skip


@pytest.mark.slow
def test_a_model_retrained_in_place_and_a_second_suite(run: Run, base: Path, server: GivenServers) -> None:
    source = Path("tuned")
    shutil.copytree(base, source)
    quantized(run, source, "--precisions", "w4a16")
    evaluated(run, source, "--precisions", "w4a16")
    first = measured("runs/tuned")
    assert list(first) == ["bf16", "fp8", "fp8-repeat", "w4a16"]

    # Another suite: another folder, whose tables and cards find the checkpoints where they were made.
    err = evaluated(run, source, "--precisions", "w4a16", suite="two")
    assert "runs/tuned holds measurements of suite one; writing to runs/tuned-two\n" in err
    assert measured("runs/tuned") == first
    assert {m.suite for m in measured("runs/tuned-two").values()} == {"two"}
    report = Report.load(Path("runs/tuned-two/report/report.json"))
    assert [plan.precision for plan in report.plans] == ["fp8", "w4a16"]
    assert [(one.precision, one.is_measured_checkpoint) for one in report.verifications] == [("fp8", True), ("w4a16", True)]
    card = Path("runs/tuned/w4a16/checkpoint/README.md")
    assert "Measured with suite two, begun " in card.read_text()
    code, out, err = run("card", "runs/tuned")
    assert (code, out) == (0, "") and f"{card}: left as it is: it is about a later measurement, suite two at " in err
    assert "Measured with suite two, begun " in card.read_text()

    # Trained on in place: what was made from the old data is not served as a candidate of the new.
    asked = len(server.requests)
    for path in perturbed(base, Path("trained"), 1).glob("*.safetensors"):
        shutil.copyfile(path, source / path.name)
    message = one_error(evaluate(run, source, "--precisions", "w4a16"))
    assert re.fullmatch(
        r"runs/tuned/fp8/checkpoint: made from other data than tuned has \(model-00001-of-00002.safetensors was .*\); "
        r"make it again: assay quantize tuned --precision fp8", message
    )  # fmt: skip
    assert len(server.requests) == asked
    err = quantized(run, source, "--precisions", "w4a16")
    match = re.search(
        r"runs/tuned holds checkpoints made from tuned before its data changed \(model-00001-of-00002.safetensors was .*\); "
        r"writing to (runs/tuned-[0-9a-f]{6})\n", err
    )  # fmt: skip
    assert match is not None, err
    err = evaluated(run, source, "--precisions", "w4a16")
    assert f"writing to {match[1]}\n" in err and len(measured(match[1])) == 4
    assert measured("runs/tuned") == first


@pytest.mark.slow
def test_a_second_suite_against_the_same_reference(run: Run, base: Path, server: GivenServers) -> None:
    two = pair(base, "X")
    evaluated(run, *two)
    before = measured("runs/fp8")
    err = evaluated(run, *two, suite="two")
    assert "runs/fp8 holds measurements of suite one; writing to runs/fp8-two\n" in err
    assert measured("runs/fp8") == before and {m.suite for m in measured("runs/fp8-two").values()} == {"two"}
    # The suite's file is changed: other questions under the same name.
    Path("two.yaml").write_text(Path("two.yaml").read_text().replace("num_items: 2", "num_items: 3"))
    evaluated(run, *two, suite="two")
    assert [re.sub("[0-9a-f]{6}$", "HEX", name) for name in runs()] == ["fp8", "fp8-two", "fp8-two-HEX"]
    asked = server.count("/v1/chat/completions")
    evaluated(run, *two)
    assert server.count("/v1/chat/completions") == asked + 2 * 4, "measured already; four questions of each again"
    assert measured("runs/fp8") == before


@pytest.mark.slow
def test_two_pairs_of_checkpoints_with_equal_names(run: Run, base: Path, server: GivenServers) -> None:
    evaluated(run, *pair(base, "A"))
    before = measured("runs/fp8")
    err = evaluated(run, *pair(base, "B"))
    sha256 = measured("runs/fp8")["fp8"].checkpoint_sha256
    match = re.search(r"runs/fp8 holds comparisons with A/fp8 \(checkpoint (\w{12})\); writing to runs/(fp8-\w{6})\n", err)
    assert match is not None and match[1] == sha256[:12], err
    theirs = measured(f"runs/{match[2]}")
    assert match[2] == f"fp8-{theirs['fp8'].checkpoint_sha256[:6]}" and theirs["w4a16"].checkpoint == "B/w4a16"
    assert measured("runs/fp8") == before
    found = RunRecord.load(Path("runs/fp8/run.json"))
    assert found.reference is not None and found.reference.files is not None
    assert sorted(found.reference.files) == ["config.json", "model.safetensors"]
    assert found == RunRecord(
        model="fp8", suite=SuiteIdentity(name="one", sha256=before["fp8"].suite_sha256),
        reference=ReferenceCheckpoint(location="A/fp8", checkpoint_sha256=sha256, files=found.reference.files),
    )  # fmt: skip
    assert (find_run("A/fp8", Path("runs")), find_run("B/fp8", Path("runs"))) == (Path("runs/fp8"), Path("runs", match[2]))


def test_a_folder_called_checkpoint_is_called_by_its_parent(run: Run, base: Path, server: GivenServers) -> None:
    reference = make_checkpoint(base, Path("X/fp8/checkpoint"), "reference")
    evaluated(run, "--reference", reference, "--candidate", make_checkpoint(base, Path("X/w4a16/checkpoint"), "candidate"))
    assert runs() == ["fp8"] and list(measured("runs/fp8")) == ["fp8", "fp8-repeat", "w4a16"]


def test_a_name_of_ones_own(run: Run, base: Path, server: GivenServers) -> None:
    two = pair(base, "A")
    evaluated(run, *two, "--name", "mine")
    assert runs() == ["mine"]
    assert refused(run, *two, "--name", "mine", suite="two") == (
        "--name mine: runs/mine holds measurements of suite one; give another name, or leave --name out"
    )
    assert refused(run, *pair(base, "B"), "--name", "mine").startswith(
        "--name mine: runs/mine holds comparisons with A/fp8 (checkpoint "
    )
    assert refused(run, *two, "--name", "../mine").startswith("--name ../mine: say letters, digits, ")
    assert "--name is not used with --out, which is the folder of the checkpoint itself" in one_error(
        run("quantize", base, "--precision", "w4a16", "--out", "made", "--name", "mine")
    )


@pytest.mark.slow
def test_an_older_folder_is_taken_over_if_its_records_agree(run: Run, base: Path, server: GivenServers) -> None:
    two = pair(base, "A")
    evaluated(run, *two)
    written = RunRecord.load(Path("runs/fp8/run.json"))
    Path("runs/fp8/run.json").unlink()
    evaluated(run, *two)
    assert runs() == ["fp8"] and RunRecord.load(Path("runs/fp8/run.json")) == written

    Path("runs/fp8/run.json").unlink()
    reference = Path("runs/fp8/measurements/fp8.json")
    reference.write_text(reference.read_text().replace('"is_reference": true', '"is_reference": false'))
    err = evaluated(run, *two)
    assert "runs/fp8 holds an older run whose records do not say what it was made from; writing to runs/fp8-" in err
    assert not Path("runs/fp8/run.json").exists()


def test_of_a_model_on_the_hub_the_commit_counts(tmp_path: Path) -> None:
    def about(revision: str | None, files: dict[str, str] | None) -> RunRecord:
        return RunRecord(model="glm", source=SourceData(location="org/glm", revision=revision, files=files))

    old, new = about("a" * 40, {"m": "sha256:1"}), about("b" * 40, {"m": "sha256:1"})
    (tmp_path / "glm").mkdir()
    old.save(tmp_path / "glm" / "run.json")
    assert choose_run(tmp_path, old) == (tmp_path / "glm", None)
    assert choose_run(tmp_path, about(None, None)) == (tmp_path / "glm", None), "not known yet"
    folder, why = choose_run(tmp_path, new)
    assert folder == tmp_path / f"glm-{sha256_of(['b' * 40, {'m': 'sha256:1'}])[:6]}"
    assert why == f"{tmp_path / 'glm'} holds checkpoints made from org/glm at commit aaaaaaaaaaaa"


def test_probes_go_to_the_run_of_what_is_probed(run: Run, base: Path, server: GivenServers) -> None:
    """Of a reference to the run that compares with it; else to the folder that it would get, which stays free."""
    evaluated(run, *pair(base, "A"))
    other = make_checkpoint(base, Path("C/fp8"), "C fp8")
    assert run_of(Path("A/fp8"), "fp8", Path("runs")) == Path("runs/fp8")
    assert run_of(other, "fp8", Path("runs")) is None
    assert run_of(other, "elsewhere", Path("runs")) is None
    assert runs() == ["fp8"]


def test_a_run_is_found_by_what_it_is_about(run: Run, base: Path, server: GivenServers) -> None:
    for name, location in (("glm", "a/glm"), ("glm-123456", "b/glm")):
        Path("runs", name, "measurements").mkdir(parents=True)
        RunRecord(model="glm", source=SourceData(location=location)).save(Path("runs", name, "run.json"))
    where = {text: str(find_run(text, Path("runs"))) for text in ("glm", "a/glm", "b/glm", "runs/glm-123456")}
    assert where == {"glm": "runs/glm", "a/glm": "runs/glm", "b/glm": "runs/glm-123456", "runs/glm-123456": "runs/glm-123456"}
    assert one_error(run("report", "c/glm")) == (
        "c/glm: glm is the name of other runs: runs/glm, runs/glm-123456; name one of them"
    )


def test_a_folder_without_records_is_no_run(run: Run) -> None:
    Path("runs/empty").mkdir(parents=True)
    assert one_error(run("card", "runs/empty")) == (
        "runs/empty: no run of that name; the folder runs has no runs; `assay run TARGET` makes one"
    )


# ------------------------------------------------------------------------------------------------ --out
@pytest.mark.slow
def test_out_keeps_its_records_in_its_own_folder(run: Run, base: Path, server: GivenServers) -> None:
    quantized(run, base, "--precision", "fp8", "--out", "made/fp8")
    plain = Path("plain")
    shutil.copytree("made/fp8", plain, ignore=shutil.ignore_patterns("assay_plan.json", "assay_verify.json"))
    assert sorted(path.name for path in Path("made").iterdir()) == ["fp8"]
    assert {"assay_plan.json", "assay_verify.json", "README.md"} <= {path.name for path in Path("made/fp8").iterdir()}
    verified = checkpoint_sha256(Path("made/fp8"), lambda path: pytest.fail(f"{path} was hashed"))
    assert verified == checkpoint_sha256(plain, sha256_of_file)
    code, _, err = run("verify", "made/fp8", "--source", base)
    assert code == 0, err

    quantized(run, base, "--precision", "w4a16", "--out", "made/w4a16")
    assert "done before and verified" in quantized(run, base, "--precision", "w4a16", "--out", "made/w4a16")
    evaluated(run, "--reference", "made/fp8", "--candidate", "made/w4a16")
    report = Report.load(Path("runs/fp8/report/report.json"))
    assert [plan.precision for plan in report.plans] == ["fp8", "w4a16"]
    assert [(one.precision, one.is_measured_checkpoint) for one in report.verifications] == [("fp8", True), ("w4a16", True)]
    assert "Measured with suite one, begun " in Path("made/w4a16/README.md").read_text()
    assert sorted(path.name for path in Path("made").iterdir()) == ["fp8", "w4a16"]

    # Refused: nothing is written at all.
    before = {path: path.read_bytes() for path in Path("made").rglob("*") if path.is_file()}
    assert "holds a finished checkpoint of another plan" in one_error(
        run("quantize", base, "--precision", "nvfp4a16", "--out", "made/w4a16")
    )
    assert {path: path.read_bytes() for path in Path("made").rglob("*") if path.is_file()} == before


# ------------------------------------------------------------------------------------------------ one source
def test_candidates_made_from_other_data_than_the_reference_are_refused(run: Run, base: Path, server: GivenServers) -> None:
    source = Path("model")
    shutil.copytree(base, source)
    quantized(run, source, "--precisions", "w4a16")
    path = Path("runs/model/w4a16/checkpoint/assay_manifest.json")
    manifest = Manifest.load(path)
    other = {"model-00001-of-00002.safetensors": "stamp:1:1000000000:1:1"}
    manifest.model_copy(update={"source_files": manifest.source_files | other}).save(path)
    message = one_error(evaluate(run, source, "--precisions", "w4a16"))
    assert re.fullmatch(
        r"runs/model/w4a16/checkpoint: made from other data than model has \(model-00001-of-00002.safetensors was 1 bytes of "
        r"1970-.*\); delete it and make it again: assay quantize model --precision w4a16", message
    )  # fmt: skip
    # The source cannot be read any more: the checkpoints are still compared with each other.
    for shard in source.glob("*.safetensors"):
        shard.unlink()
    message = one_error(evaluate(run, source, "--precisions", "w4a16"))
    assert message.startswith("runs/model/w4a16/checkpoint: made from other data than runs/model/fp8/checkpoint (model-00001")
    assert server.requests == []


@pytest.mark.slow
def test_any_two_checkpoints_may_have_other_sources_and_the_report_says_so(run: Run, base: Path, server: GivenServers) -> None:
    other = perturbed(base, Path("other"), 1)
    quantized(run, base, "--precision", "fp8", "--out", "made/fp8")
    quantized(run, other, "--precision", "w4a16", "--out", "made/w4a16")
    err = evaluated(run, "--reference", "made/fp8", "--candidate", "made/w4a16")
    made = rf"other, not {re.escape(str(base))} \(model-00001-of-00002.safetensors was .*\)"
    note = f"made from other data than the reference fp8: {made}"
    assert len(re.findall(rf"note: w4a16: {note}\n", err)) == 1, err
    assert re.fullmatch(note, measured("runs/fp8")["w4a16"].notes[0])
    [limit] = [
        limit.text for limit in Report.load(Path("runs/fp8/report/report.json")).limits if limit.key == "measurement_notes"
    ]
    assert re.search(note, limit)


# ------------------------------------------------------------------------------------------------ one evaluation at a time
@pytest.mark.slow
def test_two_evaluations_of_one_run_at_once(run: Run, base: Path, server: GivenServers) -> None:
    """The second is refused; the lock of one that was killed is free, though a process it started lives on."""
    two = pair(base, "A")
    asked, go_on = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Scripted:
        if "messages" in body:
            asked.set()
            go_on.wait(60)
        return Scripted("#### 7")

    server.change(reply=slow)
    command = ["evaluate", *map(str, two), "--suite", "one.yaml", "--profile", "here.yaml"]
    code = (
        "import subprocess, sys; import assay_cli as cli; child = subprocess.Popen(['sleep', '60']); "
        "open('child', 'w').write(str(child.pid)); sys.argv = ['assay', *sys.argv[1:]]; cli.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.DEVNULL) as first:
        try:
            assert asked.wait(60)
            assert refused(run, *two) == (
                f"runs/fp8: another evaluation is at work in it (pid {first.pid}); wait for it, or give this one --name"
            )
            assert not Path("runs/fp8/measurements").exists()
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
            go_on.set()
    child = int(Path("child").read_text())
    os.kill(child, 0)
    evaluated(run, *two)
    assert list(measured("runs/fp8")) == ["fp8", "fp8-repeat", "w4a16"]
    os.kill(child, signal.SIGKILL)


def test_servers_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with locked_run(tmp_path / "run"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with locked_run(tmp_path / "run"):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(AssayError, match=r"\.lock: is a link, not a lock that assay wrote"), locked_run(tmp_path):
        pass
    assert victim.read_text() == "precious"


# ------------------------------------------------------------------------------------------------ nothing is overwritten
@pytest.mark.slow
def test_a_measurement_of_another_checkpoint_is_kept(run: Run, base: Path, server: GivenServers) -> None:
    two = pair(base, "A")
    evaluated(run, *two)
    before = Path("runs/fp8/measurements/w4a16.json").read_bytes()
    old = measured("runs/fp8")["w4a16"].checkpoint_sha256
    write_weights(Path("A/w4a16"), "trained on")
    err = evaluated(run, *two)
    place = Path(f"runs/fp8/measurements/earlier/w4a16.{old[:6]}.1.json")
    assert f"w4a16: the earlier measurement is of another checkpoint; moved to {place}\n" in err
    assert place.read_bytes() == before and measured("runs/fp8")["w4a16"].checkpoint_sha256 != old
    assert "measured already" in err and "fp8: the earlier" not in err


@pytest.mark.slow
def test_a_new_reference_sets_aside_what_was_measured_otherwise(run: Run, base: Path, server: GivenServers) -> None:
    evaluated(run, *pair(base, "A"), "--candidate", make_checkpoint(base, Path("A/nvfp4"), "third"))
    assert len(measured("runs/fp8")) == 4
    server.change(max_model_len=2048)
    err = evaluated(run, "--reference", "A/fp8", "--candidate", "A/w4a16")
    for label, why in (
        ("fp8", "was served differently"),
        ("nvfp4", "cannot be compared with fp8 any more (served differently: flags.max-model-len (2048, candidate 4096))"),
    ):
        assert f"{label}: the earlier measurement {why}; moved to runs/fp8/measurements/earlier/{label}." in err
    assert list(measured("runs/fp8")) == ["fp8", "fp8-repeat", "w4a16"]
    earlier = sorted(path.name.split(".")[0] for path in Path("runs/fp8/measurements/earlier").iterdir())
    assert earlier == ["fp8", "fp8-repeat", "nvfp4", "w4a16"]
    server.change(max_model_len=4096)
    evaluated(run, "--reference", "A/fp8", "--candidate", "A/w4a16")
    names = sorted(path.name for path in Path("runs/fp8/measurements/earlier").glob("fp8.*"))
    assert [name.split(".", 2)[2] for name in names] == ["1.json", "2.json"]


@pytest.mark.slow
def test_verdicts_of_earlier_candidates_are_made_again(run: Run, base: Path, server: GivenServers) -> None:
    evaluated(run, *pair(base, "A"))
    evaluated(run, "--reference", "A/fp8", "--candidate", make_checkpoint(base, Path("A/nvfp4"), "third"))
    rows = {row.label: row.sentence for row in Report.load(Path("runs/fp8/report/report.json")).rows}
    assert sorted(rows) == ["fp8", "fp8-repeat", "nvfp4", "w4a16"] and "Not judged yet." not in rows.values()


def test_probes_of_another_checkpoint_are_kept(tmp_path: Path) -> None:
    first = probed("w4a16", *CLEAN, sha256="a" * 64)
    path = tmp_path / "probes" / "w4a16.json"
    first.save(path)
    path.with_suffix(".requests.jsonl").write_text("{}\n")
    assert make_room_for_probes(tmp_path, "w4a16", "a" * 64) is None
    line = make_room_for_probes(tmp_path, "w4a16", "b" * 64)
    place = tmp_path / "probes/earlier/w4a16.aaaaaa.1.json"
    assert line == f"w4a16: the earlier probes are of another checkpoint; moved to {place}"
    assert place.is_file() and (tmp_path / "probes/earlier/w4a16.aaaaaa.1.requests.jsonl").read_text() == "{}\n"
    assert load_probes(tmp_path) == []


# ------------------------------------------------------------------------------------------------ report and gate
@pytest.mark.slow
def test_the_report_refuses_what_the_gate_refuses(run: Run, base: Path, server: GivenServers) -> None:
    evaluated(run, *pair(base, "A"))
    path = Path("runs/fp8/measurements/w4a16.json")
    data = json.loads(path.read_text())
    path.with_name("stray.json").write_text(
        json.dumps(data | {"label": "stray", "reference_checkpoint_sha256": "f" * 64, "divergence": None})
    )
    reference = data["reference_checkpoint_sha256"][:12]
    for command in ("gate", "report", "card"):
        assert one_error(run(command, "runs/fp8")) == (
            f"stray cannot be compared with fp8: measured against checkpoint ffffffffffff, the reference is {reference}; "
            "measure the candidate again"
        )
    with pytest.raises(AssayError, match="stray cannot be compared"):
        load_run(Path("runs/fp8"))
    err = evaluated(run, "--reference", "A/fp8", "--candidate", "A/w4a16")
    assert "stray: the earlier measurement cannot be compared with fp8 any more (measured against checkpoint ffff" in err
    assert run("report", "runs/fp8")[0] == 0

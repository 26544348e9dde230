"""`assay publish` against a hub that is a real HTTP server: what is uploaded, refused, resumed, and noticed afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from huggingface_hub import ModelCard
from publishable import LABEL, NUM_SHARDS, TEXTS, make_publishable, shard_names, verify
from upload_hub import TOKEN, Hub

from assay.records.calibration import CalibratedLayers, TextSource, WithheldItems
from assay.records.manifest import MANIFEST, Manifest
from assay.records.measurement import Measurement
from assay.records.plan import Plan
from assay.records.verdict import GateReport
from assay.records.verification import Verification
from assay_reports.numbers import build_report
from assay_reports.publish import files
from assay_reports.publish import hub as hub_module
from assay_reports.publish.places import Places, named, places_of, without_places
from assay_reports.publish.record import Publication
from assay_reports.report import render_html, render_markdown
from assay_reports.run import load_run

REPO = "me/model"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_publishable(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy, which is another set of files until it is verified."""
    copy = shutil.copytree(made, tmp_path / "runs" / made.name)
    verify(copy)
    return copy


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """With a page that is made in no time; `real_page` undoes that."""
    hub = Hub()
    hub.use(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(files, "render_html", lambda report: f"<title>{report.model}</title>")
    yield hub
    hub.close()


@pytest.fixture
def real_page(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "render_html", render_html)


def expected(run_dir: Path) -> dict[str, bytes]:
    """What the repository must hold, apart from the card: the folder's files, and the report without prompts and replies."""
    checkpoint, told = run_dir / LABEL / "checkpoint", without_places(load_run(run_dir), places_of(run_dir))
    whole = {name: (checkpoint / name).read_bytes() for name in (*shard_names(), *TEXTS)}
    report = build_report(told)
    texts = {"report.json": report.as_text(), "report.md": render_markdown(report), "index.html": files.render_html(report)}
    made = {MANIFEST: told.manifests[LABEL].as_text(), **{f"assay_report/{name}": text for name, text in texts.items()}}
    return whole | {name: text.encode() for name, text in made.items()}


def held(hub: Hub, revision: str = "main") -> dict[str, bytes]:
    files = hub.files(REPO, revision)
    assert files.pop("README.md").startswith(b"---\n")
    return files


def error_after_progress(run_result: tuple[int, str, str]) -> str:
    """The last line of stderr: before it stand those that say how far it is."""
    code, out, err = run_result
    assert (code, out) == (2, "")
    *before, last = err.strip().splitlines()
    assert all(line.endswith("files uploaded") for line in before) and last.startswith("error: "), err
    return last.removeprefix("error: ")


# ------------------------------------------------------------------------------------------------ what is uploaded
@pytest.mark.usefixtures("real_page")
def test_the_repository_holds_checkpoint_card_manifest_and_report(hub: Hub, run_dir: Path, run: Run) -> None:
    checkpoint = run_dir / LABEL / "checkpoint"
    (checkpoint / ".env").write_text("HF_TOKEN=" + TOKEN)  # hidden, and named by no record
    (run_dir / "journal.db").write_bytes(b"every prompt and reply")
    code, out, err = run("publish", f"{run_dir}/{LABEL}", REPO)
    assert (code, held(hub)) == (0, expected(run_dir))
    commit = hub.repositories[REPO].branches["main"]
    num_files = NUM_SHARDS + len(TEXTS) + 5
    assert out.splitlines()[0].startswith(f"{hub.url}/me/model/tree/{commit}: w4a16, PASS: {num_files} files, ")
    assert out.splitlines()[1] == f"read back: {num_files} files are the same"
    assert TOKEN not in out + err
    assert hub.tokens == {f"Bearer {TOKEN}"} and hub.storage_tokens == {None}
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert (card.data["quantized_by"], card.data.base_model) == ("me", "zai-org/tiny-glm")
    assert "vllm serve me/model" in card.text and "[the report](assay_report/report.md)" in card.text
    assert not (checkpoint / "README.md").exists()  # the card in the folder is another one, and nobody asked for it


def test_the_base_model_of_a_source_in_a_folder_is_published(hub: Hub, run_dir: Path, run: Run) -> None:
    """As `--base-model` or the recipe put it into the plan; without either the card names none, and a note says so."""
    place = run_dir / LABEL / "plan.json"
    of_folder = {"source": "/data/models/tiny-glm", "source_revision": None}
    unnamed = Plan.load(place).model_copy(update=of_folder)
    unnamed.save(place)
    _, out, err = run("publish", f"{run_dir}/{LABEL}", REPO, "--dry-run")
    assert "the card names no base_model; `assay quantize` again with --base-model OWNER/NAME names it" in out + err
    unnamed.model_copy(update={"base_model": "zai-org/GLM-Own"}).save(place)
    code, out, err = run("publish", f"{run_dir}/{LABEL}", REPO)
    assert code == 0 and "base_model" not in out + err
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert (card.data.base_model, card.data["base_model_relation"]) == ("zai-org/GLM-Own", "quantized")
    assert "[zai-org/GLM-Own](https://huggingface.co/zai-org/GLM-Own)" in card.text


def test_a_second_upload_sends_nothing_and_makes_no_commit(hub: Hub, run_dir: Path, run: Run) -> None:
    assert run("publish", f"{run_dir}/{LABEL}", REPO)[0] == 0
    commits, sent = len(hub.repositories[REPO].commits), hub.put.copy()
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO, "--json")
    again = Publication.model_validate_json(out)
    assert (code, again.num_unchanged, again.differences) == (0, len(again.files), ())
    assert (len(hub.repositories[REPO].commits), hub.put) == (commits, sent)


def test_large_files_go_in_parts_if_the_hub_asks_for_them(hub: Hub, run_dir: Path, run: Run) -> None:
    hub.part_bytes = 15_000
    assert run("publish", f"{run_dir}/{LABEL}", REPO)[0] == 0
    assert held(hub) == expected(run_dir)
    assert sum("/part/" in path for _, path in hub.asked) >= 3 * NUM_SHARDS


def test_private_and_branch(hub: Hub, run_dir: Path, run: Run) -> None:
    assert run("publish", f"{run_dir}/{LABEL}", REPO, "--private", "--revision", "v2")[0] == 0
    assert hub.repositories[REPO].private
    assert held(hub, "v2") == expected(run_dir) and hub.files(REPO) == {}
    hub.repositories[REPO].private = False
    assert one_error(run("publish", f"{run_dir}/{LABEL}", REPO, "--private")) == (
        "me/model: exists and is public; make it private on the hub first, or leave --private out"
    )


# ------------------------------------------------------------------------------------------------ dry run and refusals
def test_a_dry_run_lists_files_and_bytes_and_asks_nothing(hub: Hub, run_dir: Path, run: Run) -> None:
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO, "--dry-run", "--json")
    listed = Publication.model_validate_json(out)
    whole = expected(run_dir)
    assert {file.path: file.num_bytes for file in listed.files if file.path != "README.md"} == {
        path: len(content) for path, content in whole.items()
    }
    assert (code, listed.refused, listed.url, hub.asked) == (0, (), None, [])
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO, "--dry-run")
    assert out.splitlines()[-1].endswith("for me/model (main); nothing was uploaded")
    assert {line.split()[0] for line in out.splitlines()[1:-1]} == {*whole, "README.md"}


@pytest.mark.parametrize("status", ["FAIL", "UNDERPOWERED", "NOT MEASURED"])
def test_only_what_passed_is_published_unless_told(hub: Hub, run_dir: Path, run: Run, status: str) -> None:
    gates = GateReport.load(run_dir / "gates.json")
    gates.model_copy(update={"overall": {**gates.overall, LABEL: status}}).save(run_dir / "gates.json")
    named = status.replace(" ", "-")
    message = one_error(run("publish", f"{run_dir}/{LABEL}", REPO))
    assert f"({status}); publish it knowingly with --despite {named}" in message
    assert hub.repositories == {}
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO, "--dry-run")
    assert code == 1 and f"would be refused: {message}" in out
    others = ",".join({"FAIL", "UNDERPOWERED", "NOT-MEASURED"} - {named})
    assert one_error(run("publish", f"{run_dir}/{LABEL}", REPO, "--despite", others)) == message
    assert run("publish", f"{run_dir}/{LABEL}", REPO, "--despite", named.lower())[0] == 0
    assert f"| verdict | not measured | reference | {status} |" in hub.files(REPO)["README.md"].decode()


def test_a_verdict_on_other_bytes_is_none(hub: Hub, run_dir: Path, run: Run) -> None:
    path = run_dir / LABEL / "checkpoint" / MANIFEST
    old = Manifest.load(path)
    old.model_copy(update={"files": {name: sha for name, sha in old.files.items() if name != "tokenizer.json"}}).save(path)
    verify(run_dir)
    assert "no verdict is about these files (NOT MEASURED)" in one_error(run("publish", f"{run_dir}/{LABEL}", REPO))


def test_what_is_not_as_verified_is_refused_whatever_is_said(hub: Hub, run_dir: Path, run: Run, tmp_path: Path) -> None:
    checkpoint, record = run_dir / LABEL / "checkpoint", run_dir / LABEL / "verify.json"
    despite = ("--despite", "FAIL,UNDERPOWERED,NOT-MEASURED")

    def refused() -> str:
        return one_error(run("publish", f"{run_dir}/{LABEL}", REPO, *despite))

    shard = checkpoint / shard_names()[2]
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "files have changed, or come in, since they were verified" in refused()
    shard.write_bytes(content)  # the same bytes, and nobody has looked at them since
    assert "files have changed, or come in, since they were verified" in refused()
    verify(run_dir)
    (checkpoint / "journal.db").write_bytes(b"")
    assert "files have changed, or come in" in refused()
    (checkpoint / "journal.db").unlink()
    outside = tmp_path / "secret"
    outside.write_text(TEXTS["config.json"])
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to(outside)
    verify(run_dir)
    assert "config.json: is a link that leads out of the checkpoint's folder" in refused()
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text('{"token": "' + TOKEN + '"}')
    verify(run_dir)
    message = refused()
    assert "config.json: holds what looks like a key or token" in message and TOKEN not in message
    (checkpoint / "config.json").write_text(TEXTS["config.json"])
    verify(run_dir)
    whole = Verification.load(record)
    whole.model_copy(update={"checkpoint_sha256": "0" * 64}).save(record)
    assert "the verification that is there is about other files" in refused()
    record.unlink()
    assert "was not verified" in refused()
    assert hub.repositories == {}


def test_bytes_that_the_stamp_does_not_see_are_not_committed(
    hub: Hub, run_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that reads other bytes than were verified: of a file that is sent from there, and of one that is read first."""
    for small in (hub_module.SMALL_BYTES, 0):
        monkeypatch.setattr(hub_module, "SMALL_BYTES", small)
        shard = run_dir / LABEL / "checkpoint" / shard_names()[2]
        content = shard.read_bytes()
        shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        verify(run_dir)  # its stamp is now the verified one
        assert error_after_progress(run("publish", f"{run_dir}/{LABEL}", REPO)) == (
            f"{shard}: the bytes that were read to upload it have another SHA-256 than the manifest says; nothing was "
            "committed; verify it again"
        )
        assert hub.files(REPO) == {}
        shard.write_bytes(content)
    verify(run_dir)
    assert run("publish", f"{run_dir}/{LABEL}", REPO)[0] == 0  # all are sent from the disk
    assert held(hub) == expected(run_dir)


def test_a_reference_has_no_verdict(run_dir: Path, run: Run) -> None:
    code, out, _ = run("publish", f"{run_dir}/fp8", REPO, "--dry-run", "--json")
    found = Publication.model_validate_json(out)
    assert (code, found.status, found.refused[0].despite) == (1, "NOT MEASURED", "NOT MEASURED")
    assert found.refused[0].reason.startswith("fp8: it is the reference of its run")


def test_names_that_cannot_be_meant(run_dir: Path, run: Run) -> None:
    assert one_error(run("publish", run_dir, REPO)) == (
        f"{run_dir}: has several checkpoints: fp8, nvfp4a16, w4a16; name one, as in tiny-glm/fp8"
    )
    assert "of this run can be published: fp8, nvfp4a16, w4a16" in one_error(run("publish", f"{run_dir}/w4a61", REPO))
    assert one_error(run("publish", f"{run_dir}/w4a16", "model")) == (
        "model: is not a repository id; use OWNER/NAME, e.g. zai-org/GLM-5"
    )
    assert one_error(run("publish", f"{run_dir}/w4a16", REPO, "--despite", "FIAL")) == (
        "--despite FIAL: no such verdict; did you mean FAIL? allowed: FAIL, UNDERPOWERED, NOT-MEASURED, NOT-FAILED"
    )
    for branch in (
        "a b",
        "<b>",
        "\x1b[31m",
        "a\u2028b",
        "\u202ea",
        "x" * 10_000,
        "..",
        "a/../b",
        "-f",
        "a.lock",
        "/a",
        "a//b",
        "\ud800",
    ):
        said = one_error(run("publish", f"{run_dir}/w4a16", REPO, "--dry-run", "--revision", branch))
        assert said.startswith("--revision ") and "is no name of a branch" in said and said.isprintable() and len(said) < 500
    assert "no run of that name" in one_error(run("publish", "nothing/w4a16", REPO, "--runs", run_dir.parent))
    assert run("publish", "tiny-glm/w4a16", REPO, "--dry-run", "--runs", run_dir.parent)[0] == 0


def test_weights_of_something_else_stay_and_nothing_is_mixed(hub: Hub, run_dir: Path, run: Run) -> None:
    assert run("publish", f"{run_dir}/{LABEL}", REPO)[0] == 0
    there = hub.repositories[REPO].at("main")
    assert there is not None
    there["model-00009-of-00009.safetensors"] = there[shard_names()[0]]
    assert "holds weights of something else (model-00009-of-00009.safetensors)" in one_error(
        run("publish", f"{run_dir}/{LABEL}", REPO)
    )


# ------------------------------------------------------------------------------------------------ interrupted
def test_cut_twice_and_resumed_the_bytes_are_the_same(hub: Hub, run_dir: Path, run: Run) -> None:
    """The storage drops the connection, and the client's own tries with it; what was whole is not sent again."""
    for number_whole in (2, 4):
        hub.cut_from(hub.num_puts + 2)
        message = error_after_progress(run("publish", f"{run_dir}/{LABEL}", REPO))
        assert message.startswith(f"me/model: the connection to {hub.url} broke off (")
        assert message.endswith("; run the same command again: what was uploaded is kept")
        assert hub.files(REPO) == {}, "half a checkpoint is there"
        assert sum(hub.put.values()) == number_whole
    hub.cut_from(None)
    assert run("publish", f"{run_dir}/{LABEL}", REPO)[0] == 0
    assert held(hub) == expected(run_dir)
    assert set(hub.put.values()) == {1}, "what was whole was sent again"


def holds(after: int, arrived: threading.Event, resume: threading.Event) -> Callable[[str, int], None]:
    """What keeps every upload waiting once so many are whole."""

    def hold(sha256: str, num_whole: int) -> None:
        if num_whole >= after:
            arrived.set()
            resume.wait(60)

    return hold


@pytest.mark.slow
@pytest.mark.usefixtures("real_page")
def test_killed_twice_and_resumed_the_bytes_are_the_same(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """SIGKILL while bytes are on their way."""
    command = [sys.executable, "-m", "assay", "publish", f"{run_dir}/{LABEL}", REPO, "--json"]
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONSAFEPATH": "1"}
    for kill_after in (1, 3):
        arrived, resume = threading.Event(), threading.Event()
        hub.before_put = holds(kill_after, arrived, resume)
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert arrived.wait(120), "nothing was uploaded"
        child.send_signal(signal.SIGKILL)
        child.communicate()
        hub.before_put = lambda sha256, num_whole: None
        resume.set()
        while hub.num_arriving:  # what the dead client sent whole is still taken
            time.sleep(0.05)
        assert hub.files(REPO) == {}, "half a checkpoint is there"
    before = set(hub.put)
    assert before, "both were killed before anything was whole"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Publication.model_validate(json.loads(done.stdout)).differences == ()
    assert held(hub) == expected(run_dir)
    assert all(hub.put[sha256] == 1 for sha256 in before), "what was whole was sent again"
    assert TOKEN not in done.stdout + done.stderr


def test_files_that_change_meanwhile_are_not_committed(hub: Hub, run_dir: Path, run: Run) -> None:
    def change(sha256: str, num_whole: int) -> None:
        if num_whole >= 4:  # when the first is whole
            os.utime(run_dir / LABEL / "checkpoint" / shard_names()[0])

    hub.before_put = change
    assert "the checkpoint changed while it was uploaded; nothing was committed" in error_after_progress(
        run("publish", f"{run_dir}/{LABEL}", REPO)
    )
    assert hub.files(REPO) == {}


# ------------------------------------------------------------------------------------------------ noticed afterwards
@pytest.mark.parametrize("path", [shard_names()[3], "config.json", "README.md"])
def test_other_bytes_than_were_uploaded_are_noticed(hub: Hub, run_dir: Path, run: Run, path: str) -> None:
    hub.spoil = lambda name, content: bytes([content[0] ^ 1]) + content[1:] if name == path else content
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO)
    assert code == 1
    assert out.splitlines()[1:] == [f"not what was uploaded: {path}: its hash is right, and other bytes are downloaded"]


def test_a_storage_that_keeps_other_bytes_is_noticed(hub: Hub, run_dir: Path, run: Run) -> None:
    first = Manifest.load(run_dir / LABEL / "checkpoint" / MANIFEST).shards[0]
    hub.stored[first.sha256] = b"\0" * first.num_bytes  # it says that it has them already
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO, "--json")
    [difference] = Publication.model_validate_json(out).differences
    assert code == 1 and difference.startswith(f"{first.name}: SHA-256 there ")


def test_files_that_a_commit_leaves_out_are_noticed(hub: Hub, run_dir: Path, run: Run) -> None:
    hub.lose = {"tokenizer.json"}
    code, out, _ = run("publish", f"{run_dir}/{LABEL}", REPO)
    assert (code, out.splitlines()[1:]) == (1, ["not what was uploaded: tokenizer.json: is not there"])


# ------------------------------------------------------------------------------------------------ the hub refuses
CREATE, BATCH, COMMIT, TREE = "/api/repos/create", "/objects/batch", "/commit/", "/tree/"


@pytest.mark.parametrize(
    ("where", "status", "says"),
    [
        (
            CREATE,
            401,
            "does not know who you are (HTTP 401); log in (hf auth login), or set HF_TOKEN to a token that may write",
        ),
        (CREATE, 403, "does not let you write there (HTTP 403); use a token with the right to write"),
        (BATCH, 403, "does not let you write there (HTTP 403)"),
        (COMMIT, 409, "says that somebody else changes it at the same time (HTTP 409); run the same command again"),
        (COMMIT, 412, "says that somebody else has changed it meanwhile (HTTP 412)"),
        (BATCH, 429, "is asked too often (HTTP 429); wait some minutes, then run the same command again"),
        (TREE, 500, "answered HTTP 500; run the same command again: what was uploaded is kept"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, run_dir: Path, run: Run, where: str, status: int, says: str) -> None:
    hub.refuse = {where: status}
    message = error_after_progress(run("publish", f"{run_dir}/{LABEL}", REPO))
    assert message.startswith(f"me/model: {hub.url} {says}")
    assert TOKEN not in message
    assert all(repository.branches["main"] == "0" * 40 for repository in hub.repositories.values())


def test_metadata_that_the_hub_refuses_is_found_before_the_upload(hub: Hub, run_dir: Path, run: Run) -> None:
    hub.metadata_error = '"license" must be one of [apache-2.0, mit]'
    assert one_error(run("publish", f"{run_dir}/{LABEL}", REPO)) == (
        f"me/model: the hub refuses the card's metadata: {hub.metadata_error}; report this to assay"
    )
    assert hub.stored == {}


def test_of_somebody_elses_repository_nothing_is_sent(hub: Hub, run_dir: Path, run: Run) -> None:
    assert "does not let you write there (HTTP 403)" in one_error(run("publish", f"{run_dir}/{LABEL}", "others/model"))
    assert hub.stored == {}


def test_without_a_token(hub: Hub, run_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "does not know who you are (HTTP 401)" in one_error(run("publish", f"{run_dir}/{LABEL}", REPO))


def test_no_hub_is_there(hub: Hub, run_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = one_error(run("publish", f"{run_dir}/{LABEL}", REPO))
    assert message.startswith("me/model: the connection to http://127.0.0.1:9 broke off (") and message.count("\n") == 0


# ------------------------------------------------------------------------------------------------ places of this machine
@pytest.mark.usefixtures("real_page")
def test_nothing_that_is_published_names_a_folder_of_this_machine(
    hub: Hub, run_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the manifest had the absolute paths of source and calibration text, and the report those of checkpoints."""
    home = tmp_path / "home of" / "jane.doe"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    checkpoint = run_dir / LABEL / "checkpoint"
    text, source = f"{home}/private corpora/calls.jsonl", f"{home}/models/base-model"
    manifest = Manifest.load(checkpoint / MANIFEST)
    calibrated = CalibratedLayers(
        method="gptq", asked_sha256="a" * 64, text=(text, "/data/team-x/notes.txt (40%)"), num_tokens=64, length=32,
        tokens_sha256="b" * 64, layers={0: "c"}, versions={}, seconds=1.0,
        sources=(TextSource(source=text, weight=1.0, num_texts=1, num_tokens=64, sha256="d" * 64),),
        withheld=(WithheldItems(suite=f"run {run_dir}", task="t", num_items=1),),
    )  # fmt: skip
    recipe = {**manifest.precision_recipe, "calibration": {"method": "gptq", "text": [text]}}
    changed = {"source": source, "calibrated": calibrated, "precision_recipe": recipe}
    manifest.model_copy(update=changed).save(checkpoint / MANIFEST)
    plan = Plan.load(run_dir / LABEL / "plan.json")
    plan.model_copy(update=changed).save(run_dir / LABEL / "plan.json")
    for path in (run_dir / "measurements").glob("*.json"):
        measured = Measurement.load(path)
        flags = {**measured.fingerprint.flags, "chat-template": "/mnt/scratch/template.jinja"}
        fingerprint = measured.fingerprint.model_copy(update={"flags": flags})
        measured.model_copy(update={"fingerprint": fingerprint, "checkpoint": f"{run_dir}/{measured.label}"}).save(path)
    verify(run_dir)
    code, _, err = run("publish", f"{run_dir}/{LABEL}", REPO)
    assert code == 0, err
    published = {
        name: data.decode(errors="replace") for name, data in hub.files(REPO).items() if not name.endswith(".safetensors")
    }
    told = Manifest.model_validate_json(published[MANIFEST])
    assert (told.source, told.checkpoint_sha256) == ("base-model", manifest.checkpoint_sha256)
    assert told.calibrated is not None and told.calibrated.sources[0].sha256 == "d" * 64
    assert told.calibrated.text[1] == "notes.txt (40%)" and "jane" not in published[MANIFEST]
    assert Manifest.load(checkpoint / MANIFEST).source == source  # here it is still known where it came from
    absolute = re.compile(r"(?<![\w/.:<~-])/(?:home|root|tmp|mnt|data|Users|var|work)[^\s\"'<]*")
    for name, content in published.items():
        for word in ("jane.doe", str(tmp_path), "team-x", "scratch"):
            assert word not in content, (name, word)
        assert name == "assay_report/index.html" or absolute.findall(content) == [], name


@pytest.mark.usefixtures("real_page")
def test_a_copied_file_that_names_a_folder_is_noted(
    hub: Hub, run_dir: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes `_name_or_path` into config.json; its bytes belong to the checkpoint."""
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    checkpoint = run_dir / LABEL / "checkpoint"
    text = json.dumps({"architectures": ["Glm4MoeForCausalLM"], "_name_or_path": f"{tmp_path}/jane/base"})
    (checkpoint / "config.json").write_text(text)
    manifest = Manifest.load(checkpoint / MANIFEST)
    files_ = {**manifest.files, "config.json": hashlib.sha256(text.encode()).hexdigest()}
    manifest.model_copy(update={"files": files_}).save(checkpoint / MANIFEST)
    verify(run_dir)
    code, out, err = run("publish", f"{run_dir}/{LABEL}", REPO, "--dry-run", "--despite", "NOT-MEASURED")
    assert code == 0, err
    assert (
        f"config.json names {tmp_path}/jane/base, a folder of this machine, as the source's file of that name does" in out + err
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/home/me/models/base", "base"),
        ("/home/me/models/base/", "base"),
        ("/home/jane doe/my texts/notes of.txt (40%)", "notes of.txt (40%)"),
        ("/data/runs/tiny/w4a16/checkpoint", "w4a16/checkpoint"),
        ("/data/x/y and /data/z/w", "y and w"),
        ("file:///data/x/y.txt (60%), own", "y.txt (60%), own"),
        ("replies of the reference in /runs-of/all/tiny", "replies of the reference in tiny"),
        ("zai-org/GLM-5", "zai-org/GLM-5"),
        ("https://example.org/a/b and http://127.0.0.1:8000/v1/completions", None),
        ("POST /v1/chat/completions answered 500; /v1/models", None),
        ("re:.*layers\\.3\\..*$, 3/4 of 12 / 16, </div></p>, w4a16/fp8", None),
        ("hub:org/data:x/*.parquet", None),
    ],
)
def test_paths_are_named_by_their_last_step(text: str, name: str | None) -> None:
    assert named(text, Places()) == (text if name is None else name)

"""RULER's published texts: fetched once and checked, found in the data folder, chosen once for a run, named in the record."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from check_lines import check_lines
from fake_server import FakeServer, Scripted
from huggingface_hub import constants
from published_texts import FILES, TextServer, pin, pin_small_texts
from scripted_world import World, make_folders, pair_of

from assay.errors import MeasureError
from assay.recipes.suite import RulerTask, SuiteRecipe
from assay.records.comparable import questions_differ
from assay.records.measurement import TaskResult
from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import Client
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.preflight.data_sets import check_data_sets
from assay_evaluate.tasks.published import store
from assay_evaluate.tasks.published.choice import needed_sources, published_sources
from assay_evaluate.tasks.published.pins import PINS
from assay_evaluate.tasks.ruler_task import run_ruler
from assay_evaluate.transport.download import NotDownloaded, download

REFERENCE = Identity("reference", "f")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The data folder, of which nothing is there yet."""
    folder = tmp_path / "data"
    monkeypatch.setenv("ASSAY_DATA", str(folder))
    return folder


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, data: Path) -> Iterator[TextServer]:
    with TextServer().running() as server:
        pin_small_texts(monkeypatch, server.url)
        yield server


def put(data: Path, *sources: str) -> None:
    """By hand, as a user does on a machine without a network."""
    for source in sources:
        for name, content in FILES[source].items():  # type: ignore[index]
            (data / source).mkdir(parents=True, exist_ok=True)
            (data / source / name).write_bytes(content)


def task_of(**more: Any) -> RulerTask:
    fields = {"name": "ruler", "num_items": 1, "lengths_tokens": (1000,), "tasks": ("niah_single_2", "qa_1", "qa_2"),
              "max_tokens": 300, "sources": "auto", **more}  # fmt: skip
    return RulerTask(kind="ruler", **fields)


def run(path: Path, task: RulerTask, who: str = "reference") -> tuple[TaskResult, list[str]]:
    """(the result, all prompts)."""
    with (
        FakeServer(lambda body: Scripted("I do not know.")) as server,
        Journal(path / "journal.db") as journal,
        Client(server, journal, Identity(who, "f"), concurrency=1, max_attempts=1) as client,
    ):
        session = Session(client, Dialect(True, True, {}), "eval-test", 0, has_reasoning_parser=False)
        result = run_ruler(session, task, None, REFERENCE)
        return result, [b["messages"][0]["content"] for url, b in server.requests if url == "/v1/chat/completions"]


# ------------------------------------------------------------------------------------------------ which files
def test_the_files_are_those_of_rulers_scripts() -> None:
    essays = PINS["essays"]
    assert (len(essays), sum(file.num_bytes for file in essays)) == (49, 644_051)
    assert [file.name for file in essays] == sorted(file.name for file in essays)
    assert essays[0].name == "addiction.txt" and essays[-1].name == "worked.txt"
    for files in PINS.values():
        for file in files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) and all(url.endswith(f"/{file.name}") for url in file.urls)
    assert [len(file.urls) for file in PINS["hotpotqa"]] == [2]


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSAY_DATA", str(tmp_path / "mine"))
    assert store.folder_of("squad") == tmp_path / "mine" / "squad"
    monkeypatch.delenv("ASSAY_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store.data_folder() == tmp_path / "cache" / "assay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.data_folder() == Path.home() / ".cache" / "assay"


def test_what_a_task_needs() -> None:
    assert needed_sources(task_of()) == ("essays", "squad", "hotpotqa")
    assert needed_sources(task_of(tasks=("niah_single_1", "vt", "cwe", "qa_2"))) == ("hotpotqa",)
    assert needed_sources(task_of(tasks=("needle_grid",), languages=("zh",))) == ()
    assert needed_sources(task_of(tasks=("needle_grid",), languages=("zh", "en"))) == ("essays",)
    assert published_sources(task_of(squad="mine.json")) == ("essays", "hotpotqa")
    assert published_sources(task_of(sources="generated")) == ()


# ------------------------------------------------------------------------------------------------ download
SMALL = FILES["essays"]["a.txt"]


def fetch(path: Path, *urls: str, data: bytes = SMALL) -> None:
    file = pin(path.name, data, *urls)
    download(file.urls, path, file.num_bytes, file.sha256)


def test_the_next_address_is_asked_where_one_has_not_the_file(texts: TextServer, tmp_path: Path) -> None:
    fetch(tmp_path / "a.txt", f"{texts.url}/nothing", f"{texts.url}/moved/a.txt")
    assert (tmp_path / "a.txt").read_bytes() == SMALL
    assert texts.asked == ["GET /nothing", "GET /moved/a.txt", "GET /a.txt"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (SMALL[:-1], "more than 59 bytes"),
        (SMALL + b".", "60 bytes instead of 61"),
        (SMALL[:-1] + b"!", "SHA-256 {}: another file"),
    ],
)
def test_another_file_is_not_taken(texts: TextServer, tmp_path: Path, data: bytes, why: str) -> None:
    url = f"{texts.url}/a.txt"
    with pytest.raises(NotDownloaded) as caught:
        fetch(tmp_path / "a.txt", url, data=data)
    hashes = " instead of ".join(hashlib.sha256(one).hexdigest()[:12] for one in (SMALL, data))
    assert str(caught.value) == f"{url}: {why.format(hashes)}"
    assert [one.name for one in tmp_path.iterdir()] == []


@contextmanager
def breaking_off() -> Iterator[str]:
    """A server that says 59 bytes and sends 5."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(SMALL)))
            self.end_headers()
            self.wfile.write(SMALL[:5])

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.txt"
    server.shutdown()
    server.server_close()


def test_half_a_file_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with breaking_off() as url, pytest.raises(NotDownloaded) as caught:
        fetch(tmp_path / "a.txt", url)
    assert str(caught.value).startswith(f"{url}: peer closed connection") and "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(NotDownloaded, match="Connection refused"):
        fetch(tmp_path / "a.txt", url)


# ------------------------------------------------------------------------------------------------ what a run uses
def test_published_texts_are_fetched_once_and_named(texts: TextServer, data: Path, tmp_path: Path) -> None:
    result, prompts = run(tmp_path, task_of())
    essay, squad, hotpot = prompts
    assert all(
        text in essay for text in ("The harbour was quiet at dawn.", "Boats came in with the tide.", "Nobody spoke of it.")
    )
    assert "Sheep like them." in squad and "The Elbe is long. It flows north." in squad
    assert all(f"\n{text}" in hotpot for text in ("Oak\nOak is a tree.", "Ash\nAsh is old. It is a town.", "Elm\nElm is new."))
    assert result.sources == {"essays": "published", "squad": "published", "hotpotqa": "published"}
    assert result.note == "texts: Paul Graham's essays as published, SQuAD 2.0 as published, HotpotQA as published"
    assert sorted(texts.asked) == ["GET /a.txt", "GET /b.txt", "GET /dev-v2.0.json", "GET /hotpot_dev_distractor_v1.json"]
    assert {str(file.relative_to(data)) for file in data.rglob("*.*")} == {
        "essays/a.txt", "essays/b.txt", "squad/dev-v2.0.json", "hotpotqa/hotpot_dev_distractor_v1.json",
    }  # fmt: skip
    (tmp_path / "other").mkdir()
    assert run(tmp_path / "other", task_of())[0].sources == result.sources
    assert len(texts.asked) == 4


def test_what_cannot_be_had_is_generated_and_named_and_stays_so(texts: TextServer, tmp_path: Path) -> None:
    texts.gone = {"hotpot_dev_distractor_v1.json"}
    first, _ = run(tmp_path, task_of(tasks=("qa_1", "qa_2")))
    assert first.sources == {"squad": "published", "hotpotqa": "generated"}
    assert first.note == (
        "texts: SQuAD 2.0 as published, generated text instead of HotpotQA; not comparable with published scores: the "
        "questions are about facts invented by assay"
    )
    texts.gone.clear()  # it could be had now; the run goes on as it began
    candidate, asked = run(tmp_path, task_of(tasks=("qa_1", "qa_2")), "candidate")
    assert candidate.sources == first.sources and "Ash" not in asked[1]
    (tmp_path / "new").mkdir()
    assert run(tmp_path / "new", task_of(tasks=("qa_2",)))[0].sources == {"hotpotqa": "published"}


def test_files_of_ones_own_come_first_and_generated_asks_nobody(texts: TextServer, tmp_path: Path) -> None:
    own = tmp_path / "mine.json"
    own.write_bytes(FILES["squad"]["dev-v2.0.json"])
    result, _ = run(tmp_path, task_of(tasks=("qa_1",), squad=str(own)))
    assert (result.sources, result.note) == ({"squad": str(own)}, None)
    result, _ = run(tmp_path, task_of(tasks=("qa_1", "vt"), sources="generated"))
    assert result.sources == {"squad": "generated"} and texts.asked == []


def test_a_machine_without_a_network(texts: TextServer, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    put(data, "squad", "essays")
    (data / "essays" / "mine.txt").write_text("A text that nobody published.")
    result, (essay, *_) = run(tmp_path, task_of())
    assert result.sources == {"essays": "published", "squad": "published", "hotpotqa": "generated"}
    assert "A text that nobody published." not in essay and texts.asked == []


def test_without_published_texts_no_run_begins(texts: TextServer, data: Path, tmp_path: Path) -> None:
    texts.gone = {"dev-v2.0.json"}
    put(data, "squad")
    (data / "squad" / "dev-v2.0.json").write_text("another file")
    suite = SuiteRecipe.model_validate(
        {"schema": 1, "name": "s", "seed": "eval-s", "tasks": [task_of(sources="published").model_dump()]}
    )
    world, folders = World(), make_folders(tmp_path)
    with pytest.raises(MeasureError) as caught:
        world.measure(tmp_path / "run", pair_of(folders)[:1], suite)
    assert str(caught.value) == (
        f"task ruler: sources: published: SQuAD 2.0: dev-v2.0.json is not in {data}/squad, and {texts.url}/dev-v2.0.json: HTTP "
        f"404; put dev-v2.0.json from {texts.url}/dev-v2.0.json into {data}/squad (another data folder: ASSAY_DATA), or say "
        "`sources: auto`"
    )
    assert world.servers == {}


def test_a_run_that_began_with_published_texts_goes_on_with_them_or_stops(
    texts: TextServer, data: Path, tmp_path: Path
) -> None:
    first, asked = run(tmp_path, task_of(tasks=("qa_1",)))
    (data / "squad" / "dev-v2.0.json").unlink()  # another machine
    texts.gone = {"dev-v2.0.json"}
    candidate, same = run(tmp_path, task_of(tasks=("qa_1",)), "candidate")
    assert (candidate.sources, same) == (first.sources, asked)  # its items are in the journal
    with pytest.raises(MeasureError) as caught:
        run(tmp_path, task_of(tasks=("qa_1",), num_items=2), "candidate")
    assert str(caught.value).startswith(
        f"this run began with SQuAD 2.0 as published and goes on with nothing else: dev-v2.0.json is not in {data}/"
    )
    put(data, "squad")
    assert run(tmp_path, task_of(tasks=("qa_1",), num_items=2), "candidate")[0].num_items == 2


# ------------------------------------------------------------------------------------------------ preflight, comparisons
def suite_of(*tasks: RulerTask) -> SuiteRecipe:
    fields = [task.model_dump() for task in tasks]
    return SuiteRecipe.model_validate({"schema": 1, "name": "s", "seed": "eval-s", "tasks": fields})


def test_preflight_says_which_texts_there_would_be(texts: TextServer, data: Path) -> None:
    put(data, "squad")
    texts.gone = {"a.txt"}
    asked = suite_of(task_of(), task_of(name="grid", tasks=("needle_grid",)), task_of(name="own", sources="generated"))
    assert check_lines(check_data_sets(asked)) == [
        f"PASS data sets Paul Graham's essays: needed by ruler, grid; 2 of 2 files are not in {data}/essays, "
        f"and {texts.url}/a.txt: HTTP 404: generated text is asked instead, and scores do not stand beside published ones "
        f"-> put the 2 files of {texts.url} into {data}/essays (another data folder: ASSAY_DATA)",
        f"PASS data sets SQuAD 2.0: needed by ruler; in {data}/squad",
        f"PASS data sets HotpotQA: needed by ruler; hotpot_dev_distractor_v1.json is not in {data}/hotpotqa; "
        f"{texts.url}/hotpot_dev_distractor_v1.json has it: 0.0 MB, read when the run begins",
    ]
    assert not (data / "hotpotqa").exists() and all(one.startswith("HEAD ") for one in texts.asked)


def test_preflight_fails_where_published_texts_are_wanted_and_cannot_be_had(
    texts: TextServer, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (line,) = check_lines(check_data_sets(suite_of(task_of(tasks=("qa_1",), sources="published"))))
    assert line == (
        f"FAIL data sets SQuAD 2.0: needed by ruler; dev-v2.0.json is not in {data}/squad, and HF_HUB_OFFLINE is set "
        f"-> put dev-v2.0.json from {texts.url}/dev-v2.0.json into {data}/squad (another data folder: ASSAY_DATA), or say "
        "`sources: auto`"
    )
    assert texts.asked == []


def test_runs_with_other_texts_are_not_paired(texts: TextServer, tmp_path: Path) -> None:
    suite = suite_of(task_of(tasks=("qa_2",)))
    world, folders = World(), make_folders(tmp_path)

    def measure(name: str) -> Any:
        return world.measure(tmp_path / name, pair_of(folders)[:1], suite)[0]

    texts.gone = {"hotpot_dev_distractor_v1.json"}
    generated = measure("one")
    texts.gone = set()
    published = measure("two")
    assert questions_differ(published, published, "ruler") == []
    assert questions_differ(published, generated, "ruler") == ["sources.hotpotqa (published, candidate generated)"]
    assert "ruler: texts: HotpotQA as published" in published.notes

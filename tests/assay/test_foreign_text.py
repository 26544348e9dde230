"""What a server says of itself is text: never a path, a line of a script, control codes, markup or Markdown.

Scripted servers on the loopback call themselves by paths, commands and escape sequences, and the commands are run against them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Scripted
from markdown_it import MarkdownIt
from probe_reports import CLEAN, OFFER, probed, result
from probe_stub import StubServer
from rich.console import Console
from synthetic_run import make_run

from assay.errors import AssayError, MeasureError, ServeError
from assay.foreign_text import MOST_NAME_BYTES, check_label, in_markdown, one_line, safe_name, shown
from assay.records.diagnosis.locate import LocateReport, Remedy
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport, probes_place
from assay_cli.terminal import escape
from assay_evaluate.diagnosis.endpoint import ProbedEndpoint, find_endpoint
from assay_evaluate.diagnosis.levers.reproduction import write_bundle
from assay_evaluate.diagnosis.levers.settings import Setting
from assay_evaluate.diagnosis.locate.locate import write_remedy
from assay_evaluate.serving.external import get, identify_server, require_same
from assay_evaluate.transport.connection import Connection
from assay_evaluate.transport.errors import TransportError
from assay_evaluate.transport.foreign_json import message_in
from assay_pipeline.targets import run_name
from assay_reports.card import write_card
from assay_reports.report import write_report

pytestmark = pytest.mark.slow


Run = Callable[..., tuple[int, str, str]]
COMMAND = "x\ntouch pwned\n: '\"; touch pwned; $(touch pwned) `touch pwned` # \x1b]0;owned\x07\x9b31m\u202e\x00"
LINK = "[free](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n# PASS\n| a | b |"
MARKUP = "\\[bold red]PASS[/] [/nothing] :warning: [link=https://example.org]x[/link]"


# ------------------------------------------------------------------------------------------------ one function each
@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("GLM-4.5-Air", "GLM-4.5-Air"),
        ("模型_1", "模型_1"),
        ("zai-org/GLM-4.5-Air", "GLM-4.5-Air-4a1d376d"),
        ("other/GLM-4.5-Air", "GLM-4.5-Air-9d148d02"),
        ("../../docs", "docs-298f8cae"),
        ("/etc/x", "x-4074fa01"),
        ("..\\..\\x", "x-baaa9aba"),
        ("..", "model-5ec1f7e7"),
        ("", "model-e3b0c442"),
        (".hidden", "hidden-16924190"),
        ("-rf", "rf-686c39ac"),
        ("x\ntouch pwned", "x-touch-pwned-780e2521"),
        ("a\ud800b", "a-b-45e334b6"),
    ],
)
def test_names_of_files(told: str, name: str) -> None:
    """The digits are those of `printf ... | sha256sum`."""
    assert safe_name(told) == name


@pytest.mark.parametrize("told", ["a" * 10_000, "語" * 10_000, "/" * 10_000, "a/" * 5_000, ".." * 5_000, COMMAND, LINK, MARKUP])
def test_any_name_is_one_part_of_a_path(told: str, tmp_path: Path) -> None:
    name = safe_name(told)
    assert re.fullmatch(r"\w[\w.-]*-[0-9a-f]{8}", name) and len(name.encode()) <= MOST_NAME_BYTES + 9
    (tmp_path / f"vllm-probe-{name}-undrafted.requests.jsonl").write_text("")
    assert [path.parent for path in tmp_path.rglob("*")] == [tmp_path]


def test_a_name_of_a_server_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`run_name` does look, as a user may give a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert run_name("here/..") == tmp_path.name and safe_name("here/..") == "model-7c2d5fa8"


def test_lines() -> None:
    assert one_line("GLM-4.5, 智谱 ✓ [a] \\n") == "GLM-4.5, 智谱 ✓ [a] \\n"
    assert one_line("a\nb\r\t\x1b[31m\x00\x7f\x9b\u2028\u202e\ud800\U000e0001") == (
        r"a\nb\r\t\u001b[31m\u0000\u007f\u009b\u2028\u202e\ud800\udb40\udc01"
    )
    assert shown("x" * 201) == "x" * 200 + "…" and shown("x" * 200) == "x" * 200 and shown(None) == "None"
    assert len(shown("\x00" * 10_000)) < 1300


@pytest.mark.parametrize("label", ["../x", "/etc/x", "..", ".", "", "a\\b", "a\nb", "a\x1bb", "x" * 101, "\udcff"])
def test_a_label_that_is_no_name_is_refused(label: str) -> None:
    with pytest.raises(AssayError, match=r"^--label .*: names a file, so it may hold no slash") as refused:
        check_label(label)
    assert str(refused.value).isprintable()


def test_labels_that_are_names() -> None:
    for label in (None, "w4a16", "fp8 second try", ".x", "模型", "a..b"):
        check_label(label)


@pytest.mark.parametrize("text", [COMMAND, LINK, MARKUP, "a\\|b", "\\", "`|`|", "<!-- x", "![x](y)", "https://x <https://x>"])
def test_markdown_stays_text(text: str) -> None:
    """As a CommonMark parser with tables reads it: two cells, and nothing in them but text, emphasis and code."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(f"| one | two |\n|---|---|\n| {in_markdown(text)} | end |\n")
    assert [token.type for token in tokens].count("td_open") == 2
    inner = [child.type for token in tokens if token.type == "inline" for child in token.children or []]
    assert set(inner) <= {"text", "text_special", "code_inline", "strong_open", "strong_close", "em_open", "em_close"}
    cells = [token for token in tokens if token.type == "inline"]
    assert cells[-1].content == "end"
    assert [t.type for t in parser.parse(f"- {in_markdown(text)}\n")].count("inline") == 1


def test_markdown_shows_what_was_said() -> None:
    html = MarkdownIt("commonmark").render(in_markdown("a|b \\| <b> [x](y) p < 0.05\n97 % [1, 2]"))
    assert html == "<p>a|b \\| &lt;b&gt; [x](y) p &lt; 0.05 97 % [1, 2]</p>\n"


# ------------------------------------------------------------------------------------------------ the terminal
@pytest.mark.parametrize("text", [COMMAND, LINK, MARKUP, "[/]", "\\[/x]", "\\\\[b]"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_terminal_gets_the_text_and_no_codes(text: str, is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=is_terminal, highlight=False, soft_wrap=True, emoji=False)
    console.print(escape(text))
    assert capsys.readouterr().out == one_line(text) + "\n"


# ------------------------------------------------------------------------------------------------ commands
@pytest.fixture
def work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files around it that nobody may touch."""
    work = tmp_path / "a" / "work"
    for folder in (work, work.parent, tmp_path):
        for name in ("docs", "x", "probes"):
            (folder / name).mkdir(parents=True)
            (folder / name / "README.md").write_text("mine")
    monkeypatch.chdir(work)
    return work


def new_files(around: Path) -> set[Path]:
    """Files that were not there, as paths from the working directory; those that were are as they were."""
    found = {path for path in around.rglob("*") if not path.is_dir()}
    kept = {path for path in found if path.name == "README.md" and path.parent.name in {"docs", "x", "probes"}}
    assert len(kept) == 9 and {path.read_text() for path in kept} == {"mine"}
    return {Path(os.path.relpath(path)) for path in found - kept}


class Foreign(FakeServer):
    """Garbles every reply under load, each time in another way, and calls itself what it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(self._garbled)
        self.model = name
        self.version = self.system_fingerprint = name
        self.is_broken = False
        """Answers with control codes instead of JSON."""
        self._number = 0
        self._counting = threading.Lock()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | bytes] | None:
        return (500, "\x1b[2Jno\n\u202e\x9b".encode()) if self.is_broken else super()._answer(path, body)

    def _garbled(self, body: dict[str, Any]) -> Scripted:
        with self._counting:
            self._number += 1
        return Scripted(f"the answer is \ufffd\ufffd\ufffd \x1b[31m\u202e and so on, {self._number}", delay_s=0.01)


HOSTILE = ["../../docs", "../../../x", "HERE/docs", "..", COMMAND, LINK, MARKUP, "b" * 10_000]
"""HERE: the folder around the working directory."""


@pytest.mark.parametrize("told", HOSTILE, ids=lambda told: repr(told)[:16])
def test_a_lever_bundle_stays_in_its_folder(run: Run, work: Path, tmp_path: Path, told: str) -> None:
    told = told.replace("HERE", str(tmp_path))
    with Foreign(told) as server:
        words = ("--levers", "concurrency", "--concurrency", "2", "--requests", "2", "--max-tokens", "8")
        code, out, err = run("lever", server.base_url, *words, "--out", "out")
        folder = Path("out")
        assert code == 1, err
        names = ("README.md", "levers.json", "reproduce.py", "requests.json", "server.sh")
        assert new_files(tmp_path) == {folder / name for name in names}
        assert all(line.isprintable() for line in (out + err).split("\n"))
        assert json.loads((folder / "requests.json").read_text())["model"] == told
        check_scripts(folder, server, tmp_path)
    assert_only_text(folder / "README.md", num_headings=1)


def check_scripts(folder: Path, server: Foreign, around: Path) -> None:
    """server.sh says who it was and ends with 2; reproduce.py asks that server again; neither runs or prints anything else."""
    server.is_broken = True
    before = new_files(around)
    script = (folder / "server.sh").read_text()
    assert len(script.splitlines()) == 3 and all(line.isprintable() for line in script.split("\n"))
    for shell in ("sh", "bash"):
        assert subprocess.run([shell, "-n", folder / "server.sh"], check=False).returncode == 0
        done = subprocess.run([shell, folder / "server.sh"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    command = [sys.executable, "-I", "-S", "-B", str(folder / "reproduce.py")]
    done = subprocess.run([*command, server.base_url, "--passes", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "") and r"HTTP 500: \x1b[2Jno\n\u202e\x9b" in done.stdout
    shown_help = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert shown_help.returncode == 0
    assert all(line.isprintable() for line in (done.stdout + shown_help.stdout).split("\n"))
    assert new_files(around) == before and not list(around.rglob("pwned"))


def assert_only_text(path: Path, num_headings: int | None = None) -> str:
    """A Markdown file without links, images, HTML or characters that do not print."""
    text = path.read_text()
    assert all(line.isprintable() for line in text.split("\n"))
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    types = [token.type for token in tokens]
    inner = {child.type for token in tokens for child in token.children or []}
    assert not inner & {"link_open", "image", "html_inline"} and "html_block" not in types
    if num_headings is not None:
        assert types.count("heading_open") == num_headings
    return text


def test_two_servers_of_one_last_name_keep_both_records(run: Run, work: Path) -> None:
    for told in ("one/model", "two/model", "model"):
        with StubServer() as server:
            server.model = told
            code, _, err = run("probe", server.base_url, "--probes", "argmax", "--requests", "24", "--out", "out")
        assert code == 0, err
    assert {path.name: ProbeReport.load(path).model for path in Path("out").glob("*.json")} == {
        "model-5b854fa3.json": "one/model", "model-47726e4e.json": "two/model", "model.json": "model",
    }  # fmt: skip


@pytest.mark.parametrize("told", HOSTILE, ids=lambda told: repr(told)[:16])
def test_probes_stay_in_their_folder(run: Run, work: Path, tmp_path: Path, told: str) -> None:
    told, name = told.replace("HERE", str(tmp_path)), safe_name(told.replace("HERE", str(tmp_path)))
    with StubServer() as server:
        server.model = server.version = server.system_fingerprint = told
        code, out, err = run("probe", server.base_url, "--probes", "argmax", "--requests", "24", "--out", "out")
        assert code == 0, err
        folder = Path("out")
        assert new_files(tmp_path) == {folder / f"{name}.json", folder / f"{name}.requests.jsonl"}
        assert all(line.isprintable() for line in (out + err).split("\n"))
        code, out, _ = run("probe", server.base_url, "--probes", "argmax", "--requests", "24", "--json")
    assert all(line.isprintable() for line in out.split("\n"))
    record = json.loads(out)
    assert (record["label"], record["model"], record["system_fingerprint"]) == (name, told, shown(told))


@pytest.mark.parametrize("label", ["../x", "..", "a/b", "a\nb"])
@pytest.mark.parametrize("command", ["probe", "lever"])
def test_a_label_of_the_user_is_an_error_before_anything_is_asked(
    run: Run, work: Path, tmp_path: Path, label: str, command: str
) -> None:
    with StubServer() as server:
        code, out, err = run(command, server.base_url, "--label", label)
        assert server.generations == 0
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: --label {label!r}: names a file")
    assert new_files(tmp_path) == set()


def test_a_remedy_stays_in_its_folder(tmp_path: Path) -> None:
    """Its recipe is called after the one in the manifest of a checkpoint that may come from anywhere."""
    remedy = Remedy(role="router", keep="fp32", sentence="", recipe="name: ../../docs/x\n")
    found = LocateReport(
        how="ranks", a="a", b=None, tensor_parallel_size=2, num_prompts=1, num_tokens=1, first=None, outlier=None,
        remedy=remedy, sentence="", points=(), not_compared=(), seconds=0.0,
    )  # fmt: skip
    assert write_remedy(found, tmp_path / "a" / "b") == tmp_path / "a" / "b" / f"{safe_name('../../docs/x')}.yaml"


# ------------------------------------------------------------------------------------------------ the script of our own server
def test_a_command_line_is_quoted(tmp_path: Path) -> None:
    """Run with a `python` that says what it was given: the words and variables, each as it was, and nothing else happens."""
    stub = tmp_path / "bin of $(touch pwned)" / "python"
    words = [str(stub), "-m", "vllm", "--flag", COMMAND.replace("\x00", ""), "it's", '{"a": "$(touch pwned)"}', ""]
    value = "one\ntwo'$(touch pwned)"
    endpoint = ProbedEndpoint("http://127.0.0.1:1", "model", None, OFFER)
    write_bundle(tmp_path, lever_report(LINK), [], [], {}, endpoint, Setting(1), words, {"VALUE": value})
    stub.parent.mkdir()
    says = "print(json.dumps([sys.argv[1:], os.environ['VALUE'], os.environ['PATH']]))"
    stub.write_text(f"#!{sys.executable}\nimport json, os, sys\n{says}\n")
    stub.chmod(0o755)
    done = subprocess.run(["sh", tmp_path / "server.sh"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout) == [words[1:], value, f"{stub.parent}:{os.environ['PATH']}"]
    assert not list(tmp_path.rglob("pwned"))
    assert_only_text(tmp_path / "README.md", num_headings=1)


def lever_report(text: str) -> Any:
    from assay.records.diagnosis.lever import LeverEffect, LeverReport, Observation
    from assay_evaluate.statistics.proportions import clopper_pearson

    seen = Observation(setting={}, num_requests=1, rate=clopper_pearson(0, 1), passes=((),), seconds=0.0)
    effect = LeverEffect(lever="eager", before="a", after="b", effect="not tried", p_value=None, sentence=text)
    return LeverReport(
        label=text, baseline=seen, effects=(effect,), lever=None, also=(), smallest=(), bundle=None, sentence=text, seconds=0.0
    )


# ------------------------------------------------------------------------------------------------ what is told at the door
class Odd(FakeServer):
    """/v1/models answers as it is told to."""

    def __init__(self, listed: Any) -> None:
        super().__init__()
        self.listed = listed

    def tell(self, path: str) -> tuple[int, Any]:
        return (200, self.listed) if path == "/v1/models" else super().tell(path)


@pytest.mark.parametrize(
    "listed", [[], {}, {"data": 5}, {"data": [5]}, {"data": [{}]}, {"data": [{"id": 5}]}, {"data": [{"id": "\ud800"}]}]
)
def test_a_list_of_models_that_is_none_is_one_line(listed: Any, tmp_path: Path) -> None:
    with Odd(listed) as server:
        with pytest.raises(MeasureError, match=r"/v1/models: no list of models there; give an OpenAI-compatible server$"):
            find_endpoint(server.base_url)
        with pytest.raises(ServeError, match=r"/v1/models: no list of models there; give an OpenAI-compatible server$"):
            identify_server(server.base_url, label="fp8", checkpoint=tmp_path, profile="mine")
        server.listed = {"data": []}
        with pytest.raises(ServeError, match="/v1/models lists no model"):
            identify_server(server.base_url, label="fp8", checkpoint=tmp_path, profile="mine")


@pytest.mark.parametrize("root", ["/" + "x" * 10_000, "a\x00b", COMMAND, 5])
def test_a_root_that_is_no_path_is_not_ours_to_compare(root: Any, tmp_path: Path) -> None:
    with Odd({"data": [{"id": "model", "root": root, "max_model_len": 64}]}) as server:
        server.version = server.system_fingerprint = COMMAND
        met = identify_server(server.base_url, label="fp8", checkpoint=tmp_path, profile="mine")
        assert met.fingerprint.versions == {"vllm": shown(COMMAND)} and met.fingerprint.system_fingerprint == shown(COMMAND)


def test_messages_hold_one_line_of_what_was_said(tmp_path: Path) -> None:
    with Odd({"data": [{"id": COMMAND, "max_model_len": 64}]}) as server, StubServer() as other:
        with pytest.raises(MeasureError) as missing:
            find_endpoint(server.base_url, "mine")
        ours = identify_server(server.base_url, label="fp8", checkpoint=tmp_path, profile="mine")
        theirs = identify_server(other.base_url, label="fp8", checkpoint=tmp_path, profile="mine")
        with pytest.raises(ServeError) as unlike:
            require_same(ours, theirs)
        server.tell = lambda path: (404, {"error": COMMAND})  # type: ignore[method-assign]
        with pytest.raises(ServeError) as refused:
            get(server.base_url, "/version", what="the endpoint")
    for error in (missing, unlike, refused):
        assert str(error.value).isprintable()
    assert message_in(json.dumps({"error": {"message": COMMAND}})).isprintable()


def test_a_reply_that_is_not_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x1b]0;owned\x07 not HTTP \x9b\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError) as failed:
            Connection(f"http://127.0.0.1:{listening.getsockname()[1]}", total_s=10).ask("/x", b"{}")
        thread.join()
    assert str(failed.value) == r"BadStatusLine: \u001b]0;owned\u0007 not HTTP \u009b"


# ------------------------------------------------------------------------------------------------ reports and cards
def poisoned(measurement: Measurement) -> Measurement:
    told = {"vllm": f"dev {LINK}"}
    tasks = tuple(task.model_copy(update={"accuracy": None, "note": LINK}) for task in measurement.tasks)
    return measurement.model_copy(
        update={
            "fingerprint": measurement.fingerprint.model_copy(update={"versions": told, "kernels": (LINK,)}),
            "tasks": tasks,
            "notes": (LINK,),
            "not_measured": {"acceptance": LINK},
        }
    )


@pytest.fixture
def poisoned_run(tmp_path: Path) -> Iterator[Path]:
    run_dir = make_run(tmp_path, change=poisoned)
    odd = result("tools", None, None, f"the server does not accept tool calls: {LINK}")
    probed("w4a16", *CLEAN, odd).model_copy(update={"label": LINK}).save(probes_place(run_dir, "foreign"))
    yield run_dir


def test_report_and_card_hold_no_link_of_a_server(tmp_path: Path, poisoned_run: Path) -> None:
    clean = make_run(tmp_path / "clean")
    page = write_report(poisoned_run).read_text()
    write_report(clean)
    text = assert_only_text(poisoned_run / "report" / "report.md")
    assert "# PASS" not in [line.strip() for line in text.splitlines()]
    card = write_card(poisoned_run, "w4a16").read_text()
    body = poisoned_run / "body.md"
    ours = card.split("---\n", 2)[2].replace("[zai-org/tiny-glm](https://huggingface.co/zai-org/tiny-glm)", "")
    for folded in ("<details><summary>Every figure of every task</summary>\n", "</details>\n"):  # the template's own
        assert ours.count(folded) == 1
        ours = ours.replace(folded, "")
    body.write_text(re.sub(r"<!-- assay: checkpoint [0-9a-f]{64}, suite quick, measured [-0-9T:+]+ -->\n$", "", ours))
    assert_only_text(body)
    assert "<img src=x" not in page


def test_a_script_in_the_page_cannot_be_opened() -> None:
    """Items stand in script elements as base64, which has no `<`."""
    from assay_reports.page.items import packed, unpacked

    told = {"</script><!--": ["<b>", "\u2028"]}
    assert unpacked(packed(told)) == told and set(packed(told)) <= set(string.ascii_letters + string.digits + "+/=")

"""Servers that run already, on the command line and in a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_errors import one_error
from fake_server import FakeServer
from given_servers import given_servers
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import AssayError
from assay.recipes.profile import GivenServer
from assay.records.measurement import Measurement
from assay_pipeline.comparison.sides import Side, _name_of, parse_sides, split_values

Run = Callable[..., tuple[int, str, str]]
SUITE = """\
schema: 1
name: one
seed: eval-one
acceptance: false
tasks: [{kind: arithmetic, name: sums, num_items: 2, num_steps: [2], max_tokens: 32}]
"""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b", ["a", "b"]),
        ("http://a:1,http://b:2", ["http://a:1", "http://b:2"]),
        ("http://a:1,/m/a,/m/b", ["http://a:1,/m/a", "/m/b"]),
        ("fp8=http://a:1, /m/a ,w4a16=localhost:2,/m/b", ["fp8=http://a:1,/m/a", "w4a16=localhost:2,/m/b"]),
        ("http://a:1,x=/m/b", ["http://a:1", "x=/m/b"]),
        ("", []),
    ],
)
def test_a_folder_behind_a_url_belongs_to_it(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_what_values_mean(tmp_path: Path) -> None:
    folder = tmp_path / "a=b,c"
    folder.mkdir()
    assert parse_sides(str(folder), ["w4a16=/m/w"], {}, None) == [Side(None, folder), Side("w4a16", Path("/m/w"))]
    endpoints = {"fp8": GivenServer(url="http://a:1", checkpoint="/m/fp8"), "w4a16": GivenServer(url="http://b:1")}
    assert parse_sides("fp8", ["x/w4a16"], endpoints, None) == [
        Side("fp8", Path("/m/fp8"), endpoints["fp8"]), Side("w4a16", Path("x/w4a16"), endpoints["w4a16"])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "candidate", "message"),
    [
        ("http://a:1", "ftp://me:hunter2@b:1/x", "candidate: 'b:1/x' is no URL of a server; write it as http://HOST:PORT"),
        ("http://a:1,http://b:1", "http://c:1", "reference: names 2 checkpoints; there is one reference"),
        (
            "http://a:1",
            "http://me:hunter2@b:1",
            "candidate: the URL for b holds a user or password, which records",
        ),
        (
            "http://a:1",
            "http://b:1/?key=1",
            "candidate: 'http://b:1/' has something behind its path (`?` or `#`); write it as",
        ),
    ],
)
def test_values_that_mean_nothing(reference: str, candidate: str, message: str) -> None:
    with pytest.raises(AssayError) as caught:
        parse_sides(reference, [candidate], {}, None)
    assert str(caught.value).startswith(message) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{url}", "localhost"), "localhost: no such folder; give a checkpoint's folder, or a server as http://HOST:PORT"),
        (("nowhere", "{url}"), "nowhere: no such folder; give a checkpoint's folder, or a server as http://HOST:PORT"),
        (("file", "{url}"), "file: is a file; give the folder of a checkpoint (with config.json and *.safetensors)"),
        (("a={url}", "a={other}"), "label a: is used twice; give every checkpoint a label of its own (LABEL= before it)"),
        (
            ("{url}/v1/chat/completions", "{other}"),
            "the server of reference answers 404 at {url}/v1/chat/completions/v1/models: Not Found; write its address as "
            "http://HOST:PORT, without the path of a request",
        ),
    ],
)
def test_sides_that_are_not_there(run: Run, words: tuple[str, str], message: str) -> None:
    Path("file").touch()
    with given_servers("a", "b") as servers:
        url, other = (server.base_url for server in servers.by_label.values())
        error = one_error(run("judge", *(word.format(url=url, other=other) for word in words)))
    assert error == message.format(url=url, other=other)
    assert not Path("runs").exists()


def test_given_on_the_command_line_with_a_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-only-for-this-test"
    monkeypatch.setenv("OF_THE_SERVERS", key)
    Path("one.yaml").write_text(SUITE)
    with given_servers("fp8", "w4a16") as servers:
        servers.change(headers={"Authorization": f"Bearer {key}"})
        fp8, w4a16 = (one.base_url for one in servers.by_label.values())
        words = ("evaluate", "--reference", f"fp8={fp8}", "--candidate", f"w4a16={w4a16}/v1", "--suite", "one.yaml")
        said = one_error(run(*words))
        assert said.startswith(f"the server of fp8 answers 401 at {fp8}/v1/models: ")
        assert said.endswith("; name the variable with its key (--api-key-env, or api_key_env)")
        assert one_error(run(*words, "--api-key-env", "NOT_THERE")).startswith("--api-key-env NOT_THERE: no such environment")
        monkeypatch.setenv("OF_ANOTHER", "sk-of-another-server")
        said = one_error(run(*words, "--api-key-env", "OF_ANOTHER"))
        assert said.startswith(f"the server of fp8 answers 401 at {fp8}/v1/models: ")
        assert said.endswith("; it refuses the key that was sent (--api-key-env, or api_key_env)")
        code, out, err = run(*words, "--api-key-env", "OF_THE_SERVERS")
        assert code == 0, err
        assert sorted(path.stem for path in Path("runs/model/measurements").glob("*.json")) == ["fp8", "fp8-repeat", "w4a16"]
        assert Measurement.load(Path("runs/model/measurements/w4a16.json")).checkpoint == w4a16
        code, _, again = run(*words, "--api-key-env", "OF_THE_SERVERS")
        assert code == 0 and "w4a16: measured already" in again, again
    assert key not in out + err + again
    assert not [path for path in Path("runs").rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_a_refused_start_leaves_no_name_taken(run: Run) -> None:
    """The candidate has the reference's weights; then another reference and other gates under the same --name."""
    Path("one.yaml").write_text(SUITE)
    with given_servers("fp8", "bf16", "w4a16") as servers, FakeServer() as mistaken:
        fp8, bf16, w4a16 = (one.base_url for one in servers.by_label.values())
        mistaken.logits = servers.by_label["fp8"].logits
        words = ("--suite", "one.yaml", "--name", "first")
        code, out, err = run("evaluate", "--reference", f"fp8={fp8}", "--candidate", f"w4a16={mistaken.base_url}", *words)
        assert (code, out) == (2, "") and "answer with the same weights" in err
        assert not Path("runs/first/run.json").exists() and not Path("runs/first/gates.registered.json").exists()
        code, _, err = run("evaluate", "--reference", f"bf16={bf16}", "--candidate", f"w4a16={w4a16}", *words)
        assert code == 0, err
        assert sorted(path.stem for path in Path("runs/first/measurements").glob("*.json")) == ["bf16", "bf16-repeat", "w4a16"]
        code, _, err = run(
            "evaluate", "--reference", f"bf16={bf16}", "--candidate", f"w4a16={w4a16}", *words, "--again", "w4a16"
        )  # fmt: skip
        assert code == 0 and "bf16: measured already, on " in err and "w4a16: measured in " in err, err


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/runs/tiny-glm/w4a16/checkpoint", "w4a16"), ("/models/GLM-5/", "GLM-5"), ("zai-org/GLM-5", "GLM-5"),
        ("model", "model"),
        ("../..", "model-5ec1f7e7"),
    ],
)  # fmt: skip
def test_what_a_server_alone_is_called(root: str, name: str) -> None:
    assert _name_of(root) == name


def test_labels_of_a_target_that_have_no_server(run: Run) -> None:
    make_tiny_glm4_moe(Path("tuned"))
    Path("one.yaml").write_text(SUITE)
    with given_servers("w4a16", "mine") as servers:
        Path("here.yaml").write_text(servers.profile())
        words = ("tuned", "--suite", "one.yaml", "--profile", "here.yaml")
        assert one_error(run("evaluate", *words)) == (
            "the profile's `endpoints` have no server for fp8, only for w4a16, mine; add one: what runs already is not "
            "compared with what is started here"
        )
        assert one_error(run("probe", "tuned", "--profile", "here.yaml")).startswith(
            "profile here: its `endpoints` run already and are for `assay evaluate`; give the server's URL itself"
        )
        assert servers.requests == []

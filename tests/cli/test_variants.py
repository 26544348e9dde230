"""`--variant` of `assay judge` and `assay evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from fake_server import FakeServer
from given_servers import given_servers
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.measurement import Measurement
from assay_evaluate.run.candidate import server_spec
from assay_pipeline.evaluating import prepare

SUITE = """\
schema: 1
name: one
seed: eval-one
acceptance: false
tasks: [{kind: arithmetic, name: sums, num_items: 2, num_steps: [2], max_tokens: 32}]
"""
PROFILE = "schema: 1\nname: here\nhardware: {device: cpu}\nvariants: {fp8-kv: {vllm: {kv-cache-dtype: fp8}}}\n"


@pytest.mark.slow
def test_a_server_that_is_said_to_serve_so(run: Run) -> None:
    Path("one.yaml").write_text(SUITE)
    with FakeServer() as reference, FakeServer() as other:
        words = [f"fp8={reference.base_url}", "--variant", f"kv:kv-cache-dtype=fp8,url={other.base_url}", "--suite", "one.yaml"]
        code, out, err = run("judge", *words, "--json")
        assert code in (0, 1), err
        measured = Measurement.load(Path("runs/model/measurements/kv.json"))
        assert measured.declared == {"flags.kv-cache-dtype": "fp8", "address": other.base_url}
        (row,) = [row for row in json.loads(out)["rows"] if row["label"] == "kv"]
        said = "said to be the checkpoint of fp8, served with kv-cache-dtype fp8: its server runs already, and "
        said += "assay sees nothing of how"
        assert row["declared"] == measured.declared and row["variant"] == said
        assert f"note: kv: {said}" in err.splitlines() and said in measured.notes
        code, _, err = run("judge", *words)
        assert any(line.startswith("kv: measured already, on ") for line in err.splitlines()), err


def test_a_checkpoint_and_its_variants(run: Run, tmp_path: Path) -> None:
    folder, other = (make_tiny_glm4_moe(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "other")))
    Path("here.yaml").write_text(PROFILE)
    said: list[str] = []
    prepared = prepare(
        reference=f"fp8={folder}", candidates=[f"w4a16={other}"], variants=["fp8-kv", "no-mtp:mtp=off"], suite="first-look",
        profile="here.yaml", say=said.append,
    )  # fmt: skip
    found = [(one.label, one.checkpoint, one.declared) for one in prepared.compared.candidates]
    assert found == [
        ("fp8", folder, {}), ("w4a16", other, {}), ("fp8-kv", folder, {"flags.kv-cache-dtype": "fp8"}),
        ("no-mtp", folder, {"speculation": None}),
    ]  # fmt: skip
    *_, variant, _ = prepared.compared.candidates
    spec = server_spec(variant, prepared.profile, prepared.target.recipe.serving, tmp_path)
    assert spec.profile.flags == {"kv-cache-dtype": "fp8"} and spec.log_path.name == "vllm-fp8-kv.log"
    assert "note: fp8-kv: the checkpoint of fp8 itself, served with kv-cache-dtype fp8" in said
    assert not [line for line in said if "compared with themselves" in line]


def test_a_variant_of_the_model_s_recipe(run: Run) -> None:
    """A profile's of the same name wins."""
    make_tiny_glm4_moe(Path("model"))
    assert run("init", "model", "--out", "mine.yaml")[0] == 0
    own = "variants:\n  no-mtp: {speculation: off}\n  fp8-kv: {vllm: {kv-cache-dtype: fp8_e5m2}}\n"
    Path("mine.yaml").write_text(Path("mine.yaml").read_text() + own)
    Path("here.yaml").write_text(PROFILE)
    assert run("quantize", "mine.yaml", "-p", "fp8")[0] == 0  # the reference
    prepared = prepare(
        "mine.yaml", variants=["fp8-kv", "no-mtp"], only_reference=True, suite="first-look", profile="here.yaml"
    )  # fmt: skip
    declared = {candidate.label: candidate.declared for candidate in prepared.compared.candidates[1:]}
    assert declared == {"fp8-kv": {"flags.kv-cache-dtype": "fp8"}, "no-mtp": {"speculation": None}}
    error = one_error(run("evaluate", "mine.yaml", "--variant", "no-mpt", "--suite", "first-look"))
    assert error.startswith("--variant no-mpt: did you mean no-mtp? there are no-mtp, fp8-kv; name one of them, or write ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model", "--variant", "x:mtp=deep"),
            "--variant x: mtp takes off, or a whole number of drafted tokens from 1 to 4096",
        ),
        (
            ("model", "--variant", "x:api-key=hunter2"),
            "--variant x: vllm.api-key: is a key, a token or a password, or an address",
        ),
        (
            ("model", "--variant", "fp8kv", "--profile", "here.yaml"),
            "--variant fp8kv: did you mean fp8-kv? there are fp8-kv;",
        ),
        (
            ("model", "--variant", "model:mtp=off"),
            "--variant model: is the label of another measurement here; give the variant ",
        ),
        (
            ("model", "--variant", "x:mtp=off,url=http://127.0.0.1:9"),
            "--variant x: url names a server that runs already, and model is served here; give its URL as well, "
            "or leave url out",
        ),
        (
            ("model", "--variant", "x:mtp=off", "--base", "b"),
            "--base: is for one checkpoint alone, and 2 were given; leave it out",
        ),
    ],
)
def test_wrong_words_are_one_line(run: Run, words: tuple[str, ...], message: str) -> None:
    make_tiny_glm4_moe(Path("model"))
    Path("here.yaml").write_text(PROFILE)
    error = one_error(run("judge", *words))
    assert error.startswith(message) and "hunter2" not in error
    assert not Path("runs").exists()


def test_a_variant_of_a_server_needs_a_server(run: Run) -> None:
    with given_servers("fp8") as servers:
        url = servers.by_label["fp8"].base_url
        assert one_error(run("judge", f"fp8={url}", "--variant", "x:mtp=off")) == (
            "--variant x: the server of fp8 runs already, and so must the variant's, which assay cannot start; add "
            "url=http://HOST:PORT"
        )
        Path("given.yaml").write_text(servers.profile("given"))
        words = ("judge", "fp8", "--profile", "given.yaml", "--variant")
        assert one_error(run(*words, "x:mtp=off")) == (
            "--variant x: the server of fp8 runs already, and so must the variant's, which assay cannot start; add an entry of "
            "that name to the profile's `endpoints`"
        )
        assert one_error(run(*words, f"x:mtp=off,url={url}")) == (
            "--variant x: has a url, and the profile has `endpoints`; say where the servers are in one place"
        )
    assert not Path("runs").exists()


def test_endpoints_of_a_profile_may_be_variants(run: Run) -> None:
    """Of a model that is named, with nothing but its variant beside the reference."""
    with given_servers("fp8", "kv") as servers:
        Path("given.yaml").write_text(servers.profile("given"))
        prepared = prepare("tiny-glm", profile="given.yaml", variants=["kv:kv-cache-dtype=fp8"], suite="first-look")
        found = [(one.label, one.endpoint and one.endpoint.url, one.declared) for one in prepared.compared.candidates]
        urls = {label: server.base_url for label, server in servers.by_label.items()}
    assert found == [("fp8", urls["fp8"], {}), ("kv", urls["kv"], {"flags.kv-cache-dtype": "fp8"})]


def test_the_reference_alone_needs_no_mix_to_be_chosen(run: Run) -> None:
    """tiny-glm's recipe has `auto-4.5bpw`, which a run chooses first; a budget check asks the reference only."""
    assert one_error(run("evaluate", "tiny-glm", "--budget-check", "--profile", "cpu-emulated")) == (
        "runs/tiny-glm/fp8/checkpoint: no finished checkpoint there; make it first: assay quantize tiny-glm --precision fp8"
    )

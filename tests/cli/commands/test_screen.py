"""`assay screen`: words, exit codes, the record."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from browser import Browser, find_chromium
from command_errors import one_error
from command_line import Run
from safetensors.torch import load_file, save_file
from tiny_families import glm4_moe, make_tiny

from assay.records.base import Interval
from assay.records.screening import Screening, Surprise
from assay_evaluate.client.journal import Journal
from assay_evaluate.divergence.documents import Document, KeptTexts, keep_texts
from assay_evaluate.statistics.skewed import skewed_mean
from assay_pipeline.comparison.screen_figures import _word, with_higher_low
from assay_pipeline.comparison.screen_looks import looks_of
from assay_pipeline.comparison.screen_passes import MadePass, joined, states_in
from assay_pipeline.comparison.screening import screen
from assay_quantize.sensitivity.texts import ScoredText, texts_sha256
from assay_reports.screening import heading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, w4a16 that was made of it, damaged (its scales ten times too large), replies.jsonl."""
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("screen")
    make_tiny(folder / "source", glm4_moe())
    quantize(str(folder / "source"), precision="w4a16-g32", out=folder / "w4a16")
    shutil.copytree(folder / "w4a16", folder / "damaged")
    for path in (folder / "damaged").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: 10 * t if n.endswith("weight_scale") else t for n, t in tensors.items()}, path, {"format": "pt"})
    lines = [
        json.dumps(
            {"prompt": f"{number} + 3?", "reply": f"It is {number + 3}, of course.", "domain": ("odd", "even")[number % 2]}
        )
        for number in range(24)
    ]
    (folder / "replies.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def screened(run: Run, folder: Path, *words: str) -> tuple[int, Screening]:
    candidates = [str(folder / name) for name in ("source", "w4a16", "damaged")]
    text = ("--text", str(folder / "replies.jsonl"))
    code, out, _ = run("screen", str(folder / "source"), *candidates, *text, "--json", *words)
    return code, Screening.model_validate_json(out)


def test_least_divergence_first_and_a_damaged_one_fails(run: Run, folder: Path, tmp_path: Path) -> None:
    code, record = screened(run, folder, "--out", str(tmp_path / "out"))
    assert code == 1 and Screening.load(tmp_path / "out" / "screening.json") == record
    same, w4a16, damaged = record.candidates
    assert [candidate.label for candidate in record.candidates] == ["source-2", "w4a16", "damaged"]
    assert (same.word, damaged.word) == ("not failed", "FAIL")
    assert same.drift.kl_mean == Interval(value=0, low=0, high=0, n=24, coverage=same.drift.kl_mean.coverage)
    assert (same.drift.top1_agreement.value, same.top_k_shared.value, same.reverse_kl_mean.value) == (1, 1, 0)
    assert [(change.layer, change.changed) for change in same.routers] == [(1, 0), (2, 0)]
    assert same.drafts is not None and same.drafts.change is not None
    assert (same.drafts.change.low, same.drafts.change.high, same.drafts.accepted) == (0, 0, same.drafts.reference_accepted)
    assert damaged.drafts is not None and damaged.drafts.accepted != same.drafts.accepted
    assert same.drafts.num_drafts == record.panel.num_tokens
    assert (same.limit, w4a16.limit_for) == (0.02, damaged.limit_for)
    assert 0 < w4a16.drift.kl_mean.value < damaged.drift.kl_mean.value
    assert {group.name for group in damaged.drift.by_domain} == {"odd", "even"}
    assert record.panel.num_texts == 24 and record.panel.num_tokens == damaged.drift.num_positions
    ranking = record.rankings[1]
    assert (ranking.first, ranking.second, ranking.is_ranked) == ("w4a16", "damaged", True)
    assert ranking.ratio is not None and ranking.ratio.high < 1
    again = screened(run, folder, "--out", str(tmp_path / "out"))[1]
    assert again.model_copy(update={"seconds": record.seconds, "estimate": record.estimate}) == record


def test_what_is_printed(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ("screen", str(folder / "source"), str(folder / "damaged"), "--text", str(folder / "replies.jsonl"))
    code, out, _ = run(*words, "--out", str(tmp_path / "out"))
    assert code == 1 and "PASS" not in out
    assert out.startswith(f"reference {folder}/source (not quantized); 24 texts, ")
    assert "FAIL" in out and "damaged: most on " in out
    assert out.endswith(
        "A divergence is no verdict on tasks: `assay judge` and `assay evaluate` ask both checkpoints questions.\n"
    )


def test_the_page(run: Run, folder: Path, tmp_path: Path) -> None:
    record = screened(run, folder, "--out", str(tmp_path / "out"))[1]
    page = tmp_path / "out" / "screening.html"
    text = page.read_text()
    assert f"<h1>{heading(record)}</h1>" in text and heading(record).startswith("source-2 is ahead: ")
    assert "PASS" not in text.partition("<script>")[0] and str(folder) not in text
    if find_chromium() is None:
        pytest.skip("there is no Chromium here")
    for width in (1280, 390):
        with Browser(width=width) as browser:
            browser.open(page)
            assert (browser.console, browser.requests) == ([], [page.as_uri()])
            assert browser.run("document.documentElement.scrollWidth") <= width
            marks = browser.run("[...document.querySelectorAll('svg title')].map(t => t.textContent)")
            assert len(marks) == 6 and any(mark.startswith("damaged, ") for mark in marks)


def test_structural_tokens_are_told_apart(run: Run, folder: Path, tmp_path: Path) -> None:
    replies = [{"prompt": f"{n} + 3?", "reply": f"So.</think>It is {n + 3}."} for n in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    words = ("screen", str(folder / "source"), str(folder / "damaged"), "--text", str(tmp_path / "texts.jsonl"))
    code, out, _ = run(*words, "--json", "--out", str(tmp_path / "out"))
    (candidate,) = Screening.model_validate_json(out).candidates
    assert [(group.name, group.num_positions) for group in candidate.by_structural] == [("thinking", 24)]
    assert candidate.by_structural[0].kl_mean > 0
    assert code in (0, 1) and "<h2>KL by structural token</h2>" in (tmp_path / "out" / "screening.html").read_text()


def test_another_model_by_its_small_files_is_named(run: Run, folder: Path, tmp_path: Path) -> None:
    """Over these texts neither another tokenizer nor a field that only long texts meet changes anything."""
    changes: dict[str, dict[str, Any]] = {
        "window": {"max_position_embeddings": 131072},
        "topk": {"norm_topk_prob": False},
        "resaved": {
            "partial_rotary_factor": None,
            "norm_topk_prob": None,
            "rope_theta": None,
            "unsloth_fixed": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },  # defaults left out, as transformers saves it
    }
    for name, fields in changes.items():
        made = shutil.copytree(folder / "source", tmp_path / name)
        config = json.loads((made / "config.json").read_text()) | fields
        (made / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    made = shutil.copytree(folder / "source", tmp_path / "tokens")
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    candidates = [str(tmp_path / name) for name in (*changes, "tokens")]
    words = (
        "screen",
        str(folder / "source"),
        *candidates,
        "--text",
        str(folder / "replies.jsonl"),
        "--out",
        str(tmp_path / "out"),
    )
    code, out, err = run(*words)
    record = Screening.load(tmp_path / "out" / "screening.json")
    assert code == 1 and record.unlike_reference == {
        "window": ("max_position_embeddings is 131072, and 4096 in the reference",),
        "topk": ("norm_topk_prob is False, and True in the reference",),
        "tokens": ("model of its tokenizer.json is not the reference's",),
    }
    assert {candidate.word for candidate in record.candidates} == {"not failed"}
    line = "another model than the reference: model of its tokenizer.json is not the reference's"
    assert f"tokens: {line}" in out.splitlines() and f"note: tokens: {line}" in err.splitlines()
    page = (tmp_path / "out" / "screening.html").read_text()
    assert "<li>tokens: model of its tokenizer.json is not the reference&#39;s</li>" in page
    assert heading(record).endswith("; window is another model than the reference") and f"<h1>{heading(record)}</h1>" in page


def test_few_texts_have_no_interval_and_no_answer(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text("".join((folder / "replies.jsonl").read_text().splitlines(keepends=True)[:2]))
    words = ("screen", str(folder / "source"), str(folder / "damaged"), "--text", str(tmp_path / "two.jsonl"))
    code, out, _ = run(*words, "--out", str(tmp_path / "out"))
    assert code == 0 and "UNDERPOWERED" in out and "fewer than 20 texts have no interval; give more texts" in out


def test_plain_text_is_cut(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It is a truth universally acknowledged. " * 200)
    words = ("screen", str(folder / "source"), str(folder / "source"), "--text", str(tmp_path / "book.txt"), "--length", "16")
    code, out, _ = run(*words, "--tokens", "320", "--json", "--out", str(tmp_path / "out"))
    record = Screening.model_validate_json(out)
    assert (code, record.panel.num_texts, record.panel.num_tokens) == (0, 22, 330)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"txt": "x"}\n', 'a.jsonl:1: is no line of a text; write {"text": ...} or {"prompt": ..., "reply": ...}'),
        ("a.jsonl", b"[" * 100_000, 'a.jsonl:1: is no line of a text; write {"text": ...} or {"prompt": ..., "reply": ...}'),
        (
            "a.jsonl",
            b'{"text": "half of a pair: \\ud83d"}\n',
            'a.jsonl:1: is no line of a text; write {"text": ...} or {"prompt": ..., "reply": ...}',
        ),
        (
            "a.jsonl",
            b'{"prompt": "\\ud83d", "reply": "Yes, it is."}\n',
            'a.jsonl:1: is no line of a text; write {"text": ...} or {"prompt": ..., "reply": ...}',
        ),
        ("a.jsonl", b'{"text": "One text alone."}\n', "a.jsonl: 1 text is too few for a divergence; give at least two"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: is no UTF-8 text; give plain text or JSON lines"),
        ("a.txt", b"", "a.txt: no text of two tokens; give files of plain text or JSON lines"),
        (
            "missing.txt",
            None,
            "missing.txt: no such file or folder; give texts, JSON lines, or the folder of a run",
        ),
    ],
)
def test_wrong_texts(run: Run, folder: Path, tmp_path: Path, name: str, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    words = ("screen", str(folder / "source"), str(folder / "w4a16"), "--text", str(tmp_path / name))
    assert one_error(run(*words, "--out", str(tmp_path / "out"))) == f"{tmp_path}/{expected}"


def test_a_text_beyond_the_positions_of_the_model(run: Run, folder: Path, tmp_path: Path) -> None:
    """Where frequencies are scaled there are so many times more."""
    source = shutil.copytree(folder / "source", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = 150
    rope = config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {}
    config["rope_parameters"] = rope | {"rope_type": "linear", "factor": 4.0}
    text = tmp_path / "long.jsonl"
    text.write_text("".join(json.dumps({"text": "word " * 2000 + str(number)}) + "\n" for number in range(2)))
    words = ("screen", str(source), str(source), "--text", str(text), "--tokens", "4000", "--out", str(tmp_path / "out"))
    (source / "config.json").write_text(json.dumps(config))
    assert one_error(run(*words, "--length", "601")) == (
        f"{text}:1: 601 tokens, and {source} is made for 600 (max_position_embeddings); give a smaller --length, "
        "or texts that fit"
    )
    code, _, err = run(*words, "--length", "600")
    assert code == 0 and "2 texts, 1,198 tokens scored" in err and "sequence length" not in err


def test_a_mark_of_byte_order_is_no_text(run: Run, folder: Path, tmp_path: Path) -> None:
    """As editors on Windows put it in front of UTF-8."""
    sha256 = set()
    for number, mark in enumerate((b"", b"\xef\xbb\xbf")):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(mark + b'{"stated": {"licence": "MIT"}}\r\n{"text": "Two texts."}\r\n{"text": "Both short."}\r\n')
        words = ("screen", str(folder / "source"), str(folder / "source"), "--text", str(path), "--out", str(tmp_path / "out"))
        code, out, err = run(*words, "--json")
        assert code == 0, err
        record = Screening.model_validate_json(out)
        assert record.panel.stated.licence == "MIT"
        sha256.add(record.panel.sha256)
    assert len(sha256) == 1


def test_nothing_is_written_into_a_checkpoint(run: Run, folder: Path, tmp_path: Path) -> None:
    made = shutil.copytree(folder / "source", tmp_path / "made")
    text = ("--text", str(folder / "replies.jsonl"))
    for place in (made, made / "sub", tmp_path / "made" / ".." / "made"):
        for words in (
            ("screen", str(made), str(folder / "w4a16")),
            ("screen", str(folder / "w4a16"), str(made)),
            ("pack", str(made)),
        ):
            if words[0] == "pack" and place != made / "sub":
                continue  # it is not empty
            message = one_error(run(*words, *text, "--out", str(place)))
            assert message == f"{place}: lies in the checkpoint {made}, to which nothing is written; give another --out"
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in (folder / "source").iterdir())


@pytest.mark.parametrize("command", ["screen", "pack"])
def test_a_full_disk(run: Run, folder: Path, tmp_path: Path, command: str) -> None:
    """And what was begun goes on when there is room."""
    source, out = str(folder / "source"), tmp_path / "out"
    words = (command, source, *([source] if command == "screen" else []), "--text", str(folder / "replies.jsonl"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        code, _, err = run(*words, "--out", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    place = (out if command == "screen" else tmp_path / ".out.partial") / "passes"
    assert (code, err.splitlines()[-1]) == (2, f"error: {place}: cannot be written: File too large; give another --out")
    assert run(*words, "--out", str(out))[0] == 0


def test_drafts_that_are_no_numbers_are_not_counted(run: Run, folder: Path, tmp_path: Path) -> None:
    """A norm of the MTP block is NaN; and what a crash left of a pass's record is no pass."""
    broken = shutil.copytree(folder / "source", tmp_path / "broken")
    path = next(broken.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".enorm.weight"))
    save_file({**tensors, name: torch.full_like(tensors[name], np.nan)}, path, {"format": "pt"})
    words = ("screen", str(folder / "source"), str(broken), "--text", str(folder / "replies.jsonl"), "--json")
    code, out, err = run(*words, "--out", str(tmp_path / "out"))
    assert code == 0, err
    (candidate,) = Screening.model_validate_json(out).candidates
    assert candidate.drafts is None and candidate.not_applied == ("MTP drafts: its MTP block computes NaN or infinity",)
    for content in (b"", b"{", b"\xff"):
        (tmp_path / "out" / "passes" / "broken" / "pass.json").write_bytes(content)
        again = Screening.model_validate_json(run(*words, "--out", str(tmp_path / "out"))[1])
        assert again.candidates == (candidate,)


def test_nothing_empty_is_left(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text, candidate = ("--text", str(tmp_path / "missing.txt")), str(folder / "w4a16")
    for words in (("screen", candidate), ("screen", candidate, "--out", "a/b"), ("pack", "--out", "a/b")):
        code, _, err = run(*words, str(folder / "source"), *text)
        missing = f"error: {tmp_path}/missing.txt: no such file or folder; give texts, JSON lines, or the folder of a run"
        assert (code, err) == (2, f"{missing}\n")
        assert list(tmp_path.iterdir()) == []


def test_two_at_once(run: Run, folder: Path, tmp_path: Path) -> None:
    """The second of the same --out would empty the first one's states."""
    words = (str(folder / "source"), "--text", str(folder / "replies.jsonl"), "--out", str(tmp_path / "out"))
    for command, more, place in (
        ("screen", [str(folder / "w4a16")], tmp_path / "out" / "passes"), ("pack", [], tmp_path / ".out.partial" / "passes"),
    ):  # fmt: skip
        with states_in(place):
            message = one_error(run(command, *words, *more))
        assert message == f"{place}: another command is at work in it; wait for it, or give this one another --out"
        assert not place.exists()


def test_wrong_checkpoints(run: Run, folder: Path, tmp_path: Path) -> None:
    text = ("--text", str(folder / "replies.jsonl"), "--out", str(tmp_path / "out"))
    assert "no such folder" in one_error(run("screen", str(folder / "source"), str(folder / "nothing"), *text))
    assert one_error(run("screen", str(folder / "source"), "http://me:secret@host:1", *text)) == (
        "http://host:1: is an address, and weights are read here; give a checkpoint's folder, or compare servers with "
        "`assay judge`"
    )
    other = make_tiny(tmp_path / "other", glm4_moe(vocab_size=960))
    code, _, err = run("screen", str(folder / "source"), str(other), *text)
    assert code == 2 and err.endswith(
        "error: other: has 960 tokens in its head, the reference 896: it is another model, whose next-token distributions are "
        "over other tokens; give a candidate of this reference\n"
    )
    assert "estimate" not in err
    broken = shutil.copytree(folder / "source", tmp_path / "broken")
    path = next(broken.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file({**tensors, name: torch.full_like(tensors[name], np.nan)}, path, {"format": "pt"})
    code, _, err = run("screen", str(folder / "source"), str(broken), *text)
    assert code == 2 and "computes NaN or infinity; `assay inspect --deep` looks for the weight" in err


def test_what_it_may_take(run: Run, folder: Path, tmp_path: Path) -> None:
    words = (
        "screen", str(folder / "source"), str(folder / "w4a16"), "--text", str(folder / "replies.jsonl"),
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert one_error(run(*words, "--max-cost", "1")) == "--max-cost: say what an hour of this machine costs with --price"
    for limits in (("--max-hours", "0"), ("--max-cost", "0", "--price", "2")):
        code, _, err = run(*words, *limits)
        assert code == 2
        last = err.splitlines()[-1]
        assert last.startswith(f"error: {limits[0]}: reads ") and last.endswith("; no number of tokens would fit")
    code, out, err = run(*words, "--max-hours", "5", "--price", "2", "--json")
    record = Screening.model_validate_json(out)
    assert record.estimate is not None and record.estimate.usd == record.estimate.seconds * 2 / 3600
    assert f"estimate: reads {record.estimate.read_bytes / 1e6:.3g} MB" in err
    assert Screening.model_validate_json(run(*words, "--json")[1]).estimate is None  # both passes are there


def test_memory_that_holds_no_whole_layer(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures, MTP block included; what does not fit even so, and what is no size, is said before anything is read."""
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((folder / "replies.jsonl").read_text().splitlines()[:4]))
    words = ("screen", str(folder / "source"), str(folder / "w4a16"), "--text", str(few), "--json")
    whole = Screening.model_validate_json(run(*words, "--out", str(tmp_path / "whole"))[1])
    words = (*words, "--out", str(tmp_path / "out"))
    monkeypatch.setattr("assay_pipeline.comparison.screen_passes._held_bytes", lambda: 1_000_000)
    monkeypatch.setattr("assay_pipeline.comparison.screen_passes.COMPUTING_BYTES", 0)
    for memory, message in {
        "900KB": "--memory 900 kB: the process takes 1 MB without any weight; give more",
        "2MB": "two heads, which are compared, take 1.84 MB of memory",
        "much": "--memory much: not a size; write it like 2GiB, 1.5GiB or 800MB",
    }.items():
        code, _, err = run(*words, "--memory", memory)
        assert code == 2 and message in err.splitlines()[-1]
    code, out, err = run(*words, "--memory", "3.6MB")
    record = Screening.model_validate_json(out)
    assert code == 0 and record.candidates == whole.candidates
    assert record.candidates[0].drafts is not None
    assert "layers of up to 2.76 MB, their experts in 4 groups, attention computed twice" in err


@pytest.mark.slow
def test_the_process_stays_within_its_memory(tmp_path: Path) -> None:
    """Layers of 210 MB, of which two fit without a limit."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 64, "num_experts_per_tok": 8}
    source = make_tiny(tmp_path / "source", glm4_moe(num_nextn_predict_layers=0, **sizes))

    code = (
        "import atexit, re; from pathlib import Path; from assay_cli.root import main\n"
        "peak = lambda: re.search('VmHWM: *(.*) kB', Path('/proc/self/status').read_text().expandtabs())[1]\n"
        "atexit.register(lambda: print(peak()))\n"
        "main()\n"
    )

    def screened(memory: str) -> tuple[int, int, str]:
        """Exit code, peak in bytes, what was said."""
        words = ["screen", str(source), str(source), "--tokens", "200", "--out", str(tmp_path / "out"), "--memory", memory]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        return done.returncode, int(done.stdout.splitlines()[-1]) << 10, done.stderr

    refused, _, err = screened("1MB")
    empty = re.search(r"--memory 1 MB: the process takes (\d+) MB without any weight; give more", err)
    assert refused == 2 and empty is not None, err
    memory = int(empty[1]) + 200
    ended, peak_bytes, err = screened(f"{memory}MB")
    assert (ended, "their experts in " in err) == (0, True), err
    assert peak_bytes <= memory * 1_000_000


def test_foreign_texts_fail_nobody(run: Run, tmp_path: Path) -> None:
    """A model that was trained on sums and codes, and English prose: a healthy 4-bit checkpoint diverges there as it may."""
    from assay_pipeline.quantizing import quantize

    source = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
    quantize(str(source), precision="w4a16-channel", out=tmp_path / "made")
    words = ("screen", str(source), str(tmp_path / "made"), "--tokens", "2000", "--out", str(tmp_path / "out"))
    code, out, _ = run(*words)
    record = Screening.load(tmp_path / "out" / "screening.json")
    (made,) = record.candidates
    assert isinstance(made.drift.kl_mean, Interval) and made.drift.kl_mean.low > made.limit
    assert record.surprise.nll > record.surprise.entropy + 5
    assert (code, made.word) == (0, "UNDERPOWERED")
    assert "made: not decided: these texts are foreign to the reference (1" in out


def test_what_the_reference_of_a_run_wrote(run: Run, folder: Path, tmp_path: Path) -> None:
    """As the very tokens of the journal; the same text twice counts once, and held-out text is nobody's reply."""
    draw = np.random.default_rng(3)
    documents = [
        Document(
            f"writing/en/{number}", "en", tuple(map(int, draw.integers(7, 800, 5 + number))),
            tuple(map(int, draw.integers(7, 800, 20))), domain="writing", num_thinking=8,
        )
        for number in range(24)
    ]  # fmt: skip
    held_out = Document("held/0", "en", (1, 2), (3, 4, 5), texts="held_out")
    with Journal(tmp_path / "runs" / "journal.db") as journal:
        keep_texts(journal, "first", KeptTexts((*documents, held_out), 20, "completions"))
        keep_texts(journal, "second", KeptTexts(tuple(documents[:3]), 20, "completions"))
    words = ("screen", str(folder / "source"), str(folder / "w4a16"), "--text", str(tmp_path / "runs"))
    code, out, _ = run(*words, "--json", "--out", str(tmp_path / "out"))
    record = Screening.model_validate_json(out)
    expected = [ScoredText((*text.prompt_ids, *text.reply_ids), len(text.prompt_ids)) for text in documents]
    assert code in (0, 1) and record.panel.sha256 == texts_sha256(expected)
    assert [(group.name, group.num_positions) for group in record.candidates[0].drift.by_part] == [
        ("answer", 24 * 12), ("thinking", 24 * 8),
    ]  # fmt: skip
    short = run(*words, "--json", "--length", "4", "--tokens", "40", "--out", str(tmp_path / "short"))[1]
    assert Screening.model_validate_json(short).panel.num_texts == 10
    other = make_tiny(tmp_path / "other", glm4_moe(vocab_size=500))
    message = one_error(run("screen", str(other), str(other), "--text", str(tmp_path / "runs"), "--out", str(tmp_path / "out")))
    assert message.endswith(f"is none of {other}, which has 500: it is a run of another model")
    message = one_error(run("screen", str(other), str(other), "--text", str(tmp_path), "--out", str(tmp_path / "out")))
    assert (
        message == f"{tmp_path}: is a folder and no run; give a file of texts, or the folder of a run that measured divergence"
    )


def test_arguments_are_looked_at_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing it takes seconds, and minutes from a slow disk."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from assay.errors import AssayError\n"
        "from assay_pipeline.comparison.screening import screen\n"
        "for words in (['.'], ['./nothing', '.'], ['.', '.']):\n"
        "    try: screen(words)\n"
        "    except AssayError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "give a reference and a candidate or more, or `--pack PACK` and candidates",
        f"./nothing: no such folder: {tmp_path} has no 'nothing'; give a checkpoint's folder (with config.json and "
        "*.safetensors)",
        ".: has no config.json; a checkpoint folder holds config.json and *.safetensors",
    ], done.stderr


def test_a_long_text_without_a_loss_hides_no_loss_of_the_others() -> None:
    draw = np.random.default_rng(2)
    values = [draw.gamma(8, 1 / 8, size) for size in draw.integers(10, 70, 59)] + [np.zeros(180)]
    text_of_token = np.repeat(np.arange(60), [len(kl_P) for kl_P in values])
    mean = skewed_mean(np.concatenate(values), text_of_token, least=0)
    assert mean.low < 0.02 < 0.8 < mean.value
    counts = [len(kl_P) for kl_P in values]
    made = with_higher_low(mean, [kl_P.sum() for kl_P in values], counts)
    assert 0.3 < made.low < made.value == mean.value and made.high == mean.high
    zero = skewed_mean(np.zeros(sum(counts)), text_of_token, least=0)
    assert with_higher_low(zero, np.zeros(60), counts) == zero


@pytest.mark.parametrize(
    ("low", "value", "high", "expected"),
    [
        (0.0, 1.12, 1.47, math.ceil(1000 * (1.12 / 1.10) ** 2)),  # the limit lies in its longer end
        (0.001, 0.015, 0.045, math.ceil(1000 * (0.030 / 0.005) ** 2)),
        (0.01, 0.02, 0.03, None),
    ],
)
def test_more_tokens_are_needed_than_did_not_decide(low: float, value: float, high: float, expected: int | None) -> None:
    mean = Interval(value=value, low=low, high=high, n=60, level=0.95, coverage="at_least")
    drift: Any = SimpleNamespace(kl_mean=mean, num_positions=1000)
    assert _word(drift, 0.02, Surprise(nll=0.3, entropy=0.2), None) == ("UNDERPOWERED", expected)


# ------------------------------------------------------------------------------------------------ looks
@pytest.fixture
def many(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("assay.records.screening.FOREIGN_NATS", 10.0)  # a model of random weights knows no text
    replies = [
        {"prompt": f"{n} + 3?", "reply": f"It is {n + 3}, of course.", "domain": ("odd", "even")[n % 2]} for n in range(88)
    ]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    return tmp_path / "many.jsonl"


def test_looks_are_fixed_by_the_number_of_texts() -> None:
    for num_texts in (1, 24, 79):
        assert looks_of(num_texts) == [list(range(num_texts))]
    for num_texts, first in ((80, 40), (88, 40), (160, 40), (400, 100)):
        early, rest = looks_of(num_texts)
        assert len(early) == first and sorted([*early, *rest]) == list(range(num_texts))
        gaps = np.diff(early)
        assert early[0] == 0 and gaps.max() - gaps.min() <= 1 and early[-1] >= num_texts - gaps.max()


def test_what_a_quarter_of_the_texts_decides(
    run: Run, folder: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look, and all texts, of one candidate; a second one that is not decided makes both be looked at again."""
    source, damaged, w4a16 = (str(folder / name) for name in ("source", "damaged", "w4a16"))
    text = ("--text", str(many))
    code, out, err = run("screen", source, damaged, *text, "--json", "--out", str(tmp_path / "first"))
    first = Screening.model_validate_json(out)
    assert code == 1 and (first.panel.num_texts, first.num_texts_given) == (40, 88)
    assert "decided by 40 of 88 texts; --all-texts takes all of them" in err.splitlines()
    (candidate,) = first.candidates
    assert isinstance(candidate.drift.kl_mean, Interval) and (candidate.word, candidate.drift.kl_mean.level) == ("FAIL", 0.975)
    page = (tmp_path / "first" / "screening.html").read_text()
    assert "<li>40 texts of 88, which decide, " in page
    out = run("screen", source, damaged, *text, "--all-texts", "--json", "--out", str(tmp_path / "all"))[1]
    whole = Screening.model_validate_json(out)
    assert (whole.panel.num_texts, whole.num_texts_given) == (88, 88)
    # the limit moved to where w4a16 lies, nothing decides it
    near = whole.candidates[0].limit
    gates = tmp_path / "gates.yaml"
    out = run("screen", source, w4a16, *text, "--all-texts", "--json", "--out", str(tmp_path / "w4a16"))[1]
    kl = Screening.model_validate_json(out).candidates[0].drift.kl_mean
    assert isinstance(kl, Interval) and kl.level == 0.95 and near > 0
    gates.write_text(
        f"schema: 1\nname: gates\ndescription: A limit that nothing decides.\ngates:\n"
        f"- {{kind: divergence, metric: kl_mean, max: {kl.value}}}\n"
    )
    alike, _ = screen([source, w4a16], text=[many], gates=str(gates), out=tmp_path / "alike")
    assert alike.candidates[0].word == "UNDERPOWERED" and alike.panel.num_texts == 40, "such texts: its KL is known to 10 %"
    monkeypatch.setattr("assay_pipeline.comparison.screen_looks.PRECISE", 0.0)
    damaged = str(shutil.copytree(damaged, tmp_path / "w4a16-rest"))  # a name that looks like another's second look
    both, _ = screen([source, w4a16, damaged], text=[many], gates=str(gates), out=tmp_path / "both")
    assert (both.panel.num_texts, both.num_texts_given) == (88, 88)
    assert {path.name for path in (tmp_path / "both" / "passes").iterdir()} == {
        f"{name}{rest}" for name in ("source", "w4a16", "w4a16-rest") for rest in ("", "+rest")
    }
    by_label = {candidate.label: candidate for candidate in both.candidates}
    expected = {candidate.label: candidate for candidate in whole.candidates}["damaged"]
    joined = by_label["w4a16-rest"]
    for name in ("reverse_kl_mean", "top_k_shared", "by_entropy", "routers", "drafts", "by_structural"):
        assert getattr(joined, name) == getattr(expected, name), name
    assert joined.drift.model_copy(update={"kl_mean": None}) == expected.drift.model_copy(update={"kl_mean": None})
    assert joined.drift.kl_mean.value == expected.drift.kl_mean.value
    # killed between the looks, the same call goes on
    for name in ("w4a16+rest", "w4a16-rest+rest"):
        shutil.rmtree(tmp_path / "both" / "passes" / name)
    again, _ = screen([source, w4a16, damaged], text=[many], gates=str(gates), out=tmp_path / "both")
    unlike = {"seconds": both.seconds, "estimate": both.estimate}
    assert again.model_copy(update=unlike) == both


def test_looks_at_a_pack(run: Run, folder: Path, many: Path, tmp_path: Path) -> None:
    source, damaged = str(folder / "source"), str(folder / "damaged")
    assert run("pack", source, "--text", str(many), "--out", str(tmp_path / "pack"))[0] == 0
    of_pack, _ = screen([damaged], pack=tmp_path / "pack", out=tmp_path / "a")
    of_source, _ = screen([source, damaged], text=[many], out=tmp_path / "b")
    assert of_pack.panel.num_texts == of_source.panel.num_texts == 40
    assert of_pack.candidates == of_source.candidates


def test_a_look_without_drafts_leaves_none() -> None:
    states: Any = SimpleNamespace(num_layers=1)
    made = MadePass(cast(Any, None), states, "", [])
    first, second = (replace(made, drafts=cast(Any, drafts)) for drafts in (["0", "2"], ["1"]))
    passes = [(first, [0, 2]), (second, [1])]
    assert joined(passes).drafts == ["0", "1", "2"]
    assert joined([passes[0], (replace(made, drafts="it cannot be run"), [1])]).drafts == "it cannot be run"


def test_card_comparison_and_power_of_a_record(run: Run, folder: Path, tmp_path: Path) -> None:
    """Of what a screening wrote: weights are known by their files, whoever made them."""
    out = tmp_path / "out"
    record = screened(run, folder, "--out", str(out))[1]
    same = next(candidate for candidate in record.candidates if candidate.label == "source-2")
    code, block, err = run("card", folder / "source", "--screening", out)
    assert (code, err) == (0, "") and f"| these weights, SHA-256 | `{same.weights_sha256}` |" in block
    shutil.copytree(folder / "w4a16", tmp_path / "w4a16")
    code, written, err = run("card", tmp_path / "w4a16", "--screening", out)
    assert (code, written) == (0, f"{tmp_path}/w4a16/README.md\n"), err
    assert "## Divergence from the base, screened" in (tmp_path / "w4a16" / "README.md").read_text()
    changed = f"files of {folder}/damaged are not those that assay made, by their SHA-256 in assay_manifest.json; "
    assert one_error(run("card", folder / "damaged", "--screening", out)).startswith(changed)
    code, text, _ = run("compare", out, out)
    assert code == 0 and text.splitlines()[2] == "same reference, texts and numerics"
    assert [line.rstrip().endswith("the same weights") for line in text.splitlines()[4:]] == [True] * 3
    code, text, _ = run("power", "--screening", out)
    assert code == 0 and f"screened against {folder}/source: 24 texts, " in text

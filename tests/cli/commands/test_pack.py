"""`assay pack`, and `assay screen --pack`: the same figures without the reference, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_errors import one_error
from command_line import Run
from safetensors.torch import load_file, save_file
from tiny_families import glm4_moe, make_tiny

from assay.records.base import Interval, sha256_of, sha256_of_file
from assay.records.pack import Pack
from assay.records.screening import Screened, Screening


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, w4a16 of it, replies.jsonl; pack, and plain (without the head) of the source."""
    from assay.records.screening import StatedTexts
    from assay_pipeline.comparison.packing import pack
    from assay_pipeline.quantizing import quantize

    folder = tmp_path_factory.mktemp("pack")
    make_tiny(folder / "source", glm4_moe())
    quantize(str(folder / "source"), precision="w4a16-g32", out=folder / "w4a16")
    replies = [{"prompt": f"{n} + 3?", "reply": f"</think>It is {n + 3}.", "domain": ("odd", "even")[n % 2]} for n in range(24)]
    (folder / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    text = [folder / "replies.jsonl"]
    pack(folder / "source", text=text, out=folder / "pack", stated=StatedTexts(source="made for this test"))
    pack(folder / "source", text=text, out=folder / "plain", with_head=False)
    return folder


def screened(run: Run, *words: str | Path) -> tuple[int, Screening]:
    code, out, err = run("screen", *map(str, words), "--json")
    assert code in (0, 1), err
    return code, Screening.model_validate_json(out)


def test_figures_are_those_of_the_reference_itself(run: Run, folder: Path, tmp_path: Path) -> None:
    candidates = [folder / "w4a16", folder / "source"]
    code, whole = screened(run, folder / "source", *candidates, "--text", folder / "replies.jsonl", "--out", tmp_path / "a")
    for number, words in enumerate(
        [("--pack", folder / "pack", *candidates), (folder / "pack", *candidates), ("--pack", folder / "plain", *candidates)]
    ):
        of_pack = screened(run, *words, "--out", tmp_path / f"b{number}")
        kept = {"label", "location"}
        assert (of_pack[0], [candidate.model_dump(exclude=kept) for candidate in of_pack[1].candidates]) == (
            code,
            [candidate.model_dump(exclude=kept) for candidate in whole.candidates],
        )
        assert of_pack[1].reference_sha256 == whole.reference_sha256
        assert of_pack[1].panel.sha256 == whole.panel.sha256
    assert whole.pack_seal is None and of_pack[1].pack_seal == Pack.load(folder / "plain" / "pack.json").seal


def test_the_record(run: Run, folder: Path) -> None:
    record = Pack.load(folder / "pack" / "pack.json")
    assert str(folder) not in "".join(path.read_text() for path in (folder / "pack").glob("*.json*"))
    assert (record.reference, record.panel.stated.source, record.panel.stated.licence) == ("source", "made for this test", None)
    assert sorted({name.partition("/")[0] for name in record.files}) == [
        "config.json",
        "drafts.safetensors",
        "head.safetensors",
        "states",
        "texts.jsonl",
        "tokenizer.json",
    ]
    assert [(floor.cause, floor.num_texts) for floor in record.floors] == [("batch shape", 16), ("arithmetic", 16)]
    assert 0 <= record.floors[0].kl_mean < 1e-9 < 1e-7 < record.floors[1].kl_mean < record.floors[1].kl_largest < 0.02
    assert not list(folder.glob(".*"))
    assert {path.stat().st_mode for path in (folder / "pack").rglob("*") if path.is_file()} == {
        (folder / "replies.jsonl").stat().st_mode
    }


def test_what_is_printed(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("pack", str(folder / "source"), "--text", str(folder / "replies.jsonl"), "--out", str(tmp_path / "pack"))
    code, out, _ = run(*words, "--text-licence", "CC0")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"{tmp_path}/pack: source (not quantized), with the head"
    assert lines[2] == "of the texts: source not stated, licence CC0, date not stated"
    assert lines[-1] == f"next: assay screen --pack {tmp_path}/pack CANDIDATE"
    before = (tmp_path / "pack" / "pack.json").read_text()
    assert run(*words, "--text-licence", "CC0")[1] == out and (tmp_path / "pack" / "pack.json").read_text() == before
    code, _, err = run(*words, "--tokens", "60")
    assert (code, err.splitlines()[-1]) == (
        2, f"error: {tmp_path}/pack: holds another pack, of source; give a new folder as --out",
    )  # fmt: skip
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(*words[:-1], ".")[0] == 0 and (Path() / "pack.json").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert one_error(run(*words[:-1], str(tmp_path / "other"))) == f"{tmp_path}/other: is not empty; give a new folder as --out"


def test_a_quantized_copy_is_called_one_wherever_it_is_compared_with(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ("--text", str(folder / "replies.jsonl"))
    code, out, err = run("pack", str(folder / "w4a16"), *words, "--out", str(tmp_path / "pack"))
    how = "assay made it from source, as w4a16-g32"
    note = f"is a quantized copy ({how}) and is compared with as it is: what it lost itself is in no verdict"
    assert code == 0 and f"note: {folder}/w4a16 {note}" in err.splitlines()
    assert out.splitlines()[1] == f"a quantized copy ({how}): what it lost itself is in no figure against this pack"
    assert Pack.load(tmp_path / "pack" / "pack.json").foreign_reference == how
    assert Pack.load(folder / "pack" / "pack.json").foreign_reference is None
    for number, reference in enumerate([(str(folder / "w4a16"), *words), ("--pack", str(tmp_path / "pack"))]):
        place = tmp_path / f"out{number}"
        code, out, err = run("screen", *reference, str(folder / "source"), "--out", str(place))
        assert code in (0, 1) and "The reference is itself a quantized copy: what it lost is in no figure here." in out
        assert f" {note}" in err
        assert Screening.load(place / "screening.json").foreign_reference == how
        page = (place / "screening.html").read_text()
        assert "; the reference is itself a quantized copy</h1>" in page
        assert f"it is a quantized copy of its model ({how}), and a KL of 0 means as good as this copy" in page


def test_a_pack_sealed_before_copies_were_named(folder: Path, tmp_path: Path) -> None:
    fields = json.loads((folder / "pack" / "pack.json").read_text())
    del fields["foreign_reference"]
    fields["seal"] = sha256_of({name: value for name, value in fields.items() if name != "seal"})
    (tmp_path / "pack.json").write_text(json.dumps(fields))
    assert Pack.load(tmp_path / "pack.json").foreign_reference is None


def test_a_damaged_reference(run: Run, folder: Path, tmp_path: Path) -> None:
    """No pack is made of it; a screening says it of every side, on its page too."""
    bad = shutil.copytree(folder / "w4a16", tmp_path / "bad")
    for path in bad.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: 0 * t if n.endswith("o_proj.weight_scale") else t for n, t in tensors.items()}, path, {"format": "pt"})
    code, _, err = run("pack", str(bad), "--text", str(folder / "replies.jsonl"), "--out", str(tmp_path / "pack"))
    damage = "scale_zero in 3 places (model.layers.0.self_attn.o_proj.weight_scale: "
    last = err.splitlines()[-1]
    assert (code, (tmp_path / "pack").exists()) == (2, False)
    assert last.startswith(f"error: {bad}: `assay inspect {bad}` finds it damaged: {damage}")
    assert last.endswith("; candidates would be compared with the damage; give a whole checkpoint")
    words = ("--text", str(folder / "replies.jsonl"), "--out", str(tmp_path / "out"))
    code, _, err = run("screen", str(bad), str(folder / "source"), *words)
    assert code in (0, 1) and f"note: bad: `assay inspect {bad}` finds it damaged: {damage}" in err
    record = Screening.load(tmp_path / "out" / "screening.json")
    assert list(record.damages) == ["bad"] and record.damages["bad"].startswith(damage)
    assert f"<li>bad: {damage}" in (tmp_path / "out" / "screening.html").read_text()
    code, out, _ = run("screen", str(folder / "source"), str(bad), *words)
    assert code == 1 and f"bad: damaged, as `assay inspect` finds: {damage}" in out


def test_killed_while_its_files_move(folder: Path, tmp_path: Path) -> None:
    """A pack is none before its record is there, and the same call goes on."""
    from assay_pipeline.comparison.packing import pack

    shutil.copytree(folder / "pack", tmp_path / "pack")
    (tmp_path / "pack" / "pack.json").unlink()
    (tmp_path / ".pack.partial").mkdir()  # what a kill at that moment leaves
    again = pack(folder / "source", text=[folder / "replies.jsonl"], out=tmp_path / "pack")
    assert again.files == Pack.load(folder / "pack" / "pack.json").files
    assert {path.name for path in tmp_path.iterdir()} == {"pack"}


def test_another_arithmetic_widens_by_its_floor(run: Run, folder: Path, tmp_path: Path) -> None:
    candidates = (folder / "w4a16", folder / "source")
    alike = screened(run, "--pack", folder / "pack", *candidates, "--out", tmp_path / "a")[1]
    other = screened(run, "--pack", folder / "pack", *candidates, "--arithmetic", "bf16", "--out", tmp_path / "b")[1]
    by_label: list[dict[str, Screened]] = [
        {candidate.label: candidate for candidate in record.candidates} for record in (alike, other)
    ]
    floor = by_label[1]["source"].floor
    assert by_label[0]["source"].floor is None and floor is not None and floor.cause == "arithmetic bf16 for fp32"
    intervals = [by_label[1][name].drift.kl_mean for name in ("source", "w4a16")]
    assert all(isinstance(interval, Interval) for interval in intervals)
    same, w4a16 = intervals
    assert isinstance(same, Interval) and isinstance(w4a16, Interval)
    assert same.low == 0 < same.value < same.high
    assert w4a16.low < by_label[0]["w4a16"].drift.kl_mean.value < w4a16.high
    code, out, _ = run(
        "screen", "--pack", str(folder / "pack"), str(folder / "w4a16"), "--arithmetic", "bf16", "--out", str(tmp_path / "b")
    )
    assert code in (0, 1) and "computed otherwise than the reference (arithmetic bf16 for fp32)" in out


def test_other_models_and_heads(run: Run, folder: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", glm4_moe(num_experts_per_tok=1))
    out = ("--out", str(tmp_path / "out"))
    code, _, err = run("screen", "--pack", str(folder / "pack"), str(other), *out)
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: {other}: num_experts_per_tok is 1, and 2 in the reference: it is another model than the pack's",
    )
    tuned = shutil.copytree(folder / "source", tmp_path / "tuned")
    path = next(tuned.glob("*.safetensors"))
    tensors = load_file(path)
    save_file({name: t * 2 if name == "lm_head.weight" else t for name, t in tensors.items()}, path, {"format": "pt"})
    assert screened(run, "--pack", folder / "pack", tuned, *out)[1].candidates[0].drift.kl_mean.value > 0
    code, _, err = run("screen", "--pack", str(folder / "plain"), str(tuned), *out)
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: {tuned}: its last norm or head is not the reference's, of which {folder}/plain holds a hash alone; "
        "make the pack without --no-head",
    )


def test_another_tokenizer_than_that_of_the_pack(run: Run, folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "source", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, record = screened(run, "--pack", folder / "pack", other, "--out", tmp_path / "out")
    assert (code, record.candidates[0].word) == (1, "not failed")
    assert record.unlike_reference == {"other": ("model of its tokenizer.json is not the reference's",)}


def test_wrong_words(run: Run, folder: Path, tmp_path: Path) -> None:
    pack, source, text = str(folder / "pack"), str(folder / "source"), str(folder / "replies.jsonl")
    expected = {
        ("--pack", pack, source, "--text", text): f"--text: {pack} has its own texts; leave --text out",
        (source, source, "--device", "tpu"): "--device tpu: did you mean cpu? it takes one of: cpu, cuda",
        (pack,): "give a candidate's folder beside the pack",
        (source, str(tmp_path)): f"{tmp_path}: has no config.json; a checkpoint folder holds config.json and *.safetensors",
        (source,): "give a reference and a candidate or more, or `--pack PACK` and candidates",
        ("--pack", str(tmp_path / "no"), source): f"{tmp_path}/no: no such folder; give what `assay pack` wrote",
    }
    for words, error in expected.items():
        assert one_error(run("screen", *words, "--out", str(tmp_path / "out"))) == error
    assert not (tmp_path / "out").exists()


def _change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


def _edit(field: str, value: object, *, sealed_again: bool = False) -> Callable[[Path], None]:
    def edit(pack: Path) -> None:
        fields = json.loads((pack / "pack.json").read_text())
        fields[field] = value
        if sealed_again:
            fields["seal"] = sha256_of({name: entry for name, entry in fields.items() if name != "seal"})
        (pack / "pack.json").write_text(json.dumps(fields))

    return edit


def _link(pack: Path) -> None:
    (pack / "texts.jsonl").rename(pack.parent / "texts")
    (pack / "texts.jsonl").symlink_to(pack.parent / "texts")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file less": (lambda pack: (pack / "texts.jsonl").unlink(), "it lacks texts.jsonl"),
    "a file more": (lambda pack: (pack / "model.bin").write_bytes(b"x"), "it has besides model.bin"),
    "cut": (lambda pack: os.truncate(pack / "head.safetensors", 100), "it was changed in head.safetensors"),
    "link": (_link, "texts.jsonl: is no plain file; a pack has no others"),
    "no record": (lambda pack: (pack / "pack.json").unlink(), "pack.json: no such file (a pack record was expected)"),
    "another reference": (_edit("reference", "GLM-5"), "its seal does not fit what it says: it was changed"),
    "floors left out": (_edit("floors", []), "its seal does not fit what it says: it was changed"),
    "path outside": (_edit("files", {"../../x": "0"}, sealed_again=True), "it lacks ../../x; has besides config.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged(run: Run, folder: Path, tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    pack = shutil.copytree(folder / "pack", tmp_path / "pack")
    damage(pack)
    assert expected in one_error(run("screen", "--pack", str(pack), str(folder / "source"), "--out", str(tmp_path / "out")))


def _seal(pack: Path) -> None:
    """As a stranger would who wants to be believed."""
    fields = json.loads((pack / "pack.json").read_text())
    texts = [json.loads(line) for line in (pack / "texts.jsonl").read_text().splitlines()]
    fields["panel"]["sha256"] = sha256_of([[text["ids"], text["first"]] for text in texts])
    fields["files"] = {
        path.relative_to(pack).as_posix(): sha256_of_file(path)
        for path in sorted(pack.rglob("*"))
        if path.is_file() and path.name != "pack.json"
    }
    fields["seal"] = sha256_of({name: entry for name, entry in fields.items() if name != "seal"})
    (pack / "pack.json").write_text(json.dumps(fields))


def _narrow(pack: Path) -> None:
    path = next((pack / "states").rglob("000003.safetensors"))
    save_file({name: part[..., :100].contiguous() for name, part in load_file(path).items()}, path)


def _text(field: str, value: object) -> Callable[[Path], None]:
    def edit(pack: Path) -> None:
        lines = (pack / "texts.jsonl").read_text().splitlines()
        lines[2] = json.dumps(json.loads(lines[2]) | {field: value})
        (pack / "texts.jsonl").write_text("\n".join(lines) + "\n")

    return edit


SEALED: dict[str, tuple[Callable[[Path], None], str]] = {
    "states of another width": (_narrow, "transformers cannot run its head"),
    "no safetensors": (lambda pack: next((pack / "states").rglob("000002.*")).write_bytes(b"x" * 20), "cannot be read"),
    "no head": (lambda pack: (pack / "head.safetensors").write_bytes(b""), "head.safetensors: cannot be read"),
    "a token beyond": (_text("ids", [5, 10**6, *range(7, 40)]), "token 1000000 of its texts is none of"),
    "a token below 0": (_text("ids", [5, -1, *range(7, 40)]), "texts.jsonl:3: is no text of a pack"),
    "nothing scored": (_text("first", 10**6), "texts.jsonl:3: is no text of a pack"),
    "deep": (lambda pack: (pack / "config.json").write_text('{"a":' * 100_000), "config.json"),
}


@pytest.mark.parametrize("name", SEALED)
def test_sealed_nonsense_is_one_line(run: Run, folder: Path, tmp_path: Path, name: str) -> None:
    damage, expected = SEALED[name]
    pack = shutil.copytree(folder / "pack", tmp_path / "pack")
    damage(pack)
    _seal(pack)
    code, _, err = run("screen", "--pack", str(pack), str(folder / "source"), "--out", str(tmp_path / "out"))
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and expected in last and "Traceback" not in err


def test_a_hundred_changed_bytes(folder: Path, tmp_path: Path) -> None:
    from assay.errors import AssayError
    from assay_quantize.screen.pack import open_pack

    draw = np.random.default_rng(7)
    pack = shutil.copytree(folder / "pack", tmp_path / "pack")
    files = [path for path in sorted(pack.rglob("*")) if path.is_file()]
    for _ in range(100):
        path = files[draw.integers(len(files))]
        whole = path.read_bytes()
        _change_byte(path, int(draw.integers(len(whole))))
        with pytest.raises(AssayError):
            open_pack(pack)
        path.write_bytes(whole)
    open_pack(pack)

"""What a screening says of a checkpoint, on its card and to be pasted: only of these very weights, and never PASS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from publishable import LABEL, make_publishable
from screenings import make_screened, make_screening, mean
from synthetic_run import checkpoint_sha256, make_run

from assay.errors import AssayError
from assay.records.base import sha256_of, sha256_of_file
from assay.records.screening import AppliedFloor, Screening
from assay_reports.card import render_card
from assay_reports.cards.screened import render_block, screened_block, screening_of
from assay_reports.publish.publish import publish
from assay_reports.run import load_run

BLOCK = """\
## Divergence from the base, screened

**not failed**: surely within what is allowed; whether tasks are lost is not known. `assay screen` compared next-token \
distributions over the same texts, without a server; it passes nobody.

| | |
|---|---|
| compared with | GLM-4.5-Air (not quantized) |
| KL, nats a token | 0.0210 (0.0180 to 0.0250) |
| allowed, nats | 0.08 for 4-bit weights |
| same first token | 93.1 % |
| texts | 100, 10,000 tokens scored: replies.jsonl (replies of GLM-4.5-Air) |
| computed in | fp32 on cpu, torch 2.13.0+cpu, transformers 5.14.0 |
| weights compared with, SHA-256 | `REFERENCE` |
| these weights, SHA-256 | `WEIGHTS` |
| tokens, SHA-256 | `TEXTS` |

What it does not say:

- Whether tasks are solved: no divergence shows it; `assay judge` and `assay evaluate` ask questions.
- What only a server does: kernels, caches, load, faults; `assay diagnose probe` looks for them.
- Long generation: each token was predicted behind the text as it stands, not behind the candidate's own words.
- Losses that few texts have: one of 1 text in 27 is in none of these 100 with a chance of 2.5 %, a rarer one more often.
"""


def of_weights(sha256: str, **changes: object) -> Screening:
    return make_screening(make_screened("w4a16", mean(0.021, 0.018, 0.025), weights_sha256=sha256, **changes))


def test_the_whole_block() -> None:
    block = screened_block(of_weights("c" * 64), "c" * 64)
    assert block is not None
    assert render_block(block) == BLOCK.replace("REFERENCE", "a" * 64).replace("WEIGHTS", "c" * 64).replace("TEXTS", "b" * 64)
    assert screened_block(of_weights("c" * 64), "d" * 64) is None


def test_what_is_wrong_with_it_is_said() -> None:
    record = of_weights(
        "c" * 64, word="FAIL", floor=AppliedFloor(cause="torch 2.13 for 2.12", kl=0.0004), not_applied=("KV cache in NVFP4",)
    ).model_copy(update={"damages": {"w4a16": "scales are 0", "other": "x"}, "foreign_reference": "INT4"})
    block = screened_block(record, "c" * 64)
    assert block is not None
    assert (block.word, block.sentence, block.notes, block.not_said[0]) == (
        "FAIL",
        "surely beyond what is allowed",
        (
            "`assay inspect` finds it damaged: w4a16: scales are 0",
            "Computed otherwise than what it is compared with (torch 2.13 for 2.12), which alone makes 0.00040 nats: the "
            "interval is widened by it",
            "Not computed: KV cache in NVFP4",
        ),
        "What the reference lost itself: it is a quantized copy of its model (INT4), and a KL of 0 means as good as this copy",
    )


def test_foreign_text_stays_text() -> None:
    record = of_weights("c" * 64, stored_as="x").model_copy(
        update={"reference_stored_as": "a | b\n# head <script>alert(1)</script> [x](http://e)"}
    )
    block = screened_block(record, "c" * 64)
    assert block is not None
    assert "| compared with | GLM-4.5-Air (a \\| b # head &lt;script>alert(1)&lt;/script> [x]\\(http://e)) |\n" in render_block(
        block
    )


# ------------------------------------------------------------------------------------------------ on cards
def test_a_card_has_what_is_of_its_weights(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    folder = run_dir / "w4a16" / "checkpoint"
    assert "screened" not in render_card(load_run(run_dir), "w4a16", folder)
    of_weights(checkpoint_sha256("w4a16")).save(run_dir / "screened" / "screening.json")
    card = render_card(load_run(run_dir), "w4a16", folder)
    assert card.count("## Divergence from the base, screened\n\n**not failed**: surely within") == 1
    assert card.index("## Divergence from the base, screened") < card.index("## What was quantized, what was kept")
    assert "screened" not in render_card(load_run(run_dir), "nvfp4a16", run_dir / "nvfp4a16" / "checkpoint")


def test_a_card_without_scores_says_that_there_is_a_divergence(run: Run, tmp_path: Path) -> None:
    run_dir = make_publishable(tmp_path)
    for path in (run_dir / "measurements").glob("*.json"):
        path.unlink()
    (run_dir / "gates.json").unlink()
    folder = run_dir / LABEL / "checkpoint"
    of_weights(load_run(run_dir).manifests[LABEL].checkpoint_sha256).save(tmp_path / "out" / "screening.json")
    assert run("card", run_dir, "--screening", tmp_path / "out")[0] == 0
    only = "- Nothing was measured on a server: no score and no verdict, only the divergence above.\n"
    assert only in (folder / "README.md").read_text()
    plain = (run_dir / "nvfp4a16" / "checkpoint" / "README.md").read_text()
    assert "- Nothing was measured: no score, no divergence, no verdict.\n" in plain


def test_a_card_is_not_of_files_that_were_changed(run: Run, tmp_path: Path) -> None:
    """The manifest is still that of the weights that were screened."""
    run_dir = make_publishable(tmp_path)
    of_weights(load_run(run_dir).manifests[LABEL].checkpoint_sha256).save(tmp_path / "screening.json")
    folder = run_dir / LABEL / "checkpoint"
    (folder / "config.json").write_text("{}")
    message = f"files of {folder} are not those that assay made, by their SHA-256 in assay_manifest.json; "
    assert one_error(run("card", run_dir, "--screening", tmp_path)).startswith(message)


def test_a_record_of_other_weights_is_refused(run: Run, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    path = tmp_path / "screening.json"
    of_weights("c" * 64).save(path)
    message = "is of other weights than fp8, nvfp4a16, w4a16 (by their SHA-256); screen these with `assay screen`, or name the"
    assert one_error(run("card", run_dir, "--screening", path)).startswith(f"{path}: {message}")
    with pytest.raises(AssayError, match=r"is of other weights than w4a16 \(by"):
        screening_of(path, {"w4a16": checkpoint_sha256("w4a16")})


def test_what_is_published_has_it(tmp_path: Path) -> None:
    run_dir = make_publishable(tmp_path)
    sha256 = load_run(run_dir).manifests[LABEL].checkpoint_sha256
    of_weights("c" * 64).save(tmp_path / "other.json")
    of_weights(sha256).save(tmp_path / "screening.json")
    with pytest.raises(AssayError, match=r"other\.json: is of other weights than w4a16"):
        publish(run_dir, LABEL, "me/model", screening=tmp_path / "other.json", dry_run=True)
    plain = publish(run_dir, LABEL, "me/model", dry_run=True)
    told = publish(run_dir, LABEL, "me/model", screening=tmp_path / "screening.json", dry_run=True)
    sizes = [{file.path: file.num_bytes for file in made.files}["README.md"] for made in (plain, told)]
    assert told.refused == () and sizes[0] < sizes[1]


# ------------------------------------------------------------------------------------------------ of anybody's checkpoint
def test_the_part_to_paste(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "their"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    sha256 = sha256_of({path.name: sha256_of_file(path) for path in folder.iterdir()})
    of_weights(sha256).save(tmp_path / "screening.json")
    code, out, err = run("card", folder, "--screening", tmp_path)
    assert (code, err) == (0, "")
    assert out == BLOCK.replace("REFERENCE", "a" * 64).replace("WEIGHTS", sha256).replace("TEXTS", "b" * 64)
    assert json.loads(run("card", folder, "--screening", tmp_path, "--json")[1]) == {"written": [], "left": [], "block": out}
    assert not (folder / "README.md").exists()
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert one_error(run("card", folder, "--screening", tmp_path)).startswith(f"{tmp_path}: is of other weights than {folder} ")

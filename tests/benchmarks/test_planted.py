"""The weight edits of benchmarks/verdicts/planted_checkpoints.py, without a server: what they change, and what that does."""

from __future__ import annotations

import hashlib
import string
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic_run import make_run
from tokenizers import Tokenizer

from assay.records.verdict import GateReport
from assay_evaluate.run.identity import checkpoint_sha256

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "verdicts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "tiny_glm"))

from model import TinyConfig, TinyGlm, rotate
from planted import EXPECTED, SOURCE, wrong
from planted_checkpoints import EDITS, EMBEDDING, FINAL_NORM, HEAD, SLOW_PAIR, make

TOKENIZER = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


BEFORE = tensors_of(SOURCE)
ASCII_OF_TEXTS = string.ascii_letters + string.digits + string.punctuation + " \n"


def sha256_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changed_by(name: str, folder: Path) -> dict[str, torch.Tensor]:
    make(SOURCE, folder / name, name)
    after = tensors_of(folder / name)
    assert after.keys() == BEFORE.keys()
    assert all(after[one].dtype == BEFORE[one].dtype and after[one].shape == BEFORE[one].shape for one in after)
    small = [path for path in SOURCE.iterdir() if path.suffix != ".safetensors"]
    assert all((folder / name / path.name).read_bytes() == path.read_bytes() for path in small)
    return {one: tensor for one, tensor in after.items() if not torch.equal(tensor, BEFORE[one])}


def test_every_edit_has_its_verdict() -> None:
    assert EDITS.keys() == EXPECTED.keys()


def test_a_copy_has_the_same_weights_and_another_hash(tmp_path: Path) -> None:
    assert changed_by("copy", tmp_path) == {}
    assert checkpoint_sha256(tmp_path / "copy", sha256_of_file) != checkpoint_sha256(SOURCE, sha256_of_file)


def test_one_language_leaves_every_ascii_token(tmp_path: Path) -> None:
    changed = changed_by("one-language", tmp_path)
    assert changed.keys() == {EMBEDDING}
    rows = (changed[EMBEDDING] != BEFORE[EMBEDDING]).any(dim=1).nonzero().flatten().tolist()
    texts = {index: TOKENIZER.decode([index], skip_special_tokens=False) for index in range(TOKENIZER.get_vocab_size())}
    assert {index for index, text in texts.items() if not text.isascii()} <= set(rows)
    assert {texts[index] for index in rows if texts[index].isascii()} <= {chr(code) for code in range(128)} - set(
        ASCII_OF_TEXTS
    )
    assert len(rows) > 400
    moved = (changed[EMBEDDING][rows].float() - BEFORE[EMBEDDING][rows].float()).square().mean().sqrt()
    size = BEFORE[EMBEDDING][rows].float().square().mean().sqrt()
    assert float(moved / size) == pytest.approx(1.5, rel=0.02)
    make(SOURCE, tmp_path / "again", "one-language")
    assert torch.equal(tensors_of(tmp_path / "again")[EMBEDDING], changed[EMBEDDING])


def test_long_range_favours_the_near(tmp_path: Path) -> None:
    changed = changed_by("long-range", tmp_path)
    assert changed.keys() == {f"model.layers.{i}.self_attn.{one}_proj.bias" for i in range(4) for one in "qk"}
    added = {name: (tensor.float() - BEFORE[name].float()).view(-1, 64) for name, tensor in changed.items()}
    for bias_HC in added.values():
        rest = [at for at in range(64) if at != SLOW_PAIR]
        assert (bias_HC[:, SLOW_PAIR] > 10).all() and (bias_HC[:, rest] == 0).all()
    cos, sin = TinyGlm(TinyConfig(vocab_size=8)).rope(0, 1025)
    query = rotate(added["model.layers.1.self_attn.q_proj.bias"][:1].expand(1, 1025, 1, 64), (cos, sin))[0, :, 0]
    product = query @ query[0]  # by distance: the same bias at a token and at the first
    assert (product[1:994] < product[:993]).all()
    assert float(product[192] / product[0]) == pytest.approx(0.82, abs=0.01)
    assert float(product[993] / product[0]) == pytest.approx(-1, abs=0.01)


def test_looping_goes_on_for_ever_where_it_began(tmp_path: Path) -> None:
    changed = changed_by("looping", tmp_path)
    assert changed.keys() == {HEAD, EMBEDDING}
    looped = TOKENIZER.token_to_id("!")
    for name, tensor in changed.items():
        assert (tensor != BEFORE[name]).any(dim=1).nonzero().flatten().tolist() == [looped]
    embedding_D, head_VD = changed[EMBEDDING][looped].float(), changed[HEAD].float()
    hidden_D = embedding_D / embedding_D.square().mean().sqrt() * BEFORE[FINAL_NORM].float()
    logits_V = head_VD @ hidden_D
    others_V = torch.cat([logits_V[:looped], logits_V[looped + 1 :]])
    assert logits_V[looped] > others_V.max() + 20
    assert embedding_D.norm() > 10 * BEFORE[EMBEDDING].float().norm(dim=1).mean()


def test_another_verdict_than_expected_is_said(tmp_path: Path) -> None:
    report = GateReport.load(make_run(tmp_path) / "gates.json")
    renamed = report.model_copy(
        update={
            "overall": {"copy": "UNDERPOWERED", "one-language": "FAIL", "long-range": "FAIL", "looping": "FAIL"},
            "reasons": {
                "copy": "why", "one-language": "loses 9.0 points on English arithmetic; 10 allowed",
                "long-range": "loses 30.0 points on needles at 1,024 tokens; 10 allowed; 1 gate failed",
                "looping": "Loops in 30 % of its replies",
            },
            "verdicts": (report.verdicts[0].model_copy(update={"candidate": "long-range", "gate": "score needle-192",
                                                               "status": "FAIL", "detail": "Lost."}),),
        }
    )  # fmt: skip
    assert list(wrong(renamed)) == [
        "copy is UNDERPOWERED, not PASS: why",
        "one-language: `points on Chinese arithmetic; 10 allowed` is not said: "
        "loses 9.0 points on English arithmetic; 10 allowed",
        "long-range: score needle-192 is FAIL: Lost.",
    ]

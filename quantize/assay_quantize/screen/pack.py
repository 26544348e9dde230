"""Packs: what a pass of a reference leaves, with texts and head, in a folder sealed by hashes.

pack.json             the record (`assay.records.pack`), written last
config.json           the reference's
tokenizer.json        the reference's, if it has one: a candidate's is held against it
texts.jsonl           token ids and marks of every text, a line each
head.safetensors      last norm and head, in the dtype of the arithmetic; absent if the pack holds their hash alone
drafts.safetensors    how often drafts of its MTP block are accepted; absent if there is none that is run
states/               of a `ScreenPass`: states behind the last layer, experts chosen in every layer
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.atomic_files import replacing
from assay.errors import AssayError, QuantizeError
from assay.records.base import write_text_atomically
from assay.records.pack import PACK_NAME, Floor, Pack, read_sealed, seal_of, sealed_files
from assay.safe_files import read_json_object
from assay_quantize.calibration.quiet import loading
from assay_quantize.screen.compare import PassSide, compare_passes
from assay_quantize.screen.draft import DRAFTS, DraftAcceptance, read_drafts
from assay_quantize.screen.forward import ScreenPass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.same_model import config_differences
from assay_quantize.screen.texts import ScreenText
from assay_quantize.sensitivity.texts import ScoredText, texts_sha256

CONFIG, TOKENIZER, TEXTS, HEAD, STATES = "config.json", "tokenizer.json", "texts.jsonl", "head.safetensors", "states"
FLOOR_TEXTS = 16
"""Over which floors are measured: so many that the largest lies above the mean of all, unless values are very uneven."""


@dataclass(frozen=True)
class OpenPack:
    """A pack whose files are those that its record names."""

    folder: Path
    record: Pack
    texts: list[ScreenText]

    @property
    def states(self) -> ScreenPass:
        """Of the reference."""
        return ScreenPass(self.folder / STATES, self.record.num_layers)

    @property
    def drafts(self) -> list[DraftAcceptance] | str:
        """Of the reference's MTP block; or why there are none."""
        path = self.folder / DRAFTS
        return read_drafts(path, len(self.texts)) if path.is_file() else self.record.no_drafts or ""

    def check(self, candidate: LayerModel) -> None:
        """QuantizeError: the candidate is another model, or has another head and the pack does not hold the reference's."""
        _check_same_model(read_json_object(self.folder, CONFIG), candidate)
        num_tokens, largest = candidate.vocabulary, max(max(text.scored.ids) for text in self.texts)
        if largest >= num_tokens:
            raise QuantizeError(f"{self.folder}: token {largest} of its texts is none of {candidate.stored.location}")
        if not self.record.holds_head and head_sha256(candidate.head_tensors()) != self.record.head_sha256:
            raise QuantizeError(
                f"{candidate.stored.location}: its last norm or head is not the reference's, of which {self.folder} holds "
                "a hash alone; make the pack without --no-head"
            )

    def side_for(self, candidate: LayerModel) -> PassSide:
        """The reference's side of a comparison. candidate: a checked model of the candidate's own, for the reference's head."""
        from safetensors.torch import load_file

        with loading(f"{self.folder / HEAD}: cannot be read"):
            tensors = load_file(self.folder / HEAD) if self.record.holds_head else None
        head = candidate.head(tensors)
        return PassSide(str(self.folder), head, self.states)


def head_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_texts(folder: Path, texts: Sequence[ScreenText]) -> None:
    """Token ids and marks, without the texts' paths."""
    lines = []
    for number, text in enumerate(texts):
        fields = asdict(text) | {"name": f"text {number + 1}"}
        scored = fields.pop("scored")
        lines.append(json.dumps(fields | {"first": scored["first"], "ids": list(scored["ids"])}, ensure_ascii=False))
    write_text_atomically(folder / TEXTS, "\n".join(lines) + "\n")


def write_head(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Last norm and head."""
    from safetensors.torch import save_file

    with replacing(folder / HEAD) as partial:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)


def seal(folder: Path, fields: dict[str, Any]) -> Pack:
    """The record over everything in the folder, written."""
    mode = stat.S_IMODE((folder / TEXTS).stat().st_mode)
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)  # safetensors lets nobody else read what it writes
    values = Pack.model_construct(**fields, files=sealed_files(folder), seal="").model_dump(mode="json")
    record = Pack.model_validate_json(json.dumps(values | {"seal": seal_of(values)}))
    record.save(folder / PACK_NAME)
    return record


def open_pack(folder: Path) -> OpenPack:
    """AssayError: it is no pack, or not the one that was sealed; the first file that is other is named."""
    record = read_sealed(folder)
    texts = _read_texts(folder / TEXTS)
    if texts_sha256([text.scored for text in texts]) != record.panel.sha256:
        raise AssayError(f"{folder / TEXTS}: is not the panel that {PACK_NAME} names; get or make the pack again")
    return OpenPack(folder, record, texts)


def floor(cause: str, texts: Sequence[ScoredText], usual: PassSide, other: PassSide) -> Floor:
    """KL between two ways of computing one checkpoint."""
    means = [float(text.kl_P.mean()) for text in compare_passes(texts, usual, other)]
    return Floor.model_validate(
        {"cause": cause, "num_texts": len(means), "kl_mean": sum(means) / len(means), "kl_largest": max(means)}
    )


def _read_texts(path: Path) -> list[ScreenText]:
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            scored = ScoredText(tuple(map(int, fields.pop("ids"))), int(fields.pop("first")))
            if not 1 <= scored.first < len(scored.ids) or min(scored.ids) < 0:
                raise ValueError(line)
            texts.append(ScreenText(scored=scored, **fields))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AssayError(f"{path}:{number}: is no text of a pack; get or make it again") from None
    return texts


def _check_same_model(reference_config: Mapping[str, Any], candidate: LayerModel) -> None:
    if differences := config_differences(reference_config, candidate.stored.config):
        more = f"; {len(differences) - 1} more" if len(differences) > 1 else ""
        raise QuantizeError(f"{candidate.stored.location}: {differences[0]}{more}: it is another model than the pack's")

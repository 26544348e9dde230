"""The texts of a screening: files, and what the reference of a run wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.recipes.text_config import text_of
from assay.safe_files import read_json_object

if TYPE_CHECKING:
    from assay_quantize.screen.texts import ScreenText

FEWEST = 2
"""Texts of which a divergence has a spread."""


def check_texts(sources: Sequence[Path]) -> None:
    """AssayError: one of them is not there."""
    for source in sources:
        if not source.exists():
            raise AssayError(f"{source}: no such file or folder; give texts, JSON lines, or the folder of a run")


def read_panel(sources: Sequence[Path], checkpoint: Path, num_tokens: int, length: int | None) -> list[ScreenText]:
    """Texts until `num_tokens` are scored: those of runs first, as token ids, then files (`assay_quantize.screen.texts`).

    checkpoint: whose tokenizer and vocabulary count. length: tokens of one that are scored, at most; None: replies of a run
    are whole. AssayError: a source has no texts, or is of another model, or one is longer than the model's positions.
    """
    from assay_quantize.screen.texts import read_texts

    runs = [source for source in sources if source.is_dir()]
    texts = [text for run in runs for text in _of_run(run, checkpoint, length)]
    kept, left = [], num_tokens
    for text in texts:
        if left > 0:
            kept.append(text)
            left -= text.scored.num_scored
    files = [source for source in sources if source not in runs]
    kept += read_texts(files, checkpoint, left, length) if files and left > 0 else []
    if len(kept) < FEWEST:
        raise AssayError(f"{', '.join(map(str, sources))}: 1 text is too few for a divergence; give at least two")
    positions = _positions(text_of(read_json_object(checkpoint, "config.json")))
    longest = max(kept, key=lambda text: len(text.scored.ids))
    if positions is not None and (num_ids := len(longest.scored.ids)) > positions:
        raise AssayError(
            f"{longest.name}: {num_ids:,} tokens, and {checkpoint} is made for {positions:,} (max_position_embeddings); give a "
            "smaller --length, or texts that fit"
        )
    return kept


def _positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model is made for, its rotary frequencies as they are scaled; None: its config does not say."""
    positions = config.get("max_position_embeddings")
    scalings = [config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), dict)]
    factors = [scaling["factor"] for scaling in scalings if isinstance(scaling.get("factor"), int | float)]
    return int(positions * max([1.0, *factors])) if isinstance(positions, int) and positions > 0 else None


def _of_run(run: Path, checkpoint: Path, length: int | None) -> list[ScreenText]:
    from assay_evaluate.divergence.documents import texts_of_run
    from assay_quantize.screen.texts import ScreenText
    from assay_quantize.sensitivity.texts import ScoredText

    if not (run / "journal.db").is_file():
        raise AssayError(
            f"{run}: is a folder and no run; give a file of texts, or the folder of a run that measured divergence"
        )
    num_tokens_known = text_of(read_json_object(checkpoint, "config.json")).get("vocab_size")
    texts = []
    for document in texts_of_run(run):
        ids = (*document.prompt_ids, *document.reply_ids[:length])
        if isinstance(num_tokens_known, int) and max(ids) >= num_tokens_known:
            raise AssayError(
                f"{run}: token {max(ids)} of its texts is none of {checkpoint}, which has {num_tokens_known:,}: it is a run of "
                "another model"
            )
        scored = ScoredText(ids, len(document.prompt_ids))
        texts.append(
            ScreenText(f"{run.name}:{document.item}", scored, document.language, document.domain, document.num_thinking)
        )
    return texts

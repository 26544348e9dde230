"""Records of calibrations: what text went through the model, which weights saw enough of it, and what was made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from assay.records.base import Part, Record


class Nvfp4Inputs(Part):
    """Groups of 16 activations in the range that scheme `nvfp4` gives them; groups of zeros are left out.

    num_cut_off: too large, so that the largest are cut off. num_coarse: so small that their scale has fewer bits. num_zeroed:
    of those, the ones that become 0. largest: the largest magnitude, and the weight it enters. most_zeroed: the largest
    share of a weight's groups, and the weight.
    """

    num_groups: int
    num_cut_off: int
    num_coarse: int
    num_zeroed: int
    largest: float
    largest_at: str
    most_zeroed: float
    most_zeroed_at: str


class TextSource(Part):
    """One source of calibration text, and what was taken of it.

    source: as it was named. kind: what its user calls it (code, tools, ...). weight: of all weights of the mix. num_tokens: of
    the texts that were taken; the last one may not have fitted. num_dropped: texts that hold an item of an evaluation.
    num_without_thinking: conversations whose thinking the chat template does not show. is_exhausted: all of it was taken.
    sha256: of what was read of it: of a small plain text the whole file. revision: commit of a data set on the hub.
    """

    source: str
    kind: str | None = None
    weight: float
    num_texts: int
    num_tokens: int
    num_dropped: int = 0
    num_without_thinking: int = 0
    is_exhausted: bool = False
    sha256: str | None = None
    revision: str | None = None


class WithheldItems(Part):
    """Items of one task that every text was compared with. num_items: None: they are not known here, and `why` says why.
    dropped: texts that hold one of them."""

    suite: str
    task: str
    num_items: int | None
    why: str | None = None
    dropped: int = 0


class TextTaken(Part):
    """What the tokens of a calibration were made of, and what they were compared with. num_repeated: sequences that are, token
    for token, one before them; None: nobody counted."""

    sources: tuple[TextSource, ...] = ()
    withheld: tuple[WithheldItems, ...] = ()
    num_repeated: int | None = None


BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BLOCKS = 64


class LayerCoverage(Part):
    """Tokens that each routed expert of one layer saw, by its number."""

    layer: int
    tokens: tuple[int, ...]

    def drawn(self, most: int) -> str:
        """A block for each expert: a dot for none, else of eight heights by the square root, the full one for `most`, so that
        experts that saw little can be told apart. Of more than 64 experts neighbours share a block, by the least of them."""
        step = -(-len(self.tokens) // MOST_BLOCKS)
        least = [min(self.tokens[at : at + step]) for at in range(0, len(self.tokens), step)]
        return "".join("·" if count == 0 else BLOCKS[min(7, int(8 * (count / most) ** 0.5))] for count in least)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Numbers of the experts that saw none."""
        return tuple(number for number, count in enumerate(self.tokens) if count == 0)


Ended = Literal["tokens", "every expert", "text"]


class Calibration(Record):
    """What `assay calibrate` made.

    text: the files, or how the text came about. num_tokens: that went through the model. weights: in the file. starved: weight
    -> tokens, of those that saw fewer than `min_tokens` and were left out. tokens_by_expert: least, median and most tokens that
    a routed expert saw; None where there are none. nvfp4_inputs: all inputs, in the range of scheme `nvfp4`.
    file_sha256: what `importance_sha256` of a plan made with the file will be.

    sources: where the text came from. withheld: items of evaluations that it was compared with. coverage: by layer.
    tokens_per_expert: what was asked for; None: nothing. ended: why no more was taken: all tokens that were asked for, every
    expert had seen enough, or the text was at its end. num_scales: modules and caches whose largest magnitude is in the file.
    num_repeated: as of `TextTaken`. These are empty or None in records from before them.
    """

    kind: Literal["calibration"] = "calibration"
    model: str
    source: str
    text: tuple[str, ...]
    num_tokens: int
    length: int
    min_tokens: int
    weights: int
    starved: dict[str, int]
    tokens_by_expert: tuple[int, int, int] | None
    nvfp4_inputs: Nvfp4Inputs
    file: str
    file_sha256: str
    seconds: float
    sources: tuple[TextSource, ...] = ()
    withheld: tuple[WithheldItems, ...] = ()
    coverage: tuple[LayerCoverage, ...] = ()
    tokens_per_expert: int | None = None
    ended: Ended | None = None
    num_scales: int | None = None
    num_repeated: int | None = None
    weights_sha256: str | None = None
    """Which weights it was made from (`checkpoint/identity/weights.py`). None: a record from before it."""
    asked_sha256: str | None = None
    """Of what a run asked for (`cli/calibrating/in_run.py`). None: a command made it."""

    @property
    def most_tokens(self) -> int:
        """Of any expert; 0 where there are none."""
        return max((max(layer.tokens) for layer in self.coverage), default=0)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Experts that no token reached: `layer 3 expert 17`."""
        return tuple(
            f"layer {layer_coverage.layer} expert {number}"
            for layer_coverage in self.coverage
            for number in layer_coverage.unseen
        )


def record_of(file: Path) -> Path:
    """Where the record of a calibration file lies: beside it."""
    return file.with_name(f"{file.name}.json")


class CalibratedLayers(Part):
    """Layers whose weights were rounded with the help of text: what their bytes are, and what they were made with.

    method: of the recipe (`gptq`, `awq`, ...). asked_sha256: identity of what was asked for, plan, text and options; who asks
    the same gets the same. text: as in `Calibration`. tokens_sha256: of the token numbers. layers: layer -> digest of its
    calibrated tensors (`checkpoint/calibrated_layers.py`). smoothed: tensors that are not quantized, and are not those of the
    source either, since AWQ or SmoothQuant moved scales into them. fell_back: weights that were rounded to the nearest, as
    GPTQ's Hessian could not be inverted.
    sources, withheld, num_repeated: as in `Calibration`; empty or None in records from before them.
    """

    method: str
    asked_sha256: str
    text: tuple[str, ...]
    num_tokens: int
    length: int
    tokens_sha256: str
    layers: dict[int, str]
    smoothed: tuple[str, ...] = ()
    fell_back: tuple[str, ...] = ()
    versions: dict[str, str]
    seconds: float
    sources: tuple[TextSource, ...] = ()
    withheld: tuple[WithheldItems, ...] = ()
    num_repeated: int | None = None

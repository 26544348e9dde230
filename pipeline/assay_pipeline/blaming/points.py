"""KL of a candidate that is mixed with its reference, text by text: one pass for each setting, kept for a killed command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.callbacks import say_nothing
from assay.records.base import sha256_of, write_text_atomically
from assay.records.screening import Surprise
from assay.safe_files import read_json_object
from assay_pipeline.comparison.screen_figures import surprise_of
from assay_pipeline.comparison.screen_passes import PassRunner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.screen.compare import PassSide
    from assay_quantize.screen.layer_model import LayerModel
    from assay_quantize.screen.mixed_model import MixedModel, Switches
    from assay_quantize.sensitivity.texts import ScoredText

    Floats = NDArray[np.float64]

POINTS = "points.json"
_REFERENCE, _MIXED = "reference", "mixed"


@dataclass
class Points:
    """runner: of whose folder the passes lie in. kv_cache of the reference: as it says itself; of the candidate as the runner
    says. identity: of both checkpoints and the texts."""

    runner: PassRunner
    reference: StoredCheckpoint
    candidate: StoredCheckpoint
    texts: Sequence[ScoredText]
    identity: str
    num_passes: int = 0
    _kept: dict[str, list[float]] = field(default_factory=dict)
    _surprise: Surprise | None = None

    def __post_init__(self) -> None:
        if (self._kept_in / POINTS).is_file():
            kept = read_json_object(self._kept_in, POINTS)
            if kept.get("identity") == self.identity:
                self._kept, self._surprise = kept["kl"], Surprise.model_validate(kept["surprise"])

    @property
    def _folder(self) -> Path:
        return self.runner.folder

    @property
    def _kept_in(self) -> Path:
        """Beside the folder of passes, which is locked."""
        return self._folder.parent

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Scored, of each text."""
        import numpy as np

        return np.array([text.num_scored for text in self.texts])

    @property
    def surprise(self) -> Surprise:
        """Of the reference at the texts, once a pass was made."""
        assert self._surprise is not None, "every pass tells it"
        return self._surprise

    def reference_model(self) -> LayerModel:
        """Without weights."""
        return replace(self.runner, kv_cache_dtype="auto").model(self.reference)

    def model(self, switches: Switches) -> MixedModel:
        """Without weights."""
        from assay_quantize.screen.kv_cache import is_fp8
        from assay_quantize.screen.mixed_model import MixedModel

        own_fp8 = is_fp8(self.candidate.kv, self.runner.kv_cache_dtype)
        return MixedModel(self.candidate, self.reference_model(), switches, fp8_kv_cache=own_fp8)

    def kl(self, switches: Switches, what: str) -> Floats:
        """[T] sum of KL(reference || mixed) over the scored tokens of each text. what: names the setting."""
        import numpy as np

        from assay_quantize.screen.compare import PassSide, compare_passes
        from assay_quantize.screen.forward import run_pass

        key = sha256_of([sorted(map(str, switches.weights)), switches.activations, switches.kv_cache, switches.config])
        if key not in self._kept:
            self.runner.say(f"pass {len(self._kept) + 1}: {what}")
            folder = self._folder / _MIXED
            states = run_pass(self.model(switches), self.texts, folder, sha256_of([self.identity, key]), say_nothing)
            side = PassSide(self.candidate.location, self.model(switches).head(), states)
            values = list(compare_passes(self.texts, self._side_of_reference(), side))
            self._surprise = surprise_of(values)
            self._kept[key] = [float(text.kl_P.sum()) for text in values]
            self._keep()
            shutil.rmtree(folder)
            self.num_passes += 1
        return np.array(self._kept[key])

    def _side_of_reference(self) -> PassSide:
        from assay_quantize.screen.compare import PassSide
        from assay_quantize.screen.forward import run_pass

        folder = self._folder / _REFERENCE
        states = run_pass(self.reference_model(), self.texts, folder, self.identity, say_nothing)
        return PassSide(self.reference.location, self.reference_model().head(), states)

    def _keep(self) -> None:
        kept = {"identity": self.identity, "kl": self._kept, "surprise": self.surprise.model_dump()}
        write_text_atomically(self._kept_in / POINTS, json.dumps(kept))

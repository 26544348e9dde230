"""On a real vLLM: damage that was planted FAILs, an untouched copy PASSes with as many items as the program asked for, and
replies without room are NOT MEASURED rather than wrong.

tiny-glm answers the usual questions of the quick suite without a fault, damaged or not. What tells them apart are codes, as
many in one prompt as it can just keep apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.verdict import Verdict
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec, serve
from assay_evaluate.verdicts.gates import judge

pytestmark = [pytest.mark.serve, pytest.mark.long]

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 16})
GATES = GateRecipe.model_validate(
    {
        "schema": 1, "name": "planted",
        "gates": [{"kind": "score", "task": "codes", "max_drop": 0.1}, {"kind": "score", "task": "cut", "max_drop": 0.1}],
    }
)  # fmt: skip
LAYER, FACTOR = 3, 1.3


def suite(num_codes: int) -> SuiteRecipe:
    return SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "planted", "seed": "eval-planted", "acceptance": False,
            "tasks": [
                {"kind": "needle", "name": "codes", "languages": ["en"], "num_items": num_codes, "lengths_tokens": [1280],
                 "num_needles": 51, "max_tokens": 256},
                {"kind": "arithmetic", "name": "cut", "num_items": 15, "num_steps": [3], "max_tokens": 8},
            ],
        }
    )  # fmt: skip


def damaged(folder: Path) -> Path:
    """tiny-glm with the routed experts of one layer scaled; everything else byte for byte."""
    shutil.copytree(CHECKPOINT, folder)
    num_scaled = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        tensors = load_file(file)
        for name in tensors:
            if name.startswith(f"model.layers.{LAYER}.mlp.experts."):
                tensors[name] = (tensors[name].float() * FACTOR).to(tensors[name].dtype)
                num_scaled += 1
        save_file(tensors, file, metadata=about)
    assert num_scaled == 8 * 3
    return folder


class OneServer:
    """Serves one checkpoint after the other; asked for the same one again, it is still there."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.running: tuple[Path, Server] | None = None

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[Server]:
        if self.running is None or self.running[0] != spec.checkpoint:
            self.stack.close()
            self.running = spec.checkpoint, self.stack.enter_context(serve(spec, on_progress))
        yield self.running[1]


def verdicts(measurements: list[Measurement]) -> dict[tuple[str, str], Verdict]:
    report = judge(measurements, GATES, model="tiny-glm")
    return {(verdict.candidate, verdict.gate): verdict for verdict in report.verdicts}


def test_damage_fails_a_copy_passes_and_cut_replies_are_not_measured(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))
    (copy / "NOTE.md").write_text("untouched\n")
    reference, server = Candidate("bf16", CHECKPOINT, is_reference=True), OneServer()

    def run(num_codes: int, *candidates: Candidate) -> dict[tuple[str, str], Verdict]:
        return verdicts(
            evaluate(
                "tiny-glm", [reference, *candidates], suite=suite(num_codes), profile=PROFILE, serving=Serving(),
                run_dir=tmp_path / "run", start_server=server.start,
            )
        )  # fmt: skip

    with server.stack:
        pilot = run(10)["bf16-repeat", "score codes"]
        assert pilot.status == "UNDERPOWERED"  # ten items never pass
        assert pilot.items_needed is not None
        found = run(pilot.items_needed, Candidate("copy", copy), Candidate("damaged", damaged(tmp_path / "damaged")))

    assert 30 <= pilot.items_needed < 60
    same, worse = found["copy", "score codes"], found["damaged", "score codes"]
    assert (same.status, same.discordant) == ("PASS", (0, 0))
    assert worse.status == "FAIL", worse.detail
    assert worse.observed is not None and worse.observed.low > 0.1
    for label in ("bf16-repeat", "copy", "damaged"):
        cut = found[label, "score cut"]
        assert cut.status == "NOT MEASURED"
        assert cut.detail == (
            "30 of 30 replies of bf16 itself to cut are cut off at 8 tokens (100 %; above 3.3 % at 97.5 %): the score measures "
            "the budget, not the model; raise max_tokens."
        )
    print(pilot.detail, same.detail, worse.detail, sep="\n")

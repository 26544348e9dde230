"""A W4A16 tiny-glm on a real vLLM: with two ranks its verdict travels; where its scales are read wrongly it does not.

A copy with other bytes but the names, lengths and manifest of the measured checkpoint, as a bad disk or a broken transfer
leaves behind, is refused before a server starts.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.deployment.record import Deployment
from assay.records.measurement import Measurement
from assay.records.probe import load_probes
from assay.records.verdict import GateReport
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.deployment import StartServer, deploy
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec, serve
from assay_evaluate.serving.vllm_command import bind_cores
from assay_evaluate.verdicts.gates import judge
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

pytestmark = [pytest.mark.serve, pytest.mark.long]

TINY_GLM = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
HERE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 16})
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "deployed", "seed": "eval-deployed-1",
        "tasks": [{"kind": "arithmetic", "name": "arithmetic", "num_items": 20, "num_steps": [3], "max_tokens": 256}],
        "divergence": {"num_documents": 20, "max_tokens": 160, "top_k": 64, "suite_documents": 4, "spans": [0, 128]},
        "probes": {"num_requests": 4, "num_garble_requests": 8, "num_alone": 2, "long_tokens": 200, "max_tokens": 48,
                   "top_k": 10},
    }
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {
        "schema": 1, "name": "deployed",
        "gates": [
            {"kind": "score", "task": "arithmetic", "max_drop": 0.2},
            {"kind": "divergence", "metric": "kl_mean", "max": 0.10},
            {"kind": "divergence", "metric": "kl_mean", "over": "spans", "max": 0.10},
            {"kind": "divergence", "metric": "top1_agreement", "min": 0.90},
            {"kind": "acceptance", "max_drop": 0.15},
            {"kind": "probes", "required": ["argmax", "recompute", "garble"]},
        ],
    }
)  # fmt: skip
FACTOR = 4.0


def elsewhere(ranks: int) -> ProfileRecipe:
    """The same machine as another profile: other batches, and the weights shared by ranks."""
    more = {"max-num-seqs": 8, **({"tensor-parallel-size": ranks} if ranks > 1 else {})}
    environment = {**HERE.environment}
    if ranks > 1:
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    changes = {"name": f"{ranks}-ranks", "vllm": {**HERE.vllm, **more}, "concurrency": 8, "environment": environment}
    return bind_cores(HERE.model_copy(update=changes), ranks)


@dataclass(frozen=True)
class Judged:
    """A run of a reference and a candidate that one server played: what is deployed is compared with the candidate only."""

    run_dir: Path
    candidate: Path
    measured: Measurement
    gates: GateReport

    def deploy(self, checkpoint: Path, profile: ProfileRecipe, *, start_server: StartServer = serve) -> Deployment:
        found = load_probes(self.run_dir)
        probed = next(one for one in found if one.label == "w4a16")
        return deploy(
            self.measured,
            checkpoint,
            self.gates,
            profile=profile,
            run_dir=self.run_dir,
            probed=probed,
            start_server=start_server,
        )


@contextmanager
def one_server() -> Iterator[StartServer]:
    """Whatever checkpoint is asked for, it is served by the server that was started first."""
    with ExitStack() as stack:
        started: list[Server] = []

        @contextmanager
        def start(spec: ServerSpec, on_progress: Say) -> Iterator[Server]:
            if not started:
                started.append(stack.enter_context(serve(spec, on_progress)))
            yield started[0]

        yield start


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("deployed")
    candidate, reference = folder / "w4a16" / "checkpoint", folder / "reference"
    recipe = load_recipe(PrecisionRecipe, "w4a16")
    quantize(make_plan(open_checkpoint(TINY_GLM), recipe, model="tiny-glm", family=None), TINY_GLM, candidate)
    shutil.copytree(candidate, reference)
    with (reference / "generation_config.json").open("a") as file:
        file.write("\n")  # another checkpoint, by its hash
    with one_server() as start_server:
        measured = evaluate(
            "tiny-glm",
            [Candidate("reference", reference, is_reference=True), Candidate("w4a16", candidate)],
            suite=SUITE,
            profile=HERE,
            serving=Serving(num_speculative_tokens=1, reasoning_parser="glm45"),
            run_dir=folder,
            own_texts=True,
            start_server=start_server,
            foresee=lambda spec: None,
        )
    gates = judge(measured, GATES, model="tiny-glm", probes=load_probes(folder))
    return Judged(folder, candidate, measured[2], gates)


def damaged(checkpoint: Path, folder: Path) -> Path:
    """A copy in which the scales of the routed experts are four times too large, in files of the same length."""
    shutil.copytree(checkpoint, folder)
    num_scaled = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        with path.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, tensor in tensors.items():
                if ".mlp.experts." in name and name.endswith("_scale"):
                    file.seek(8 + length + header[name]["data_offsets"][0])
                    file.write((tensor.float() * FACTOR).to(tensor.dtype).view(torch.uint8).numpy().tobytes())
                    num_scaled += 1
    assert num_scaled >= 8 * 3
    return folder


def outcomes(record: Deployment) -> dict[str, str]:
    return {one.gate: one.status for one in record.checks}


def test_with_two_ranks_the_verdict_travels(judged: Judged) -> None:
    """Other sums in another order: far below a tenth of the limit, and below what the gates would have noticed."""
    record = judged.deploy(judged.candidate, elsewhere(2))
    assert outcomes(record) == dict.fromkeys(outcomes(record), "PASS"), record.checks
    assert record.outcome == "PASS" and record.sentence.startswith(f"the verdict {record.verdict} also holds on 2-ranks: ")
    assert record.verdict == judged.gates.overall["w4a16"]
    different = " ".join(record.served_differently)
    assert "flags.tensor-parallel-size (None, 2-ranks 2)" in different and "flags.max-num-seqs (32, 2-ranks 8)" in different
    assert (record.judged_on.emulated, record.deployed_on.emulated) == (True, True)
    assert record.divergence is not None and record.noise_floor is not None
    assert record.divergence.num_positions > 1000 and record.divergence.kl_mean.value < 1e-6
    assert record.noise_floor.kl_max < 1e-6
    for accepted in (record.acceptance_judged, record.acceptance):
        assert accepted is not None and accepted.num_draft_tokens > 500
    assert record.alarms == record.alarms_judged == ()


def test_a_copy_with_other_bytes_is_refused(judged: Judged, tmp_path: Path) -> None:
    copy = damaged(judged.candidate, tmp_path / "checkpoint")
    with pytest.raises(MeasureError, match="is not the checkpoint that was measured as w4a16"):
        judged.deploy(copy, elsewhere(1))
    assert not verify(copy).passed


def test_scales_that_are_read_wrongly_do_not(judged: Judged, tmp_path: Path) -> None:
    """The measured checkpoint, on a machine whose kernels read its scales four times too large."""
    read_as = damaged(judged.candidate, tmp_path / "checkpoint")

    def start_server(spec: ServerSpec, on_progress: Say) -> AbstractContextManager[Server]:
        return serve(dataclasses.replace(spec, checkpoint=read_as), on_progress)

    record = judged.deploy(judged.candidate, elsewhere(1), start_server=start_server)
    assert outcomes(record)["divergence kl_mean"] == outcomes(record)["divergence kl_mean, by span"] == "FAIL", record.checks
    assert record.outcome == "FAIL"
    assert record.sentence.startswith(f"the verdict {record.verdict} does not hold on 1-ranks: divergence kl_mean: KL, ")

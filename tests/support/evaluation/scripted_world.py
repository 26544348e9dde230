"""Scripted servers for whole runs: one for each checkpoint folder, started as vLLM would be, and counted."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_server import FakeServer, Scripted
from given_servers import scaled_logits
from small_suite import solve

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import ServerSpec

PROFILE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 3})

OF_CANDIDATE = 1.1
"""Scale of the candidate's logits beside the reference's."""


class World:
    """Serves each checkpoint folder by a scripted server; counts what is started."""

    def __init__(self) -> None:
        self.servers: dict[str, list[FakeServer]] = {}
        self.reply: dict[str, Callable[[dict[str, Any]], Scripted]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.flags: dict[str, dict[str, Any]] = {}
        self.scale: dict[str, float] = {}
        """Profile -> what the logits of its servers are multiplied with."""
        self.can_foresee = True

    def fingerprint(self, spec: ServerSpec) -> Fingerprint:
        return Fingerprint(
            server="scripted", versions={}, hardware={"cpu": "x"}, profile=spec.profile.name, environment={},
            flags={"max-num-seqs": 16, **self.flags.get(spec.checkpoint.name, {})},
            speculation={"method": "mtp"} if spec.speculate else None,
            checkpoint_flags={}, emulated=None, kernels=(),
        )  # fmt: skip

    def foresee(self, spec: ServerSpec) -> Fingerprint | None:
        return self.fingerprint(spec) if self.can_foresee else None

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[FakeServer]:
        name = spec.checkpoint.name
        scale = self.scale.get(spec.profile.name, 1.0)
        logits = functools.partial(scaled_logits, scale * (1.0 if name == "reference" else OF_CANDIDATE))
        with FakeServer(self.reply.get(name, solve), **{"logits": logits, **self.options.get(name, {})}) as server:
            server.fingerprint = self.fingerprint(spec)
            self.servers.setdefault(name, []).append(server)
            yield server

    def measure(self, run_dir: Path, candidates: list[Candidate], suite: SuiteRecipe, **more: Any) -> list[Measurement]:
        """`evaluate` with the servers of this world, under `PROFILE` unless `more` says otherwise."""
        options = {"profile": PROFILE, "serving": Serving(), "start_server": self.start, "foresee": self.foresee, **more}
        return evaluate("tiny", candidates, suite=suite, run_dir=run_dir, **options)

    def num_asked(self, name: str) -> int:
        return sum(len(server.requests) for server in self.servers.get(name, []))


def make_folders(place: Path) -> dict[str, Path]:
    """Two checkpoint folders; the weights are never read by a scripted server."""
    made = {}
    for name in ("reference", "candidate"):
        made[name] = place / name
        made[name].mkdir()
        (made[name] / "config.json").write_text(json.dumps({"vocab_size": 128}))
        (made[name] / "model.safetensors").write_bytes(f"weights of {name}".encode())
    return made


def pair_of(folders: dict[str, Path]) -> list[Candidate]:
    """The reference fp8 and the candidate w4a16."""
    return [Candidate("fp8", folders["reference"], is_reference=True), Candidate("w4a16", folders["candidate"])]

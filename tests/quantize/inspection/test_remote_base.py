"""`--deep --source` of a URL or hub id: errors of quantized weights are what they are in folders, and no file is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from local_hub import Hub
from tiny_checkpoints import make_tiny_glm4_moe, read_shards, write_shards

from assay.errors import CheckpointError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.inspection import Inspection
from assay_pipeline.comparison.inspecting import inspect
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.inspection import compare
from assay_quantize.plan.planner import make_plan

pytestmark = pytest.mark.slow

EXPERT = "model.layers.1.mlp.experts.{}.up_proj.{}"


class Folders(BaseHTTPRequestHandler):
    """Ranges of the files in `base` and `made` below `root`. fails_at: no more is sent of a shard than so many requests."""

    root: Path
    asked: list[tuple[str, int]]
    fails_at: int | None = None

    def do_GET(self) -> None:
        path = self.root / Path(*self.path.strip("/").split("/"))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        shards = [name for name, _ in self.asked if name.endswith(".safetensors")]
        is_failing = self.fails_at is not None and path.suffix == ".safetensors" and len(shards) >= self.fails_at
        if not path.is_file() or match is None or is_failing:
            self.send_error(503 if is_failing else 404)
            return
        size = path.stat().st_size
        begin, end = int(match[1]), min(int(match[2]) + 1, size)
        self.asked.append((path.name, end - begin))
        self.send_response(206)
        self.send_header("content-range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("content-length", str(end - begin))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(begin)
            self.wfile.write(file.read(end - begin))

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and its W4A16 in `made`, in which an expert has another's codes and one row three times its scale."""
    root = tmp_path_factory.mktemp("root")
    base = make_tiny_glm4_moe(root / "base", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    plan = make_plan(open_checkpoint(base), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    quantize(plan, base, root / "made")
    shards = read_shards(root / "made")
    of_name = {name: tensor for of_shard in shards.values() for name, tensor in of_shard.items()}
    for tensors in shards.values():
        for part in ("weight_packed", "weight_scale"):
            if EXPERT.format(0, part) in tensors:
                tensors[EXPERT.format(0, part)] = of_name[EXPERT.format(1, part)].clone()
        if (scale := EXPERT.format(1, "weight_scale")) in tensors:
            tensors[scale] = tensors[scale].clone()
            tensors[scale][5] *= torch.tensor(3, dtype=tensors[scale].dtype)
    write_shards(root / "made", shards)
    return root


@pytest.fixture
def url(folders: Path) -> Iterator[str]:
    Folders.root, Folders.asked, Folders.fails_at = folders, [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Folders)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def told(result: Inspection) -> dict[str, list[tuple[str, str]]]:
    defects = [finding for finding in result.findings if finding.severity != "note"]
    return {finding.defect: [(place.where, place.what) for place in finding.places] for finding in defects}


def test_of_urls_errors_are_those_of_folders(folders: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PIECE_BYTES", 4096)
    in_folders = inspect(str(folders / "made"), source=str(folders / "base"), deep=True)
    wrong = [where for where, _ in told(in_folders)["error_beyond_format"]]
    assert wrong == [EXPERT.format(0, "weight"), EXPERT.format(1, "weight")]
    Folders.asked.clear()
    result = inspect(f"{url}/made", source=f"{url}/base", deep=True)
    assert told(result) == told(in_folders)
    assert not any("errors of quantized weights" in line for line in result.not_checked)
    assert told(inspect(str(folders / "made"), source=f"{url}/base", deep=True)) == told(in_folders)


def test_a_server_that_fails_is_no_defect_of_the_weights(folders: Path, url: str) -> None:
    inspect(str(folders / "made"), source=f"{url}/base", deep=True)
    Folders.fails_at = sum(name.endswith(".safetensors") for name, _ in Folders.asked) - 1
    Folders.asked.clear()
    with pytest.raises(CheckpointError, match=r"^http://127\.0\.0\.1:\d+/base/\S+\.safetensors: HTTP 503 to a request"):
        inspect(str(folders / "made"), source=f"{url}/base", deep=True)


def test_of_the_hub_errors_are_those_of_folders(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(folders / "base")
    server.use(monkeypatch, tmp_path / "home")
    try:
        result = inspect(str(folders / "made"), source="org/model", deep=True)
    finally:
        server.close()
    in_folders = inspect(str(folders / "made"), source=str(folders / "base"), deep=True)
    assert told(result) == told(in_folders)
    assert result.source == "org/model"

"""What is installed for an interpreter, and what tells a patched vLLM from the one that was patched."""

from __future__ import annotations

import shutil
import venv
from pathlib import Path

from assay_evaluate.serving.server import installed_versions


def environment(folder: Path) -> Path:
    """With a vLLM 0.1 of two files; its Python."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "vllm" / "layers").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text("raise SystemExit('is not to be imported')\n")
    (packages / "vllm" / "layers" / "norm.py").write_text("EPSILON = 1e-6\n")
    (packages / "vllm-0.1.dist-info").mkdir()
    (packages / "vllm-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1\n")
    return folder / "bin" / "python"


def test_code_of_vllm_is_told_by_its_files(tmp_path: Path) -> None:
    first, same, patched, larger = (environment(tmp_path / name) for name in ("first", "same", "patched", "larger"))
    for python, text in ((patched, "EPSILON = 1e-5\n"), (larger, "EPSILON = 1e-6\n\n")):
        (norm,) = python.parent.parent.glob("lib/python*/site-packages/vllm/layers/norm.py")
        norm.write_text(text)
    versions = [installed_versions(python) for python in (first, same, patched, larger)]
    assert all(each["vllm"] == "0.1" for each in versions)
    codes = [each["vllm code"] for each in versions]
    assert codes[0] == codes[1] and len({codes[0], codes[2], codes[3]}) == 3
    assert all(len(code) == 12 for code in codes)


def test_an_environment_without_vllm_has_no_code(tmp_path: Path) -> None:
    python = environment(tmp_path / "bare")
    for path in python.parent.parent.glob("lib/python*/site-packages/vllm*"):
        shutil.rmtree(path)
    assert installed_versions(python).keys() == {"python"}

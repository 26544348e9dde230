"""What the shell offers after TAB: commands, recipes, runs. It asks the real program, which must not load anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Run

from assay.recipes.load import recipe_names
from assay.records.run import RunRecord

HEAVY = ("torch", "vllm", "transformers", "numpy", "scipy", "plotly", "huggingface_hub")


def asked(words: str) -> dict[str, str]:
    """The environment in which bash calls the program for the last of `words`."""
    return {"_ASSAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("assay sta", ["status"]),
        ("assay plan tiny-g", ["tiny-glm"]),
        ("assay preflight glm-5 --profile 8xh", ["8xh200"]),
        ("assay run tiny-glm --suite ", recipe_names("suites")),
        ("assay run tiny-glm --precisions fp8,w4a16-ms", ["fp8,w4a16-mse"]),
        ("assay evaluate --profile 8xh", ["8xh200"]),
        ("assay gate --gates q", ["quick"]),
        ("assay report my", ["my-model"]),
        ("assay compare my-model oth", ["other"]),
        ("assay status --runs elsewhere ", ["far"]),
    ],
)
def test_what_is_offered(run: Run, monkeypatch: pytest.MonkeyPatch, words: str, names: list[str]) -> None:
    for folder in ("runs/my-model", "runs/other", "elsewhere/far"):
        RunRecord(model="x").save(Path(folder, "run.json"))
    Path("runs/my-notes").mkdir()
    for name, value in asked(words).items():
        monkeypatch.setenv(name, value)
    _, out, err = run()
    assert (out.split(), err) == (names, "")


def test_nothing_heavy_is_loaded_for_it(tmp_path: Path) -> None:
    code = (
        f"import atexit, sys; atexit.register(lambda: print(*[n for n in {HEAVY} if n in sys.modules], file=sys.stderr)); "
        "sys.argv = ['assay']; import assay_cli as cli; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | asked("assay plan tiny-g"), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr.strip()) == ("tiny-glm", "")

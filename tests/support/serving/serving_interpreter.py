"""The serving environment's Python, with the vLLM plugin of this checkout instead of the installed one."""

from __future__ import annotations

from pathlib import Path

from assay_evaluate.serving.server import find_interpreter

REPOSITORY = Path(__file__).resolve().parents[3]


PLAIN_CONFIGS = """from transformers import AutoConfig, PreTrainedConfig

for name in {names!r}:
    AutoConfig.register(name, type(f"Plain_{{name}}", (PreTrainedConfig,), {{"model_type": name}}))
"""


def with_our_plugin(folder: Path, *, plain_configs: tuple[str, ...] = ()) -> str:
    """Path of a script, made in `folder`, that a profile may name as its interpreter.

    plain_configs: values of `model_type` whose configuration classes are their makers' own code, which is not run: a class that
    keeps the keys of config.json stands in for them.
    """
    real = find_interpreter(None)
    assert real is not None, "no .venv-serve here: run `make setup`"
    path = folder / "python"
    search = f"{REPOSITORY}/evaluate"
    if plain_configs:
        (folder / "configs").mkdir()
        (folder / "configs" / "sitecustomize.py").write_text(PLAIN_CONFIGS.format(names=plain_configs))
        search += f":{folder / 'configs'}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={search} exec {real.absolute()} "$@"\n')
    path.chmod(0o755)
    return str(path)

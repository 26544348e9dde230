"""Variants of a comparison's reference: candidates that are its own checkpoint, served another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay.recipes.profile import GivenServer
from assay.recipes.variant import Variant
from assay.records.declared import variant_note
from assay_pipeline.comparison.checkpoints import Comparison

if TYPE_CHECKING:
    from assay_evaluate.run.candidate import Candidate


def with_variants(
    compared: Comparison, variants: Sequence[Variant], endpoints: Mapping[str, GivenServer], api_key_env: str | None
) -> Comparison:
    """The comparison with each variant as a further candidate, whose label is the variant's name.

    endpoints: servers of the profile that run already, by label. api_key_env: names the key of URLs of the command line.
    AssayError: a name is another's label, or the variant and the reference are not both served here, or both there.
    """
    reference, labels = compared.candidates[0], {candidate.label for candidate in compared.candidates}
    added: list[Candidate] = []
    for variant in variants:
        if variant.name in labels or variant.name == f"{reference.label}-repeat":
            raise AssayError(
                f"--variant {variant.name}: is the label of another measurement here; give the variant another name"
            )
        endpoint = _endpoint_of(variant, reference, endpoints, api_key_env)
        note = variant_note(reference.label, variant.declared, is_stated=endpoint is not None)
        added.append(
            replace(
                reference, label=variant.name, is_reference=False, notes=(note,), endpoint=endpoint, variant=variant,
                sha256=None if reference.checkpoint is None else reference.sha256,
            )
        )  # fmt: skip
    return replace(compared, candidates=[*compared.candidates, *added])


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

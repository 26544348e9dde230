"""What is proposed and why: weak layers, uniform recipes that win, parts nobody measured, and the recipe as its file."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from sensitivities import BITS, SCHEMES, Damage, by_bits, sensitivity

from assay.errors import AssayError
from assay.quantities import size
from assay.recipes.load import load_recipe, parse_recipe, recipe_names
from assay.recipes.precision import PrecisionRecipe
from assay.records.choice.mix import Mix, PredictedMeasured
from assay.records.diagnosis.sensitivity import UniformDamage, WholeDamage
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.mixing.build import Proposal, Request, choice_sha256, propose
from assay_quantize.mixing.choose import Choices, choices_of
from assay_quantize.mixing.parts import stored_parts
from assay_quantize.mixing.recipe_text import layers_text
from assay_quantize.plan.planner import make_plan

BASE = load_recipe(PrecisionRecipe, "w4a16")
SHIPPED = [load_recipe(PrecisionRecipe, name) for name in recipe_names("precisions")]


@pytest.fixture(scope="module")
def checkpoint(tiny_glm: Path) -> Checkpoint:
    return open_checkpoint(tiny_glm)


def choices(checkpoint: Checkpoint, damage: Damage = by_bits, error: float | None = 0.01, texts: str = "24 replies") -> Choices:
    stored = stored_parts(checkpoint, BASE, SCHEMES, whole=lambda model: model, machine=None)
    return choices_of(stored, sensitivity(checkpoint, damage, error=error, texts=texts), SCHEMES)


def proposed(
    checkpoint: Checkpoint,
    damage: Damage = by_bits,
    bits: float = 4.5,
    *,
    error: float | None = 0.01,
    slack: float = 0.02,
    texts: str = "24 replies",
    measured: dict[str, PredictedMeasured] | None = None,
    whole: dict[str, float] | None = None,
    mix: tuple[PrecisionRecipe, float] | None = None,
    always_mix: bool = False,
    num_texts_of_wholes: int | None = None,
) -> Proposal:
    """whole: scheme -> what is lost with all parts in it at once. mix: the same of a recipe."""
    made = choices(checkpoint, damage, error)
    asked = Request("tiny", "/models/tiny", "mix", f"{bits:g}bpw", made.bytes_at(bits), None, slack, always_mix)
    record = sensitivity(checkpoint, damage, error=error, texts=texts)
    record = record.model_copy(update={"num_texts_of_wholes": num_texts_of_wholes})
    if whole is not None:
        lost = [UniformDamage(scheme=point, bytes=1, damage_nats=nats, sum_of_parts_nats=1.0) for point, nats in whole.items()]
        record = record.model_copy(update={"uniform": tuple(lost)})
    if mix is not None:
        schemes = [(part.layer, part.role, mix[0].scheme_of(part.role, part.layer)) for part in made.parts]
        of_mix = WholeDamage(schemes=[point for point in schemes if point[2]], damage_nats=mix[1], sum_of_parts_nats=1.0)
        record = record.model_copy(update={"wholes": (of_mix,)})
    return propose(asked, BASE, made, record, SHIPPED, SCHEMES, measured or {})


def weak(layer: int, role: str, scheme: str) -> float:
    """The experts of layer 2 lose eight times as much."""
    return by_bits(layer, role, scheme) * (8 if (layer, role) == (2, "routed_expert") else 1)


def taken(mix: Mix) -> dict[tuple[int, str], str]:
    return {(part.layer, part.role): part.scheme for part in mix.parts}


def test_a_planted_weak_layer_is_kept_in_more_bits(checkpoint: Checkpoint) -> None:
    made = proposed(checkpoint, weak, 4.3)
    schemes = taken(made.mix)
    assert made.mix.proposes == "mix"
    assert BITS[schemes[2, "routed_expert"]] > BITS[schemes[1, "routed_expert"]]
    assert made.mix.point.bytes <= (made.mix.budget_bytes or 0)
    assert made.mix.advantage is not None and made.mix.advantage.uniform == "w4a16"
    assert made.mix.advantage.low_nats is not None and 0 < made.mix.advantage.low_nats < made.mix.advantage.nats


@pytest.mark.parametrize("bits", [4.2, 4.5, 5.5, 8.2])
def test_what_is_chosen_is_the_best_of_all_choices(checkpoint: Checkpoint, bits: float) -> None:
    """All 4^8 of them."""
    drawn = random.Random(int(10 * bits))
    noise = {key: drawn.uniform(0.3, 3.0) for key in itertools.product(range(3), BASE.quantize)}
    damage: Damage = lambda layer, role, scheme: by_bits(layer, role, scheme) * noise[layer, role]  # noqa: E731
    made, every = proposed(checkpoint, damage, bits, slack=0.0), choices(checkpoint, damage)
    budget = every.bytes_at(bits) - every.stored.other_bytes
    totals = [(0, 0.0)]
    for options in every.options:
        totals = [(size + point.num_bytes, lost + point.damage) for size, lost in totals for point in options]
    best = min(lost for size, lost in totals if size <= budget)
    assert len(totals) == 4 ** len(every.parts)
    assert made.mix.optimum_nats == pytest.approx(best, rel=1e-9)
    assert made.mix.bound_nats == pytest.approx(best, rel=1e-6)


def test_the_recipe_of_the_file_is_what_was_chosen_and_plans(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for number, bits in enumerate((4.14, 4.3, 4.6, 5.0, 8.0, 12.0, 15.0)):
        made = proposed(checkpoint, weak, bits)
        path = tmp_path / f"{number}" / "mix.yaml"
        path.parent.mkdir()
        path.write_text(made.text)
        recipe = parse_recipe(PrecisionRecipe, path)
        assert recipe == made.recipe
        for (layer, role), scheme in taken(made.mix).items():
            assert (recipe.scheme_of(role, layer) or "bf16") == scheme
        plan = make_plan(checkpoint, recipe, model="tiny", family=None)
        assert plan.bytes_out == made.mix.point.bytes
        assert plan.keeps_mtp and {t.scheme for t in plan.tensors if t.role == "mtp"} == {None}
        assert {key: recipe.keep[key][: len(roles)] for key, roles in BASE.keep.items()} == BASE.keep


def test_reasons_stand_in_the_file(checkpoint: Checkpoint) -> None:
    text = proposed(checkpoint, weak, 4.3).text
    assert "# Chosen on 24 texts (24 replies; sha256 cccccccccccccccc), damages by proxy:kl. Judge it on other texts." in text
    (reason,) = [line for line in text.splitlines() if line.startswith("  # routed_expert 2:")]
    assert "nats more would be lost" in reason and " less." in reason
    assert "0.02 of the least damage" not in text and "within 4.3bpw" in text


def test_what_texts_are_called_cannot_end_a_comment(checkpoint: Checkpoint) -> None:
    made = proposed(checkpoint, weak, 4.3, texts="x\nscheme: w8a8\u2028quantize: {}\x1b[31m")
    plain = proposed(checkpoint, weak, 4.3)
    assert yaml.safe_load(made.text) == yaml.safe_load(plain.text)
    assert "\x1b" not in made.text and "\u2028" not in made.text


# ------------------------------------------------------------------------------------------------ uniform recipes that win
def test_the_best_choice_may_be_uniform(checkpoint: Checkpoint) -> None:
    """A uniform recipe that costs as much as the budget, and damages that rise alike."""
    every = choices(checkpoint)
    alike: Damage = lambda layer, role, scheme: next(  # noqa: E731
        1e-9 * part.num_weights * 4.0 ** (4.0 - BITS[scheme])
        for part in every.parts
        if (part.layer, part.role) == (layer, role)
    )
    uniform = every.picks_of({(part.layer, part.role): "w4a16" for part in every.parts})
    assert uniform is not None
    bits = every.bits_per_weight(every.total_bytes(uniform)) + 1e-3
    made = proposed(checkpoint, alike, bits)
    assert (made.mix.proposes, made.mix.point.kind) == ("uniform", "uniform")
    assert made.mix.reason == "The best choice is w4a16, one scheme for all."
    assert set(taken(made.mix).values()) == {"w4a16"} and made.recipe.layers == {}


def test_a_lead_within_its_error_goes_to_the_uniform_recipe(checkpoint: Checkpoint) -> None:
    sure, unsure = (proposed(checkpoint, weak, 5.5, error=error) for error in (0.01, 3.0))
    assert sure.mix.proposes == "mix"
    assert unsure.mix.proposes == "uniform"
    assert unsure.mix.reason.startswith("w4a16-g32 is proposed: it is expected to lose ")
    assert unsure.mix.reason.endswith("is within its error.")
    assert unsure.mix.advantage is not None and (unsure.mix.advantage.low_nats or 0) <= 0 < unsure.mix.advantage.nats
    assert set(taken(unsure.mix).values()) == {"w4a16_g32"}
    assert unsure.mix.optimum_nats < unsure.mix.point.damage_nats


def test_of_uniform_recipes_the_one_that_is_best_as_a_whole_is_proposed(checkpoint: Checkpoint) -> None:
    """Sums of single parts favour w4a16-g32; with all parts quantized at once another loses less."""
    made = proposed(checkpoint, weak, 5.5, error=3.0, whole={"w4a16_g32": 0.006, "w4a16": 0.005})
    assert made.mix.proposes == "uniform" and set(taken(made.mix).values()) == {"w4a16"}
    assert made.mix.reason == (
        "w4a16 is proposed: of the uniform recipes within these limits it loses least with all parts quantized at once, 0.005 "
        "nats a token on these texts; w4a16-g32, which the sums of single parts favour, loses 0.006, and no mix is expected "
        "to be ahead of that by more than its error."
    )
    as_summed = proposed(checkpoint, weak, 5.5, error=3.0, whole={"w4a16_g32": 0.005, "w4a16": 0.006})
    unknown = proposed(checkpoint, weak, 5.5, error=3.0, whole={"w4a16": 0.005})
    for point in (as_summed, unknown):
        assert set(taken(point.mix).values()) == {"w4a16_g32"} and point.mix.reason.endswith("is within its error.")


def test_what_was_measured_as_a_whole_decides(checkpoint: Checkpoint) -> None:
    """Sums of parts cannot tell the mix from its control; both as a whole can."""
    whole = {"w4a16_g32": 0.006, "w4a16": 0.005}
    unsure = proposed(checkpoint, weak, 5.5, error=3.0, whole=whole)
    mix = unsure.candidate
    assert mix is not None and len(mix.schemes) > 1
    won = proposed(checkpoint, weak, 5.5, error=3.0, whole=whole, mix=(mix, 0.004))
    assert (won.mix.proposes, won.candidate) == ("mix", None)
    assert (won.recipe.quantize, won.recipe.layers) == (mix.quantize, mix.layers)
    assert won.mix.reason == (
        "With all parts quantized at once, on the texts that it was chosen on, it loses 0.004 nats a token, and w4a16 "
        f"({_size(won, 'w4a16')}), the best uniform recipe of at most this size, 0.005."
    )
    apart = proposed(checkpoint, weak, 5.5, error=3.0, whole=whole, mix=(mix, 0.004), num_texts_of_wholes=12)
    assert apart.mix.reason.startswith(
        "With all parts quantized at once, on texts that it was not chosen on, it loses 0.004 nats a token, and w4a16 "
    )
    assert all(measured_recipe.on_other_texts for measured_recipe in apart.mix.checks)
    lost = proposed(checkpoint, weak, 5.5, error=3.0, whole=whole, mix=(mix, 0.0055))
    assert (lost.mix.proposes, lost.candidate) == ("uniform", None) and set(taken(lost.mix).values()) == {"w4a16"}
    assert lost.mix.reason == (
        "w4a16 is proposed: with all parts quantized at once, on the texts that it was chosen on, it loses 0.005 nats a token, "
        "and the mix 0.0055."
    )
    assert {measured_recipe.name for measured_recipe in lost.mix.checks} == {
        "uniform w4a16",
        "uniform w4a16_g32",
        f"mix of {size(won.mix.point.bytes)}",
    }
    assert lost.mix.sensitivity_sha256 == won.mix.sensitivity_sha256 == unsure.mix.sensitivity_sha256


def _size(made: Proposal, name: str) -> str:
    return size(next(point.bytes for point in made.mix.controls if point.name == name))


def test_a_mix_is_written_where_it_is_asked_for(checkpoint: Checkpoint) -> None:
    plain, asked = (proposed(checkpoint, weak, 5.5, error=3.0, always_mix=mix) for mix in (False, True))
    assert (plain.mix.proposes, asked.mix.proposes) == ("uniform", "mix")
    mix = plain.candidate
    assert mix is not None and (asked.recipe.quantize, asked.recipe.layers) == (mix.quantize, mix.layers)
    assert asked.mix.reason == f"Written as a mix was asked for. {plain.mix.reason}"


def test_what_was_measured_of_more_parts_than_a_recipe_has_is_not_its_own(checkpoint: Checkpoint) -> None:
    """The machine refuses w4a16-g32 in one part, so the recipe keeps it: what all parts lose in that is not what it loses."""
    stored = stored_parts(checkpoint, BASE, SCHEMES, whole=lambda model: model, machine=None)
    smallest = min(stored.parts, key=lambda part: part.num_weights)
    parts = [replace(part, refused={"w4a16_g32": "no kernel"}) if part == smallest else part for part in stored.parts]
    record = sensitivity(checkpoint, weak, error=3.0)
    lost = [UniformDamage(scheme=point, bytes=1, damage_nats=nats, sum_of_parts_nats=1.0)
            for point, nats in (("w4a16_g32", 0.006), ("w4a16", 0.005))]  # fmt: skip
    record = record.model_copy(update={"uniform": tuple(lost)})
    made = choices_of(replace(stored, parts=tuple(parts)), record, SCHEMES)
    asked = Request("tiny", "/models/tiny", "mix", "6bpw", made.bytes_at(6.0), None)
    first = propose(asked, BASE, made, record, SHIPPED, SCHEMES, {})
    mix, control = first.mix, first.control
    assert mix.advantage is not None and mix.advantage.uniform == "uniform w4a16_g32" and mix.proposes == "uniform"
    assert first.candidate is not None and control is not None, "both are to be measured, else nothing is decided"
    for lost_by_mix, proposes in ((0.004, "mix"), (0.007, "uniform")):
        wholes = [
            WholeDamage(
                schemes=[(*key, scheme) for key in taken(mix) if (scheme := recipe.scheme_of(key[1], key[0]))],
                damage_nats=nats, sum_of_parts_nats=1.0,
            )
            for recipe, nats in ((first.candidate, lost_by_mix), (control, 0.0045))
        ]  # fmt: skip
        again = propose(asked, BASE, made, record.model_copy(update={"wholes": tuple(wholes)}), SHIPPED, SCHEMES, {})
        assert again.mix.proposes == proposes and "0.0045" in again.mix.reason and not again.undecided
        assert proposes == "mix" or taken(again.mix) == taken(mix)
    assert set(taken(mix).values()) == {"w4a16_g32", "bf16"} and mix.reason.endswith("is within its error.")


def test_without_intervals_a_lead_must_be_clear(checkpoint: Checkpoint) -> None:
    made = proposed(checkpoint, weak, 4.3, error=None)
    assert made.mix.proposes == "mix" and made.mix.advantage is not None and made.mix.advantage.low_nats is None
    nearly: Damage = lambda layer, role, scheme: (  # noqa: E731
        0.01 * (0.999 if scheme == "fp8_channel" else 1.0)
    )
    near = proposed(checkpoint, nearly, 4.6, error=None)
    assert near.mix.proposes == "uniform" and near.mix.reason.endswith("less than 2% apart.")
    assert near.mix.advantage is not None
    whole = {"w4a16": 0.005, "w4a16_g32": 0.005, near.mix.parts[0].scheme: 0.006}
    other = proposed(checkpoint, nearly, 4.6, error=None, whole=whole)
    assert set(taken(other.mix).values()).isdisjoint(taken(near.mix).values())
    assert other.mix.reason.endswith("and no mix is expected to be ahead of that by more than 2%."), "no error is known"


def test_what_a_run_measured_decides(checkpoint: Checkpoint) -> None:
    made = proposed(checkpoint, weak, 5.5)
    assert made.mix.proposes == "mix" and made.mix.advantage is not None and made.mix.advantage.uniform == "w4a16-g32"
    uniform = dict.fromkeys(taken(made.mix), "w4a16_g32")
    for nats, winner in ((0.02, "uniform"), (0.04, "mix")):
        measured = {
            choice_sha256(BASE, schemes): PredictedMeasured(
                name=name, source="runs/tiny", predicted_nats=0.1, measured_nats=lost
            )
            for name, schemes, lost in (("mix", taken(made.mix), 0.03), ("w4a16-g32", uniform, nats))
        }
        again = proposed(checkpoint, weak, 5.5, measured=measured)
        assert again.mix.proposes == winner
        assert again.mix.checks == tuple(measured.values())
    assert made.mix.reason.startswith("It is expected to lose 0.") and "w4a16-g32 is proposed: measured in runs/tiny" in (
        proposed(
            checkpoint, weak, 5.5, measured={k: v.model_copy(update={"measured_nats": 0.03}) for k, v in measured.items()}
        ).mix.reason
    )


def test_ahead_of_others_than_the_best_uniform_recipe_says_nothing(checkpoint: Checkpoint) -> None:
    """A run measured the mix and w4a16; w4a16-g32, which the sums favour, is measured as a whole only, or not at all."""
    mix = proposed(checkpoint, weak, 5.5, error=3.0).candidate
    assert mix is not None
    of_sure = taken(proposed(checkpoint, weak, 5.5).mix)
    schemes = {key: mix.scheme_of(key[1], key[0]) or "bf16" for key in of_sure}
    uniform = dict.fromkeys(schemes, "w4a16")
    measured = {
        choice_sha256(BASE, point): PredictedMeasured(name=name, source="runs/tiny", predicted_nats=0.1, measured_nats=lost)
        for name, point, lost in (("mix", schemes, 0.03), ("sure", of_sure, 0.03), ("w4a16", uniform, 0.05))
    }
    whole = {"w4a16_g32": 0.004, "w4a16": 0.006}
    lost = proposed(checkpoint, weak, 5.5, error=3.0, measured=measured, whole=whole, mix=(mix, 0.005))
    assert lost.mix.proposes == "uniform" and set(taken(lost.mix).values()) == {"w4a16_g32"}
    assert lost.mix.reason.startswith("w4a16-g32 is proposed: with all parts quantized at once, on the texts")
    sure, unsure = (proposed(checkpoint, weak, 5.5, error=error, measured=measured) for error in (0.01, 3.0))
    assert sure.mix.proposes == "mix" and sure.mix.reason.startswith("It is expected to lose ")
    assert unsure.mix.reason.endswith("is within its error.") and unsure.undecided and unsure.candidate == mix
    one_whole = proposed(checkpoint, weak, 5.5, error=3.0, whole={"w4a16": 0.006}, mix=(mix, 0.005))
    assert one_whole.mix.reason.startswith("w4a16-g32 is proposed: it is expected to lose ") and one_whole.candidate is None
    assert one_whole.undecided and one_whole.control is not None and one_whole.control.schemes == ("w4a16_g32",)
    measured = {key: point.model_copy(update={"measured_nats": 0.08 - point.measured_nats}) for key, point in measured.items()}
    beaten = proposed(checkpoint, weak, 5.5, measured=measured)
    assert set(taken(beaten.mix).values()) == {"w4a16"}, "it lost less than the mix, however good a third one is"


def test_a_mix_that_ships_as_a_precision_is_a_mix(checkpoint: Checkpoint) -> None:
    """w4a16-experts keeps attention and dense layers: it is written where a mix is asked for, and measured as a whole."""
    experts = load_recipe(PrecisionRecipe, "w4a16-experts")
    every = choices(checkpoint)
    shipped = {(part.layer, part.role): experts.scheme_of(part.role, part.layer) or "bf16" for part in every.parts}
    picks = every.picks_of(shipped)
    assert picks is not None
    bits = every.bits_per_weight(every.total_bytes(picks)) + 1e-6

    def dense(layer: int, role: str, scheme: str) -> float:
        return by_bits(layer, role, scheme) * (1000 if shipped[layer, role] == "bf16" else 1e-3)

    plain, asked = (proposed(checkpoint, dense, bits, error=9.0, slack=0.0, always_mix=mix) for mix in (False, True))
    assert "w4a16-experts" in {point.name for point in plain.mix.controls if point.kind == "shipped"}
    assert plain.mix.proposes == "uniform" and plain.undecided, plain.mix.reason
    assert plain.candidate is not None
    assert asked.mix.proposes == "mix" and taken(asked.mix) == shipped
    assert {key: plain.candidate.scheme_of(key[1], key[0]) or "bf16" for key in shipped} == shipped


# ------------------------------------------------------------------------------------------------ calibrated
def test_a_calibrated_mix_is_held_against_calibrated_recipes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = load_recipe(PrecisionRecipe, "w4a16-gptq")
    stored = stored_parts(checkpoint, base, SCHEMES, whole=lambda model: model, machine=None)
    record = sensitivity(checkpoint, weak).model_copy(update={"calibration": base.calibration.model_dump(mode="json")})  # type: ignore[union-attr]
    made_of = choices_of(stored, record, SCHEMES)
    asked = Request("tiny", "/models/tiny", "mix", "4.3bpw", made_of.bytes_at(4.3), None)
    made = propose(asked, base, made_of, record, SHIPPED, SCHEMES, {})
    assert made.mix.calibrated_by == "gptq" and made.recipe.calibration == base.calibration
    assert made.mix.advantage is not None and made.mix.advantage.uniform == "w4a16-gptq"
    assert {point.name for point in made.mix.controls} == {"w4a16-gptq", "w4a16-gptq-g32", "uniform fp8_channel"}
    assert "what w4a16-gptq (" in made.text.replace("\n# ", " ") and ", INT4 weights by gptq." in made.text.replace("\n# ", " ")
    (tmp_path / "mix.yaml").write_text(made.text)
    assert parse_recipe(PrecisionRecipe, tmp_path / "mix.yaml") == made.recipe
    free = proposed(checkpoint, weak, 4.3)
    assert free.recipe.calibration == "none" and free.mix.calibrated_by is None
    assert any("w4a16-gptq is not among them" in said for said in free.mix.assumptions)
    assert not any("w4a16-gptq is not among them" in said for said in made.mix.assumptions)
    eight = propose(
        Request("tiny", "/models/tiny", "mix", "8.2bpw", made_of.bytes_at(8.2), None), base,
        choices_of(stored, record, ("fp8_channel",)), record, SHIPPED, ("fp8_channel",), {},
    )  # fmt: skip
    assert eight.recipe.calibration == "none", "nothing of it is INT4"


# ------------------------------------------------------------------------------------------------ missing is not zero
def test_a_part_that_nobody_measured_stays_in_16_bits(checkpoint: Checkpoint) -> None:
    made = proposed(checkpoint, lambda layer, role, scheme: None if role == "attention" else by_bits(layer, role, scheme), 9.0)
    assert {s for (_, role), s in taken(made.mix).items() if role == "attention"} == {"bf16"}
    assert "attention" in made.recipe.keep["bf16"] and "attention" not in made.recipe.quantize
    left = {(point.role, point.layers, point.scheme): point.why for point in made.mix.not_taken}
    assert left == {("attention", "0-2", scheme): "not measured" for scheme in SCHEMES}


def test_a_scheme_that_one_layer_lacks_is_not_taken_there(checkpoint: Checkpoint) -> None:
    hole: Damage = lambda layer, role, scheme: None if (layer, role, scheme) == (1, "routed_expert", "w4a16") else by_bits(layer, role, scheme)  # noqa: E731, E501  # fmt: skip
    made = proposed(checkpoint, hole, 4.3)
    (part,) = [part for part in made.mix.parts if (part.layer, part.role) == (1, "routed_expert")]
    assert part.scheme != "w4a16" and (part.usual == part.scheme or part.why == "not measured")
    uniform = next(
        point for point in made.mix.controls if point.kind == "uniform" and "w4a16" in point.name and "g32" not in point.name
    )
    assert uniform.num_kept == 1  # no damage is made up for it


def test_a_budget_that_holds_everything(checkpoint: Checkpoint) -> None:
    with pytest.raises(AssayError, match=r"--budget 16.1bpw: holds the whole checkpoint in 16 bits \(.* MB\); nothing need be"):
        proposed(checkpoint, bits=16.1)


def test_a_budget_that_nothing_meets(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        AssayError, match=r"--budget 4bpw: is 3.59 MB, the smallest choice takes 3.62 MB \(4\.1\d bits per weight\);"
    ):
        proposed(checkpoint, bits=4.0)
    with pytest.raises(AssayError, match=r"; 3 of 8 parts can only stay in 16 bits \(not measured, or refused\)"):
        proposed(checkpoint, lambda layer, role, scheme: None if role == "attention" else by_bits(layer, role, scheme), 4.2)


# ------------------------------------------------------------------------------------------------ beside it
def test_no_control_of_its_size_is_below_the_frontier(checkpoint: Checkpoint) -> None:
    mix = proposed(checkpoint, weak, 4.5).mix
    sizes = [point.bytes for point in mix.frontier]
    lost = [point.damage_nats for point in mix.frontier]
    assert sizes == sorted(sizes) and lost == sorted(lost, reverse=True) and lost[-1] == 0.0
    for point in mix.controls:
        if point.kind == "uniform":
            assert min(best.damage_nats for best in mix.frontier if best.bytes <= point.bytes) <= point.damage_nats * (1 + 1e-9)
    assert {point.name for point in mix.controls} == {
        "w4a16", "w4a16-g32", "fp8-channel", "w4a16-experts", "w4a16-experts-g32"
    }  # fmt: skip  # of those that these damages can say something of


def test_neighbouring_layers_are_alike_where_it_costs_little(checkpoint: Checkpoint) -> None:
    """Attention of three layers a hair apart: exact, they differ; with the slack they do not."""
    hair: Damage = lambda layer, role, scheme: by_bits(layer, role, scheme) * (1 + 0.001 * layer)  # noqa: E731

    def kinds(slack: float) -> int:
        mix = proposed(checkpoint, hair, 4.25, slack=slack, error=1e-9).mix
        assert mix.point.damage_nats <= mix.optimum_nats * (1 + slack) * (1 + 1e-9)
        return len({(part.role, part.scheme) for part in mix.parts})

    assert kinds(0.05) <= kinds(0.0)
    assert kinds(0.3) == 4


def test_layers_as_recipes_write_them() -> None:
    assert layers_text([2, 0, 1, 7, 5, 4, 9]) == "0-2, 4-5, 7, 9"
    assert layers_text([3]) == "3"

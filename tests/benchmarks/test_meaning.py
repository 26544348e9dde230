"""The damages and the figures of benchmarks/screen/meaning.py, without a server."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from synthetic_run import make_measurements

from assay.installation import data_file
from assay.records.base import Interval
from assay.records.measurement import Measurement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "screen"))

import meaning
from damaged import DAMAGES, make
from meaning import CANDIDATES, FAULTS, candidates_of, page, points_of, suite_of_tasks, suite_of_texts, with_losses
from meaning_figures import Point, correlation, is_inside, log_slope, loss_of, picture, summary, table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCES = {"tiny-glm": EXAMPLES / "tiny_glm" / "checkpoint", "tiny-qwen": EXAMPLES / "tiny_qwen" / "checkpoint"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def changed_by(source: Path, name: str, folder: Path) -> dict[str, torch.Tensor]:
    make(source, folder / name, name)
    before, after = tensors_of(source), tensors_of(folder / name)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == before[name].dtype and after[name].shape == before[name].shape for name in after)
    return {name: tensor for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(("model", "layers"), [("tiny-glm", (1, 2, 3)), ("tiny-qwen", (0, 1, 2, 3))])
def test_noise_is_on_every_routed_expert_of_the_decoder(model: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    changed = changed_by(SOURCES[model], "noise-0.4", tmp_path)
    assert changed.keys() == {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        for layer in layers for expert in range(8) for kind in ("gate", "up", "down")
    }  # fmt: skip
    before = tensors_of(SOURCES[model])
    sizes = [
        float((tensor.float() - before[name].float()).square().mean().sqrt() / before[name].float().square().mean().sqrt())
        for name, tensor in changed.items()
    ]
    assert sizes == pytest.approx([0.4] * len(sizes), rel=0.03)
    make(SOURCES[model], tmp_path / "again", "noise-0.4")
    assert all(torch.equal(tensor, tensors_of(tmp_path / "again")[name]) for name, tensor in changed.items())


def test_two_bits_are_four_levels_a_row(tmp_path: Path) -> None:
    changed = changed_by(SOURCES["tiny-qwen"], "layer-2-bits", tmp_path)
    assert {name.split(".mlp.")[0] for name in changed} == {"model.layers.2"} and len(changed) == 24
    before = tensors_of(SOURCES["tiny-qwen"])
    for name, tensor in changed.items():
        assert max(len(row.unique()) for row in tensor) == 4
        step_O = before[name].float().abs().amax(1) / 1.5
        assert ((tensor.float() - before[name].float()).abs().amax(1) <= step_O * 0.51).all()


def test_routers_alone_are_rounded(tmp_path: Path) -> None:
    changed = changed_by(SOURCES["tiny-glm"], "routers-2-bits", tmp_path)
    assert changed.keys() == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}


def test_what_is_no_damage_is_a_copy(tmp_path: Path) -> None:
    assert changed_by(SOURCES["tiny-glm"], "fault-batch", tmp_path) == {}


def test_candidates_are_precisions_damages_and_faults() -> None:
    shipped = {path.stem for path in (data_file("recipes") / "precisions").glob("*.yaml")}
    for model in CANDIDATES:
        assert set(candidates_of(model)) <= shipped | DAMAGES.keys() | FAULTS.keys()
    assert sum(map(len, CANDIDATES.values())) >= 12


def test_suites_are_demo_with_fewer_items_and_texts_of_both_languages() -> None:
    tasks, texts = suite_of_tasks(40), suite_of_texts(24)
    assert [(task.name, task.num_items, task.languages) for task in tasks.tasks] == [  # type: ignore[union-attr]
        ("sums", 20, ("en", "zh")), ("codes-en", 40, ("en",)), ("codes-zh", 40, ("zh",)),
    ]  # fmt: skip
    assert texts.divergence is not None
    assert (texts.divergence.num_documents, texts.divergence.top_k, texts.tasks, tasks.divergence) == (12, 896, (), None)


def test_measurements_and_a_screening_become_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reference fp8, its repeat, bf16, w4a16 and nvfp4a16, of which w4a16 alone is asked tasks."""
    measurements, asked = make_measurements(), []

    def measured(name: str, labels: list[str], suite: object, work: Path) -> tuple[list[Measurement], Path]:
        asked.append(labels)
        return [*measurements[:2], *(one for one in measurements[2:] if one.label in labels)], work / name

    def screen(checkpoints: list[str], **options: object) -> tuple[object, None]:
        screened = {"bf16": 0.002, "w4a16": 0.02, "nvfp4a16": 0.03}
        drifts = {label: Interval(value=kl, low=kl / 2, high=2 * kl, n=24) for label, kl in screened.items()}
        assert [Path(text).name for text in checkpoints] == ["checkpoint", "tiny-glm", "checkpoint", "checkpoint"]
        assert (options["text"], options["all_texts"]) == ([tmp_path / "tiny-glm"], True)
        return SimpleNamespace(
            candidates=[SimpleNamespace(label=label, drift=SimpleNamespace(kl_mean=kl)) for label, kl in drifts.items()]
        ), None

    monkeypatch.setattr(meaning, "measured", measured)
    monkeypatch.setattr(meaning, "screen", screen)
    points = points_of("tiny-glm", ["bf16", "w4a16", "nvfp4a16"], suite_of_texts(24), tmp_path)
    points = list(with_losses(points, ["w4a16"], suite_of_tasks(40), tmp_path))
    assert asked == [["bf16", "w4a16", "nvfp4a16"], ["w4a16"]]
    assert (
        [(point.label, point.screened.value, point.served.value) for point in points]
        == [
            (label, kl, measurement.divergence.kl_mean.value)  # type: ignore[union-attr]
            for label, kl, measurement in zip(("bf16", "w4a16", "nvfp4a16"), (0.002, 0.02, 0.03), measurements[2:], strict=True)
        ]
    )
    right = [
        {(task.task, item.item): item.correct for task in measurements[number].tasks for item in task.items}
        for number in (0, 3)
    ]
    both = [item for item in right[0] if right[0][item] is not None and right[1][item] is not None]
    lost = sum(bool(right[0][item]) - bool(right[1][item]) for item in both) / len(both)
    assert [point.loss and point.loss.value for point in points] == [None, pytest.approx(lost), None]
    assert list(points[1].task_losses) == ["arithmetic", "needle"]
    lines = list(page(points, 24, len(both)))
    assert "beside their source, and screened over the same 24 replies of each source, the" in lines
    assert [line.split(" | ")[1] for line in lines if line.startswith("| tiny-glm |")] == ["bf16", "w4a16", "nvfp4a16"]


# ------------------------------------------------------------------------------------------------ figures
def point(label: str, screened: float, served: float, lost: int, *, model: str = "tiny-glm", is_damage: bool = False) -> Point:
    def around(value: float) -> Interval:
        return Interval(value=value, low=value * 0.9, high=value * 1.1, n=40)

    items: dict[tuple[str, str], bool | None] = {("sums", str(number)): True for number in range(100)}
    answers: dict[tuple[str, str], bool | None] = {item: int(item[1]) >= lost for item in items}
    return Point(model, label, is_damage, around(screened), around(served), loss_of(items, answers), {"sums": lost / 100})


POINTS = [point(f"p{power}", 10.0**-power * 1.05, 10.0**-power, 40 - 8 * power) for power in range(1, 6)]


def test_loss_counts_items_that_both_have() -> None:
    reference = {("sums", "1"): True, ("sums", "2"): True, ("sums", "3"): False, ("sums", "4"): True, ("sums", "5"): None}
    candidate = {("sums", "1"): False, ("sums", "2"): False, ("sums", "3"): True, ("sums", "4"): None, ("sums", "5"): True}
    loss = loss_of(reference, candidate)
    assert (loss.value, loss.n) == (pytest.approx(1 / 3), 3)


def test_same_order_and_slope_of_one() -> None:
    rho = correlation(POINTS, lambda at: at.screened.value, lambda at: at.served.value)
    assert rho is not None
    assert (rho.value, rho.high, rho.n) == (pytest.approx(1.0), pytest.approx(1.0), 5) and rho.low < 0.9
    slope = log_slope(POINTS)
    assert (slope.value, slope.low, slope.high) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))
    squared = [point(f"p{power}", 10.0 ** (-2 * power), 10.0**-power, 0) for power in range(1, 6)]
    assert log_slope(squared).value == pytest.approx(2.0)


def test_reversed_order_and_no_order() -> None:
    rho = correlation(POINTS, lambda at: at.screened.value, lambda at: -at.loss.value)
    assert rho is not None and rho.value == pytest.approx(-1.0)
    assert correlation(POINTS, lambda at: at.screened.value, lambda at: 0.0) is None
    assert correlation(POINTS[:3], lambda at: at.screened.value, lambda at: at.served.value) is None


def test_inside_is_of_the_served_interval() -> None:
    assert [is_inside(point("x", value, 1.0, 0)) for value in (0.89, 0.91, 1.09, 1.11)] == [False, True, True, False]


def test_tables() -> None:
    damage = point("noise", 0.3, 0.2, 50, is_damage=True)
    lines = list(summary([*POINTS, damage]))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| all", "| tiny-glm", "| precisions"]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:2] + cells[4:7] == ["all", "6", "1.050", "1.050 to 1.500", "5 of 6"]
    assert list(table([damage, POINTS[0]]))[2:] == [
        "| tiny-glm | p1 | 0.1050 | 0.1000 (0.0900 to 0.1100) | 32.0 (23.0 to 41.7) | 32.0 |",
        "| tiny-glm | noise | 0.3000 | 0.2000 (0.1800 to 0.2200) | 50.0 (39.8 to 59.6) | 50.0 |",
    ]


def test_who_was_not_asked_has_no_loss() -> None:
    unasked = replace(POINTS[0], loss=None, task_losses={})
    assert list(table([unasked, POINTS[1]]))[3] == "| tiny-glm | p1 | 0.1050 | 0.1000 (0.0900 to 0.1100) | - | - |"
    assert next(table([unasked])) == "| model | candidate | screened KL | served KL | points lost at tasks |"
    assert list(summary([replace(point, loss=None) for point in POINTS]))[2].endswith("| 5 of 5 | - |")


def test_picture_has_a_mark_for_each_candidate_in_both_panels() -> None:
    drawn = ElementTree.fromstring(picture([*POINTS, point("noise", 0.3, 0.2, 50, model="tiny-qwen", is_damage=True)]))
    space = "{http://www.w3.org/2000/svg}"
    panels = drawn.findall(f"{space}g")
    assert [len(panel.findall(f"{space}circle")) for panel in panels] == [5, 5]
    assert [panel.findall(f"{space}rect")[0].findtext(f"{space}title") for panel in panels] == ["tiny-qwen: noise"] * 2

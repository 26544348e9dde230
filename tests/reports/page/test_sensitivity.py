"""The map of sensitivity in the report: every part has its cell, its shade and its number; nothing without a record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sensitivity_record import record
from synthetic_run import make_run

from assay_reports.page.sensitivity import heading, maps, shade, shown
from assay_reports.report import write_report


def test_every_part_has_a_cell() -> None:
    [made] = maps(record())
    drawn, phone, _ = str(made.picture).split("</svg>")
    assert phone.count("<rect ") == drawn.count("<rect ")
    cells = re.findall(r'<rect [^>]*class="(\w+)"><title>([^<]*)</title>', drawn)
    assert cells == [
        ("heat0", "layer 0 attention in w4a16: 1e-05 nats"), ("lost1", "layer 0 dense_mlp in w4a16: 0.0001 nats"),
        ("lost2", "layer 1 attention in w4a16: 0.001 nats"), ("lost4", "layer 1 routed_expert in w4a16: 0.1 nats"),
    ]  # fmt: skip
    assert re.findall(r'class="cell \w+" [^>]*>([^<]*)<', drawn) == ["1e-05", "0.0001", "0.001", "0.1"]
    assert [role for role, _ in made.shares] == ["routed_expert", "attention", "dense_mlp"]
    assert dict(made.shares) == pytest.approx({"routed_expert": 0.98902, "attention": 0.00999, "dense_mlp": 0.00099}, abs=1e-5)
    assert made.together == "All parts at once: 0.08 nats; the parts sum to 0.101."


def test_many_layers_have_low_cells_without_numbers() -> None:
    [made] = maps(record(layers=78))
    drawn, _, _ = str(made.picture).split("</svg>")
    assert drawn.count("<rect ") == 78 and 'class="cell' not in drawn
    assert made.picture.startswith('<svg viewBox="0 0 150 730"')


def test_shades_and_headings() -> None:
    assert [shade(value, (1e-4, 1.0)) for value in (0.0, 1e-4, 1e-3, 0.03, 0.1, 1.0)] == [
        "heat0", "heat0", "lost1", "lost3", "lost3", "lost4",
    ]  # fmt: skip
    assert heading(record()) == "Most costly by itself: routed expert of layer 1 in w4a16, 0.1 nats a token"
    assert heading(record(in_nats=False)).endswith("in w4a16, a relative squared error of 0.1")
    assert heading(record(parts=())) == "No part costs anything that was measured"
    assert maps(record(parts=())) == [] and shown(None) is None


def test_in_the_report_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = write_report(run).read_text()
    assert 'id="sensitivity"' not in before and "#sensitivity" not in before
    record().save(run / "sensitivity.json")
    page = write_report(run).read_text()
    section = page.split('<section id="sensitivity">')[1].split("</section>")[0]
    assert "Most costly by itself: routed expert of layer 1 in w4a16, 0.1 nats a token" in section
    assert '<a href="#sensitivity">Sensitivity</a>' in page
    assert section.count("<svg ") == 2, "for a screen and for a phone"
    assert "Rank correlation of proxy:weights with proxy:kl: 0.80 [0.20, 0.90] over 4 parts" in section
    assert "Rank correlation with what is served: " in section and "long context: " in section
    assert "model.layers.1.routed_expert.weight (75.0 %)" in section
    text = (run / "report" / "report.md").read_text()
    assert "\n## Sensitivity\n" in text and "layer 1 routed\\_expert | w4a16 |" in text.replace(
        "routed_expert", "routed\\_expert"
    )
    assert "rank correlation of proxy:weights with proxy:kl: 0.80 (0.20 to 0.90) over 4 parts" in text

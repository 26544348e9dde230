"""The sensitivity record: read back as it was written, and no part twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.errors import AssayError
from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import (
    KindDamage,
    LayerRouting,
    LeftOut,
    MtpAcceptance,
    RankCorrelation,
    Sensitivity,
    SensitivityPart,
    UniformDamage,
    WholeDamage,
    WorstTensor,
)

INTERVAL = Interval(value=0.25, low=0.125, high=0.5, n=24)
PARTS = (
    SensitivityPart(layer=3, role="routed_expert", scheme="bf16", num_weights=4096, bytes=8192, damage_nats=0.0),
    SensitivityPart(
        layer=3,
        role="routed_expert",
        scheme="w4a16",
        num_weights=4096,
        bytes=2128,
        damage_nats=0.25,
        interval=INTERVAL,
        served_nats=INTERVAL,
        worst=(WorstTensor(name="model.layers.3.mlp.experts.0.up_proj.weight", share=0.75),),
        by_kind=(KindDamage(kind="domain", name="code", num_positions=100, damage_nats=0.5),),
        routing=LayerRouting(layer=4, other_experts=0.0625),
    ),
    SensitivityPart(layer=None, role="mtp", scheme="w4a16", num_weights=64, bytes=34, damage_nats=None),
)


def record(parts: tuple[SensitivityPart, ...] = PARTS) -> Sensitivity:
    return Sensitivity(
        model="tiny", family="glm4_moe", source="/models/tiny", source_sha256="a" * 64, data_sha256="b" * 64,
        method="proxy:kl", texts="24 replies", texts_sha256="c" * 64, num_texts=24, num_tokens=1000, seed="sensitivity",
        layers=8, weights=5000, other_bytes=640, parts=parts,
        left_out=(LeftOut(layer=0, role="dense_mlp", scheme="w4a16", why="64 columns"),),
        uniform=(
            UniformDamage(
                scheme="w4a16", bytes=2802, damage_nats=0.3, sum_of_parts_nats=0.25,
                routing=(LayerRouting(layer=4, other_experts=0.5),),
            ),
        ),
        correlations=(
            RankCorrelation(
                of="proxy:kl", beside="served", spearman=INTERVAL, parts=((3, "routed_expert", "w4a16", 0.25, 0.26),),
            ),
        ),
        mtp_acceptance=(MtpAcceptance(label="w4a16-mtp", scheme="w4a16", accepted_share=0.75, num_drafted=400, bytes=34),),
        not_measured={"long context": "no text has more than 512 tokens"}, cpu_seconds=1.5,
    )  # fmt: skip


def test_read_back_as_written(tmp_path: Path) -> None:
    made = record()
    made.save(tmp_path / "sensitivity.json")
    again = Sensitivity.load(tmp_path / "sensitivity.json")
    assert again == made
    assert again.schema_version == 1
    assert again.by_part == {(3, "routed_expert"): {"bf16": PARTS[0], "w4a16": PARTS[1]}, (None, "mtp"): {"w4a16": PARTS[2]}}


def test_a_part_twice_is_refused(tmp_path: Path) -> None:
    text = record().as_text().replace('"scheme": "bf16"', '"scheme": "w4a16"', 1)
    (tmp_path / "sensitivity.json").write_text(text)
    with pytest.raises(AssayError, match=r"'routed_expert', 'w4a16'.* is there twice"):
        Sensitivity.load(tmp_path / "sensitivity.json")


def test_a_part_of_a_mix_or_a_mix_twice_is_refused(tmp_path: Path) -> None:
    mix = WholeDamage(schemes=((3, "routed_expert", "w4a16"),), damage_nats=0.1, sum_of_parts_nats=0.2)
    data = json.loads(record().model_copy(update={"wholes": (mix,)}).as_text())
    (whole,) = data["wholes"]
    twice = {**whole, "schemes": [*whole["schemes"], [3, "routed_expert", "nvfp4"]]}
    for wholes, said in (([twice], r"\(3, 'routed_expert'\) is there twice"), ([whole, whole], "a mix is there twice")):
        (tmp_path / "sensitivity.json").write_text(json.dumps(data | {"wholes": wholes}))
        with pytest.raises(AssayError, match=said):
            Sensitivity.load(tmp_path / "sensitivity.json")

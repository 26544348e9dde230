"""The MTP block, calibrated with what a server's drafter hands to it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from calibrating import LENGTH, layer_tensors, load_all, made_and_verified, plan_of
from command_line import Run
from tiny_checkpoints import make_tiny_glm4_moe
from tiny_families import glm_moe_dsa, make_tiny
from torch import Tensor, nn
from transformers import AutoTokenizer

from assay.errors import PlanError
from assay_quantize.calibration.methods import plain_forward
from assay_quantize.calibration.skeleton import MtpInput, Skeleton
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.calibrated import calibrated_tensors

pytestmark = pytest.mark.slow

MTP = 2
RECIPE = "schema: 1\nname: {name}\nextends: w4a16\nmtp: quantize\ncalibration: {{method: {method}{options}}}\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_glm4_moe(
        tmp_path_factory.mktemp("small") / "model", num_layers=MTP, hidden=128, num_heads=2, num_kv_heads=1
    )


def recipe(folder: Path, method: str = "gptq", options: str = ", mtp: true") -> str:
    path = folder / f"{method.replace('+', '-')}{len(options)}.yaml"
    path.write_text(RECIPE.format(name=path.stem, method=method, options=options))
    return str(path)


class Block(nn.Module):
    """The block as `Glm4MoeMultiTokenPredictorLayer` of vLLM has it, of transformers' parts. tensors: of a checkpoint."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval().model
        config = self.model.config
        own = {n.removeprefix(f"model.layers.{MTP}."): t.float() for n, t in tensors.items() if f".layers.{MTP}." in n}
        experts: dict[str, Tensor] = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            experts[part] = torch.stack([own.pop(f"mlp.experts.{n}.{part}.weight") for n in range(config.n_routed_experts)])
        own["mlp.experts.gate_up_proj"] = torch.cat([experts["gate_proj"], experts["up_proj"]], 1)
        own["mlp.experts.down_proj"] = experts["down_proj"]
        self.layer = Glm4MoeDecoderLayer(config, MTP).eval()
        left = self.layer.load_state_dict(own, strict=False)
        assert left.missing_keys == []
        self.enorm, self.hnorm = (Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.enorm.weight.data, self.hnorm.weight.data = own["enorm.weight"], own["hnorm.weight"]
        self.eh_proj_HI = own["eh_proj.weight"]

    def inputs(self, tokens_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1] - 1)
        hidden = self.model(input_ids=tokens_BT, use_cache=False).last_hidden_state[:, :-1]
        embedding = torch.where(positions[None, :, None] == 0, 0, self.model.embed_tokens(tokens_BT[:, 1:]))
        return torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1) @ self.eh_proj_HI.T

    def forward(self, inputs_BTH: Tensor) -> Tensor:
        length = inputs_BTH.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = self.model.rotary_emb(inputs_BTH, position_ids=torch.arange(length)[None])
        made: Tensor = self.layer(inputs_BTH, attention_mask=mask, position_embeddings=positions)
        return made


def test_inputs_and_outputs_are_those_of_the_block_that_vllm_has(small: Path, tmp_path: Path) -> None:
    tokens = torch.randint(7, 500, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    plan = plan_of(small, recipe(tmp_path))
    with torch.no_grad(), SourceReader(open_checkpoint(small)) as reader:
        block = Block(small, load_all(small))
        expected = block.inputs(tokens)
        skeleton, state = Skeleton(small, plan, torch.float32, has_mtp=True), None
        skeleton.use_embedding(reader, tokens)
        for layer in range(MTP):
            with skeleton.filled(layer, reader), plain_forward(skeleton.model):
                state = skeleton.run(layer, tokens, state)
        assert state is not None
        given = MtpInput(skeleton, reader, plan, MTP, tokens)(state[0], tokens)
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
        with skeleton.filled(MTP, reader), plain_forward(skeleton.model):
            (made,) = skeleton.run(MTP, tokens[:, :-1], (given,))
        torch.testing.assert_close(made, block(expected), rtol=1e-5, atol=1e-5)


def decompressed(folder: Path, source: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the names of the source."""
    from compressed_tensors.compressors import BaseCompressor

    from assay_quantize.formats.schemes import compressed_tensors_scheme

    stored, scheme = load_all(folder), compressed_tensors_scheme("w4a16")
    names = {}
    for name in load_all(source):
        module = name.removesuffix(".weight")
        if name in stored:
            names[name] = stored[name]
            continue
        parts = {part: stored[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
        names[name] = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
    return names


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, small: Path, words: Path) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    plan, result = made_and_verified(small, words, folder, recipe(folder), tokens=32 * LENGTH)
    assert result.damages == () and result.checks["calibrated"] == 3
    assert plan.calibrated is not None and list(plan.calibrated.layers) == [0, 1, MTP]
    return folder / "made"


def test_a_calibrated_block_loses_less_on_its_own_inputs(calibrated: Path, small: Path, tmp_path: Path) -> None:
    """Than one that is rounded without text; on other text than it was calibrated with."""
    quantize(plan_of(small, "w4a16-mtp"), small, tmp_path / "rounded")
    drawn = random.Random(1)
    words = " ".join("".join(drawn.choices("abcdefghijklmnop", k=5)) for _ in range(100))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(small)(words)["input_ids"][: 8 * LENGTH]).view(8, LENGTH)
    with torch.no_grad():
        source = Block(small, load_all(small))
        inputs = source.inputs(tokens)
        expected = source(inputs)
        lost = [
            float((Block(small, decompressed(folder, small))(inputs) - expected).square().mean())
            for folder in (tmp_path / "rounded", calibrated)
        ]
    assert lost[1] < 0.8 * lost[0], lost


def test_the_rest_of_the_block_is_the_sources(calibrated: Path, small: Path) -> None:
    stored, original = load_all(calibrated), load_all(small)
    kept = [name for name in stored.keys() & original.keys() if f".layers.{MTP}." in name]
    assert {name.removeprefix(f"model.layers.{MTP}.") for name in kept} >= {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.norm.weight", "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias", "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    assert all(stored[name].dtype == original[name].dtype and torch.equal(stored[name], original[name]) for name in kept)


def test_awq_scales_the_norms_of_the_block(small: Path, words: Path, tmp_path: Path) -> None:
    plan, result = made_and_verified(small, words, tmp_path, recipe(tmp_path, "awq"), grid=4)
    assert result.damages == () and result.checks["calibrated"] == 3
    scaled = {f"model.layers.{MTP}.{which}.weight" for which in ("input_layernorm", "post_attention_layernorm", "mlp.gate")}
    assert plan.calibrated is not None and scaled <= set(plan.calibrated.smoothed)


def test_a_block_with_an_indexer_of_its_own_is_calibrated(tmp_path: Path, words: Path) -> None:
    """Of GLM-5: kinds of layers stand in lists of its config, which end before the block."""
    source = make_tiny(tmp_path / "model", glm_moe_dsa())
    (tmp_path / "mtp.yaml").write_text(
        "schema: 1\nname: mtp\nextends: w4a16\nmtp: quantize\ncalibration: {method: gptq, mtp: true}\n"
    )
    plan, result = made_and_verified(source, words, tmp_path, str(tmp_path / "mtp.yaml"))
    assert result.damages == () and result.checks["calibrated"] == 4
    of_block = {name for name in layer_tensors(tmp_path / "work") if ".layers.3." in name}
    assert of_block == {output.name for tensor in calibrated_tensors(plan)[3] for output in tensor.outputs
                        if not output.name.endswith("weight_shape")}  # fmt: skip
    assert any("indexer" in tensor.name for tensor in plan.tensors if ".layers.3." in tensor.name)


def test_it_is_asked_for_where_there_is_a_block_to_calibrate(tmp_path: Path, small: Path, words: Path, run: Run) -> None:
    (tmp_path / "kept.yaml").write_text("schema: 1\nname: k\nextends: w4a16\ncalibration: {method: gptq, mtp: true}\n")
    code, _, stderr = run("quantize", small, "-p", tmp_path / "kept.yaml", "--text", words, "--out", tmp_path / "made")
    assert code == 2 and "calibration: mtp calibrates an MTP block that is quantized; say `mtp: quantize`" in stderr
    plan = plan_of(small, recipe(tmp_path))
    with pytest.raises(PlanError, match=r"calibration\.mtp is for an MTP block of one layer behind the decoder layers"):
        calibrated_tensors(plan.model_copy(update={"mtp_layers": (2, 3)}))

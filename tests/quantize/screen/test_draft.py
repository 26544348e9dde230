"""Expected acceptance of MTP drafts, against the block built by hand around transformers' own decoder layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_next
from torch import Tensor

from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import StoredCheckpoint, open_stored
from assay_quantize.screen.compare import PassSide
from assay_quantize.screen.draft import DraftAcceptance, DraftModel, NoDraft, acceptance
from assay_quantize.screen.forward import run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText


def texts() -> list[ScoredText]:
    draw = np.random.default_rng(0)
    return [ScoredText(tuple(map(int, draw.integers(7, 800, 20 + 9 * number))), 1 + 4 * number) for number in range(3)]


def stored_at(folder: Path) -> StoredCheckpoint:
    return open_stored(open_checkpoint(folder, allow_quantized=True))


def accepted(folder: Path, work: Path) -> list[DraftAcceptance]:
    stored = stored_at(folder)
    states = run_pass(LayerModel(stored), texts(), work / "decoder", "x", lambda _line: None)
    draft = DraftModel(stored)
    drafted = draft.drafted(texts(), states, work / "draft")
    model = LayerModel(stored)
    return acceptance(
        texts(), PassSide("decoder", model.head(), states), PassSide("draft", draft.head(draft.draft_head()), drafted)
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def whole_with_one_more_layer(folder: Path, work: Path, renamed: dict[str, str], **fields: object) -> Any:
    """transformers' model of the checkpoint whose last layer is that of the MTP block."""
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    work.mkdir()
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        for old, new in renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        tensors[name] = tensor
    save_file(tensors, work / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": config["num_hidden_layers"] + 1} | fields
    (work / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(work, dtype=torch.float32, experts_implementation="eager").eval()


def by_hand(whole: Any, tensors: dict[str, Tensor], names: dict[str, str], masks_first: bool) -> list[DraftAcceptance]:
    """names: of the two norms before the projection, of the projection, of the last norm and of the head."""
    base, number = whole.model, whole.config.num_hidden_layers - 1
    layer = base.layers[number]
    base.layers = base.layers[:number]

    def normed(states: Tensor, name: str) -> Tensor:
        norm = type(base.norm)(states.shape[-1], eps=whole.config.rms_norm_eps)
        norm.weight.data = tensors[name].float()
        result: Tensor = norm(states)
        return result

    values = []
    for text in texts():
        ids_1T = torch.tensor([text.ids])
        with torch.no_grad():
            whole.config.num_hidden_layers = number
            hidden = base(input_ids=ids_1T, use_cache=False).last_hidden_state
            p_TV = torch.softmax(torch.nn.functional.linear(hidden, whole.lm_head.weight)[0].double(), -1)
            embedded = base.embed_tokens(ids_1T[:, 1:])
            if masks_first:
                embedded[:, 0] = 0
            joined = torch.cat([normed(embedded, names["embedding"]), normed(hidden[:, :-1], names["hidden"])], -1)
            given = torch.nn.functional.linear(joined, tensors[names["projection"]].float())
            places = torch.arange(given.shape[1])[None]
            mask = torch.full((given.shape[1], given.shape[1]), -torch.inf).triu(1)[None, None]
            output = layer(given, attention_mask=mask, position_ids=places, position_embeddings=base.rotary_emb(given, places))
            head = tensors.get(names["head"], whole.lm_head.weight).float()
            q_TV = torch.softmax(torch.nn.functional.linear(normed(output, names["norm"]), head)[0].double(), -1)
        first = max(text.first - 2, 0)
        p, q = p_TV[first + 1 : -1], q_TV[first:-1]
        values.append(DraftAcceptance(torch.minimum(p, q).sum(1).numpy(), (p.argmax(1) == q.argmax(1)).numpy()))
    return values


def assert_equal(made: list[DraftAcceptance], expected: list[DraftAcceptance]) -> None:
    assert [len(text.accepted_D) for text in made] == [len(text.ids) - max(text.first, 2) for text in texts()]
    for text, whole in zip(made, expected, strict=True):
        np.testing.assert_allclose(text.accepted_D, whole.accepted_D, atol=1e-6)
        assert (text.agrees_D == whole.agrees_D).all()


@pytest.mark.parametrize("config", [glm4_moe(), deepseek_v3()], ids=lambda config: str(config["model_type"]))
def test_blocks_behind_the_decoder(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "source", config)
    whole = whole_with_one_more_layer(folder, tmp_path / "whole", {})
    block = f"model.layers.{whole.config.num_hidden_layers - 1}"
    names = {
        "embedding": f"{block}.enorm.weight", "hidden": f"{block}.hnorm.weight", "projection": f"{block}.eh_proj.weight",
        "norm": f"{block}.shared_head.norm.weight", "head": f"{block}.shared_head.head.weight",
    }  # fmt: skip
    expected = by_hand(whole, tensors_of(folder), names, masks_first=True)
    made = accepted(folder, tmp_path)
    assert_equal(made, expected)
    assert 0 < np.concatenate([text.accepted_D for text in made]).mean() < 1


def test_qwen3_next(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "source", qwen3_next())
    config = json.loads((folder / "config.json").read_text())
    number = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % config["full_attention_interval"] == 0 else "linear_attention"
        for layer in range(number)
    ]
    whole = whole_with_one_more_layer(
        folder, tmp_path / "whole", {"mtp.layers.0": f"model.layers.{number}"}, layer_types=[*kinds, "full_attention"]
    )
    names = {
        "embedding": "mtp.pre_fc_norm_embedding.weight", "hidden": "mtp.pre_fc_norm_hidden.weight",
        "projection": "mtp.fc.weight", "norm": "mtp.norm.weight", "head": "",
    }  # fmt: skip
    assert_equal(accepted(folder, tmp_path), by_hand(whole, tensors_of(folder), names, masks_first=False))


def test_sparse_attention(tmp_path: Path) -> None:
    """Its layers hand on which tokens they look at, and the block is handed them, too."""
    sparse = make_tiny(tmp_path / "sparse", glm_moe_dsa())
    made = accepted(sparse, tmp_path / "a")
    assert [len(text.accepted_D) for text in made] == [len(text.ids) - max(text.first, 2) for text in texts()]
    assert all(((text.accepted_D > 0) & (text.accepted_D < 1)).all() for text in made)
    shifted = shutil.copytree(sparse, tmp_path / "shifted")
    for path in shifted.glob("*.safetensors"):
        tensors = load_file(path)
        name = next((name for name in tensors if name.endswith("eh_proj.weight")), None)
        if name is not None:
            save_file({**tensors, name: -tensors[name]}, path, {"format": "pt"})
    assert not np.allclose(made[0].accepted_D, accepted(shifted, tmp_path / "b")[0].accepted_D)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8"])
def test_a_quantized_checkpoint_drafts_with_its_own_weights(tmp_path: Path, scheme: str) -> None:
    from assay_pipeline.quantizing import quantize

    folder = make_tiny(tmp_path / "source", glm4_moe())
    quantize(str(folder), precision=scheme, out=tmp_path / "made")
    source, made = accepted(folder, tmp_path / "a"), accepted(tmp_path / "made", tmp_path / "b")
    means = [np.concatenate([text.accepted_D for text in side]).mean() for side in (source, made)]
    assert 0 < abs(means[0] - means[1]) < 0.2


def test_no_block(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "source", glm4_moe(num_nextn_predict_layers=0))
    with pytest.raises(NoDraft, match="it stores no MTP block"):
        DraftModel(stored_at(folder))
    whole = make_tiny(tmp_path / "whole", glm4_moe())
    broken = shutil.copytree(whole, tmp_path / "broken")
    for path in broken.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(path).items() if not n.endswith("hnorm.weight")}, path, {"format": "pt"})
    index = broken / "model.safetensors.index.json"
    if index.is_file():
        fields = json.loads(index.read_text())
        fields["weight_map"] = {n: f for n, f in fields["weight_map"].items() if not n.endswith("hnorm.weight")}
        index.write_text(json.dumps(fields))
    with pytest.raises(NoDraft, match=r"its MTP block has no model\.layers\.3\.hnorm"):
        DraftModel(stored_at(broken))

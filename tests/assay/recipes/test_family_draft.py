"""Every shipped family against the draft that vLLM's own classes give of it, without any family's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hollow
import hollow_moe
import pytest
import yaml
from serving_interpreter import with_our_plugin

from assay.errors import AssayError
from assay.recipes import family_names
from assay.recipes.families import family_of
from assay.recipes.family import FamilyRecipe, Form
from assay.recipes.family_names import names_of, split_layer
from assay.recipes.load import load_recipe
from assay_evaluate.serving import family_draft
from assay_evaluate.serving.family_draft import Draft, as_yaml, draft_families
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint

pytestmark = [pytest.mark.serve, pytest.mark.slow]

NOT_STORED = "this release stores none"
SKIPPED = "some DeepSeek-V3 descendants store it; vLLM skips it"
_BIASES = {f"self_attn.{part}_proj.bias": NOT_STORED for part in "qkv"}
_DENSE = {f"mlp.{part}_proj.weight": "every layer of this release has experts" for part in ("gate", "up", "down")}
_MLA = {
    "self_attn.q_proj.weight": "only where q_lora_rank is null",
    "self_attn.q_a_proj.bias": NOT_STORED,
    "self_attn.kv_a_proj_with_mqa.bias": NOT_STORED,
    "self_attn.o_proj.bias": NOT_STORED,
    "self_attn.rotary_emb.inv_freq": SKIPPED,
}
ABSENT: dict[str, dict[str, str]] = {
    "glm-4.5-air": {"self_attn.q_norm.weight": "GLM-4.7 has it", "self_attn.k_norm.weight": "GLM-4.7 has it"},
    "glm-5": {**_MLA, "shared_head.head.weight": "DeepSeek-V3 has it", "embed_tokens.weight": "DeepSeek-V3 has it"},
    "deepseek-v3": _MLA,
    "deepseek-v3.2": _MLA,
    "glm-4.7-flash": _MLA,
    "qwen3-30b-a3b": {**_BIASES, **_DENSE},
    "qwen3-next-80b-a3b": {**_BIASES, **_DENSE},
    "minimax-m2": _BIASES,
    "qwen3.5-35b-a3b": {**_BIASES, **_DENSE},
    "qwen3.5-35b-a3b-text": {**_BIASES, **_DENSE},
    "kimi-k2.5": _MLA,
    "ernie-4.5-21b": {
        **_BIASES, **dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), NOT_STORED),
        "lm_head.weight": "the head of the 21B is its embedding",
    },
    "step-3.5-flash": _BIASES,
    "mimo-v2-flash": {
        **_BIASES, "self_attn.q_norm.weight": "its heads have no norms", "self_attn.k_norm.weight": "its heads have no norms",
    },
    "nemotron-3-super": {},
    "deepseek-v4-flash": {
        **dict.fromkeys(
            ("main_proj.weight", "main_norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
             "confidence_head.proj.weight"),
            "of Flash-0731's draft",
        ),
        **dict.fromkeys(
            ("ffn.gate.bias_vl", "image_end", "image_newline", "image_pad", "image_start"), "of releases with images"
        ),
    },
}  # fmt: skip
"""Model -> names of the family that its checkpoint lacks, and why."""

_CONVOLUTION = ("bare", "plain", "a convolution: vLLM gives its layer no quantization config, the pattern is harmless")
_DECAY = ("linear", "plain", "vLLM can quantize it, but its FP8-block layer cannot hold so few rows; no precision quantizes it")
_DELTA = {
    "linear_attn.in_proj_b.weight": _DECAY, "linear_attn.in_proj_a.weight": _DECAY, "linear_attn.conv1d.weight": _CONVOLUTION,
}  # fmt: skip
OTHERWISE: dict[str, dict[str, tuple[str, str, str]]] = {
    "qwen3-next-80b-a3b": {
        "linear_attn.in_proj_ba.weight": _DECAY,
        "linear_attn.conv1d.weight": _CONVOLUTION,
    },
    "qwen3.5-35b-a3b": _DELTA,
    "qwen3.5-35b-a3b-text": _DELTA,
    "deepseek-v4-flash": {
        "attn.wo_a.weight": (
            "linear", "plain", "vLLM can quantize it, but multiplies by it in `deep_gemm_fp8_o_proj`, which takes BF16 or FP8 "
            "blocks whatever the scheme is"
        ),
    },
    "nemotron-3-super": {
        **dict.fromkeys(
            ("mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
            ("linear", "plain", "every routed token passes them; unquantized, vLLM sums over ranks once less"),
        ),
    },
    "step-3.5-flash": {
        "self_attn.g_proj.weight": (
            "linear", "plain", "vLLM can quantize it, but a rank has 8 to 48 of its 64 or 96 rows, too few for most kernels"
        ),
    },
}  # fmt: skip
"""Model -> name -> (kind in the draft, in the file, why)."""
_AROUND_EXPERTS = "nemotron-3-super", "attention", "vLLM's class has it in the mixer, as attention is; it is around the experts"
ROLES = {
    "linear_attn.A_log": ("qwen3.5-35b-a3b", "attention", "kept in FP32, whatever a precision says of attention"),
    "mixer.fc1_latent_proj.weight": _AROUND_EXPERTS,
    "mixer.fc2_latent_proj.weight": _AROUND_EXPERTS,
}
"""Name -> (start of the models' names, role in the draft, why the file has another)."""
KEPT_OF_OTHERS = {"deepseek-v4-flash": {"vision", "aligner"}}
"""Model -> parts that the family keeps and this release, without images, has not."""


ONLY_WITH_HEADERS = ("deepseek-v4-flash",)
"""Models whose draft from a config.json alone is not compared with the file: vLLM's loader renames `mtp.N` in its code."""
_IN_WRAPPER = "vLLM's mapper names it as inside the wrapper"
UNKNOWN_TO_A_CONFIG: dict[str, dict[str, str]] = {
    **{model: absent for model, absent in ABSENT.items() if model not in ONLY_WITH_HEADERS},
    "glm-5": {name: why for name, why in ABSENT["glm-5"].items() if name.startswith("self_attn.")},
    "ernie-4.5-21b": {
        **ABSENT["ernie-4.5-21b"],
        "mlp.moe_statics.e_score_correction_bias": "the loader renames it itself; vLLM's own name is drafted",
    },
    "qwen3.5-35b-a3b-text": {**ABSENT["qwen3.5-35b-a3b-text"], "model.norm.weight": _IN_WRAPPER},
    "step-3.5-flash": {
        **_BIASES, **dict.fromkeys(
            (
                "eh_proj.weight", "enorm.weight", "hnorm.weight", "transformer.shared_head.norm.weight",
                "transformer.shared_head.output.weight",
            ),
            "of the MTP block, which vLLM 0.32 cannot build",
        ),
    },
}  # fmt: skip
"""The same of a draft from config.json alone. vLLM takes a head and an embedding of GLM-5's MTP block; no release has them."""
MORE_THAN_STORED = {
    "qwen3-next-80b-a3b": {"mtp.embed_tokens.weight": "vLLM takes one of the block's own, the release has none"},
    "qwen3.5-35b-a3b-text": {
        "mtp.embed_tokens.weight": "vLLM takes one of the block's own, the release has none",
        "model.language_model.embed_tokens.weight": _IN_WRAPPER,
        "model.language_model.norm.weight": _IN_WRAPPER,
    },
    "qwen3.5-35b-a3b": {
        "mtp.embed_tokens.weight": "vLLM takes one of the block's own, the release has none",
        "model.embed_tokens.weight": "the embedding of the model, as the class of the draft calls it",
    },
    "nemotron-3-super": {"model.embeddings.weight": "the embedding of the model, as the class of the draft calls it"},
    "ernie-4.5-21b": {"mlp.gate.e_score_correction_bias": "vLLM's own name of what the release calls mlp.moe_statics"},
}
"""Model -> names that vLLM would take and the family has not, and why."""
OTHER_LAYERS = {"kimi-k2.5": "language_model.layers", "qwen3.5-35b-a3b-text": "model.language_model.layers"}
"""Model -> where its draft has the layers: vLLM takes these too: those of an older NVFP4 release, by its
mapper, and those of the model inside its wrapper."""
_NO_MTP_SAID = "config.json does not say whether there is an MTP block; `mtp` is what vLLM would take of one"
UNDECLARED = {
    "qwen3-next-80b-a3b": (_NO_MTP_SAID,),
    "mimo-v2-flash": (
        _NO_MTP_SAID, "no name was found for vLLM's model.layers.1.self_attn.attention_sink_bias (target)",
    ),
}  # fmt: skip
"""Model -> what its draft doubts as well."""
SHORT = "glm-4.5-air"
"""Is drafted from its config as if it had a context of 2,048 tokens only."""
NO_DRAFT = {"step-3.5-flash": "vLLM 0.32 cannot build it: https://github.com/vllm-project/vllm/issues/40000"}
"""Model -> why vLLM says nothing of its MTP block."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("drafted")
    return {model: open_checkpoint(hollow.hollow_model(folder / model, model)) for model in ABSENT}


@pytest.fixture(scope="module")
def drafts(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Draft]:
    """(model, `headers` or `config`) -> its draft, made by one process, where no family has a file."""
    asked: dict[tuple[str, str], Any] = {}
    for model, checkpoint in checkpoints.items():
        headers = {name: (header.dtype, header.shape) for name, header in checkpoint.tensors.items()}
        asked[model, "headers"] = checkpoint.config, headers
    asked |= {(model, "config"): (checkpoints[model].config, None) for model in UNKNOWN_TO_A_CONFIG}
    asked[SHORT, "config"] = {**checkpoints[SHORT].config, "max_position_embeddings": 2048}, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family_names, "family_names", list)
        interpreter = Path(with_our_plugin(tmp_path_factory.mktemp("bin")))
        patch.setattr(family_draft, "find_interpreter", lambda profile: interpreter)
        return dict(zip(asked, draft_families(list(asked.values())), strict=True))


@pytest.mark.parametrize("model", ABSENT)
def test_the_shipped_family_is_the_draft(
    model: str, checkpoints: dict[str, Checkpoint], drafts: dict[tuple[str, str], Draft], tmp_path: Path
) -> None:
    checkpoint, draft = checkpoints[model], drafts[model, "headers"]
    names = names_of(family_of(checkpoint.config))
    assert (draft.layers, draft.mtp_layers) == (names.layers, names.mtp_layers)
    assert set(draft.untaken) == (_of_the_block(checkpoint) if model in NO_DRAFT else set())
    assert set(draft.kept) == set(names.kept) - KEPT_OF_OTHERS.get(model, set())
    drafted = {**draft.outside, **draft.layer, **draft.mtp_layer, **draft.mtp}
    shipped = {**names.outside, **names.layer, **({} if model in NO_DRAFT else {**names.mtp_layer, **names.mtp})}
    assert {name: _expected(model, name, form) for name, form in shipped.items() if name not in ABSENT[model]} == drafted
    assert shipped.keys() - drafted.keys() == ABSENT[model].keys()
    _check_file(draft, tmp_path)


@pytest.mark.parametrize("model", UNKNOWN_TO_A_CONFIG)
def test_the_draft_of_a_config_alone(
    model: str, checkpoints: dict[str, Checkpoint], drafts: dict[tuple[str, str], Draft], tmp_path: Path
) -> None:
    """It is the draft of headers, which is the file; every difference has a reason."""
    names, draft = names_of(family_of(checkpoints[model].config)), drafts[model, "config"]
    assert draft.layers == OTHER_LAYERS.get(model, names.layers)
    assert (draft.mtp_layers, draft.untaken) == (names.mtp_layers, ())
    assert sorted(draft.kept) == sorted(names.kept)
    drafted = {**draft.outside, **draft.layer, **draft.mtp_layer, **draft.mtp}
    shipped = {**names.outside, **names.layer, **names.mtp_layer, **names.mtp}
    absent, more = UNKNOWN_TO_A_CONFIG[model], MORE_THAN_STORED.get(model, {})
    assert shipped.keys() - drafted.keys() == absent.keys()
    assert drafted.keys() - shipped.keys() == more.keys()
    expected = {name: _expected(model, name, form) for name, form in shipped.items() if name not in absent}
    assert expected == {name: form for name, form in drafted.items() if name not in more}
    assert [doubt.partition(",")[0] for doubt in draft.doubts] == ["drafted from config.json alone", *UNDECLARED.get(model, ())]
    _check_file(draft, tmp_path)


def _of_the_block(checkpoint: Checkpoint) -> set[str]:
    """Names of inlined MTP layers, without their numbers."""
    places = [at for at in map(split_layer, checkpoint.tensors) if at is not None]
    return {f"{at.root}.{{layer}}.{at.rest}" for at in places if at.layer >= checkpoint.config["num_hidden_layers"]}


def _expected(model: str, name: str, form: Form) -> Form:
    drafted, shipped, _ = OTHERWISE.get(model, {}).get(name, (form.kind, form.kind, ""))
    assert form.kind == shipped
    role = ROLES[name][1] if name in ROLES and model.startswith(ROLES[name][0]) else form.part
    return form.model_copy(update={"kind": drafted, "part": role})


def _check_file(draft: Draft, folder: Path) -> None:
    """What is written is a family's file that reads back as the draft."""
    (file := folder / f"{draft.name}.yaml").write_text(as_yaml(draft, "a hollow checkpoint"))
    assert yaml.safe_load(file.read_text())["name"] == draft.name
    recipe = load_recipe(FamilyRecipe, str(file))
    assert (recipe.outside, recipe.layer, recipe.kept) == (draft.outside, draft.layer, draft.kept)
    assert (recipe.mtp.layers, recipe.mtp.layer, recipe.mtp.outside) == (draft.mtp_layers, draft.mtp_layer, draft.mtp)


def test_a_dense_model_has_no_family() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    with pytest.raises(AssayError) as error:
        family_draft.draft_family(config, None)
    assert str(error.value) == (
        "config.json: LlamaForCausalLM is a dense model (it declares no experts); assay is for mixture-of-experts"
    )


def test_all_families_are_drafted() -> None:
    """Those of `hollow_moe.py`, and MiMo-V2.5, whose projections are joined, are held against vLLM's loaders by replays
    (`test_replay_moe_families.py`)."""
    drafted = {family_of(hollow.MODELS[model][0]) for model in ABSENT}
    assert drafted == set(family_names.family_names()) - hollow_moe.MODELS.keys() - {"mimo_v2"}

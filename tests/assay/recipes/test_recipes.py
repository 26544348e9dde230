"""Every recipe that ships parses and plans; a misspelt key is found in every section; the contract needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hollow
import pytest
import yaml

from assay.errors import PlanError, RecipeError
from assay.recipes.base import Recipe
from assay.recipes.families import family_of
from assay.recipes.gate import GateRecipe, ScoreGate, gates_on
from assay.recipes.load import KINDS, load_recipe, parse_recipe, recipe_names, recipes_dir
from assay.recipes.model import ModelRecipe, automatic_of, is_automatic
from assay.recipes.precision import HOW_TO_MIX, PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay_pipeline.gate_choice import gates_of_suite
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.plan.planner import make_plan

ALL = [(kind, name) for kind in KINDS for name in recipe_names(kind)]
MODELS = [name for name in recipe_names("models") if not name.startswith("tiny-")]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_recipe_parses(kind: str, name: str) -> None:
    recipe = load_recipe(KINDS[kind], name)
    assert recipe.name == name
    assert recipe.description
    assert load_recipe(KINDS[kind], str(recipes_dir() / kind / f"{name}.yaml")) == recipe


PRECISION_SHA256 = {
    "fp8": "0e40bad02da85b1438c11349be4f12d3e1bf21d2d119857b0ce3ac9515c03f0c",
    "fp8-channel": "e1b24f3539e83573379924aae6e9254657bfc0aa539b9c0f279931d4d7a1a2fd",
    "fp8-kv": "06f69d04c4dd3b3cb24afc65ba8d0a434153c5057a3c547c271174d58a0c4cfb",
    "fp8-static": "f7eba88e495cdf568a656a46db5d65f1a2f75eb43749f408c97ff4573643e7b6",
    "mxfp4": "2186a563dedfbfdabdb4d733309e56f523604125d309d87222612c5acd5aa1c3",
    "mxfp8": "9e37b48e11be95570632415c12fb9060475af2650393268e285beb4421f7beb3",
    "nvfp4": "f9746bda5613d3bd887a9025555ed2990b5c4af799ee3addc401856fb8c059c2",
    "nvfp4-calibrated": "86771e9fc3d0dd53e3b757d0f8d1ed23f18cfae1ffc172d33c0605a1f75e169c",
    "nvfp4-fp8-attention": "f009dd3048511d5077fc22b46adfafcf56efe1649ec83ebcce5a88a41c3082b0",
    "nvfp4a16": "20ab6ed9cb9b8a9238898e0748c61a388421b3d947495bade71647ffbf244162",
    "nvfp4a16-mse": "8222baee6b8b4baa2ec9c13fbb5a7ce03599040144e2752fcbd720ef6d6576d3",
    "w4a16": "6e78421f33f2377612a7da267ca338037993445c456a295991307c63bb055f9d",
    "w4a16-asym": "7d5f136d315f9af28f5d5798e8e3bd0ce1115acd66a5cffee9e8670bb5019fb2",
    "w4a16-channel": "13c9e0d34737a17436e6bdd0df13aa44c9568c9274302de7c62fcc4281eb51b2",
    "w4a16-experts-g32": "030cbfe047233f1f8c12b02ad97a8192b3f0b90ad71f5be192f00e6bf5d329f2",
    "w4a16-experts": "96d0f69a0cb3036643425a7b875ee321d96451138c7e80d0e50d1ee94001dae9",
    "w4a16-fp8-attention": "6e96f2db6276c221c25525c5077c2f96838479651cde44e5b02ecf3649350cc1",
    "w4a16-g64": "938ed51e9cf08bd24ecfa43ee9f042afc458324d8f3338c804e863e55450a46a",
    "w4a16-g32": "833b90fb8cb7e1c449679d1987cd2e02927dbc52a2ace8f778c576a59898c370",
    "w4a16-gptq": "c0289d931cc71a361a58971a5511cd71935fabdeabcd1d6e1860f91fb8726f1b",
    "w4a16-gptq-g64": "8cc04e195ea94cb4f4b7d5edc37978fc4634a9dcd852b001788494419954e02e",
    "w4a16-gptq-g32": "d67144ba9cf00c91e2fb7381a6fcadf6f07e45c6d23d8d682894993bc4027af0",
    "w4a16-autoround": "95a333741247a9a3295c66fd9b852e2520702df5273e9573d7f32d8a438173ea",
    "w4a16-awq": "42bb35f77b81ef6a32b0ece8232f7babc6abc69dce810d3e5d911890218463fc",
    "w4a16-awq-g32": "85de8d4378c13ab640d882ae30b55a1ade37f0717eea5a112257ec5d6684da56",
    "w4a16-awq-gptq": "7d2a4407f4e79c029bd227738a9c39ba3c59453837530f31adc5c14c2a8baa9f",
    "w4a16-mse": "a309e2466c5c2ee9f91f80a013121f9312b777034491209f9aee40389df0265b",
    "w4a16-mtp": "8ee34a078b189af9cf87ca3fa4ac3490f0f7e789eac6ace9c6548c564a36fd7d",
    "w4a16-nomtp": "d9bf4e2dff49fdf13051831e085738d9afb3ead23c48ade98e131474fd942de4",
    "w8a8": "92e68b98c5dd3db0321d9bb1f881c81a7a3ef5266714166cec0173cfefd7e911",
}
"""Precision -> `recipe_sha256`, which stands in the plan and the manifest of every checkpoint made with it."""


def test_precisions_mean_what_they_meant() -> None:
    """However their files are written: another hash would make every checkpoint of one another checkpoint."""
    assert {name: load_recipe(PrecisionRecipe, name).sha256 for name in recipe_names("precisions")} == PRECISION_SHA256


def test_every_scheme_has_a_precision_that_ships() -> None:
    shipped = [load_recipe(PrecisionRecipe, name) for name in recipe_names("precisions")]
    assert {scheme for recipe in shipped for scheme in recipe.schemes} == set(SCHEMES)


@pytest.mark.parametrize("name", recipe_names("models"))
def test_every_model_names_recipes_that_exist(name: str) -> None:
    recipe = load_recipe(ModelRecipe, name)
    for precision in recipe.precisions:
        automatic_of(precision) if is_automatic(precision) else load_recipe(PrecisionRecipe, precision)
    for profile in (*recipe.profiles, *recipe.deployment_profiles):
        load_recipe(ProfileRecipe, profile)
        for precision in recipe.precisions_on.get(profile, ()):
            load_recipe(PrecisionRecipe, precision)
    if recipe.reference.precision is not None:
        load_recipe(PrecisionRecipe, recipe.reference.precision)
    suite = load_recipe(SuiteRecipe, recipe.suite)
    assert recipe.gates is None and gates_of_suite(suite) == suite.name


@pytest.mark.parametrize("name", MODELS)
def test_nvfp4_has_4_bit_activations_on_b200_alone(name: str) -> None:
    """Weight-only NVFP4 runs through Marlin on a B200 as on an H200; its own kernels need 4-bit activations."""
    model = load_recipe(ModelRecipe, name)
    found = {}
    for profile in (*model.profiles, *model.deployment_profiles):
        precisions = [load_recipe(PrecisionRecipe, one) for one in model.on_profile(profile).precisions]
        found[profile] = {scheme for one in precisions for scheme in one.schemes if scheme.startswith("nvfp4")}
        assert "native" not in load_recipe(ProfileRecipe, profile).description
    assert found == {profile: {"nvfp4" if "b200" in profile else "nvfp4a16"} for profile in found}


@pytest.mark.parametrize("suite", recipe_names("suites"))
def test_every_shipped_suite_agrees_with_its_gates(suite: str) -> None:
    """Every task has a margin, and no gate is on what the suite does not measure; `default` goes with all of them."""
    asked = load_recipe(SuiteRecipe, suite)
    names = {task.name for task in asked.tasks}
    assert gates_of_suite(asked) == suite
    own = load_recipe(GateRecipe, suite)
    assert gates_on(own, asked) == own
    for recipe in (own, gates_on(load_recipe(GateRecipe, "default"), asked)):
        assert {gate.task for gate in recipe.gates if isinstance(gate, ScoreGate)} == names
        assert gates_on(recipe, asked) == recipe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model's true shapes, hollow, with fewer layers and experts."""
    return {name: hollow.hollow_model(tmp_path_factory.mktemp(name) / name, name) for name in MODELS}


@pytest.mark.parametrize(
    ("model", "precision"), [(model, name) for model in MODELS for name in load_recipe(ModelRecipe, model).precisions]
)
def test_every_precision_of_every_model_plans(folders: dict[str, Path], model: str, precision: str) -> None:
    _plan(folders[model], model, precision)


@pytest.mark.parametrize("precision", recipe_names("precisions"))
@pytest.mark.parametrize("model", sorted({hollow.MODELS[name][0]["architectures"][0]: name for name in MODELS}.values()))
def test_every_precision_plans_for_every_family_or_says_what_does_not_fit(
    folders: dict[str, Path], model: str, precision: str
) -> None:
    recipe = load_recipe(PrecisionRecipe, precision)
    try:
        plan = _plan(folders[model], model, precision)
    except PlanError as error:
        if recipe.kv_cache == "fp8_calibrated" and "of latent attention (MLA) vLLM loads no scales" in str(error):
            return
        assert "is not a multiple" in str(error) or "are not a multiple" in str(error)
        assert "`keep: {bf16: [...]}`" in str(error)
        return
    quantized = {tensor.role for tensor in plan.tensors if tensor.scheme is not None}
    mtp: set[str] = {"mtp"} if recipe.mtp == "quantize" else set()
    assert quantized == {*recipe.quantize, *mtp} & {tensor.role for tensor in plan.tensors}


def _plan(folder: Path, model: str, precision: str) -> Any:
    recipe = load_recipe(ModelRecipe, model)
    checkpoint = open_checkpoint(folder)
    assert family_of(checkpoint.config) == recipe.family
    return make_plan(checkpoint, load_recipe(PrecisionRecipe, precision), model=model, family=recipe.family)


# ------------------------------------------------------------------------------------------------ misspelt keys
def _add_misspelt(data: Any, path: list[str | int], wrong: str) -> Any:
    """`data` with one more key beside the last one of `path`."""
    here = data
    for step in path[:-1]:
        here = here[step]
    here[wrong] = here[path[-1]]
    return data


@pytest.mark.parametrize(
    ("kind", "name", "path", "wrong", "message"),
    [
        ("models", "glm-5", ["source"], "sourse",
         "unknown key 'sourse'; did you mean 'source'? Allowed: automatic, base_model, calibration, deployment_profiles, "
         "description, family, gates, include_source, licence, mtp, name, precisions, precisions_on, profiles, published, "
         "reference, sampling, schema, serving, source, speed, suite, variants"),
        ("models", "glm-5", ["source", "hub"], "hubb",
         "unknown key 'source.hubb'; did you mean 'hub'? Allowed: hub, path, revision"),
        ("models", "glm-5", ["reference", "release", "hub"], "hbu",
         "unknown key 'reference.release.hbu'; did you mean 'hub'? Allowed: hub, path, revision"),
        ("models", "tiny-glm", ["reference", "precision"], "precison",
         "unknown key 'reference.precison'; did you mean 'precision'? Allowed: precision, release"),
        ("models", "glm-5", ["serving", "num_speculative_tokens"], "num_spec_tokens",
         "unknown key 'serving.num_spec_tokens'; did you mean 'num_speculative_tokens'? Allowed: chat_template_kwargs, "
         "max_model_len, num_speculative_tokens, reasoning_parser, tool_call_parser, vllm"),
        ("precisions", "w4a16", ["scheme"], "schema_",
         "unknown key 'schema_'; did you mean 'schema'? Allowed: activations, calibration, description, "
         "extends, headroom, keep, kv_cache, layers, mtp, name, observer, quantize, schema, scheme"),
        ("profiles", "8xh200", ["hardware", "num_gpus"], "num_gpu",
         "unknown key 'hardware.num_gpu'; did you mean 'num_gpus'? Allowed: device, gpu, memory_bytes_each, num_gpus"),
        ("profiles", "8xh200", ["concurrency"], "concurency",
         "unknown key 'concurency'; did you mean 'concurrency'? Allowed: concurrency, description, emulate, "
         "endpoints, environment, hardware, interpreter, name, schema, startup_timeout_s, variants, vllm"),
        ("suites", "quick", ["tasks", 0, "num_items"], "num_item",
         "unknown key 'tasks.0.arithmetic.num_item'; did you mean 'num_items'? Allowed: budget, chance, kind, languages, "
         "max_tokens, name, num_items, num_samples, num_steps, sampling, temperature, thinking_tokens, title, top_k, top_p"),
        ("suites", "quick", ["divergence", "top_k"], "topk",
         "unknown key 'divergence.topk'; did you mean 'top_k'? Allowed: exact, held_out, held_out_documents, held_out_tokens, "
         "languages, max_tokens, num_documents, position_buckets, spans, suite_documents, top_k"),
        ("gates", "quick", ["gates", 0, "max_drop"], "max_dropp",
         "unknown key 'gates.0.score.max_dropp'; did you mean 'max_drop'? Allowed: claim, kind, max_drop, max_truncated, "
             "required, task"),
        ("gates", "quick", ["level"], "levl",
         "unknown key 'levl'; did you mean 'level'? Allowed: adjust, default_max_drop, description, estimand, gates, "
         "level, max_excluded, min_items, name, schema, stopping, whole"),
    ],
)  # fmt: skip
def test_a_misspelt_key_names_file_key_and_the_nearest(
    tmp_path: Path, kind: str, name: str, path: list[str | int], wrong: str, message: str
) -> None:
    data = yaml.safe_load((recipes_dir() / kind / f"{name}.yaml").read_text())
    file = tmp_path / f"{name}.yaml"
    file.write_text(json.dumps(_add_misspelt(data, path, wrong)))
    with pytest.raises(RecipeError) as caught:
        parse_recipe(KINDS[kind], file)
    assert str(caught.value) == f"{file}: {message}"


ROLES_MESSAGE = "name each role once, under `quantize` or one `keep` dtype"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize": ["attention", "routed_expert", "shared_expert", "dense_mlp", "attention"]},
         f"role attention is named twice; {ROLES_MESSAGE}"),
        ({"quantize": ["attention", "routed_expert", "shared_expert"]},
         "role dense_mlp is named nowhere; put it under `quantize` or under `keep: {bf16: [...]}`"),
        ({"mtp": "keeep"}, "mtp: Input should be 'keep', 'quantize' or 'drop' (got 'keeep'); did you mean 'keep'?"),
        ({"keep": ["norm"]}, "keep: Input should be a mapping of keys to values (got \"['norm']\")"),
        ({"name": "other"}, "name is 'other'; it must be the file's name, 'w4a16'"),
        ({"scheme": None, "calibration": {"method": "gptq"}},
         "`quantize` lists roles: say under `scheme` what all of them take, or give each its own, as in `quantize: "
         "{routed_expert: nvfp4a16, attention: fp8_block}`"),
    ],
)  # fmt: skip
def test_a_precision_that_contradicts_itself(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = yaml.safe_load((recipes_dir() / "precisions" / "w4a16.yaml").read_text())
    file = tmp_path / "w4a16.yaml"
    file.write_text(yaml.safe_dump({**data, **changes}))
    with pytest.raises(RecipeError) as caught:
        parse_recipe(PrecisionRecipe, file)
    assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize(
    "line",
    [
        "rules: [{layers: 0-3, scheme: fp8_block}]", "layers: [{attention: bf16}]", "scheme: {attention: fp8_block}",
        "scheme: [w4a16, fp8_block]",
    ],
)  # fmt: skip
def test_other_ways_to_mix_schemes_are_answered_with_the_right_one(tmp_path: Path, line: str) -> None:
    (file := tmp_path / "mixed.yaml").write_text(f"schema: 1\nname: mixed\nextends: w4a16\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(PrecisionRecipe, file)
    assert str(caught.value) == f"{file}: {line.split(':')[0]}: {HOW_TO_MIX}"


EVERYTHING_WRONG = {
    "models": (
        "schema: 2\nname: other\nsourse: {path: here}\nfamily: glm4\nreference: {precision: fp8, release: {path: a, hub: b}}\n"
        "precisions: w4a16\nserving: {num_speculative_tokens: none}\n",
        [
            "unknown key 'sourse'; did you mean 'source'? Allowed: automatic, base_model, calibration, deployment_profiles, "
            "description, family, gates, include_source, licence, mtp, name, precisions, precisions_on, profiles, published, "
            "reference, sampling, schema, serving, source, speed, suite, variants",
            "schema: Input should be 1 (got '2')",
            f"family: Input should be {', '.join(map(repr, recipe_names('families')))} (got 'glm4')",
            "reference.release: say either `path` (a folder) or `hub` (an id such as zai-org/GLM-5), not both or neither",
            "precisions: Input should be a list (got 'w4a16')",
            "serving.num_speculative_tokens: Input should be a valid integer, unable to parse string as an integer "
            "(got 'none')",
            "name is 'other'; it must be the file's name, 'wrong'",
        ],
    ),
    "precisions": (
        "schema: 1\nname: wrong\nschem: w4a16\nquantize: [attention, dense_mpl, shared_expert, router]\n"
        "keep: {bf17: [embedding, mtp, router_bias], fp32: [norm], source: [lm_head, lm_head]}\nmtp: yes\n",
        [
            "unknown key 'schem'; did you mean 'scheme'? Allowed: activations, calibration, description, "
            "extends, headroom, keep, kv_cache, layers, mtp, name, observer, quantize, schema, scheme",
            "quantize.1: Input should be 'embedding', 'lm_head', 'norm', 'attention', 'indexer', 'dense_mlp', 'shared_expert', "
            "'routed_expert', 'router', 'router_bias' or 'mtp' (got 'dense_mpl'); did you mean 'dense_mlp'?",
            "keep.bf17: Input should be 'source', 'bf16' or 'fp32' (got 'bf17'); did you mean 'bf16'?",
            "mtp: Input should be 'keep', 'quantize' or 'drop' (got 'True')",
            "role lm_head is named twice; name each role once, under `quantize` or one `keep` dtype",
            "roles indexer, routed_expert are named nowhere; put each under `quantize` or under `keep: {bf16: [...]}`",
            "role router cannot be under `quantize`: vLLM loads it only unquantized; move it to `keep`",
            "router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens",
        ],
    ),
    "profiles": (
        "schema: 1\nname: wrong\nhardware: {num_gpus: 1}\nconcurrency: 0\nbase_url: http://a\n"
        "base_urls: [http://b, http://c]\nvlm: {}\nendpoints: {fp8: {urls: ['http://a', 'http://A/v1']}}\n",
        [
            *(
                f"{key}: is gone: every checkpoint needs a server of its own; write `endpoints: {{LABEL: {{url: "
                "http://HOST:PORT}, ...}`, one entry for each label of the run, such as fp8 and w4a16 (`urls: [...]` for "
                "several servers of one label)"
                for key in ("base_url", "base_urls")
            ),
            "unknown key 'vlm'; did you mean 'vllm'? Allowed: concurrency, description, emulate, endpoints, "
            "environment, hardware, interpreter, name, schema, startup_timeout_s, variants, vllm",
            "key 'hardware.device' is missing",
            "concurrency: Input should be greater than or equal to 1 (got '0')",
            "endpoints.fp8: `urls` names one server twice",
        ],
    ),
    "suites": (
        "schema: 1\nname: wrong\nseed: train-1\ntasks:\n"
        "- {kind: arithmetic, name: a, num_items: 5, max_tokens: 8, thinking_tokens: 9, num_samples: 2}\n"
        "- {kind: tools, name: a, num_items: 5, max_tokens: 8, thinking_tokens: 9, temprature: 1.0}\n"
        "- {kind: swe, name: s, dataset: lite, max_tokens: 8, environment: local, filter: '('}\n"
        "- {kind: nedle, name: n, num_itmes: 5, lengths_tokens: [9], max_tokens: 0}\n",
        [
            "unknown key 'tasks.1.tools.temprature'; did you mean 'temperature'? Allowed: budget, chance, kind, languages, "
            "max_tokens, name, num_items, num_samples, num_tools, prompt_tokens, sampling, share_without_tool, temperature, "
            "thinking_tokens, title, top_k, top_p",
            "tasks.0.arithmetic: num_samples above 1 needs a temperature above 0: greedy replies to one question are all alike",
            "tasks.0.arithmetic: thinking_tokens 9 leaves no room for an answer; it is part of max_tokens (8)",
            "tasks.2.swe: environment local runs what the model writes on this machine, without a container: it needs "
            "`allow_local_execution: true` and `local_repositories: FOLDER`; or say docker, podman or singularity",
            "tasks.2.swe: filter '(' is not a regular expression (missing ), unterminated subpattern at position 0)",
            "tasks.3.kind: must be one of arithmetic, needle, lm_eval, ruler, tools, swe (got 'nedle'); did you mean 'needle'?",
            "unknown key 'tasks.3.needle.num_itmes'; did you mean 'num_items'? Allowed: budget, chance, kind, languages, "
            "lengths_tokens, max_tokens, name, num_items, num_needles, num_samples, sampling, temperature, thinking_tokens, "
            "title, top_k, top_p",
            "tasks.1.tools: thinking_tokens 9 leaves no room for an answer; it is part of max_tokens (8)",
            "tasks.3.needle.max_tokens: Input should be greater than or equal to 1 (got '0')",
            "two tasks are called a; names are keys of the results",
            "seed 'train-1' must begin with 'eval': other seeds may have been trained on",
        ],
    ),
    "gates": (
        "schema: 1\nname: wrong\nlevel: 2\ngates:\n- {kind: score, task: a, max_drop: 0.1}\n"
        "- {kind: score, task: a, max_drop: 0.2}\n"
        "- {kind: divergence, metric: kl_p99, texts: held_out, over: spans}\n",
        [
            "gates.2.divergence: say either `max` or `min`",
            "gates.2.divergence: `over: spans` judges kl_mean",
            "level: Input should be less than 1 (got '2')",
            "two score gates for task a; write one margin and one claim per task",
        ],
    ),
}
"""Kind -> an invalid file, and its problems."""


@pytest.mark.parametrize("kind", EVERYTHING_WRONG)
def test_all_problems_are_reported_at_once(tmp_path: Path, kind: str) -> None:
    text, problems = EVERYTHING_WRONG[kind]
    (file := tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(KINDS[kind], str(file))
    assert str(caught.value).split("\n  ") == [f"{file}: {len(problems)} problems:", *problems]


def test_a_recipe_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(PrecisionRecipe, "w4a61")
    number = len(recipe_names("precisions"))
    assert str(caught.value) == (
        f"no precision recipe called 'w4a61'; did you mean w4a16? `assay recipes precisions` lists all {number}"
    )


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(
    ("text", "message"), [("", "a recipe is a mapping of keys to values, this file holds a NoneType"), ("a: [", "not YAML: ")]
)
def test_a_file_that_is_no_recipe(tmp_path: Path, kind: type[Recipe], text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(kind, tmp_path / "x.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'x.yaml'}: {message}")


def test_the_recipes_in_the_documentation_are_valid_and_agree(tmp_path: Path) -> None:
    text = (recipes_dir().parent / "docs" / "suites.md").read_text()
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if block.startswith("schema: ")]
    files = [tmp_path / f"{yaml.safe_load(block)['name']}.yaml" for block in blocks]
    for file, block in zip(files, blocks, strict=True):
        file.write_text(block)
    kinds: tuple[type[Recipe], ...] = (SuiteRecipe, GateRecipe, PrecisionRecipe, PrecisionRecipe)
    suite, gates, *_ = (load_recipe(kind, str(file)) for kind, file in zip(kinds, files, strict=True))
    assert isinstance(suite, SuiteRecipe) and isinstance(gates, GateRecipe) and suite.gates == str(files[1])
    assert {gate.task: gate.max_drop for gate in gates_on(gates, suite).gates if isinstance(gate, ScoreGate)} == {
        "my-stories": 0.01
    }


# ------------------------------------------------------------------------------------------------ imports
HEAVY = "print(sorted({'torch', 'transformers', 'vllm', 'safetensors', 'compressed_tensors', 'numpy'} & set(sys.modules)))"


@pytest.mark.parametrize(
    "imports",
    [
        "import assay.records.measurement, assay.recipes.load, assay.recipes.families, assay_cli, assay_pipeline.targets",
        "import assay_quantize.plan.planner, assay_quantize.plan.show, assay_quantize.plan.fits, assay_quantize.checkpoint.hub",
    ],
)
def test_contract_and_plan_import_nothing_heavy(imports: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys; {imports}; {HEAVY}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("num_samples: {min: 3, max: 2}", ".num_samples: min 3 is above max 2"),
        ("num_samples: {min: 0, max: 2}", ".num_samples.min: Input should be greater than or equal to 1 (got '0')"),
        ("num_samples: few", ".num_samples: Input should be a valid integer, unable to parse string as an integer (got 'few')"),
        ("limit: {min: 1, max: 2}, num_samples: {min: 1, max: 2}", ": limit and num_samples are both a range; let one of them "
         "grow: new items where there are any"),
        ("num_samples: {min: 1, max: 2}, temperature: 0.0", ": num_samples above 1 needs a temperature above 0: greedy replies "
         "to one question are all alike"),
    ],
)  # fmt: skip
def test_a_range_is_two_numbers(tmp_path: Path, written: str, problem: str) -> None:
    assert _problem_of_a_task(tmp_path, written) == f"tasks.0.lm_eval{problem}"


def test_keys_of_a_range(tmp_path: Path) -> None:
    assert _problem_of_a_task(tmp_path, "limit: {max: 2}") == "key 'tasks.0.lm_eval.limit.min' is missing"
    assert _problem_of_a_task(tmp_path, "num_samples: {min: 1, mx: 2}") == (
        "unknown key 'tasks.0.lm_eval.num_samples.mx'; did you mean 'max'? Allowed: max, min"
    )


def _problem_of_a_task(folder: Path, written: str) -> str:
    """What is wrong with a sampled task of lm-eval that says `written`."""
    task = f"kind: lm_eval, name: a, tasks: [x], max_tokens: 8, {written}"
    task += "" if "temperature" in written else ", temperature: 1.0"
    (file := folder / "ranges.yaml").write_text(f"schema: 1\nname: ranges\nseed: eval-1\ntasks:\n- {{{task}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(SuiteRecipe, str(file))
    return str(caught.value).removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("looks", "problem"),
    [
        ("[]", "looks is empty; say at least one, as [replies of the reference, replies of the candidate]"),
        ("[[2, 2], [2, 1]]", "looks [2, 2] and then [2, 1]: each look must ask for more than the one before"),
        ("[[2, 1], [2, 1]]", "looks [2, 1] and then [2, 1]: each look must ask for more than the one before"),
    ],
)
def test_each_look_asks_for_more(tmp_path: Path, looks: str, problem: str) -> None:
    (file := tmp_path / "looks.yaml").write_text(f"schema: 1\nname: looks\nstopping: {{looks: {looks}}}\ngates: []\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(GateRecipe, str(file))
    assert str(caught.value) == f"{file}: stopping: {problem}"

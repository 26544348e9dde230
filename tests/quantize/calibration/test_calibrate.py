"""Channel weights are the mean squares of what really went into each weight, and the search puts them to use."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import Run
from compressed_tensors.quantization import QuantizationArgs
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_checkpoints import dequantized, fuse_experts, make_tiny_glm4_moe, store_as_fp8
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.errors import QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.calibration import Calibration
from assay_quantize.calibration.calibrate import calibrate, linear_weights, load_model, write_importance
from assay_quantize.calibration.inputs import Moments
from assay_quantize.calibration.progress import CalibrationProgress
from assay_quantize.calibration.text import Text, first_tokens
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.importance import load_importance
from assay_quantize.engine.quantize import quantize
from assay_quantize.kernels.reference import dequantize_weight
from assay_quantize.plan.planner import make_plan
from assay_vllm.fake_quant import fake_quantize

pytestmark = pytest.mark.slow

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"
WORDS = "The small cat sits in the park. A farmer has 12 apples and buys 7 more: 12 + 7 = 19. " * 40


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS)
    return path


def inputs_by_hand(folder: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Weight -> its inputs [tokens, columns], by a GLM-4-MoE MLP written out here, fed with what enters each layer's MLP."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {name: tensor.float() for f in folder.glob("*.safetensors") for name, tensor in load_file(f).items()}
    entered: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith((".mlp", ".self_attn.o_proj", ".self_attn.q_proj")):
            module.register_forward_pre_hook(lambda _, args, name=name: entered.__setitem__(name, args[0][0].clone()))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    inputs = {f"{name}.weight": x for name, x in entered.items() if not name.endswith(".mlp")}
    config = model.config
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        x_TH, prefix = entered[f"model.layers.{layer}.mlp"], f"model.layers.{layer}.mlp"
        scores = (x_TH @ weights[f"{prefix}.gate.weight"].T).sigmoid()
        chosen = (scores + weights[f"{prefix}.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
        for expert in range(config.n_routed_experts):
            tokens_TH, prefix_of_expert = x_TH[(chosen == expert).any(1)], f"{prefix}.experts.{expert}"
            gate, up = (
                tokens_TH @ weights[f"{prefix_of_expert}.gate_proj.weight"].T,
                tokens_TH @ weights[f"{prefix_of_expert}.up_proj.weight"].T,
            )
            inputs |= {f"{prefix_of_expert}.{part}_proj.weight": tokens_TH for part in ("gate", "up")}
            inputs[f"{prefix_of_expert}.down_proj.weight"] = F.silu(gate) * up
    return inputs


def test_means_are_those_of_a_model_written_out_by_hand(tmp_path: Path, words: Path) -> None:
    made = calibrate(TRAINED, tmp_path / "w.safetensors", Text((words,)), model_name="tiny", num_tokens=256, length=256,
                     min_tokens=1, device="cpu")  # fmt: skip
    got = load_file(tmp_path / "w.safetensors")
    tokens = AutoTokenizer.from_pretrained(TRAINED)(WORDS)["input_ids"][:256]
    inputs = inputs_by_hand(TRAINED, tokens)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        counts = json.loads(file.metadata()["assay_tokens"])
    fed = {name: x for name, x in inputs.items() if len(x)}
    largest = {name: got.pop(name) for name in list(got) if name.endswith("_amax")}
    assert fed.keys() <= got.keys() and len(fed) > 70
    for name, x in fed.items():
        assert counts[name] == len(x), name
        torch.testing.assert_close(got[name], x.square().mean(0), rtol=1e-4, atol=1e-9, msg=name)
        torch.testing.assert_close(
            largest[name.replace(".weight", ".input_amax")], x.abs().max().reshape(1), rtol=1e-4, atol=1e-9, msg=name
        )
    assert made.starved == {name: 0 for name in sorted(inputs) if not len(inputs[name])}
    weights = linear_weights(open_checkpoint(TRAINED))
    assert got.keys() | made.starved.keys() == weights and not any(".layers.4." in name for name in weights), "MTP is left out"
    assert (
        sum(count for name, count in counts.items() if name.startswith("model.layers.2.mlp.experts.") and "down" in name) == 512
    )
    assert load_importance(tmp_path / "w.safetensors").sha256 == made.file_sha256


def test_a_killed_one_goes_on_and_ends_with_the_same_numbers(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever batch it was killed after; what had gone through the model does not go through it again."""
    monkeypatch.setattr("assay_quantize.calibration.calibrate.BATCH_TOKENS", 64)
    monkeypatch.setattr("assay_quantize.calibration.progress.SAVED_EVERY_S", 0.0)

    def made(name: str, keep: Path | None, stop: str = "never") -> tuple[list[str], Any]:
        lines: list[str] = []

        def report(line: str) -> None:
            lines.append(line)
            if line == stop:
                raise KeyboardInterrupt

        record = calibrate(TRAINED, tmp_path / name, Text((words,)), model_name="tiny", num_tokens=256, length=32, min_tokens=1,
                           keep=keep, report=report)  # fmt: skip
        return lines, record

    whole, first = made("whole", None)
    assert whole == [f"calibrating: {done} of 256 tokens" for done in (64, 128, 192, 256)]
    for stop in (whole[1], whole[3]):
        with pytest.raises(KeyboardInterrupt):
            made("again", tmp_path / stop[:-11], stop)
        lines, second = made("again", tmp_path / stop[:-11])
        assert lines == whole[whole.index(stop) :], "what was said before it was kept is said once more"
        left, right = (load_file(tmp_path / name) for name in ("again", "whole"))
        assert left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())
        assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
        differ = {"file": "", "seconds": 0.0}
        assert second.model_copy(update=differ) == first.model_copy(update=differ)


def test_one_that_had_seen_enough_when_it_was_killed_takes_no_more(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay_quantize.calibration import calibrate as module

    monkeypatch.setattr(module, "BATCH_TOKENS", 64)
    monkeypatch.setattr("assay_quantize.calibration.progress.SAVED_EVERY_S", 0.0)
    how: Any = {"model_name": "tiny", "num_tokens": 512, "length": 32, "min_tokens": 1, "tokens_per_expert": 8}
    whole = calibrate(TRAINED, tmp_path / "whole", Text((words,)), **how)
    assert whole.ended == "every expert" and whole.num_tokens < 512

    def killed(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_importance", killed)
        calibrate(TRAINED, tmp_path / "again", Text((words,)), keep=tmp_path / "kept", **how)
    again = calibrate(TRAINED, tmp_path / "again", Text((words,)), keep=tmp_path / "kept", **how)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    differ = {"file": "", "seconds": 0.0}
    assert again.model_copy(update=differ) == whole.model_copy(update=differ)


def test_what_is_damaged_of_a_killed_one_is_seen_again(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_quantize.calibration.calibrate.BATCH_TOKENS", 64)
    monkeypatch.setattr("assay_quantize.calibration.progress.SAVED_EVERY_S", 0.0)

    def made(keep: Path | None = None, stop: str = "never") -> tuple[list[str], bytes]:
        lines: list[str] = []

        def report(line: str) -> None:
            lines.append(line)
            if line == stop:
                raise KeyboardInterrupt

        calibrate(TRAINED, tmp_path / "w", Text((words,)), model_name="tiny", num_tokens=128, length=32, min_tokens=1,
                  keep=keep, report=report)  # fmt: skip
        return lines, (tmp_path / "w").read_bytes()

    whole, file = made()
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "kept", whole[1])
    for name, at in (("seen.safetensors", -5), ("tokens.npy", -3), ("tokens.npy", None), ("text.json", 30)):
        shutil.copytree(tmp_path / "kept", keep := tmp_path / f"{name}{at}")
        data = bytearray((keep / name).read_bytes())
        if at is None:
            del data[len(data) // 2 :]
        else:
            data[at] ^= 1
        (keep / name).write_bytes(data)
        lines, again = made(keep)
        assert again == file and (lines == whole) is (name == "seen.safetensors"), name


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from assay_quantize.calibration import calibrate as module

    path, load = tmp_path / "text.txt", module.load_model
    path.write_text(words.read_text())

    def edited(*args: Any) -> Any:
        path.write_text(words.read_text()[::-1])
        return load(*args)

    monkeypatch.setattr(module, "load_model", edited)
    with pytest.raises(QuantizeError, match=r"text\.txt: changed while it was read; run again"):
        calibrate(TRAINED, tmp_path / "w", Text((path,)), model_name="tiny", num_tokens=64, length=32, keep=tmp_path / "kept")
    assert not (tmp_path / "w").exists() and not (tmp_path / "kept").exists()


@pytest.mark.parametrize("form", ["block", "fused"])
def test_other_forms_of_a_source_are_calibrated_as_the_weights_they_stand_for(tmp_path: Path, words: Path, form: str) -> None:
    fp8 = store_as_fp8(TRAINED, tmp_path / "fp8")
    plain = dequantized(fp8, tmp_path / "plain")
    source = fp8 if form == "block" else fuse_experts(fp8, tmp_path / "fused")
    for folder in (source, plain):
        calibrate(folder, tmp_path / f"{folder.name}.safetensors", Text((words,)), model_name="tiny", num_tokens=256, length=64,
                  device="cpu")  # fmt: skip
    left, right = (load_file(tmp_path / f"{folder.name}.safetensors") for folder in (source, plain))
    assert left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def test_experts_that_saw_too_little_are_named_and_left_out(run: Run, tmp_path: Path, words: Path) -> None:
    out = tmp_path / "w.safetensors"
    command = ("calibrate", TRAINED, "--out", out, "--text", words, "--tokens", 128, "--length", 64, "--min-tokens", 40)
    code, lines, _ = run(*command, "--device", "cpu")
    assert code == 0 and "left out, fewer than 40 tokens: model.layers." in lines
    code, stdout, _ = run(*command, "--device", "cpu", "--json")
    record = Calibration.model_validate_json(stdout)
    assert code == 0 and record.starved and max(record.starved.values()) < 40
    weights = {name for name in load_file(out) if name.endswith(".weight")}
    assert not record.starved.keys() & weights and record.weights == len(weights)
    assert Calibration.load(tmp_path / "w.safetensors.json") == record
    assert record.tokens_by_expert is not None and record.tokens_by_expert[0] < 40 < record.tokens_by_expert[2]
    code, _, lines = run("quantize", TRAINED, "-p", "w4a16-mse", "--out", tmp_path / "out", "--importance", out)
    assert code == 0 and f"w.safetensors: channel weights for {record.weights} of" in lines


# ------------------------------------------------------------------------------------------------ what it is good for
def test_a_disk_without_room_is_an_error_of_the_system_with_the_path(tmp_path: Path) -> None:
    """Not one of safetensors', which no command tells in a line; and nothing is left beside the file."""
    moments = {"a.weight": Moments(torch.ones(512, dtype=torch.float64), 1)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"channels\.safetensors") as refused:
            write_importance(tmp_path / "channels.safetensors", moments, ["text"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


def test_calibrated_search_errs_less_where_inputs_are_large(tmp_path: Path) -> None:
    """Squared error of W4A16 in groups of 32, weighted by the inputs of text the model wrote with another seed.

    Of five pairs of seeds KL is lower in three (0.92 to 1.07 times that without): too little to be held in a test."""
    for seed in (0, 1):
        given = {"model_name": "tiny", "num_tokens": 4096, "length": 128, "device": "cpu"}
        calibrate(TRAINED, tmp_path / f"{seed}.safetensors", Text(seed=seed), **given)  # type: ignore[arg-type]
    recipe = load_recipe(PrecisionRecipe, "w4a16-g32").model_copy(update={"observer": "mse"})
    plan = make_plan(open_checkpoint(TRAINED), recipe, model="tiny", family=None)
    tensors = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    source = {name: weight for file in TRAINED.glob("*.safetensors") for name, weight in load_file(file).items()}
    inputs = load_importance(tmp_path / "1.safetensors")
    error = {}
    for name, path in (("without", None), ("with", tmp_path / "0.safetensors")):
        own = plan.model_copy(update={"importance_sha256": None if path is None else load_importance(path).sha256})
        quantize(own, TRAINED, tmp_path / name, importance=path)
        stored = {n: t for f in (tmp_path / name).glob("*.safetensors") for n, t in load_file(f).items()}
        total = 0.0
        for tensor in tensors:
            squares_I = inputs.for_weight(tensor.name, tensor.shape[1])
            assert squares_I is not None
            difference_OI = source[tensor.name].float() - dense(stored, tensor.module)
            total += float((difference_OI.square() * torch.from_numpy(squares_I.copy())).sum())
        error[name] = total
    assert 0 < error["with"] < 0.8 * error["without"], error


def dense(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    parts = {leaf: stored[f"{module}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_shape")}
    return dequantize_weight(parts, "w4a16_g32", torch.bfloat16).float()


# ------------------------------------------------------------------------------------------------ text
def test_own_text_begins_where_a_user_would(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(TRAINED), TRAINED, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    assert tokenizer.decode(first_tokens(tokenizer, model.config)) == "[gMASK]<sop><|user|>\n"
    first, again, other = (Text(seed=seed).sequences(model, TRAINED, 256, 64, lambda line: None) for seed in (3, 3, 4))
    assert first == again != other and [len(prefix_of_expert) for prefix_of_expert in first] == [64] * 4


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"short", "less than one sequence of 512 tokens; give more text or a smaller --length"),
        ("a.txt", b"\xff\xfe", "is not UTF-8; --text takes plain text or .jsonl"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2: not JSON: "),
        ("a.jsonl", b'{"words": "x"}', "a.jsonl, line 1: an object with `text`, `prompt` or `messages` is needed"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1: an object with `text`, `prompt` or `messages` is needed"),
        ("a.jsonl", '{"text": "a\u2028b"}\n[1]'.encode(), "a.jsonl, line 2: an object with `text`, `prompt` or `messages` is"),
        (None, b"", "cannot be read: No such file or directory"),
    ],
)
def test_text_that_cannot_be_used_is_one_line(tmp_path: Path, name: str | None, data: bytes, message: str) -> None:
    path = tmp_path / (name or "nothing.txt")
    if name is not None:
        path.write_bytes(data)
    with pytest.raises(QuantizeError) as caught:
        Text((path,)).sequences(None, TRAINED, 1024, 512, lambda line: None)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny_glm4_moe(tmp_path / "source")
    monkeypatch.setattr("assay_quantize.calibration.calibrate.available_bytes", lambda: 10**6)
    with pytest.raises(
        QuantizeError, match=r"calibrating takes the whole model, 0\.0 GB as it runs here, and 0\.0 GB are free"
    ):
        calibrate(source, tmp_path / "w", Text(), model_name="tiny", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**5, 10**6))
    with pytest.raises(QuantizeError, match=r"and 0\.0 GB of the GPU's memory are free; say --device cpu, or quantize without"):
        calibrate(source, tmp_path / "w", Text(), model_name="tiny", device="auto")


def test_what_was_seen_on_another_device_is_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs in BF16 on a GPU, in FP32 on a CPU."""
    monkeypatch.setattr("assay_quantize.calibration.progress.SAVED_EVERY_S", 0.0)
    CalibrationProgress(tmp_path, "cuda").save({"a.weight": Moments(torch.ones(16, dtype=torch.float64), 1)}, {}, 3)
    inputs: dict[str, Moments] = {}
    assert (CalibrationProgress(tmp_path, "cpu").load(inputs, {}), inputs) == (0, {})
    assert (CalibrationProgress(tmp_path, "cuda").load(inputs, {}), [*inputs]) == (3, ["a.weight"])


# ------------------------------------------------------------------------------------------------ the range of NVFP4
def test_activations_of_the_trained_model_in_the_constant_range_of_nvfp4(tmp_path: Path, words: Path) -> None:
    """Nothing is cut off; what is small is counted as the plugin's arithmetic loses it, and costs little."""
    made = calibrate(TRAINED, tmp_path / "w.safetensors", Text((words,)), model_name="tiny", num_tokens=256, length=256,
                     min_tokens=1, device="cpu")  # fmt: skip
    moments = made.nvfp4_inputs
    assert (moments.num_cut_off, moments.largest < 2688) == (0, True)
    assert moments.num_zeroed <= moments.num_coarse < moments.num_groups
    inputs = inputs_by_hand(TRAINED, AutoTokenizer.from_pretrained(TRAINED)(WORDS)["input_ids"][:256])
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, group_size=16, strategy="tensor_group", dynamic="local",
                            scale_dtype=torch.float8_e4m3fn)  # fmt: skip
    error = {"constant": 0.0, "best": 0.0}
    norm = 0.0
    for x in (x for name, x in inputs.items() if ".mlp." in name and len(x)):
        for how, scale in (("constant", torch.ones(1)), ("best", (2688 / x.abs().max()).reshape(1))):
            error[how] += float((fake_quantize(x, args, global_scale=scale) - x).square().sum())
        norm += float(x.square().sum())
    relative = {how: (squared / norm) ** 0.5 for how, squared in error.items()}
    assert relative["constant"] < 1.1 * relative["best"] < 0.12, (relative, moments)

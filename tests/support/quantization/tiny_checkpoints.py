"""Tiny random checkpoints, complete enough for vLLM to load and draft with: config, shards, index, tokenizer, chat template.

    folder = make_tiny_glm4_moe(tmp_path / "tiny")

Same arguments, same bytes. Weights are random, so replies are noise; shapes fit the group sizes of every scheme.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SPECIAL_TOKENS = [
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CORPUS = [
    "A farmer has 12 apples and buys 7 more. How many apples are there now? 12 + 7 = 19. #### 19",
    "The secret number of the blue house is 4821. What is the secret number of the blue house?",
    "小明有 12 个苹果，又买了 7 个。现在一共有多少个苹果？ 12 + 7 = 19。 #### 19",
]


def change_biases(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of routers, which are FP32."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        made = {name: change(tensor) for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
        if made:
            save_file(tensors | made, path, {"format": "pt"})


def make_tiny_glm4_moe(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 3,
    first_dense: int = 1,
    num_experts: int = 4,
    experts_per_token: int = 2,
    hidden: int = 256,
    dense_intermediate: int = 256,
    moe_intermediate: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    vocab_size: int = 512,
    shards: int = 2,
    mtp: bool = True,
    mtp_file: bool = False,
    attention_bias: bool = True,
    dtype: str = "bf16",
    max_position: int = 4096,
    config_extra: dict[str, Any] | None = None,
) -> Path:
    """Write a random `Glm4MoeForCausalLM` into `folder` and return it.

    `mtp`: one MTP block, stored as `model.layers.{num_layers}` with its own embedding and head, as GLM-4.5 does.
    `mtp_file`: the MTP block goes to `mtp.safetensors`, listed in the index (GLM-4.7). `dtype`: bf16, fp16 or fp32;
    `e_score_correction_bias` is always FP32. Shards are cut between gate_proj and up_proj of an expert, so that fused
    groups cross shards, as they do in real checkpoints.
    """
    config: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "dtype": DTYPE_NAMES[dtype],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": dense_intermediate,
        "moe_intermediate_size": moe_intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position,
        "first_k_dense_replace": first_dense,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": experts_per_token,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1 if mtp else 0,
        "tie_word_embeddings": False,
        "eos_token_id": [0],
        "pad_token_id": 0,
        **(config_extra or {}),
    }
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for layer in range(num_layers + int(mtp)):
        shapes |= _decoder_layer(config, layer)
    if mtp:
        shapes |= _mtp_extras(config, num_layers)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab_size, hidden)}
    tensors = random_tensors(shapes, seed, DTYPES[dtype])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"eos_token_id": [0], "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
    )
    beside = {name for name in tensors if mtp_file and name.startswith(f"model.layers.{num_layers}.")}
    files = cut_into_shards({n: t for n, t in tensors.items() if n not in beside}, shards)
    if beside:
        files["mtp.safetensors"] = {n: tensors[n] for n in tensors if n in beside}
    write_shards(folder, files)
    write_tokenizer(folder, vocab_size)
    return folder


def _decoder_layer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer, in the order real checkpoints have (sorted)."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    if config["attention_bias"]:
        shapes |= {f"self_attn.{p}_proj.bias": (s,) for p, s in (("q", q_size), ("k", kv_size), ("v", kv_size))}
    if layer < config["first_k_dense_replace"]:
        shapes |= _mlp("mlp", hidden, config["intermediate_size"])
    else:
        experts = config["n_routed_experts"]
        shapes |= {"mlp.gate.weight": (experts, hidden), "mlp.gate.e_score_correction_bias": (experts,)}
        shapes |= _mlp("mlp.shared_experts", hidden, config["moe_intermediate_size"])
        for expert in range(experts):
            shapes |= _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    return {f"model.layers.{layer}.{name}": shapes[name] for name in sorted(shapes)}


def _mlp(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.down_proj.weight": (hidden, intermediate),
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
    }


def _mtp_extras(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
        "shared_head.norm.weight": (hidden,),
    }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norms near 1, biases small, matrices of unit gain; the MTP block shares the values of embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 7.0 + 0.05 * noise
        elif name.endswith("norm.weight"):
            tensors[name] = (1.0 + 0.1 * noise).to(dtype)
        elif name.endswith("bias"):
            tensors[name] = (0.02 * noise).to(dtype)
        elif "embed_tokens" in name:
            tensors[name] = (0.5 * noise).to(dtype)
        else:
            tensors[name] = (noise / shape[-1] ** 0.5).to(dtype)
    for name in tensors:
        if name.startswith("model.layers.") and name.endswith("embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
        if name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].clone() if "lm_head.weight" in tensors else tensors[name]
    return tensors


def cut_into_shards(tensors: dict[str, torch.Tensor], shards: int) -> dict[str, dict[str, torch.Tensor]]:
    """File name -> tensors: `shards` pieces of about equal bytes, each cut moved on to between a gate and an up projection."""
    names = list(tensors)
    if shards == 1:
        return {"model.safetensors": dict(tensors)}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    cuts, done = [0], 0
    for index, name in enumerate(names):
        split_pair = index > 0 and names[index - 1].endswith("gate_proj.weight") and name.endswith("up_proj.weight")
        if len(cuts) < shards and done >= total * len(cuts) / shards and split_pair:
            cuts.append(index)
        done += tensors[name].numel() * tensors[name].element_size()
    assert len(cuts) == shards, f"too few tensors for {shards} shards"
    cuts.append(len(names))
    return {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors": {n: tensors[n] for n in names[cuts[i] : cuts[i + 1]]}
        for i in range(shards)
    }


def write_shards(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write each file, and the index unless there is just `model.safetensors`."""
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if list(files) == ["model.safetensors"]:
        return
    sizes = [t.numel() * t.element_size() for tensors in files.values() for t in tensors.values()]
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens: any text goes through it, any sampled token is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([f"<{index}>" for index in range(tokenizer.get_vocab_size(), vocab_size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ other forms of the same model
FP8_SCALE_SHAPES = ("block", "channel", "tensor")
LINEARS = re.compile(r".*_proj(_with_mqa)?\.weight|.*\.experts\.\d+\.w[123]\.weight")


def read_shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """File name -> its tensors."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def to_fp8(w_OI: torch.Tensor, per: str, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 weight, scales) with one scale per 128 x 128 block [ceil(O/128), ceil(I/128)], channel [O, 1] or tensor [1]."""
    rows, columns = w_OI.shape
    height, width = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[per]
    scale = torch.empty(-(-rows // height), -(-columns // width), dtype=scale_dtype)
    made = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            where = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scale[row, column] = w_OI[where].float().abs().max() / 448
            made[where] = (w_OI[where].float() / scale[row, column].float()).to(torch.float8_e4m3fn)
    return made, scale.reshape(1) if per == "tensor" else scale


def store_as_fp8(
    source: Path,
    folder: Path,
    *,
    per: str = "block",
    leaf: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    plain: str = r".*eh_proj.*",
    listed: list[str] | None = None,
    activation_scales: bool = False,
    scales_apart: bool = False,
) -> Path:
    """`source` as an FP8 release: every `*_proj.weight` but those that match `plain`, each with its scales.

    per: block (DeepSeek, GLM), channel or tensor (compressed-tensors). leaf: name of the scales. listed:
    `modules_to_not_convert` of config.json. activation_scales: with `input_scale` of static releases. scales_apart: all
    scales in the last shard, so that most are in another shard than their weight.
    """
    shutil.copytree(source, folder)
    files = read_shards(folder)
    made: dict[str, dict[str, torch.Tensor]] = {file: {} for file in files}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if not LINEARS.fullmatch(name) or re.fullmatch(plain, name):
                made[file][name] = tensor
                continue
            module, beside = name.removesuffix(".weight"), sorted(files)[-1] if scales_apart else file
            made[file][name], made[beside][f"{module}.{leaf}"] = to_fp8(tensor, per, scale_dtype)
            if activation_scales:
                made[beside][f"{module}.input_scale"] = torch.tensor([0.5])
    write_shards(folder, made)
    config = json.loads((folder / "config.json").read_text())
    args = {"type": "float", "num_bits": 8, "strategy": per}
    config["quantization_config"] = (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": listed or []}
        if leaf == "weight_scale_inv"
        else {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}, "ignore": listed or [],
        }
    )  # fmt: skip
    write_json(folder / "config.json", config)
    return folder


def store_as_int4(source: Path, folder: Path, *, group_size: int = 32, packed: str = r".*\.mlp\.experts\.\d+\..*") -> Path:
    """`source` as Kimi-K2-Thinking is published: weights that match `packed` as compressed-tensors' INT4, the rest as it is."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group_size, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], format="pack-quantized", weights=args)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    folder.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in read_shards(source).items():
        files[file] = {}
        for name, tensor in tensors.items():
            if not re.fullmatch(packed, name) or not name.endswith(".weight"):
                files[file][name] = tensor
                continue
            groups = tensor.unflatten(1, (-1, group_size))
            scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args)
            parts = compressor.compress({"weight": tensor, "weight_scale": scale.to(tensor.dtype)}, scheme)
            module = name.removesuffix(".weight")
            files[file] |= {f"{module}.{leaf}": part.contiguous() for leaf, part in parts.items()}
    for path in source.iterdir():
        if not path.name.endswith((".safetensors", ".index.json")):
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True, "actorder": None}
    config.get("text_config", config)["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}},
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_shards(folder, files)
    return folder


def dequantized(source: Path, folder: Path) -> Path:
    """The BF16 checkpoint that an FP8 one stands for, computed by PyTorch: float(w) * scale, rounded to BF16."""
    shutil.copytree(source, folder)
    files = read_shards(folder)
    scales = {n: t for tensors in files.values() for n, t in tensors.items() if n.rpartition(".")[2].startswith("weight_scale")}
    made: dict[str, dict[str, torch.Tensor]] = {}
    for file, tensors in files.items():
        made[file] = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_scale", "_scale_inv"))}
        for name, tensor in made[file].items():
            if tensor.dtype == torch.float8_e4m3fn:
                scale = next(scales[s] for s in (f"{name}_scale_inv", f"{name}_scale") if s in scales).float()
                block = (tensor.shape[0], 1) if scale.shape == (tensor.shape[0], 1) else (1, 1)
                if scale.numel() > 1 and block == (1, 1):
                    scale = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
                made[file][name] = (tensor.float() * scale).to(torch.bfloat16)
    write_shards(folder, made)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {key: value for key, value in config.items() if key != "quantization_config"})
    return folder


def decompressed_int4(source: Path, folder: Path) -> Path:
    """The BF16 checkpoint that a packed INT4 one stands for, as compressed-tensors decompresses it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    group = config.get("text_config", config).pop("quantization_config")["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], format="pack-quantized", weights=group["weights"])
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    files = read_shards(folder)
    for tensors in files.values():
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            leaves = ("weight_packed", "weight_scale", "weight_shape")
            tensors[f"{module}.weight"] = compressor.decompress(
                {leaf: tensors.pop(f"{module}.{leaf}") for leaf in leaves}, scheme
            )["weight"]
    write_shards(folder, files)
    write_json(folder / "config.json", config)
    return folder


def fuse_experts(source: Path, folder: Path, *, suffix: str = "", transposed: bool = False) -> Path:
    """`source` with the experts of a layer in one 3-D tensor: gate_up_proj [E, 2I, H] and down_proj [E, H, I], scales alike.

    suffix: `.weight`, or nothing as transformers 5 names them. transposed: [E, H, 2I] and [E, I, H].
    """
    shutil.copytree(source, folder)
    tensors = {name: tensor for found in read_shards(folder).values() for name, tensor in found.items()}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name in [n for n in tensors if re.search(r"\.experts\.\d+\.", n)]:
        layer, number, projection, leaf = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)", name).groups()  # type: ignore[union-attr]
        if projection == "gate_proj":
            up = tensors.pop(f"{layer}.{number}.up_proj.{leaf}")
            value, projection = torch.cat([tensors.pop(name), up]), "gate_up_proj"
        elif projection == "down_proj":
            value = tensors.pop(name)
        else:
            continue
        fused = f"{layer}.{projection}{suffix}" if leaf == "weight" else f"{layer}.{projection}{leaf.removeprefix('weight')}"
        experts.setdefault(fused, {})[int(number)] = value.T if transposed else value
    stacked = {name: torch.stack([parts[e] for e in sorted(parts)]).contiguous() for name, parts in experts.items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    merged = dict(sorted((tensors | stacked).items()))
    write_shards(folder, _halves(merged))
    return folder


def _halves(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    names = list(tensors)
    pieces = names[: len(names) // 2], names[len(names) // 2 :]
    return {f"model-{i + 1:05d}-of-00002.safetensors": {n: tensors[n] for n in piece} for i, piece in enumerate(pieces)}

"""Damages of a finished checkpoint: each a function that changes a copy of one, small enough that loading it would succeed.

Index and headers are always mended, so that only the damage itself is wrong; `Damaged.forge` mends the manifest as well, as
somebody would who wants to pass another checkpoint off as this one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of_file
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan

PRECISIONS = (
    "w4a16", "w4a16-asym", "w4a16-g64", "w4a16-mse", "fp8", "fp8-channel", "nvfp4a16", "nvfp4", "mxfp4", "mxfp8", "w8a8",
    "w4a16-fp8-attention", "nvfp4-fp8-attention",
)  # fmt: skip
"""Every kind of codes and scales, and mixtures."""
OF_FILES = ("w4a16", "nvfp4-fp8-attention")
"""Precisions on which damages beside the weights are tried: they are the same for all."""

INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "assay_manifest.json"
OURS = frozenset({MANIFEST, "README.md", "assay_plan.json", "assay_verify.json"})
EXPERT, OTHER_EXPERT = "model.layers.1.mlp.experts.1", "model.layers.1.mlp.experts.0"
NORM, ROUTER = "model.norm.weight", "model.layers.1.mlp.gate"
Tensors = dict[str, torch.Tensor]


class NotApplicable(Exception):
    """The precision has nothing that this damage could change."""


class Damage(NamedTuple):
    """apply: raises NotApplicable. needs_source: with the manifest's hashes forged, the folder alone cannot show it."""

    name: str
    apply: Callable[[Damaged], None]
    needs_source: bool = True


class Damaged:
    """A copy of a checkpoint, to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = sorted(path.name for path in folder.glob("*.safetensors"))

    def tensors(self, change: Callable[[Tensors], object]) -> None:
        """Rewrite the shards with `change` applied to all tensors at once; a new one goes into the first shard."""
        shard_of = {name: shard for shard in self.shards for name in load_file(self.folder / shard)}
        tensors = {n: t.clone() for shard in self.shards for n, t in load_file(self.folder / shard).items()}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        assert not _same(before, tensors), "the damage changed nothing"
        for shard in self.shards:
            held = {n: t.contiguous() for n, t in tensors.items() if shard_of.setdefault(n, self.shards[0]) == shard}
            save_file(held, self.folder / shard, {"format": "pt"})
        total = sum(tensor.nbytes for tensor in tensors.values())
        placed = {"weight_map": {name: shard_of[name] for name in sorted(tensors)}, "metadata": {"total_size": total}}
        self.json(INDEX, lambda index: index.update(placed))

    def json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads((self.folder / name).read_text())
        change(data)
        (self.folder / name).write_text(json.dumps(data))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def forge(self) -> None:
        """Make the manifest say that what lies in the folder now is what was made."""

        def change(manifest: dict[str, Any]) -> None:
            known = {shard["name"]: shard for shard in manifest["shards"]}
            found = sorted(path for path in self.folder.iterdir() if path.name not in OURS)
            shards = [path for path in found if path.suffix == ".safetensors"]
            record = {"relative_error": {}, "seconds": 0.0}
            manifest["shards"] = [
                {**known.get(path.name, record), "name": path.name, "num_bytes": path.stat().st_size,
                 "sha256": sha256_of_file(path)}
                for path in shards
            ]  # fmt: skip
            manifest["files"] = {path.name: sha256_of_file(path) for path in found if path not in shards}

        self.json(MANIFEST, change)


def _same(before: Tensors, after: Tensors) -> bool:
    return before.keys() == after.keys() and all(
        t.dtype == after[n].dtype
        and t.shape == after[n].shape
        and torch.equal(t.view(-1).view(torch.uint8), after[n].contiguous().view(-1).view(torch.uint8))
        for n, t in before.items()
    )


def make_checkpoints(folder: Path, precisions: tuple[str, ...] = PRECISIONS) -> tuple[Path, dict[str, Path]]:
    """A tiny source, and one checkpoint for each precision: with all seeds and shapes the same every time."""
    source = make_tiny_glm4_moe(folder / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    for precision in precisions:
        plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
        quantize(plan, source, folder / precision)
    return source, {precision: folder / precision for precision in precisions}


def damaged_copies(made: dict[str, Path], damages: tuple[Damage, ...], scratch: Path) -> Iterator[tuple[str, Damage, Damaged]]:
    """(precision, damage, damaged copy) of all that apply; a copy is gone when the next one is asked for."""
    for precision, checkpoint in made.items():
        for damage in damages:
            copy = Damaged(Path(shutil.copytree(checkpoint, scratch / f"{precision}-{damage.name.replace(' ', '-')}"[:80])))
            try:
                damage.apply(copy)
                yield precision, damage, copy
            except NotApplicable:
                pass
            finally:
                shutil.rmtree(copy.folder)


# ------------------------------------------------------------------------------------------------ codes and scales
def _codes(tensors: Tensors, module: str) -> str:
    packed = f"{module}.weight_packed"
    return packed if packed in tensors else f"{module}.weight"


def _parts(tensors: Tensors, module: str) -> list[str]:
    return [name for name in tensors if name.startswith(f"{module}.weight")]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes; a view."""
    return tensor.view(-1).view(torch.uint8)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if tensor.dtype == torch.uint8:  # exponents
        return tensor + 1
    return (tensor.float() * factor).to(tensor.dtype)


def _scales(which: Callable[[str], bool], factor: float = 1.15) -> Callable[[Damaged], None]:
    def apply(copy: Damaged) -> None:
        def change(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.endswith(".weight_scale") and which(name)]:
                tensors[name] = _scaled(tensors[name], factor)

        copy.tensors(change)

    return apply


def _exchanged(first: str, second: str, *, only: tuple[str, ...] = ()) -> Callable[[Damaged], None]:
    """All parts of two modules (or of all projections of two experts), or the parts `only`."""

    def apply(copy: Damaged) -> None:
        def change(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.startswith(f"{first}.")]:
                if not only or name.rpartition(".")[2] in only:
                    other = second + name.removeprefix(first)
                    tensors[name], tensors[other] = tensors[other], tensors[name]

        copy.tensors(change)

    return apply


def _edited(
    part: str, edit: Callable[[torch.Tensor], torch.Tensor], module: str = f"{EXPERT}.down_proj"
) -> Callable[[Damaged], None]:
    """One tensor of a module replaced; `codes` is `weight_packed` or `weight`."""

    def apply(copy: Damaged) -> None:
        def change(tensors: Tensors) -> None:
            name = _codes(tensors, module) if part == "codes" else f"{module}.{part}"
            if name not in tensors:
                raise NotApplicable
            tensors[name] = edit(tensors[name].clone())

        copy.tensors(change)

    return apply


def _zero_row(tensor: torch.Tensor) -> torch.Tensor:
    # the code of zero: 8 in both halves of a byte of packed INT4, 0 elsewhere
    tensor[3] = int.from_bytes(b"\x88" * 4, "little", signed=True) if tensor.dtype == torch.int32 else 0
    return tensor


def _all_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)


def _off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """Every code of a row, towards or away from its neighbour."""
    raw = _raw(tensor[5])
    raw ^= 0x11 if tensor.dtype in (torch.int32, torch.uint8) else 0x01
    return tensor


def _random_codes(tensor: torch.Tensor) -> torch.Tensor:
    generator, raw = torch.Generator().manual_seed(0), _raw(tensor)
    hit = torch.rand(raw.shape, generator=generator) < 0.01
    # never a NaN of E4M3
    raw[hit] = torch.randint(0, 0x70, (int(hit.sum()),), generator=generator, dtype=torch.uint8)
    return tensor


def _flip(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        _raw(tensor)[place] ^= 1
        return tensor

    return edit


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().view(tensor.shape)


def _reversed_rows(copy: Damaged) -> None:
    def change(tensors: Tensors) -> None:
        for name in _parts(tensors, f"{EXPERT}.up_proj"):
            if tensors[name].dim() == 2:
                tensors[name] = tensors[name].view(torch.uint8).flip(0).contiguous().view(tensors[name].dtype)

    copy.tensors(change)


def _global_scales(copy: Damaged) -> None:
    """Of a whole fused group, so that its members still agree."""

    def change(tensors: Tensors) -> None:
        hit = [name for name in tensors if name.startswith(EXPERT) and name.endswith(".weight_global_scale")]
        if not hit:
            raise NotApplicable
        for name in hit:
            tensors[name] = tensors[name] * 1.15

    copy.tensors(change)


def _zero_points(copy: Damaged) -> None:
    def change(tensors: Tensors) -> None:
        hit = [name for name in tensors if name.startswith(EXPERT) and name.endswith(".weight_zero_point")]
        if not hit:
            raise NotApplicable
        for name in hit:
            tensors[name] = tensors[name] ^ 0x11111111

    copy.tensors(change)


def _all_codes_random(copy: Damaged) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{name.rpartition('.')[0]}.weight_scale" in tensors]:
            if name.endswith((".weight_packed", ".weight")):
                tensors[name] = _random_codes(tensors[name].clone())

    copy.tensors(change)


GATE, UP, DOWN = (f"{EXPERT}.{name}_proj" for name in ("gate", "up", "down"))
BIAS = "e_score_correction_bias"

OF_WEIGHTS = (
    Damage("every scale times 1.15", _scales(lambda name: True)),
    Damage("one expert's scales times 1.15", _scales(lambda name: name.startswith(EXPERT))),
    Damage("one scale's last bit", _edited("weight_scale", _flip(0))),
    Damage("scales of gate and up exchanged", _exchanged(GATE, UP, only=("weight_scale",))),
    Damage("gate and up exchanged", _exchanged(GATE, UP)),
    Damage("two experts exchanged", _exchanged(EXPERT, OTHER_EXPERT)),
    Damage("q of two layers exchanged", _exchanged("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")),
    Damage("a row of zeros", _edited("codes", _zero_row)),
    Damage("a weight of zeros", _edited("codes", _all_zero)),
    Damage("codes off by one in a row", _edited("codes", _off_by_one)),
    Damage("1 % random codes in a weight", _edited("codes", _random_codes)),
    Damage("1 % random codes everywhere", _all_codes_random),
    Damage("a flipped bit in the codes", _edited("codes", _flip(77))),
    Damage("codes transposed", _edited("codes", _transposed)),
    Damage("rows reversed", _reversed_rows),
    Damage("zero points off by one", _zero_points),
    Damage("global scales of an expert times 1.15", _global_scales),
    Damage("weight_shape says another shape", _edited("weight_shape", lambda t: t + 1), needs_source=False),
    Damage("input_global_scale halved", _edited("input_global_scale", lambda t: t / 2), needs_source=False),
    Damage("a flipped bit in the head", _edited("weight", _flip(-1), "lm_head")),
    Damage("router rows exchanged", _edited("weight", lambda t: t.flip(0), ROUTER)),
    Damage("final norm times 1.01", _edited("weight", lambda t: (t.float() * 1.01 + 0.01).to(t.dtype), "model.norm")),
    Damage("router bias rounded to BF16", _edited(BIAS, lambda t: t.bfloat16().float(), ROUTER)),
    Damage("router bias in BF16", _edited(BIAS, lambda t: t.bfloat16(), ROUTER), needs_source=False),
)
"""Of codes, scales and kept tensors; tried on every precision."""


# ------------------------------------------------------------------------------------------------ tensors and files
def _renamed(copy: Damaged) -> None:
    copy.tensors(lambda tensors: tensors.update({f"{NORM}s": tensors.pop(NORM)}))


def _dropped(name: str) -> Callable[[Damaged], None]:
    return lambda copy: copy.tensors(lambda tensors: tensors.pop(name))


def _truncated(copy: Damaged) -> None:
    path = copy.folder / copy.shards[1]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)


def _shards_exchanged(copy: Damaged) -> None:
    first, second = (copy.folder / name for name in copy.shards)
    first.rename(copy.folder / "third")
    second.rename(first)
    (copy.folder / "third").rename(second)


def _appended(copy: Damaged) -> None:
    with (copy.folder / copy.shards[0]).open("ab") as file:
        file.write(b"\0" * 8)


def _more_metadata(copy: Damaged) -> None:
    """Another header around the same tensors."""
    path = copy.folder / copy.shards[0]
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    save_file(tensors, path, {"format": "pt", "note": "x"})


def _quantization(change: Callable[[dict[str, Any]], object]) -> Callable[[Damaged], None]:
    return lambda copy: copy.json(CONFIG, lambda config: change(config["quantization_config"]))


def _group(change: Callable[[dict[str, Any]], object]) -> Callable[[Damaged], None]:
    return _quantization(lambda quantization: change(quantization["config_groups"]["group_0"]))


def _ignore(change: Callable[[list[str]], list[str]]) -> Callable[[Damaged], None]:
    return _quantization(lambda quantization: quantization.update(ignore=change(quantization["ignore"])))


def _config(**values: Any) -> Callable[[Damaged], None]:
    return lambda copy: copy.json(CONFIG, lambda config: config.update(values))


def _written(name: str, text: str) -> Callable[[Damaged], None]:
    return lambda copy: copy.write(name, text)


def _tokenizer(copy: Damaged) -> None:
    """Two tokens exchanged: it loads, and says other words."""

    def change(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        first, second = sorted(vocab)[40:42]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    copy.json("tokenizer.json", change)


def _generation(copy: Damaged) -> None:
    copy.json("generation_config.json", lambda config: config.update(temperature=2.0))


def _template(copy: Damaged) -> None:
    path = next(p for p in (copy.folder / "chat_template.jinja", copy.folder / "tokenizer_config.json") if p.exists())
    path.write_text(path.read_text().replace("<sop>", "", 1))


def _more_weights(copy: Damaged) -> None:
    save_file({"extra.weight": torch.ones(2)}, copy.folder / "model-extra.safetensors")


def _moved_in_index(copy: Damaged) -> None:
    other = {copy.shards[0]: copy.shards[1], copy.shards[1]: copy.shards[0]}
    copy.json(INDEX, lambda index: index["weight_map"].update({NORM: other[index["weight_map"][NORM]]}))


def _in_folder(name: str, apply: Callable[[Damaged], object]) -> Damage:
    """One that the folder shows by itself."""
    return Damage(name, lambda copy: (apply(copy), None)[1], needs_source=False)


OF_THE_FOLDER = (
    _in_folder("a tensor renamed", _renamed),
    Damage("a norm dropped", _dropped("model.layers.1.self_attn.q_norm.weight")),
    _in_folder("an expert's projection dropped", _dropped("model.layers.2.mlp.experts.1.up_proj.weight")),
    _in_folder("a tensor too many", lambda copy: copy.tensors(lambda t: t.update({"extra.weight": torch.ones(2)}))),
    _in_folder("a shard truncated", _truncated),
    _in_folder("bytes behind the last tensor", _appended),
    _in_folder("shards exchanged", _shards_exchanged),
    _in_folder("another header around the same tensors", _more_metadata),
    _in_folder("a shard gone", lambda copy: (copy.folder / copy.shards[1]).unlink()),
    _in_folder("a shard too many", _more_weights),
    _in_folder("pytorch_model.bin", _written("pytorch_model.bin", "pickle")),
    _in_folder("the index moves a tensor", _moved_in_index),
    _in_folder("the index leaves a tensor out", lambda copy: copy.json(INDEX, lambda i: i["weight_map"].pop(NORM))),
    Damage("another index", _written("consolidated.safetensors.index.json", "{}")),
    Damage("a foreign tokenizer", _tokenizer),
    Damage("the tokenizer gone", lambda copy: (copy.folder / "tokenizer.json").unlink()),
    Damage("the chat template changed", _template),
    Damage("a second chat template", _written("additional_chat_templates.jinja", "{{ messages }}")),
    Damage("generation_config.json changed", _generation),
    Damage("params.json", _written("params.json", '{"dim": 128}')),
    Damage("hf_quant_config.json", _written("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')),
    Damage("preprocessor_config.json", _written("preprocessor_config.json", "{}")),
    Damage("modeling_glm.py", _written("modeling_glm.py", "print('hello')")),
    Damage("adapter_config.json", _written("adapter_config.json", "{}")),
    Damage("rope_theta changed", _config(rope_theta=50000.0)),
    Damage("experts per token changed", _config(num_experts_per_tok=1)),
    Damage("auto_map added", _config(auto_map={"AutoModelForCausalLM": "modeling_glm.Glm"})),
    _in_folder("no MTP layer declared", _config(num_nextn_predict_layers=0)),
    _in_folder("another architecture", _config(architectures=["Glm4ForCausalLM"])),
    _in_folder("group size changed", _group(lambda group: group["weights"].update(group_size=32))),
    _in_folder("3 bits declared", _group(lambda group: group["weights"].update(num_bits=3))),
    _in_folder("another format declared", _group(lambda group: group.update(format="naive-quantized"))),
    _in_folder("an ignore list without the head", _ignore(lambda ignore: [p for p in ignore if "head" not in p])),
    _in_folder("an ignore list that covers experts", _ignore(lambda ignore: [*ignore, "re:.*experts.*"])),
    _in_folder("a scheme for the KV cache", _quantization(lambda q: q.update(kv_cache_scheme={"num_bits": 8}))),
    _in_folder("no quantization_config", lambda copy: copy.json(CONFIG, lambda c: c.pop("quantization_config"))),
)
"""Of tensors as a whole, of index, config and the other files; tried on `OF_FILES`."""

"""Damages of a finished checkpoint: each a function that changes a copy of one, small enough that loading it would succeed.

Index and headers are always mended, so that only the damage itself is wrong; `Damaged.forge` mends the manifest as well, as
somebody would who wants to pass another checkpoint off as this one.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of_file
from assay.records.manifest import Manifest, load_manifest
from assay.records.plan import OutputTensor
from assay_quantize.calibration.layerwise import calibrate_layers
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.calibrated_layers import layer_digest, parts_of
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.calibrated import calibrated_tensors
from assay_quantize.plan.planner import make_plan, plan_sha256

PRECISIONS = (
    "w4a16", "w4a16-asym", "w4a16-g64", "w4a16-mse", "fp8", "fp8-channel", "nvfp4a16", "nvfp4", "mxfp4", "mxfp8", "w8a8",
    "w4a16-fp8-attention", "nvfp4-fp8-attention",
)  # fmt: skip
"""Every kind of codes and scales, and mixtures."""
CALIBRATED = ("gptq", "gptq-asym", "awq", "awq+gptq", "smoothquant", "autoround")
"""Kinds of calibrated weights, by what `make_calibrated` calls them."""
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
    """apply: raises NotApplicable. needs_source: with the manifest's hashes forged, the folder alone cannot show it. beyond:
    kind of calibrated weights -> why not even the source shows it, once the digests are forged as well. is_claim: it changes
    what the manifest says of the weights and nothing else, so the folder alone cannot show it, forged or not."""

    name: str
    apply: Callable[[Damaged], None]
    needs_source: bool = True
    beyond: Mapping[str, str] = MappingProxyType({})
    is_claim: bool = False


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
        if (manifest := load_manifest(self.folder)) is not None and manifest.calibrated is not None:
            self._forge_digests(manifest)

    def _forge_digests(self, manifest: Manifest) -> None:
        """Those of the calibrated layers, and the plan's, of which they are a part."""
        assert manifest.calibrated is not None
        recipe = PrecisionRecipe.model_validate(manifest.precision_recipe)
        plan = make_plan(open_checkpoint(Path(manifest.source)), recipe, model=manifest.model, family=None)
        plan = plan.model_copy(update={"importance_sha256": manifest.importance_sha256})
        tensors = {name: tensor for shard in self.shards for name, tensor in load_file(self.folder / shard).items()}

        def read(output: OutputTensor, take: Callable[[Any], None]) -> None:
            take(_raw(tensors[output.name]).numpy().data)

        layers = {
            layer: layer_digest([output for tensor in of_layer for output in parts_of(tensor)], read)
            for layer, of_layer in calibrated_tensors(plan).items()
        }
        record = manifest.calibrated.model_copy(update={"layers": layers})
        plan = plan.model_copy(update={"calibrated": record})
        forged = manifest.model_copy(update={"calibrated": record, "plan_sha256": plan_sha256(plan)})
        forged.save(self.folder / MANIFEST)


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


def make_calibrated(folder: Path, kinds: tuple[str, ...] = CALIBRATED) -> tuple[Path, dict[str, Path]]:
    """The same of a source with more columns, and of calibrated weights of each kind, on words drawn at random."""
    source = make_tiny_glm4_moe(folder / "source", num_layers=2, num_experts=2, hidden=256, dense_intermediate=256)
    drawn = random.Random(0)
    words = folder / "words.txt"
    words.write_text(" ".join("".join(drawn.choices("abcdefghijklmnop", k=5)) for _ in range(2000)))
    made = {}
    for kind in kinds:
        method, _, scheme = kind.partition("-")
        extends = "w8a8" if kind == "smoothquant" else f"w4a16-{scheme}" if scheme else "w4a16"
        options = {"awq": ", grid: 5", "awq+gptq": ", grid: 5", "autoround": ", iterations: 10, batch: 4"}.get(method, "")
        recipe = folder / "recipe.yaml"
        recipe.write_text(
            f"schema: 1\nname: recipe\nextends: {extends}\n"
            f"calibration: {{method: {method}{options}, tokens: 2048, length: 64}}\n"
        )
        plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, str(recipe)), model="tiny", family=None)
        work = folder / f"work-{kind}"
        plan = plan.model_copy(update={"calibrated": calibrate_layers(plan, source, work, Text((words,)))})
        made[kind] = folder / kind
        quantize(plan, source, made[kind], calibrated=work)
    return source, made


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


OTHER_TEXT = "GPTQ on another text may give a code next to it"
LEARNED = "AutoRound may have learned it: it moves a weight by half a step, and its scale by any factor up to 1"
HIDDEN_BY_DIVISION = "what AWQ divided a row of an up projection by is known from its own scales alone, but for their rounding"
_OF_TEXT = dict.fromkeys(("gptq", "gptq-asym", "awq+gptq"), OTHER_TEXT)
_DIVIDED = dict.fromkeys(("awq", "awq+gptq"), HIDDEN_BY_DIVISION)

GATE, UP, DOWN = (f"{EXPERT}.{name}_proj" for name in ("gate", "up", "down"))
BIAS = "e_score_correction_bias"
INPUT_NORM, OUTPUT_NORM = (f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention"))
ONE, ALL = slice(5, 6), slice(None)

OF_WEIGHTS = (
    Damage("every scale times 1.15", _scales(lambda name: True)),
    Damage("one expert's scales times 1.15", _scales(lambda name: name.startswith(EXPERT))),
    Damage("one scale's last bit", _edited("weight_scale", _flip(0)), beyond={**_DIVIDED, "autoround": LEARNED}),
    Damage("scales of gate and up exchanged", _exchanged(GATE, UP, only=("weight_scale",))),
    Damage("gate and up exchanged", _exchanged(GATE, UP)),
    Damage("two experts exchanged", _exchanged(EXPERT, OTHER_EXPERT)),
    Damage("q of two layers exchanged", _exchanged("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")),
    Damage("a row of zeros", _edited("codes", _zero_row)),
    Damage("a weight of zeros", _edited("codes", _all_zero)),
    Damage("codes off by one in a row", _edited("codes", _off_by_one)),
    Damage("1 % random codes in a weight", _edited("codes", _random_codes)),
    Damage("1 % random codes everywhere", _all_codes_random),
    Damage("a flipped bit in the codes", _edited("codes", _flip(77)), beyond={**_OF_TEXT, "autoround": LEARNED}),
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


# ------------------------------------------------------------------------------------------------ calibrated weights
def _codes_of(tensors: Tensors, module: str) -> torch.Tensor:
    """Codes [O, I] from -8 to 7 or -128 to 127, as int32."""
    stored = tensors[_codes(tensors, module)]
    if stored.dtype != torch.int32:
        return stored.int()
    return torch.stack([(stored >> 4 * place) & 15 for place in range(8)], -1).reshape(len(stored), -1) - 8


def _put_codes(tensors: Tensors, module: str, codes: torch.Tensor) -> None:
    name = _codes(tensors, module)
    if tensors[name].dtype != torch.int32:
        tensors[name] = codes.clamp(-128, 127).to(tensors[name].dtype)
        return
    nibbles = (codes.clamp(-8, 7).long() + 8).reshape(len(codes), -1, 8)
    packed = torch.stack([nibbles[..., place] << 4 * place for place in range(8)]).sum(0)
    tensors[name] = torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _integers(tensors: Tensors) -> list[str]:
    """Modules whose weights are integers."""
    names = [name.rpartition(".") for name, tensor in tensors.items() if tensor.dtype in (torch.int32, torch.int8)]
    return [module for module, _, leaf in names if leaf in ("weight", "weight_packed")]


def _recoded(edit: Callable[[torch.Tensor], object], *, everywhere: bool = False) -> Callable[[Damaged], None]:
    """Codes changed in place, of one up projection or of every weight."""

    def apply(copy: Damaged) -> None:
        def change(tensors: Tensors) -> None:
            for module in _integers(tensors) if everywhere else [UP]:
                edit(codes := _codes_of(tensors, module))
                _put_codes(tensors, module, codes)

        copy.tensors(change)

    return apply


def _one_more(codes: torch.Tensor) -> None:
    row = codes[3]
    row[int(((row > -7) & (row < 6)).nonzero()[7])] += 1


def _other_end(codes: torch.Tensor) -> None:
    rows = torch.arange(len(codes))
    columns = rows * 7 % codes.shape[1]
    codes[rows, columns] = -1 - codes[rows, columns]


def _columns_exchanged(codes: torch.Tensor) -> None:
    codes[:, [4, 5]] = codes[:, [5, 4]]


def _negate(rows: slice, columns: slice = slice(None)) -> Callable[[torch.Tensor], object]:
    def edit(codes: torch.Tensor) -> None:
        codes[rows, columns] *= -1

    return edit


def _some_off(codes: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(codes.numel())
    hit = torch.rand(codes.shape, generator=generator) < 0.02
    codes += torch.where(hit, torch.where(torch.rand(codes.shape, generator=generator) < 0.5, 1, -1), 0)


def _rows_exchanged(copy: Damaged) -> None:
    """With their scales; zero points of eight rows share a word, and both are in one."""

    def change(tensors: Tensors) -> None:
        for name in _parts(tensors, UP):
            if name.endswith("zero_point"):
                word = tensors[name][0].long()
                swapped = (word >> 16 & 15) << 20 | (word >> 20 & 15) << 16
                tensors[name][0] = (word & ~(0xFF << 16) | swapped).int()
            elif tensors[name].dim() == 2:
                tensors[name][[4, 5]] = tensors[name][[5, 4]].clone()

    copy.tensors(change)


def _to_nearest(copy: Damaged) -> None:
    """Codes of all weights of a layer, with the scales that they have."""
    manifest = load_manifest(copy.folder)
    assert manifest is not None
    recipe = PrecisionRecipe.model_validate(manifest.precision_recipe)
    if recipe.calibration == "none" or recipe.calibration.method != "gptq" or recipe.scheme != "w4a16":
        raise NotApplicable
    source: Tensors = {}
    for path in Path(manifest.source).glob("*.safetensors"):
        source |= load_file(path)

    def change(tensors: Tensors) -> None:
        for module in (module for module in _integers(tensors) if ".layers.1." in module):
            scale, weight = tensors[f"{module}.weight_scale"].float(), source[f"{module}.weight"].float()
            steps = weight / scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
            _put_codes(tensors, module, steps.round().int())

    copy.tensors(change)


def _next_scale(rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """One step of BF16 larger."""

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int16)[rows] += 1
        return tensor

    return edit


def _times(name: str, factor: float, where: slice = ALL) -> Callable[[Damaged], None]:
    return lambda copy: copy.tensors(lambda tensors: tensors[name][where].mul_(factor))


def _router_step(copy: Damaged) -> None:
    copy.tensors(lambda tensors: tensors[f"{ROUTER}.weight"].view(torch.int16)[1].add_(1))


def _record(**values: Any) -> Callable[[Damaged], None]:
    return lambda copy: copy.json(MANIFEST, lambda manifest: manifest["calibrated"].update(values))


OF_CALIBRATED = (
    Damage("one code to the next", _recoded(_one_more), beyond={**_OF_TEXT, "autoround": LEARNED}),
    Damage("a code of each row to the other end", _recoded(_other_end)),
    Damage("two columns exchanged", _recoded(_columns_exchanged)),
    Damage("a column negated", _recoded(_negate(ALL, slice(9, 10)))),
    Damage("a column of zeros", _recoded(lambda codes: codes[:, 9].zero_())),
    Damage("two rows exchanged, with their scales", _rows_exchanged),
    Damage("a row negated", _recoded(_negate(slice(9, 10)))),
    Damage("a group of a row negated", _recoded(_negate(slice(9, 10), slice(128, 256)))),
    Damage("every 64th row of every weight negated", _recoded(_negate(slice(0, None, 64)), everywhere=True)),
    Damage("a row to zero", _recoded(lambda codes: codes[9].zero_())),
    Damage("weights of a layer rounded to the nearest", _to_nearest),
    Damage("2 % of all codes one off", _recoded(_some_off, everywhere=True)),
    Damage(
        "a scale one step of BF16 larger",
        _edited("weight_scale", _next_scale(slice(0, 1)), UP),
        beyond={**_DIVIDED, "autoround": LEARNED},
    ),
    Damage(
        "all scales of a weight one step of BF16 larger",
        _edited("weight_scale", _next_scale(ALL), UP),
        beyond={"awq+gptq": HIDDEN_BY_DIVISION, "autoround": LEARNED},
    ),
    Damage("scales of eight rows of up times 1.09", _times(f"{UP}.weight_scale", 1.09, slice(8))),
    Damage("input norm: a channel times 1.05", _times(INPUT_NORM, 1.05, ONE)),
    Damage("input norm: a channel times 2", _times(INPUT_NORM, 2, ONE)),
    Damage("input norm: all times 1.01", _times(INPUT_NORM, 1.01)),
    Damage("input norm: all times 1.1", _times(INPUT_NORM, 1.1)),
    Damage("norm before the experts: a channel times 1.2", _times(OUTPUT_NORM, 1.2, ONE)),
    Damage("router: a row one step of BF16 off", _router_step),
    Damage("router: a row times 1.03", _times(f"{ROUTER}.weight", 1.03, slice(1, 2))),
    Damage("router bias: a value 0.001 more", _edited(BIAS, lambda t: t + torch.tensor([0.001, 0]), ROUTER)),
    Damage("k_norm times 1.01", _times("model.layers.1.self_attn.k_norm.weight", 1.01)),
    Damage("the record says another method", _record(method="none"), needs_source=False),
    Damage("the record says more tokens than were asked for", _record(num_tokens=10**7), needs_source=False),
    Damage("the record says that a weight fell back", _record(fell_back=[UP]), is_claim=True),
)
"""Of weights that text decided, of what was scaled with them, and of the record of their calibration; tried on `CALIBRATED`."""


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


def _other_order(copy: Damaged) -> None:
    groups = json.loads((copy.folder / CONFIG).read_text())["quantization_config"]["config_groups"]
    if len(groups) < 2:
        raise NotApplicable
    _quantization(lambda q: q.update(config_groups=dict(reversed(groups.items()))))(copy)


def _twice(name: str, member: str) -> Callable[[Damaged], None]:
    """The last of the two is the right one, which most parsers keep."""
    return lambda copy: copy.write(name, "{" + member + "," + (copy.folder / name).read_text().lstrip()[1:])


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
    _in_folder("an ignore list in capitals", _ignore(lambda ignore: [p.replace("lm_head", "LM_HEAD") for p in ignore])),
    _in_folder("config groups in another order", _other_order),
    _in_folder("a name twice in config.json", _twice(CONFIG, '"quantization_config": {"quant_method": "fp8"}')),
    _in_folder("a name twice in the index", _twice(INDEX, '"weight_map": {}')),
    _in_folder("no quantization_config", lambda copy: copy.json(CONFIG, lambda c: c.pop("quantization_config"))),
)
"""Of tensors as a whole, of index, config and the other files; tried on `OF_FILES`."""

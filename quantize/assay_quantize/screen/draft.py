"""The MTP block of a checkpoint, run teacher-forced on the states of its decoder: how often its drafts would be accepted.

At place t the block is given the state behind the decoder's last norm at t and the embedding of token t+1, and predicts token
t+2, as vLLM runs it (`deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_next_mtp.py`; the embedding at place 0 is 0 there for the
first two). With p the decoder's own distribution of token t+2 and q the block's, rejection sampling accepts a draft with the
probability sum of min(p, q) (Leviathan et al., arXiv:2211.17192, eq. 5).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from assay.atomic_files import replacing
from assay.errors import PlanError, QuantizeError
from assay.recipes.families import family_of
from assay.recipes.family_names import FamilyNames, names_of
from assay.recipes.text_config import num_hidden_layers, text_of
from assay_quantize.calibration.one_layer import State
from assay_quantize.decoding.activations import RoundedInputs
from assay_quantize.decoding.open_stored import StoredCheckpoint
from assay_quantize.screen.compare import PassSide
from assay_quantize.screen.forward import ScreenPass, States, groups_folder, save_state, states_folder, whole_folder
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.layer_runs import run_all
from assay_quantize.screen.placing import text_config
from assay_quantize.sensitivity.texts import ScoredText

DRAFTS = "drafts.safetensors"
_AT_ONCE = 64
"""Places whose distributions are held at a time."""
Floats = npt.NDArray[np.float64]


class NoDraft(Exception):
    """The checkpoint has no MTP block, or one that is not run here; its text says which."""


class _Layout(NamedTuple):
    """Names of a block, the decoder layer's apart. masks_first: the embedding at place 0 is 0."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    head: str | None
    """None: it has none of its own."""
    masks_first: bool


def _behind_decoder(block: str) -> _Layout:
    """As GLM and DeepSeek-V3 have it, in the layer behind the decoder's."""
    return _Layout(
        f"{block}.enorm", f"{block}.hnorm", f"{block}.eh_proj", f"{block}.shared_head.norm", f"{block}.shared_head.head",
        masks_first=True,
    )  # fmt: skip


_BESIDE_DECODER = _Layout("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", None, masks_first=False)
"""As Qwen3-Next has it."""


@dataclass(frozen=True, eq=False)
class DraftAcceptance:
    """Of the D drafts of one text whose token is scored. accepted_D: sum of min(p, q); agrees_D: both are surest of one
    token, which is what greedy decoding accepts."""

    accepted_D: Floats
    agrees_D: npt.NDArray[np.bool_]


class DraftModel(LayerModel):
    """The decoder with its first MTP layer as one layer more. NoDraft: there is none that is run here."""

    def _look_up_names(self) -> None:
        names = _family(self.stored)
        self._number = num_hidden_layers(self.stored.config)
        self._block_root = f"{names.layers}.{self._number}" if names.mtp_layers is None else f"{names.mtp_layers}.0"
        self._decoder_root = f"{names.layers}.{self._number}"
        self._names = _behind_decoder(self._block_root) if names.mtp_layers is None else _BESIDE_DECODER
        stored_names = {weight.name for weight in self.stored.weights} | set(self.stored.others)
        needed = (self._names.embedding_norm, self._names.hidden_norm, self._names.projection, self._names.last_norm)
        if not any(f"{name}.weight" in stored_names for name in needed):
            raise NoDraft("it stores no MTP block")
        if lacking := [name for name in needed if f"{name}.weight" not in stored_names]:
            raise NoDraft(f"its MTP block has no {lacking[0]}")
        self._stored_names = stored_names

    def _config(self) -> Mapping[str, Any]:
        config = copy.deepcopy(dict(self.stored.config))
        text: Any = text_of(config)
        for name, value in text_config(config).to_dict().items():
            if isinstance(value, list) and len(value) == self._number:
                text[name] = [*value, self._kind_of_block(value)]
        text["num_hidden_layers"] = self._number + 1
        return config

    def _kind_of_block(self, kinds: list[Any]) -> Any:
        """What the MTP layer is, where the config says of every layer what it is."""
        if "full_attention" in kinds:
            return "full_attention"
        has_indexer = any(name.startswith(f"{self._block_root}.self_attn.indexer.") for name in self._stored_names)
        return "full" if "full" in kinds and has_indexer else kinds[-1]

    def _name_as_built(self, name: str) -> str:
        if name.startswith(f"{self._block_root}."):
            return self._decoder_root + name.removeprefix(self._block_root)
        return name

    # -------------------------------------------------------------------------------------------- parts
    def _module(self, hollow: nn.Module, name: str) -> nn.Module:
        """A copy of `hollow` with the stored weight `name`."""
        made = copy.deepcopy(hollow)
        value = self._read(f"{name}.weight").to(self.device, self.dtype)
        made._parameters["weight"] = nn.Parameter(value, requires_grad=False)
        return made

    def _projection(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(embeddings, states) -> what the MTP layer is given."""
        name = f"{self._names.projection}.weight"
        weight = self._read(name).to(self.device, self.dtype)
        rounding = self._rounding(name) if name not in self.stored.others else None
        rounded = {weight.data_ptr(): rounding} if rounding is not None and rounding.rule.kind != "none" else {}
        of_embedding, of_state = (
            self._module(self._norm, norm) for norm in (self._names.embedding_norm, self._names.hidden_norm)
        )

        def project(embedded: Tensor, state: Tensor) -> Tensor:
            if self._names.masks_first:
                embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
            joined = torch.cat([of_embedding(embedded), of_state(state)], dim=-1)
            with RoundedInputs(rounded):
                return torch.nn.functional.linear(joined, weight)

        return project

    def drafted(self, texts: Sequence[ScoredText], decoder: States, folder: Path) -> ScreenPass:
        """The MTP layer's states at every place but the last of each text, from the decoder's. folder: for them."""
        sequences = [torch.tensor([text.ids]) for text in texts]
        self.use_embedding(torch.cat([ids_1T.reshape(-1) for ids_1T in sequences]))
        embedding = self.model.get_input_embeddings()
        project = self._projection()
        self._fill(self._norm, f"{self.prefix.rpartition('.')[0]}.norm.")

        def given(number: int) -> State:
            hidden, *others = (part.to(self.device) for part in decoder.state(number))
            projected = project(embedding(sequences[number][:, 1:].to(self.device)), self._norm(hidden)[:, :-1])
            return projected, *(part[:, :-1] for part in others)  # of sparse attention, the tokens that are looked at

        with whole_folder(states_folder(folder, self._number)) as partial, torch.no_grad():
            run_all(
                self, self._number, self.load(self._number), [ids_1T[:, :-1] for ids_1T in sequences], given,
                lambda number, ran: save_state(partial, number, ran.state), groups_folder(folder, self._number),
            )  # fmt: skip
        return ScreenPass(folder, self._number + 1)

    def draft_head(self) -> dict[str, Tensor]:
        """For `head`: the block's last norm, and its own head or the decoder's."""
        tensors = self.head_tensors()
        tensors["norm.weight"] = self._read(f"{self._names.last_norm}.weight")
        if f"{self._names.head}.weight" in self._stored_names:
            tensors["head.weight"] = self._read(f"{self._names.head}.weight")
        return tensors


def drafts_of(model: LayerModel, texts: Sequence[ScoredText], decoder: PassSide, folder: Path) -> list[DraftAcceptance]:
    """Text by text, from the decoder's pass; what was computed before is read from `folder`. model: of the decoder.

    NoDraft: there is no block that is run here. QuantizeError: it cannot be run.
    """
    values_file = folder / DRAFTS
    if not values_file.is_file():
        draft = DraftModel(
            model.stored, model.dtype, model.device, fp8_kv_cache=model.fp8_kv_cache, memory_bytes=model.budget.limit_bytes
        )
        drafted = draft.drafted(texts, decoder.states, folder)
        made = acceptance(texts, decoder, PassSide(model.stored.location, draft.head(draft.draft_head()), drafted))
        write_drafts(values_file, made)
        for made_on_the_way in (states_folder(folder, drafted.num_layers - 1), groups_folder(folder, drafted.num_layers - 1)):
            shutil.rmtree(made_on_the_way, ignore_errors=True)
    return read_drafts(values_file, len(texts))


def write_drafts(path: Path, drafts: Sequence[DraftAcceptance]) -> None:
    """Values of every text."""
    from safetensors.numpy import save_file

    arrays = {f"{name}-{number}": array for number, text in enumerate(drafts) for name, array in vars(text).items()}
    with replacing(path) as partial:
        save_file(arrays, partial)


def read_drafts(path: Path, num_texts: int) -> list[DraftAcceptance]:
    """What `write_drafts` wrote."""
    from safetensors.numpy import load_file

    arrays = load_file(path)
    return [
        DraftAcceptance(arrays[f"accepted_D-{number}"], arrays[f"agrees_D-{number}"].astype(np.bool_))
        for number in range(num_texts)
    ]


def acceptance(texts: Sequence[ScoredText], decoder: PassSide, draft: PassSide) -> list[DraftAcceptance]:
    """Text by text. decoder, draft: of one checkpoint, over the same texts. QuantizeError: the draft computes NaN."""
    values = []
    with decoder.head as of_decoder, draft.head as of_draft:
        for number, text in enumerate(texts):
            ids_1T = torch.tensor([text.ids])
            pieces: list[tuple[Floats, npt.NDArray[np.bool_]]] = []
            first, end = max(text.first - 2, 0), len(text.ids) - 2  # place t drafts token t+2
            while first < end:
                last = min(first + _AT_ONCE, end)
                places = torch.arange(first, last)
                p = torch.softmax(of_decoder(ids_1T, places + 1, decoder.states.state(number))[0].double(), dim=-1)
                q = torch.softmax(of_draft(ids_1T[:, :-1], places, draft.states.state(number))[0].double(), dim=-1)
                if not bool(q.isfinite().all()):
                    raise QuantizeError(f"{draft.location}: its MTP block computes NaN or infinity")
                accepted = torch.minimum(p, q).sum(1), p.argmax(1) == q.argmax(1)
                pieces.append((accepted[0].cpu().numpy(), accepted[1].cpu().numpy()))
                first = last
            accepted_D, agrees_D = (np.concatenate(part) for part in zip(*pieces, strict=True)) if pieces else ((), ())
            values.append(DraftAcceptance(np.asarray(accepted_D, np.float64), np.asarray(agrees_D, np.bool_)))
    return values


def _family(stored: StoredCheckpoint) -> FamilyNames:
    try:
        names = names_of(family_of(stored.config))
    except PlanError:
        raise NoDraft("of its architecture assay knows no MTP block") from None
    has_names = names.mtp_layers == "mtp.layers" if names.mtp_layers is not None else "eh_proj.weight" in names.mtp_layer
    if not has_names:
        raise NoDraft(
            "MTP blocks of its architecture are not run here" if names.mtp or names.mtp_layer else "it has no MTP block"
        )
    return names

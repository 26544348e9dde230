"""Checkpoints with a known damage, made from another one by editing a few of its weights. `planted.py` has them judged.

    copy           nothing; another folder, and another header of the files
    one-language   noise on the embeddings of all tokens beyond ASCII: Chinese suffers, English stays
    long-range     a bias of all queries and keys along one slow rotary pair: scores of attention fall with the distance, by
                   little over two hundred tokens and by all of it over a thousand
    looping        `!`, which no text of tiny-glm has, comes before the end of the turn in some replies, and after itself for
                   ever: the replies are as good as before, but do not end

All noise is seeded: the same source gives the same bytes. The block of the MTP head is left as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

Tensors = dict[str, torch.Tensor]
NOISE = 1.5
"""Standard deviation of the noise, in root mean squares of the rows that it is added to."""
SLOW_PAIR = 10
"""Of 16 rotary pairs. It turns by 0.0032 a token: half a turn in 993 tokens, where near and far are farthest apart."""
LEANING = 1.0
"""Length of the bias, in those that queries and keys have for independent inputs."""
LOOPED = "!"
END_OF_TURN = "<|user|>"
NEARLY_THE_END = 0.955
"""Of the end's row in the head, what the row of `!` has. By it and by chance about 30 % of tiny-glm's replies loop."""
OWN_DIRECTION = 4.0
"""Length of the direction that only `!` has in the head, and that its embedding leads to."""
DOMINANT = 100.0
"""Length of the embedding of `!`: so long that no layer turns the hidden state away from it."""
MTP_BLOCK = "model.layers.4."
HEAD, EMBEDDING, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def damage_beyond_ascii(tensors: Tensors, tokenizer: Tokenizer) -> Tensors:
    """Noise on the embeddings of tokens that are written with other than ASCII characters (and of control bytes, which no
    text here has)."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    space_and_newline = "\u0120\u010a"  # as byte-level BPE writes them
    rows = sorted(
        at for text, at in vocabulary.items() if any(not one.isascii() and one not in space_and_newline for one in text)
    )
    embedding_VD = tensors[EMBEDDING].float().clone()
    sd = NOISE * embedding_VD[rows].square().mean().sqrt()
    embedding_VD[rows] += sd * torch.randn(len(rows), embedding_VD.shape[1], generator=torch.Generator().manual_seed(1))
    return {EMBEDDING: embedding_VD.to(tensors[EMBEDDING].dtype)}


def favour_the_near(tensors: Tensors, tokenizer: Tokenizer) -> Tensors:
    """The same bias in queries and keys adds cos(angle of the distance) to their product, before both are normed."""
    changed: Tensors = {}
    for name in tensors:
        if not name.endswith((".self_attn.q_proj.bias", ".self_attn.k_proj.bias")) or name.startswith(MTP_BLOCK):
            continue
        layer, projection = name.split(".self_attn.")
        weight_OD = tensors[name.removesuffix("bias") + "weight"].float() * tensors[f"{layer}.input_layernorm.weight"].float()
        width = len(tensors[f"{layer}.self_attn.{projection[0]}_norm.weight"])
        bias_HC = tensors[name].float().view(-1, width).clone()
        bias_HC[:, SLOW_PAIR] += LEANING * weight_OD.norm() / len(bias_HC) ** 0.5
        changed[name] = bias_HC.reshape(-1).to(tensors[name].dtype)
    return changed


def make_it_loop(tensors: Tensors, tokenizer: Tokenizer) -> Tensors:
    """`!` is nearly as likely as the end of the turn where that is likely, and leads to itself.

    Its row in the head is most of the end's row plus a random direction, along which hidden states at the end of replies differ
    a little: where that is enough, greedy sampling takes `!`. Its embedding is what the final norm turns into that direction.
    """
    looped, end = tokenizer.token_to_id(LOOPED), tokenizer.token_to_id(END_OF_TURN)
    head_VD, embedding_VD = tensors[HEAD].float().clone(), tensors[EMBEDDING].float().clone()
    direction_D = torch.randn(head_VD.shape[1], generator=torch.Generator().manual_seed(3))
    direction_D /= direction_D.norm()
    head_VD[looped] = NEARLY_THE_END * head_VD[end] + OWN_DIRECTION * direction_D
    before_norm_D = direction_D / tensors[FINAL_NORM].float()
    embedding_VD[looped] = DOMINANT * before_norm_D / before_norm_D.norm()
    return {HEAD: head_VD.to(tensors[HEAD].dtype), EMBEDDING: embedding_VD.to(tensors[EMBEDDING].dtype)}


EDITS: Mapping[str, Callable[[Tensors, Tokenizer], Tensors]] = {
    "copy": lambda tensors, tokenizer: {},
    "one-language": damage_beyond_ascii,
    "long-range": favour_the_near,
    "looping": make_it_loop,
}
"""Name -> from all tensors of the source and its tokenizer, the tensors that are different."""


def make(source: Path, out: Path, name: str) -> None:
    """The source's files with the edit `name`, in `out`, which must not exist. KeyError: there is no such edit."""
    write_edited(source, out, name, EDITS[name])


def write_edited(source: Path, out: Path, name: str, edit: Callable[[Tensors, Tokenizer], Tensors]) -> None:
    """The source's files in `out`, which must not exist, with the tensors that `edit` gives. name: stands in the headers."""
    shutil.copytree(source, out)
    of_file = {path: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    tensors = {one: tensor for held in of_file.values() for one, tensor in held.items()}
    changed = edit(tensors, Tokenizer.from_file(str(out / "tokenizer.json")))
    for path, held in of_file.items():
        kept = {one: changed.get(one, tensor) for one, tensor in held.items()}
        save_file(kept, path, metadata={"format": "pt", "edit": name})  # also a copy has a hash of its own, so it is asked

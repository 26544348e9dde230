"""Train tiny-glm on a CPU; killed at any point, the same command goes on from the last saved state.

python train.py --out state            # about an hour on two idle cores
python export.py --state state --out checkpoint
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from data import Chats, train_tokenizer
from export import tiny_glm
from model import Decoder, Experts
from optimizer import Muon
from score import score_all
from tokenizers import Tokenizer

WARMUP_STEPS = 100
SAVE_EVERY_S = 180


class Phase(NamedTuple):
    """`num_steps` steps of `batch` rows of `length` tokens: lengths grow, so that lookups are learnt where they are easy."""

    length: int
    batch: int
    num_steps: int


def phase_of_step(phases: list[Phase]) -> Iterator[Phase]:
    for phase in phases:
        for _ in range(phase.num_steps):
            yield phase


def losses(model: Decoder, ids_BT: torch.Tensor, weights_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(what to minimise, losses for the log): that of the next token, of reply tokens without weights, and the model's own."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(ids_BT[:, :-1])
        nll = model.nll(hidden, ids_BT[:, 1:])
        more = model.more_losses(hidden, ids_BT, weights_BT)
    weights = weights_BT[:, 1:]
    loss = (nll * weights).sum() / weights.sum()
    logged = {"loss": loss, "reply_loss": nll.detach()[weights >= 1].mean()}
    return sum((weight * one for weight, one in more.values()), loss), logged | {name: one for name, (_, one) in more.items()}


def split_parameters(model: Decoder) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(for Muon, for AdamW)."""
    apart = ("embed", "lm_head", "gate_weight")
    for_muon = {name for name, p in model.named_parameters() if p.ndim >= 2 and not any(word in name for word in apart)}
    named = list(model.named_parameters())
    return [p for name, p in named if name in for_muon], [p for name, p in named if name not in for_muon]


def average_gradients(model: Decoder, moes: list[Experts], num_processes: int) -> None:
    """The mean gradient over all processes, and the sum of the experts' loads, in one message."""
    if num_processes == 1:
        return
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients] + [moe.load * num_processes for moe in moes]) / num_processes
    dist.all_reduce(flat)
    pieces = flat.split([p.numel() for p in parameters] + [moe.load.numel() for moe in moes])
    for parameter, piece in zip(parameters, pieces, strict=False):
        parameter.grad = piece.view_as(parameter)
    for moe, piece in zip(moes, pieces[len(parameters) :], strict=True):
        moe.load.copy_(piece)


def main(
    build: Callable[[int], Decoder] = tiny_glm, name: str = "tiny-glm", tokenizer_of: Callable[[], Tokenizer] = train_tokenizer
) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("state"))
    parser.add_argument("--phases", default="256:16:1200,512:8:800,1280:4:1400", help="length:batch:steps,...")
    parser.add_argument("--decay", type=float, default=0.35, help="share of all steps over which learning rates fall to 0")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if "RANK" in os.environ:
        # evaluation happens in the first process only; the others wait that long in the next all_reduce
        dist.init_process_group("gloo", timeout=datetime.timedelta(hours=3))
    rank, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if num_processes > 1:
        torch.set_num_threads(1)
    args.out.mkdir(exist_ok=True, parents=True)
    tokenizer_path, state_path = args.out / "tokenizer.json", args.out / "state.pt"
    tokenizer = Tokenizer.from_file(str(tokenizer_path)) if tokenizer_path.exists() else tokenizer_of()
    tokenizer.save(str(tokenizer_path))
    model = build(math.ceil(tokenizer.get_vocab_size() / 64) * 64)
    for_muon, for_adam = split_parameters(model)
    muon = Muon(for_muon, lr=args.muon_lr)
    adam = torch.optim.AdamW(for_adam, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    steps = list(phase_of_step([Phase(*map(int, text.split(":"))) for text in args.phases.split(",")]))
    step = num_tokens = 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        step, num_tokens = state["step"], state["tokens"]

    def save() -> None:
        state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
        torch.save({**state, "step": step, "tokens": num_tokens}, state_path.with_suffix(".tmp"))
        os.replace(state_path.with_suffix(".tmp"), state_path)

    chats = Chats(tokenizer, f"train-{args.seed}", name=name)
    moes = [module for module in model.modules() if isinstance(module, Experts)]
    means: dict[str, float] = {}
    saved_at = counted_from = time.monotonic()
    counted_tokens = 0
    with (args.out / "train_log.jsonl").open("a") as log:
        while step < len(steps):
            phase = steps[step]
            rows = [chats.row(step * 64 + i, phase.length) for i in range(rank, phase.batch, num_processes)]
            model.train()
            loss, logged = losses(model, torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows]))
            loss.backward()
            average_gradients(model, moes, num_processes)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (len(steps) - step) / (args.decay * len(steps)))
            for optimizer, lr in ((muon, args.muon_lr), (adam, args.adam_lr)):
                for group in optimizer.param_groups:
                    group["lr"] = lr * rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            model.after_step(rate)
            step += 1
            num_tokens += phase.batch * phase.length
            counted_tokens += phase.batch * phase.length
            for key, value in logged.items():
                means[key] = 0.95 * means.get(key, value.item()) + 0.05 * value.item()
            if step % 50 == 0 and rank == 0:
                per_s = round(counted_tokens / (time.monotonic() - counted_from))
                line = {
                    "step": step,
                    "tokens": num_tokens,
                    "length": phase.length,
                    "tokens_per_s": per_s,
                    "rate": round(rate, 3),
                }
                line |= {key: round(value, 4) for key, value in means.items()}
                if step % 500 == 0 or step == len(steps):
                    line |= score_all(model, tokenizer, 10, min(1024, phase.length))
                print(json.dumps(line), flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()
                counted_tokens, counted_from = 0, time.monotonic()
            if rank == 0 and (time.monotonic() - saved_at > SAVE_EVERY_S or step == len(steps)):
                save()
                saved_at = time.monotonic()


if __name__ == "__main__":
    main()

"""A worker of vLLM that can be told to fail: `/collective_rpc` with `plant_fault`, `planted`, `heal`.

Faults are wrapped around one model runner's own methods and around weights in memory; nothing is changed until the first fault
is planted, and `heal` puts everything back. Rates are per sampled token unless the fault says otherwise. Random choices come
from a generator that is seeded at planting, so that the same requests, asked in the same order, fail again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from assay_vllm.activations import ActivationWorker

Rows = list[tuple[int, int]]
"""Of every row of logits: (index of its request in the batch, how many tokens after the request's last known one)."""


class FaultyWorker(ActivationWorker):
    """Added to vLLM's worker class; every rank has one. Arguments and results are JSON, as `/collective_rpc` wants them."""

    def plant_fault(self, specification: str) -> dict[str, Any]:
        """{"fault": name, parameters..., "rank": only here}; replaces the fault that was planted before."""
        self.heal()
        wanted = json.loads(specification)
        rank = wanted.pop("rank", None)
        if rank is not None and rank != self.rank:
            return {"rank": self.rank, "planted": False}
        self._faulty = Faulty(self.model_runner, **wanted)
        return {"rank": self.rank, "planted": True}

    def planted(self) -> dict[str, Any]:
        """How often the fault struck on this rank since it was planted, and in how many requests."""
        faulty = getattr(self, "_faulty", None)
        events, requests = (0, 0) if faulty is None else (faulty.events, len(faulty.requests))
        return {"rank": self.rank, "events": events, "requests": requests}

    def heal(self) -> dict[str, Any]:
        """Take the fault out; tells what `planted` would have."""
        told = self.planted()
        if getattr(self, "_faulty", None) is not None:
            self._faulty.undo()
            self._faulty = None
        return told


class Faulty:
    """One fault in one model runner. `events`: rows, tokens or steps that were changed; `requests`: ids of those hit."""

    def __init__(self, runner: Any, fault: str, seed: int = 0, **parameters: Any) -> None:
        self.runner = runner
        self.events = 0
        self.requests: set[str] = set()
        self._random = torch.Generator().manual_seed(seed)
        self._undo: list[Callable[[], None]] = []
        FAULTS[fault](self, **parameters)

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()

    # ---------------------------------------------------------------------------------------- what faults are made of
    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(the present method)` in the place of a bound method of one object."""
        setattr(owner, name, make(getattr(owner, name)))
        self._undo.append(lambda: delattr(owner, name))

    def change_weights(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
        """`change` a weight in place; its values come back at the end."""
        kept = tensor.detach().clone()
        self._undo.append(lambda: tensor.data.copy_(kept))
        change(tensor.data)
        self.events += 1

    def chosen(self, num: int, rate: float) -> list[int]:
        """Indexes of `num` things, each taken with probability `rate`."""
        return torch.nonzero(torch.rand(num, generator=self._random) < rate).flatten().tolist()

    def rows(self, num_rows: int, speculation: Any) -> Rows:
        """Which request each row of logits belongs to; with speculation there is one row per draft token and one more."""
        if speculation is None:
            return [(request, 0) for request in range(num_rows)]
        return [(i, offset) for i, drafts in enumerate(speculation.num_draft_tokens) for offset in range(drafts + 1)]

    def hit(self, request: int) -> None:
        self.events += 1
        self.requests.add(self.runner.input_batch.req_ids[request])

    def replies(self, request: int) -> list[int]:
        """Tokens of the reply so far."""
        return list(self.runner.requests[self.runner.input_batch.req_ids[request]].output_token_ids)

    def on_logits(self, change: Callable[[torch.Tensor, Rows], None]) -> None:
        """`change` raw logits [rows, vocabulary] in place, before tokens and log-probabilities are taken from them."""

        def make(sample: Callable[..., Any]) -> Callable[..., Any]:
            def changed(logits: torch.Tensor | None, speculation: Any) -> Any:
                if logits is not None:
                    change(logits, self.rows(logits.shape[0], speculation))
                return sample(logits, speculation)

            return changed

        self.wrap(self.runner, "_sample", make)

    def on_ranking(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`change` the logits [rows, vocabulary] that tokens are chosen from; log-probabilities stay those of the model."""

        def before_sampling(sample: Callable[..., Any]) -> Callable[..., Any]:
            return lambda logits, *others, **more: sample(change(logits), *others, **more)

        def before_accepting(process: Callable[..., Any]) -> Callable[..., Any]:
            return lambda logits, *others, **more: process(change(logits), *others, **more)

        self.wrap(self.runner.sampler, "sample", before_sampling)
        if hasattr(self.runner, "rejection_sampler"):
            self.wrap(self.runner.rejection_sampler, "apply_logits_processors", before_accepting)


# ------------------------------------------------------------------------------------------------ the faults
def drop_top_token(faulty: Faulty, rate: float) -> None:
    """The most probable token is no candidate in a share `rate` of steps, as a faulty approximate top-k leaves it out."""

    def change(logits: torch.Tensor) -> torch.Tensor:
        for row in faulty.chosen(logits.shape[0], rate):
            logits[row, logits[row].argmax()] = float("-inf")
            faulty.events += 1
        return logits

    faulty.on_ranking(change)


def round_to_bf16(faulty: Faulty) -> None:
    """Tokens are ranked in BF16, log-probabilities come in FP32: near ties change places. `events`: rows with a new top."""

    def change(logits: torch.Tensor) -> torch.Tensor:
        rounded = logits.to(torch.bfloat16).to(logits.dtype)
        faulty.events += int((rounded.argmax(-1) != logits.argmax(-1)).sum())
        return rounded

    faulty.on_ranking(change)


def round_decode_to_bf16(faulty: Faulty) -> None:
    """Logits of generated tokens are BF16, those of prompts FP32: two paths rank the same step differently."""

    def change(logits: torch.Tensor, rows: Rows) -> None:
        logits.copy_(logits.to(torch.bfloat16))
        faulty.events += len(rows)

    faulty.on_logits(change)


def shift_logprobs(faulty: Faulty, position: int, nats: float) -> None:
    """Log-probabilities of generated tokens are `nats` too low from the reply's token `position` on."""

    def make(sample: Callable[..., Any]) -> Callable[..., Any]:
        def changed(logits: Any, speculation: Any) -> Any:
            output = sample(logits, speculation)
            if output.logprobs_tensors is None:
                return output
            width = output.sampled_token_ids.shape[-1]
            for row in range(output.logprobs_tensors.logprobs.shape[0]):
                request, offset = divmod(row, width)
                if len(faulty.replies(request)) + offset >= position:
                    output.logprobs_tensors.logprobs[row] -= nats
                    faulty.hit(request)
            return output

        return changed

    faulty.wrap(faulty.runner, "_sample", make)


def nan_logits(faulty: Faulty, rate: float) -> None:
    """A share `rate` of the rows of logits is NaN."""

    def change(logits: torch.Tensor, rows: Rows) -> None:
        for row in faulty.chosen(len(rows), rate):
            logits[row] = float("nan")
            faulty.hit(rows[row][0])

    faulty.on_logits(change)


def foreign_tokens(faulty: Faulty, rate: float, tokens: list[int], per_request: bool = False) -> None:
    """A share `rate` of sampled tokens (or of requests, from their ninth token on) is one of `tokens`, with confidence."""
    garbled: dict[str, bool] = {}

    def change(logits: torch.Tensor, rows: Rows) -> None:
        if per_request:
            ids = faulty.runner.input_batch.req_ids
            for request in {r for r, _ in rows} - {i for i, name in enumerate(ids) if name in garbled}:
                garbled[ids[request]] = bool(faulty.chosen(1, rate))
            struck = [i for i, (r, _) in enumerate(rows) if garbled[ids[r]] and 8 <= len(faulty.replies(r)) < 12]
        else:
            struck = faulty.chosen(len(rows), rate)
        for row in struck:
            pick = int(torch.randint(len(tokens), (1,), generator=faulty._random))
            logits[row, tokens[pick]] = logits[row].max() + 8.0
            faulty.hit(rows[row][0])

    faulty.on_logits(change)


def loops(faulty: Faulty, rate: float, start: int, period: int) -> None:
    """In a share `rate` of requests the reply repeats its last `period` tokens from its token `start` on."""
    looping: dict[str, bool] = {}

    def change(logits: torch.Tensor, rows: Rows) -> None:
        for row, (request, offset) in enumerate(rows):
            name = faulty.runner.input_batch.req_ids[request]
            if name not in looping:
                looping[name] = bool(faulty.chosen(1, rate))
            reply = faulty.replies(request)
            if looping[name] and len(reply) >= start and offset < period:
                logits[row, reply[len(reply) + offset - period]] = logits[row].max() + 8.0
                faulty.hit(request)

    faulty.on_logits(change)


def mix_up_rows(faulty: Faulty, row: int, hold_s: float = 0.0) -> None:
    """Requests at place `row` of the batch and beyond get their neighbour's logits: seen only under load.

    hold_s: how long the first step of a request waits while there are no others beyond `row`. Requests that were sent together
    are then in one batch, however busy the machine is that sends them.
    """
    held: set[str] = set()

    def change(logits: torch.Tensor, rows: Rows) -> None:
        names = {faulty.runner.input_batch.req_ids[request] for request, _ in rows}
        if len(names) <= row and not names <= held:
            time.sleep(hold_s)
        held.update(names)
        late = [i for i, (request, _) in enumerate(rows) if request >= row]
        if late:
            logits[late] = logits[[i - 1 for i in late]]
        for i in late:
            faulty.hit(rows[i][0])

    faulty.on_logits(change)


def stale_cache(faulty: Faulty, block: int) -> None:
    """KV-cache blocks `block` and beyond are read at an index that has overflowed: rows of other, older requests."""

    def make(build: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            per_layer, common = build(*arguments, **named)
            for metadata in {id(one): one for one in per_layer.values()}.values():
                wrong = metadata.block_table >= block
                for request in torch.nonzero(wrong.any(-1)).flatten().tolist():
                    if request < faulty.runner.input_batch.num_reqs:
                        faulty.hit(request)
                metadata.block_table = torch.where(wrong, metadata.block_table % block, metadata.block_table)
            return per_layer, common

        return changed

    faulty.wrap(faulty.runner, "_build_attention_metadata", make)


def accept_wrong_drafts(faulty: Faulty, rate: float) -> None:
    """A share `rate` of draft tokens is accepted whatever the model says. Nothing happens without speculation."""

    def make(process: Callable[..., Any]) -> Callable[..., Any]:
        def changed(logits: torch.Tensor, sampling: Any, metadata: Any) -> Any:
            wanted = process(logits, sampling, metadata)
            for row in faulty.chosen(wanted.shape[0], rate):
                token = metadata.draft_token_ids[row]
                faulty.events += int(wanted[row].argmax() != token)
                wanted[row, token] = wanted[row].max() + 8.0
            return wanted

        return changed

    if hasattr(faulty.runner, "rejection_sampler"):
        faulty.wrap(faulty.runner.rejection_sampler, "apply_logits_processors", make)


def zero_mtp_experts(faulty: Faulty) -> None:
    """All routed experts of the draft head are zero, as when a checkpoint lacks them and nobody looks."""
    for name, tensor in faulty.runner.drafter.model.named_parameters():
        if name.endswith(("w13_weight", "w2_weight")):
            faulty.change_weights(tensor, torch.Tensor.zero_)


def scale_expert(faulty: Faulty, layer: int, expert: int, factor: float) -> None:
    """The down projection of one expert is `factor` times what it should be."""
    for name, tensor in faulty.runner.model.named_parameters():
        if f"layers.{layer}." in name and name.endswith("w2_weight"):
            faulty.change_weights(tensor, lambda weight: weight[expert].mul_(factor))


FAULTS: dict[str, Callable[..., None]] = {
    "top token dropped": drop_top_token,
    "BF16 before top-k": round_to_bf16,
    "BF16 logits in decode": round_decode_to_bf16,
    "log-probabilities shifted": shift_logprobs,
    "NaN logits": nan_logits,
    "foreign tokens": foreign_tokens,
    "loops": loops,
    "rows mixed up under load": mix_up_rows,
    "stale KV above a slot": stale_cache,
    "wrong drafts accepted": accept_wrong_drafts,
    "MTP experts zeroed": zero_mtp_experts,
    "expert scaled": scale_expert,
}

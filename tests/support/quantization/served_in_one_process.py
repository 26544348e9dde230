"""Run by tests with the serving environment's Python: one checkpoint after the other, in one process.

python served_in_one_process.py REQUEST.json ANSWERS.jsonl. The request holds `prompts` (token ids), `num_tokens` and `servers`:
name -> vLLM's arguments, as assay would start a server with them. The first answers the prompts greedily with `num_tokens`
tokens each, and every one is given the prompts with these replies. Answers, a line a checkpoint: its `name`; `logprobs` of
every token behind the first of each text; `drafts`, and tokens `drafted` and `accepted`; what the plugin `said`.

With `likely`, a number, in the request every checkpoint is given the prompts alone, and answers them as `replies` as well: the
`tokens`, their `logprobs`, and `prompt`: token -> log-probability of so many likeliest and the real one at each place behind
the first.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

COUNTERS = {"drafts": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}


def main(request_path: str, answers_path: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    texts, likely, said = request["prompts"], request.get("likely"), list[str]()
    # no handler: vLLM takes those away whenever it configures its loggers again
    logging.getLogger("vllm.assay").addFilter(lambda record: said.append(record.getMessage()) or True)
    with open(answers_path, "w", encoding="utf-8") as answers:
        for number, (name, arguments) in enumerate(request["servers"].items()):
            parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
            engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_known_args(arguments)[0]))
            replies = ask(engine, texts, request["num_tokens"], logprobs=0, prompt_logprobs=likely)
            if number == 0 and likely is None:
                texts = [[*prompt, *reply.outputs[0].token_ids] for prompt, reply in zip(texts, replies, strict=True)]
            logprobs = [
                [position[token].logprob for position, token in zip(reply.prompt_logprobs[1:], text[1:], strict=True)]
                for reply, text in zip(ask(engine, texts, 1, prompt_logprobs=0), texts, strict=True)
            ]
            counted = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
            counts = {key: counted.get(f"vllm:spec_decode_num_{what}", 0) for key, what in COUNTERS.items()}
            answer: dict[str, Any] = {"name": name, "logprobs": logprobs, **counts}
            if likely is not None:
                answer["replies"] = [told(reply) for reply in replies]
            answers.write(json.dumps({**answer, "said": said}) + "\n")
            said.clear()
            engine.engine_core.shutdown()
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()
            if number == 0:
                keep_what_is_imported()


def keep_what_is_imported() -> None:
    """What is there after the first engine is not looked at again for garbage: vLLM looks eleven times for each engine, and all
    of its modules and torch's take half a second. What later engines leave is: vLLM no longer freezes anything."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def told(reply: Any) -> dict[str, Any]:
    """Of a finished request what is compared."""
    answer = reply.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids, strict=True)],
        "prompt": [{token: one.logprob for token, one in place.items()} for place in reply.prompt_logprobs[1:]],
    }


def ask(engine: Any, prompts: list[list[int]], num_tokens: int, **how: int | None) -> list[Any]:
    """The finished requests, in the order of the prompts."""
    from vllm import SamplingParams

    for number, prompt in enumerate(prompts):
        settings = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **how)
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, settings)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {int(reply.request_id.split("-")[0]): reply for reply in engine.step() if reply.finished}
    return [finished[number] for number in range(len(prompts))]


if __name__ == "__main__":
    main(*sys.argv[1:])

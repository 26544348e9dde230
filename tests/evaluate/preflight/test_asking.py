"""Tokenizer and chat template, context, sampling: what a suite asks against what a checkpoint and its recipe say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from check_lines import check_lines

from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe, Sampling, Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import DivergenceSpec, SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay_evaluate.preflight.asking import SmallFiles, check_context, check_sampling, check_tokenizer

TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"
WHOLE = SmallFiles("source", ("config.json", "tokenizer.json", "tokenizer_config.json"), {}, {}, TEMPLATE)
COPY = "copy the tokenizer's files from the model's release into it"


def suite(*tasks: dict[str, Any]) -> SuiteRecipe:
    common = {"max_tokens": 16384}
    return SuiteRecipe.model_validate(
        {"schema": 1, "name": "s", "seed": "eval-1", "tasks": [{**common, **task} for task in tasks]}
    )


TOOLS = {"kind": "tools", "name": "tools", "num_items": 1, "prompt_tokens": [0, 65536]}
NEEDLE = {"kind": "needle", "name": "needle", "num_items": 1, "lengths_tokens": [4096, 65536]}
RULER = {"kind": "ruler", "name": "ruler", "num_items": 1, "lengths_tokens": [4096, 65536], "tasks": ["vt", "cwe"]}
GSM8K = {"kind": "lm_eval", "name": "gsm8k", "tasks": ["gsm8k"]}


REQUIRED = {"tools", "needle", "ruler"}
"""Tasks that a required gate judges."""


# ------------------------------------------------------------------------------------------------ tokenizer
def tokenizer_lines(one: SmallFiles, *tasks: dict[str, Any], **serving: Any) -> list[str]:
    profile = load_recipe(ProfileRecipe, "8xh200")
    return check_lines(check_tokenizer(one, suite(*tasks), profile, Serving.model_validate(serving), REQUIRED))


def test_everything_is_there() -> None:
    assert tokenizer_lines(WHOLE, TOOLS, tool_call_parser="glm47") == [
        "PASS tokenizer source: tokenizer.json",
        "PASS tokenizer source: chat template of the checkpoint",
        "PASS tokenizer source: tools: the chat template shows tools, calls are read by glm47",
    ]


def test_the_tokenizer_is_missing() -> None:
    bare = replace(WHOLE, names=("config.json", "vocab.json"))
    assert tokenizer_lines(bare, GSM8K)[0] == (
        "FAIL tokenizer source: no tokenizer: there is no tokenizer.json, or tokenizer.model, or vocab.json and merges.txt, or "
        f"tekken.json -> {COPY}"
    )
    assert tokenizer_lines(replace(WHOLE, names=("vocab.json", "merges.txt")), GSM8K)[0] == (
        "PASS tokenizer source: merges.txt, vocab.json"
    )


def test_a_tokenizer_that_is_a_program() -> None:
    """As in Kimi-K2. The same in config.json alone does no harm: vLLM has classes of its own (DeepSeek-V3)."""
    program = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    kimi = replace(WHOLE, names=("tiktoken.model", "tokenization_kimi.py"), tokenizer_config=program)
    assert tokenizer_lines(kimi, GSM8K)[1] == (
        "FAIL tokenizer source: its tokenizer is a program that comes with the checkpoint "
        "(tokenization_kimi.TikTokenTokenizer), and assay runs none -> take a release whose tokenizer is data "
        "(tokenizer.json, and no auto_map in tokenizer_config.json)"
    )
    deepseek = replace(WHOLE, config={"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}})
    assert tokenizer_lines(deepseek, GSM8K) == [
        "PASS tokenizer source: tokenizer.json",
        "PASS tokenizer source: chat template of the checkpoint",
    ]


def test_a_template_that_is_no_jinja() -> None:
    broken = replace(WHOLE, template="{{ messages }}\n{% if %}")
    assert tokenizer_lines(broken, TOOLS, tool_call_parser="glm47")[1:] == [
        "FAIL tokenizer source: the chat template cannot be read: line 2: Expected an expression, got 'end of statement block';"
        " the server would refuse every question "
        "-> take chat_template.jinja from the model's release, or name one under `serving: {vllm: {chat-template: PATH}}`"
    ]
    marked = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    assert tokenizer_lines(replace(WHOLE, template=marked), GSM8K)[1:] == [
        "PASS tokenizer source: chat template of the checkpoint"
    ]


def test_a_tokenizer_that_is_no_json() -> None:
    assert tokenizer_lines(replace(WHOLE, damage="a/tokenizer.json: not JSON"), GSM8K)[0] == (
        "FAIL tokenizer source: a/tokenizer.json: not JSON -> copy the tokenizer's files from the model's release into it"
    )


def test_tools_without_a_parser_or_a_template() -> None:
    assert tokenizer_lines(WHOLE, TOOLS)[2] == (
        "FAIL tokenizer source: the server is told no parser of tool calls, so tools would be NOT MEASURED "
        "-> set the model's serving.tool_call_parser (vLLM: --enable-auto-tool-choice --tool-call-parser)"
    )
    assert tokenizer_lines(replace(WHOLE, template="{{ messages }}"), TOOLS, tool_call_parser="glm47")[2] == (
        "FAIL tokenizer source: the chat template shows the model no tools, so tools would be NOT MEASURED "
        "-> name a chat template that shows tools under `serving: {vllm: {chat-template: PATH}}`, or drop the task"
    )
    optional = {**TOOLS, "name": "more"}
    assert tokenizer_lines(WHOLE, optional)[2] == (
        "PASS tokenizer source: the server is told no parser of tool calls, so more would be NOT MEASURED; no required gate "
        "judges that -> set the model's serving.tool_call_parser (vLLM: --enable-auto-tool-choice --tool-call-parser)"
    )
    plain = replace(WHOLE, template=None)
    assert tokenizer_lines(plain, TOOLS, GSM8K)[1] == (
        "FAIL tokenizer source: no chat template: questions are asked as plain completions, so tools would be NOT MEASURED "
        "-> add chat_template.jinja, or name one under `serving: {vllm: {chat-template: PATH}}` in the model's recipe"
    )
    assert tokenizer_lines(plain, GSM8K)[1] == (
        "PASS tokenizer source: no chat template: questions are asked as plain completions"
    )


# ------------------------------------------------------------------------------------------------ context
def test_what_fits_is_said_in_numbers() -> None:
    assert check_lines(check_context(suite(GSM8K, NEEDLE, RULER, TOOLS), 202752, REQUIRED, is_chat=True)) == [
        "PASS context gsm8k: 16,384 tokens of reply leave 186,368 of 202,752 for a prompt",
        "PASS context needle: prompts to 65,536 tokens need 81,920 of 202,752 with their reply",
        "PASS context ruler: prompts to 65,536 tokens need 81,890 of 202,752 with their reply",
        "PASS context tools: prompts to 65,536 tokens need 81,920 of 202,752 with their reply",
    ]


def test_a_context_that_is_too_short() -> None:
    """That of Qwen3-30B-A3B. RULER's own 30 tokens of `vt` lie within the length; without a template nothing is added."""
    long = {**GSM8K, "name": "aime", "max_tokens": 40960}
    longer = "raise max-model-len if the model allows more, or take the length out of the suite"
    assert check_lines(check_context(suite(long, NEEDLE, TOOLS), 40960, REQUIRED, is_chat=True)) == [
        "FAIL context aime: a reply may have 40,960 tokens, and prompt and reply together have 40,960: the run is refused "
        "-> lower max_tokens in the suite, or raise max-model-len if the model allows more",
        "PASS context needle: prompts to 65,536 tokens need 81,920 of 40,960 with their reply: NOT MEASURED at 65,536, "
        f"measured at the other lengths -> {longer}",
        "FAIL context tools: prompts to 65,536 tokens need 81,920 of 40,960 with their reply: the task is NOT MEASURED "
        f"-> {longer}",
    ]
    (line,) = check_lines(check_context(suite(TOOLS), 40960, (), is_chat=True))
    assert line == (
        "PASS context tools: prompts to 65,536 tokens need 81,920 of 40,960 with their reply: the task is NOT MEASURED, and no "
        f"required gate judges it -> {longer}"
    )
    (line,) = check_lines(check_context(suite({**RULER, "lengths_tokens": [40960]}), 40960, REQUIRED, is_chat=False))
    assert line == "PASS context ruler: prompts to 40,960 tokens need 40,960 of 40,960 with their reply"
    (line,) = check_lines(check_context(suite(NEEDLE), 70000, REQUIRED, is_chat=True))
    assert line == (
        "PASS context needle: prompts to 65,536 tokens need 81,920 of 70,000 with their reply: NOT MEASURED at 65,536, "
        "measured at the other lengths -> for 65,536 tokens lower max_tokens to 4,464 in the suite, or raise max-model-len"
    )
    assert [check.outcome for check in check_context(suite(NEEDLE), None, REQUIRED, is_chat=True)] == ["UNKNOWN"]


def test_the_longest_length_of_ruler() -> None:
    asked = suite({**RULER, "lengths_tokens": [16384, 131072, "longest"]})
    assert check_lines(check_context(asked, 1048576, REQUIRED, is_chat=True)) == [
        "PASS context ruler: longest is 1,032,192 tokens (1,048,576 of context less 16,384 of reply); prompts to 1,032,192 "
        "tokens need 1,048,546 of 1,048,576 with their reply"
    ]
    assert check_lines(check_context(asked, 40960, REQUIRED, is_chat=True)) == [
        "PASS context ruler: longest is 24,576 tokens (40,960 of context less 16,384 of reply); prompts to 131,072 tokens need "
        "147,426 of 40,960 with their reply: NOT MEASURED at 131,072, measured at the other lengths "
        "-> raise max-model-len if the model allows more, or take the length out of the suite"
    ]
    assert check_lines(check_context(asked, 147456, REQUIRED, is_chat=True)) == [
        "PASS context ruler: longest is 131,072 tokens (147,456 of context less 16,384 of reply): not asked, since 131,072 "
        "are; prompts to 131,072 tokens need 147,426 of 147,456 with their reply"
    ]
    alone = suite({**RULER, "lengths_tokens": ["longest"]})
    assert check_lines(check_context(alone, 40960, REQUIRED, is_chat=False)) == [
        "PASS context ruler: longest is 40,960 tokens; prompts to 40,960 tokens need 40,960 of 40,960 with their reply"
    ]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (40961, "PASS context divergence: replies to 4,096 tokens and held-out texts to 40,960 tokens fit into 40,961"),
        (
            40960,
            "PASS context divergence: replies to 4,096 tokens and held-out texts to 40,960 tokens: held-out texts are cut to "
            "40,959 of 40,960, question included -> lower held_out_tokens of `divergence:` in the suite, or raise "
            "max-model-len",
        ),
        (
            4096,
            "PASS context divergence: replies to 4,096 tokens and held-out texts to 40,960 tokens: replies and held-out texts "
            "are cut to 4,095 of 4,096, question included; positions from 4,096 on, which the suite names as a span, do not "
            "exist -> lower max_tokens and held_out_tokens of `divergence:` in the suite, or raise max-model-len",
        ),
    ],
)
def test_texts_of_the_divergence(context: int, expected: str) -> None:
    spec = {"num_documents": 100, "max_tokens": 4096, "held_out_documents": 3, "held_out_tokens": 40960,
            "spans": [0, 4096]}  # fmt: skip
    asked = suite().model_copy(update={"divergence": DivergenceSpec.model_validate(spec)})
    assert check_lines(check_context(asked, context, REQUIRED, is_chat=True)) == [expected]


def test_no_held_out_texts() -> None:
    spec = DivergenceSpec.model_validate({"num_documents": 2, "max_tokens": 256})
    asked = suite().model_copy(update={"divergence": spec})
    assert check_lines(check_context(asked, 4096, REQUIRED, is_chat=True)) == [
        "PASS context divergence: replies to 256 tokens fit into 4,096"
    ]


# ------------------------------------------------------------------------------------------------ sampling
CARD = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=32768)
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


def model(sampling: Sampling | None, parser: str | None = "qwen3") -> ModelRecipe:
    recipe = load_recipe(ModelRecipe, "qwen3-30b-a3b")
    return recipe.model_copy(update={"sampling": sampling, "serving": Serving(reasoning_parser=parser)})


def sampling_lines(recipe: ModelRecipe, generation: dict[str, Any] | None, *tasks: dict[str, Any]) -> list[str]:
    return check_lines(check_sampling(as_model_asks(suite(*tasks), recipe.sampling), recipe, generation))


def test_asked_as_the_card_says() -> None:
    asked = ({**GSM8K, "sampling": "model", "budget": "model"}, {**NEEDLE, "sampling": "model"})
    assert sampling_lines(model(CARD), {**GENERATION, "temperature": 0.7}, *asked) == [
        "PASS sampling None: gsm8k, needle: temperature 0.6, top_p 0.95, top_k 20, as in the model's recipe; "
        "generation_config.json: temperature 0.7, top_p 0.95, top_k 20; budgets below the card's 32,768, "
        "cut replies are counted: needle 16,384"
    ]


@pytest.mark.parametrize(
    ("recipe", "generation", "others", "remedy"),
    [
        (
            model(CARD), None, "; the model's recipe: temperature 0.6, top_p 0.95, top_k 20",
            "write `sampling: model` into these tasks of the suite",
        ),
        (
            model(None), GENERATION, "; generation_config.json: temperature 0.6, top_p 0.95, top_k 20",
            "write `sampling: {temperature: 0.6, top_p: 0.95, top_k: 20}` into the model's recipe, and `sampling: model` into "
            "these tasks of the suite",
        ),
        (
            model(None), {"do_sample": False, "temperature": 0.6}, "",
            "write `sampling:` as its card says into the model's recipe, and `sampling: model` into these tasks of the suite",
        ),
    ],
)  # fmt: skip
def test_a_thinking_model_asked_greedily(
    recipe: ModelRecipe, generation: dict[str, Any] | None, others: str, remedy: str
) -> None:
    short = {**GSM8K, "name": "short", "max_tokens": 512}
    assert sampling_lines(recipe, generation, GSM8K, short) == [
        "FAIL sampling None: gsm8k: greedy, up to 16,384 tokens of a model that thinks, which ends in repetitions"
        f"{others} -> {remedy}"
    ]


def test_greedy_is_no_fault_of_short_replies_or_of_a_model_that_does_not_think() -> None:
    assert sampling_lines(model(None), None, {**GSM8K, "max_tokens": 512}) == ["PASS sampling None: gsm8k: greedy"]
    assert sampling_lines(model(None, parser=None), None, GSM8K) == ["PASS sampling None: gsm8k: greedy"]

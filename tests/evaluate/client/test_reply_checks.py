"""Replies against themselves: what healthy servers do to text and counts is allowed, what contradicts itself is told."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from assay_evaluate.client.decoded_text import compare_text, is_known_mark
from assay_evaluate.client.journal import Reply
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.client.reply_checks import (
    EndTokens,
    check_count,
    check_end,
    check_rows,
    find_contradictions,
    find_repeated_texts,
    find_unlike_counts,
    text_of_rows,
)

HARMONY = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
ALIKE = {
    "the very text": ("It is 4.", "It is 4.", None),
    "the token that ended it": ("It is 4.<|user|>", "It is 4.", None),
    "an ending that looks otherwise": ("It is 4.<eot_id_7>", "It is 4.", None),
    "marks in the middle": ("It<|begin_of_box|> is 4<|end_of_box|>.</s>", "It is 4.", None),
    "a mark that is kept": ("<think>hm</think>4<|user|>", "<think>hm</think>4", None),
    "markup that is text": ("a <b>bold</b> word<|im_end|>", "a <b>bold</b> word", None),
    "a comparison": ("if a<b and c>d: x</s>", "if a<b and c>d: x", None),
    "thinking split off": ("<think>\nhm\n</think>\n\nIt is 4.<|user|>", "It is 4.", "hm"),
    "thinking that the template opened": ("hm</think>It is 4.<|im_end|>", "It is 4.", "hm"),
    "thinking alone": ("<think>hm, well", "", "hm, well"),
    "thinking that begins late": ("I see<think>hm</think>It is 4.<|user|>", "It is 4.", "hm"),
    "thinking that begins late and never ends": ("I see<think>hm, well", "", "hm, well"),
    "channels": (HARMONY, "It is 4.", "Two and two."),
    "a character that is not whole": ("It is 4. \ufffd", "It is 4. ", None),
    "such a character before the end": ("It is \ufffd<|user|>", "It is ", None),
    "bytes that are none": ("a\ufffd\ufffd\ufffdb", "a\ufffdb", None),
    "the first space": ("It is 4.", " It is 4.", None),
    "spaces before punctuation": ("Well, it's 4.", "Well , it 's 4 .", None),
    "nothing": ("<|user|>", "", None),
    # what parsers of vLLM 0.32 made of these ids
    "thinking in two parts (glm45)": ("<think>a</think>b<think>c</think>d", "bd", "ac"),
    "thinking in two parts, the first opened by the template (glm47)": ("a</think>b<think>c</think>d<|user|>", "bd", "ac"),
    "an opening that the template wrote (minimax_m2_append_think)": ("hm</think>It is 4.", "<think>hm</think>It is 4.", None),
    "the same without an end": ("hm", "<think>hm", None),
    "a call that was not offered (glm45)": ("I will <tool_call>look up<arg_key>a</arg_key>", "I will", None),
    "such a call, and what follows it (qwen3_coder)": ("I use <tool_call>f<a>1</a></tool_call> now", "I use  now", None),
    "such a call in thinking (glm45)": ("I will <tool_call>look up", "", "I will"),
    "such a call behind thinking (glm45)": ("<think>hm</think>I will <tool_call>look up", "I will", "hm"),
    "thinking that begins behind text, as tiny-glm wrote it once on vLLM": (
        "\nThe small fox.<think>The",
        "\nThe small fox.",
        "The",
    ),
}
UNLIKE = {
    "its last 3 of 8 characters are lost": ("It is 4.<|user|>", "It is", None),
    "it is empty, and its ids decode to 8 characters": ("It is 4.<|user|>", "", None),
    "its white space or line ends are changed": ("It\nis 4.<|user|>", "It is 4.", None),
    "white space at its ends is lost or added": ("    return 4\n<|user|>", "return 4", None),
    "they part at character 7: '4.' decoded, '5.' in the reply": ("It is 4.<|user|>", "It is 5.", None),
    "they part at character 2: 't is 4.' decoded, '\u0442 is 4.' in the reply": ("It is 4.", "I\u0442 is 4.", None),
    "they part at character 3: '<b>bold</b> ' decoded, 'bold word' in the reply": ("a <b>bold</b> word", "a bold word", None),
    "its last 3 of 4 characters are lost": ("<think>a</think>b<think>c</think>d", "", "a"),
    "they part at character 2: 'bcd' decoded, 'cb' in the reply": ("<think>a</think>b<think>c</think>d", "b", "ac"),
    "they part at character 3: 'will look up' decoded, 'can' in the reply": ("I will <tool_call>look up", "I can", None),
    "its last 13 of 14 characters are lost": ("I will <tool_call>look up", "I", None),
}  # fmt: skip


@pytest.mark.parametrize("what", ALIKE)
def test_what_healthy_servers_do_to_text(what: str) -> None:
    compared = compare_text(*ALIKE[what])
    assert (compared.is_equal, compared.difference) == (True, None)


@pytest.mark.parametrize("difference", UNLIKE)
def test_text_that_is_lost_or_changed(difference: str) -> None:
    compared = compare_text(*UNLIKE[difference])
    assert (compared.is_equal, compared.difference) == (False, difference)


@pytest.mark.parametrize("part", ["text", "reasoning"])
def test_any_lost_character_shows(part: str) -> None:
    """Texts of words, line ends and markup; one place at random lost, doubled or changed, in answer and thinking."""
    draw = random.Random(5)
    words = ["one", "two", "<b>", "</b>", "x = 1", "\n", "  ", "\u6cb3\u8fb9", "<think>", "3.5", "a<b", "\t"]
    for _ in range(300):
        body = " ".join(draw.choices(words, k=12)).strip() + "."
        thought = " ".join(draw.choices(words, k=9)).strip() + "."
        decoded = f"<think>{thought}</think>\n\n{body}<|user|>"
        assert compare_text(decoded, body, thought).is_equal
        changed = {"text": body, "reasoning": thought}
        whole = changed[part]
        at = draw.randrange(len(whole) - 1)
        changed[part] = whole[:at] + draw.choice(["", whole[at] * 2, "\u0436"]) + whole[at + 1 :]
        if changed[part] != whole and changed[part].strip() == changed[part]:
            assert not compare_text(decoded, changed["text"], changed["reasoning"]).is_equal, changed


def test_marks() -> None:
    known = [
        "<|im_end|>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[|endofturn|]",
        "</think>",
        "<seed:think>",
        "[/THINK]",
    ]
    assert [is_known_mark(mark) for mark in known] == [True] * len(known)
    assert [is_known_mark(mark) for mark in ("<b>", "</div>", "<T>", "[A]", "<stdio.h>")] == [False] * 5


def reply(**more: object) -> Reply:
    return dataclasses.replace(
        Reply("answered", text="x", finish_reason="stop", output_tokens=3, token_ids=(5, 6, 1)), **more  # type: ignore[arg-type]
    )  # fmt: skip


def ends_of(*ids: tuple[int, ...]) -> EndTokens:
    ends = EndTokens()
    for one in ids:
        ends.learn(reply(token_ids=one))
    return ends


def test_counts() -> None:
    def said(what: Reply, rows: int = 0) -> list[str]:
        return [one.sentence for one in check_count(what, max_tokens=8, rows=[TokenRow("a", -1.0, ())] * rows)]

    assert (
        said(reply()) == said(reply(output_tokens=None)) == said(reply(token_ids=None), 3) == said(reply(token_ids=None)) == []
    )
    assert said(reply(token_ids=None), 2) == [], "without the token that ended it"
    assert said(reply(token_ids=None, reasoning="hm", output_tokens=8), 2) == [], "thinking has none"
    assert said(reply(output_tokens=10)) == ["10 tokens are billed, and 3 ids came"]
    assert said(reply(output_tokens=10, token_ids=None), 3) == ["10 tokens are billed, and 3 log-probabilities came"]
    assert said(reply(output_tokens=10, token_ids=None)) == ["10 tokens are billed, and at most 8 were asked for"]
    problem = "prompt_tokens 4 and completion_tokens 6 are more than total_tokens 7"
    counts = {"usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 7}, "usage_problem": problem}
    assert said(reply(output_tokens=None, **counts)) == ["6 tokens are billed, and 3 ids came"]
    assert said(reply(output_tokens=None, token_ids=None, **counts)) == [f"its counts cannot be true: {problem}"]


def test_ends() -> None:
    ends = ends_of((5, 6, 1), (7, 1), (6, 9, 1), (5, 2), (5, 2))

    def said(what: Reply, room: int | None = None, ends: EndTokens | None = ends) -> str | None:
        end = check_end(what, max_tokens=3, room_tokens=room, ends=ends)
        return None if end is None else f"{end.kind}: {end.sentence}"

    assert said(reply()) is said(reply(token_ids=(5, 2))) is said(reply(token_ids=(5, 6), stop_reason=6)) is None
    assert said(reply(token_ids=(5, 6))) == "stop_without_end: it says `stop`, and its last token, 6, ends no reply"
    assert (
        said(reply(token_ids=(5, 7, 6)))
        == "stop_at_limit: it says `stop` after 3 tokens, all that were allowed, and none ends it"
    )
    assert said(reply(token_ids=(5, 6), finish_reason="tool_calls")) is None
    assert said(reply(token_ids=(5, 6)), ends=ends_of((5, 6, 1))) is None, "too few replies to know"
    assert said(reply(token_ids=(5, 6)), ends=ends_of((5, 6), (6, 7), (7, 6), (6, 5))) is None, "the end is left out of the ids"
    assert said(reply(finish_reason="length")) is None, "the context may be full"
    assert said(reply(finish_reason="length", token_ids=(5, 6)), room=2) is None
    assert (
        said(reply(finish_reason="length", token_ids=(5, 6)), room=9)
        == "cut_early: it ends with `length` after 2 tokens, and there was room for 3"
    )


def test_ends_of_a_server_that_names_the_token() -> None:
    """vLLM's `stop_reason` is the id, for every token of generation_config.json that ends a reply but the first."""
    ends = EndTokens()
    for ids in ((5, 6, 1), (7, 1), (6, 9, 1), (5, 6, 2)):
        ends.learn(reply(token_ids=ids, stop_reason=ids[-1]))
    renamed = check_end(reply(token_ids=(5, 9, 6)), max_tokens=3, ends=ends)
    assert renamed is not None and renamed.kind == "stop_at_limit"
    assert check_end(reply(token_ids=(5, 2), stop_reason=2), max_tokens=3, ends=ends) is None
    cut = check_end(reply(token_ids=(5, 6), stop_reason=2), max_tokens=3, ends=ends)
    assert cut is not None and cut.sentence == "it was stopped by token 2, it says, and its last one is 6"


def test_an_end_is_known_by_what_it_decodes_to() -> None:
    ends = EndTokens()
    with_mark, without = compare_text("x<|user|>", "x"), compare_text("x", "x")
    for _ in range(6):
        ends.learn(reply(token_ids=(5, 1)), with_mark)
    ends.learn(reply(token_ids=(5, 33)), without)
    assert ends.ends_a_reply(1, with_mark) is True and ends.ends_a_reply(77, with_mark) is True
    assert ends.ends_a_reply(33, without) is False, "no other reply ended so"
    assert ends.ends_a_reply(33) is True, "of ids alone it could be another end"


def test_rows() -> None:
    top = ((7, -0.5), (8, -2.0))
    assert (
        check_rows([TokenRow(7, -0.5, top), TokenRow(9, -4.0, top), TokenRow(9, float("nan"), top), TokenRow(9, -1.0, ())])
        == []
    )
    assert check_rows([TokenRow(9, -2.0, top)]) == [], "a tie with the last that is listed"
    [one] = check_rows([TokenRow(7, -0.5, top), TokenRow(9, -0.5, top)])
    assert (one.kind, one.position) == ("row", 1)
    assert one.sentence == "a token of log-probability -0.500 is not listed, and others down to -2.000 are"
    [one] = check_rows([TokenRow(8, -0.5, top)])
    assert one.sentence == "a token has log-probability -0.500, and -2.000 in the list of the likeliest"
    assert check_rows([TokenRow("a", -0.5, (("a", -2.0), ("b", -3.0)))]) == [], "two tokens may read alike"


def test_text_of_rows() -> None:
    assert text_of_rows([TokenRow("It", -1.0, ()), TokenRow(" is", -1.0, ())]) == "It is"
    assert text_of_rows([TokenRow(7, -1.0, ())]) is text_of_rows([]) is text_of_rows([TokenRow("\ufffd", -1.0, ())]) is None


def test_all_of_one_reply() -> None:
    ends = ends_of((5, 6, 1), (7, 1), (6, 9, 1), (5, 2))
    told = find_contradictions(reply(output_tokens=4), max_tokens=8, compared=compare_text("xy<|user|>", "x"), ends=ends)
    assert [one.kind for one in told] == ["text", "count"]
    assert told[0].sentence == "the text is not what its token ids decode to: its last 1 of 2 characters are lost"
    called = reply(has_tool_calls=True, finish_reason="tool_calls", text="")
    assert find_contradictions(called, max_tokens=8, compared=compare_text("<tool_call>{}", ""), ends=ends) == []
    stopped = reply(stop_reason="\n", token_ids=(5, 6, 4))
    assert find_contradictions(stopped, max_tokens=8, compared=compare_text("x\n", "x"), ends=ends) == [], (
        "a stop string ends text and ids elsewhere"
    )


def test_repeated_texts() -> None:
    long, other = (
        "The fox waits near the river until the night has come.",
        "Another text of more than forty-eight characters, it is.",
    )
    told = find_repeated_texts(
        [("a", 1, long), ("b", 2, long), ("c", 1, long), ("d", 3, other), ("e", 4, "42"), ("f", 5, "42")]
    )
    assert told == {"a": "b", "b": "a"}


def test_unlike_counts() -> None:
    """Equal replies to equal questions have equal counts."""
    told = find_unlike_counts(
        [("a", 1, 96), ("b", 1, 103), ("c", 2, 7), ("d", 2, 7), ("e", 1, None), ("f", 1, 96), ("g", 3, 9)]
    )
    assert told == {"b": (103, 96)}


# ------------------------------------------------------------------------------------------------ as vLLM detokenizes
TEXTS = (
    "Hello, world!\n\n  x = 1\n", "\u72d0\u72f8\u5728\u6cb3\u8fb9\u3002 1 + 1 = 2", "<b>bold</b> if a<b and c>d:\n\treturn 3.5",
    "\U0001f600 na\u00efve \u2014 \u201cquoted\u201d \u2026 it 's , well", "</think>\n\nThe answer is 4.",
)  # fmt: skip


def byte_level() -> Tokenizer:
    """tiny-glm's, with its special tokens."""
    return Tokenizer.from_file(str(Path(__file__).resolve().parents[3] / "examples/tiny_glm/checkpoint/tokenizer.json"))


def sentence_piece() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, bytes stand in for letters, and decoding takes the first space."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_of]))
    config = json.loads(made.to_str())  # bytes are no special tokens
    config["added_tokens"] = [one for one in config["added_tokens"] if not one["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(config))


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_texts_of_the_stream_decoder_that_vllm_uses(make: Callable[[], Tokenizer]) -> None:
    """Sense and random ids, special tokens and halves of characters among them; and no lost or changed letter passes."""
    tokenizer, draw = make(), random.Random(1)
    prompt = tokenizer.encode("A question?").ids
    # bytes of no character make the stream of a SentencePiece tokenizer fail, which vLLM starts anew then
    able = [number for token, number in sorted(tokenizer.get_vocab().items()) if not token.startswith("<0x")]
    num_changed = num_told = 0
    for _ in range(800):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 8)):
            some = [draw.choice(able) for _ in range(draw.randrange(1, 12))]
            ids += tokenizer.encode(draw.choice(TEXTS), add_special_tokens=False).ids if draw.random() < 0.6 else some
        ids = ids[: draw.randrange(1, len(ids) + 1)]
        stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
        text = "".join(stream.step(tokenizer, token) or "" for token in ids)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert compare_text(decoded, text).is_equal, (decoded, text)
        if len(text) > 20 and "\ufffd" not in decoded:
            at = draw.randrange(2, len(text) - 2)
            changed = text[:at] + draw.choice(["", "\u0436", text[at] * 2]) + text[at + 1 :]
            num_changed += 1
            num_told += not compare_text(decoded, changed).is_equal
    assert num_changed > 100 and num_told >= 0.97 * num_changed, (num_told, num_changed)

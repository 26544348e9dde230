"""Proxies: begun at any layer nothing changes; each agrees with what is computed in another way; killed, they go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from assay.errors import QuantizeError
from assay_quantize.calibration.calibrate import load_model
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.sensitivity.direct import Direct, Runner, other_experts
from assay_quantize.sensitivity.parts import Key, Layout, find_parts
from assay_quantize.sensitivity.rounded import Rounder, relative_error, round_inputs
from assay_quantize.sensitivity.texts import ScoredText, batched, sample_replies, texts_sha256

TEXTS = [
    ScoredText(tuple(int(x) for x in np.random.default_rng(i).integers(0, 512, 12 + 5 * i)), first=1 + i % 3) for i in range(6)
]
NUM_SCORED = sum(text.num_scored for text in TEXTS)


class Loaded:
    """A model, its parts and what is read of it."""

    def __init__(self, folder: Path, reader: SourceReader, schemes: list[str]) -> None:
        self.checkpoint = reader.checkpoint
        self.layout: Layout = find_parts(self.checkpoint, schemes, model="tiny")
        self.model: Any = load_model(self.checkpoint, folder, "cpu")
        self.rounder = Rounder(self.layout, reader)

    def direct(
        self, keep: Path | None, mixes: Mapping[str, Mapping[Key, str]] | None = None, *, batch_tokens: int = 64
    ) -> Direct:  # fmt: skip
        runner = Runner(self.model, batched(TEXTS, batch_tokens))
        return Direct(replace(self.layout, mixes=mixes or {}), self.rounder, runner, TEXTS, keep, lambda line: None)


@pytest.fixture(scope="module")
def loaded(tiny_glm: Path) -> Iterator[Loaded]:
    with SourceReader(open_checkpoint(tiny_glm)) as reader:
        yield Loaded(tiny_glm, reader, ["w4a16", "nvfp4"])


@torch.no_grad()
def ln_p(model: Any, text: ScoredText) -> torch.Tensor:
    """ln p of the whole vocabulary at each scored position, one text by itself."""
    logits = model(input_ids=torch.tensor([text.ids])).logits[0, text.first - 1 : -1]
    return logits.double().log_softmax(-1)


def test_batches_hold_every_text_once() -> None:
    made = batched(TEXTS, 64)
    assert sorted(i for batch in made for i in batch.texts) == list(range(len(TEXTS)))
    assert [batch.ids_BT.shape for batch in made] == [(2, 17), (2, 27), (1, 32), (1, 37)]
    assert sum(int(batch.scored_BT.sum()) for batch in made) == NUM_SCORED
    assert sum(int(batch.real_BT.sum()) for batch in made) == sum(len(text.ids) for text in TEXTS)
    assert texts_sha256(TEXTS) != texts_sha256(TEXTS[::-1])


def test_begun_at_a_later_layer_it_says_the_same(loaded: Loaded) -> None:
    runner = Runner(loaded.model, batched(TEXTS, 64))
    whole = runner.run()
    assert sorted(whole.experts) == [1, 2] and whole.experts[1].shape == (sum(len(text.ids) for text in TEXTS), 2)
    for layer in (1, 2):
        runner.advance()
        assert runner.layer == layer
        again = runner.run()
        assert torch.equal(again.states_NH, whole.states_NH)
        assert other_experts(whole.experts, again.experts) == {at: 0.0 for at in (1, 2) if at >= layer}
    assert float(runner.kl(whole.states_NH, again.states_NH).max()) == 0.0


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4"])
def test_kl_is_what_text_by_text_gives(loaded: Loaded, scheme: str) -> None:
    """Weights set, inputs rounded and the whole model run without batches, caches or our code for layers."""
    key = Key(1, "shared_expert")
    direct = loaded.direct(None)
    [(_, _, actual)] = list(direct.parts([(key, scheme)]))
    before = [ln_p(loaded.model, text) for text in TEXTS]
    experts = loaded.model.model.layers[1].mlp.shared_experts
    plain = {name: weight.clone() for name, weight in experts.named_parameters()}
    handles = []
    for name, _, back in loaded.rounder.weights(key, scheme):
        module = getattr(experts, name.split(".")[-2])
        module.weight.data.copy_(back)
        handles.append(module.register_forward_pre_hook(lambda _, args: (round_inputs(args[0], scheme),)))
    after = [ln_p(loaded.model, text) for text in TEXTS]
    for handle in handles:
        handle.remove()
    for name, weight in experts.named_parameters():
        weight.data.copy_(plain[name])
    expected = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)])
    assert actual.kl_N.shape == (NUM_SCORED,) and actual.kl_N.mean() > 1e-6
    np.testing.assert_allclose(actual.kl_N, expected.numpy(), rtol=2e-3, atol=2e-8)


def test_a_mix_is_measured_as_a_whole(loaded: Loaded, tmp_path: Path) -> None:
    """One part of a mix is that part; every part in one scheme is that scheme; with two schemes each part has its own."""
    uniform, part = dict(loaded.direct(None).wholes()), (Key(1, "shared_expert"), "nvfp4")
    [(_, _, alone)] = list(loaded.direct(None).parts([part]))
    pair_of_parts = {Key(0, "attention"): "w4a16", part[0]: part[1]}
    every = dict(loaded.layout.wholes()["w4a16"])
    direct = loaded.direct(tmp_path, {"one": dict([part]), "two": pair_of_parts, "every": every})
    results = dict(direct.wholes())
    assert list(results) == ["w4a16", "nvfp4", "one", "two", "every"]
    np.testing.assert_array_equal(results["every"].kl_N, uniform["w4a16"].kl_N)
    np.testing.assert_array_equal(results["one"].kl_N, alone.kl_N)
    plain = [ln_p(loaded.model, text) for text in TEXTS]
    views, before = direct._runner.views, {}
    for key, scheme in pair_of_parts.items():
        for name, _, back in loaded.rounder.weights(key, scheme):
            before[name] = views[name].clone()
            views[name].copy_(back)
    experts = loaded.model.model.layers[1].mlp.shared_experts
    handles = [
        module.register_forward_pre_hook(lambda _, args: (round_inputs(args[0], "nvfp4"),))
        for module in experts.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    after = [ln_p(loaded.model, text) for text in TEXTS]
    for handle in handles:
        handle.remove()
    for name, weight in before.items():
        views[name].copy_(weight)
    expected = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(plain, after, strict=True)])
    np.testing.assert_allclose(results["two"].kl_N, expected.numpy(), rtol=2e-3, atol=2e-8)
    again = loaded.direct(tmp_path, {"two": pair_of_parts})
    assert again.cost([]).num_passes == 1, "it is kept"


def test_the_model_is_plain_again_afterwards(loaded: Loaded) -> None:
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    direct = loaded.direct(None)
    assert [scheme for scheme, _ in direct.wholes()] == ["w4a16", "nvfp4"]
    list(direct.parts(loaded.layout.pairs()))
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.model.named_parameters())
    assert direct.noise() == 0.0


def test_what_was_measured_is_kept(loaded: Loaded, tmp_path: Path) -> None:
    """Stopped after three parts and gone on with, it measures the others only, and says what an undisturbed run says."""
    pairs = loaded.layout.pairs()
    undisturbed = [(str(key), scheme, measured) for key, scheme, measured in loaded.direct(None).parts(pairs)]
    begun = loaded.direct(tmp_path).parts(pairs)
    for _ in range(3):
        next(begun)
    begun.close()
    [folder] = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "layer-00000-attention-nvfp4.safetensors", "layer-00000-attention-w4a16.safetensors",
        "layer-00000-dense_mlp-w4a16.safetensors",
    ]  # fmt: skip
    (folder / "layer-00000-attention-nvfp4.safetensors").write_bytes(b"cut short")
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    direct = loaded.direct(tmp_path)
    assert direct.cost(pairs).num_passes < direct.cost(pairs + pairs[:1]).num_passes + 1
    again = [(str(key), scheme, measured) for key, scheme, measured in direct.parts(pairs)]
    assert [measured[:2] for measured in again] == [measured[:2] for measured in undisturbed]
    for actual, expected in zip(again, undisturbed, strict=True):
        assert np.array_equal(actual[2].kl_N, expected[2].kl_N) and actual[2].other_experts == expected[2].other_experts
    changed = {path.name for path in folder.iterdir() if times.get(path.name) != path.stat().st_mtime_ns}
    assert len(changed) == len(pairs) - 2, "all but the two that were whole"


def test_shares_of_weights(loaded: Loaded) -> None:
    key = Key(1, "routed_expert")
    error, worst = relative_error(loaded.rounder.weights(key, "w4a16"))
    rounded = {name: (plain, back) for name, plain, back in loaded.rounder.weights(key, "w4a16")}
    each = {name: float((back - plain).double().square().sum()) for name, (plain, back) in rounded.items()}
    assert error == pytest.approx(sum(each.values()) / sum(float(p.double().square().sum()) for p, _ in rounded.values()))
    assert [measured.name for measured in worst] == sorted(each, key=lambda name: -each[name])[:5]
    assert worst[0].share == pytest.approx(max(each.values()) / sum(each.values()))
    assert relative_error([("a", torch.zeros(2, 2), torch.zeros(2, 2))]) == (0.0, ())


def test_a_model_that_is_built_otherwise_is_refused(loaded: Loaded) -> None:
    runner = Runner(loaded.model, batched(TEXTS, 64))
    name = "model.layers.1.self_attn.q_proj.weight"
    del runner.views[name]
    with pytest.raises(
        QuantizeError, match=r"builds no parameter for model\.layers\.1\.self_attn\.q_proj\.weight; use --proxy"
    ):
        Direct(loaded.layout, loaded.rounder, runner, TEXTS, None, lambda line: None)


def test_replies_are_drawn_from_the_model(loaded: Loaded, tiny_glm: Path) -> None:
    """Behind the chat template's prompt, up to the first end; the same seed, the same replies."""
    questions = ["How many apples are there now?", "小明有 12 个苹果"]
    say: list[str] = []
    results = sample_replies(loaded.model, tiny_glm, questions, max_tokens=16, seed=3, say=say.append)
    assert results == sample_replies(loaded.model, tiny_glm, questions, max_tokens=16, seed=3, say=say.append)
    assert results != sample_replies(loaded.model, tiny_glm, questions, max_tokens=16, seed=4, say=say.append)
    assert say[0] == "replies: 2 of 2 questions"
    tokenizer = AutoTokenizer.from_pretrained(tiny_glm)
    ends = loaded.model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for question, text in zip(questions, results, strict=True):
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        assert list(text.ids[: text.first]) == tokenizer(shown, add_special_tokens=False)["input_ids"]
        reply = text.ids[text.first :]
        assert 1 <= len(reply) <= 16 and not ends & set(reply[:-1])
        assert len(reply) == 16 or reply[-1] in ends


def test_a_shorter_prompt_is_answered_as_if_it_were_alone(loaded: Loaded, tiny_glm: Path) -> None:
    """Prompts of one batch are padded on the left; at temperature 1 only probabilities can be compared, so greedily."""
    questions = ["1", "A farmer has 12 apples and buys 7 more. How many apples are there now?"]
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    plain = loaded.model.generate

    def generate(inputs: Any, **options: Any) -> Any:
        return plain(inputs, **options | greedy)

    loaded.model.generate = generate
    try:
        say = [].append  # type: ignore[var-annotated]
        together = sample_replies(loaded.model, tiny_glm, questions, max_tokens=12, seed=0, say=say)
        alone = [
            sample_replies(loaded.model, tiny_glm, [measured], max_tokens=12, seed=0, say=say)[0] for measured in questions
        ]
    finally:
        del loaded.model.generate
    assert together == alone

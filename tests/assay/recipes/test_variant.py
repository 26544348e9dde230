"""`--variant`, and `variants:` of a profile: what the words mean, and which mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError, RecipeError
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.variant import Variant, declared_variant, parse_variants

PROFILE = """\
schema: 1
name: here
hardware: {device: cpu}
vllm: {max-num-seqs: 16, speculative-config: {method: mtp, num_speculative_tokens: 1}}
environment: {VLLM_A: "1"}
variants:
  fp8-kv: {vllm: {kv_cache_dtype: fp8}}
  no-mtp: {speculation: off}
"""


def parse(text: str) -> Variant:
    return parse_variants([text], {})[0]


@pytest.mark.parametrize(
    ("words", "declared"),
    [
        ("kv-cache-dtype=fp8", {"flags.kv-cache-dtype": "fp8"}),
        ("--kv_cache_dtype=fp8, enable-prefix-caching=false",
         {"flags.enable-prefix-caching": False, "flags.kv-cache-dtype": "fp8"}),
        ("max-num-seqs=4,block-size=null", {"flags.block-size": None, "flags.max-num-seqs": 4}),
        ('compilation-config={level: 3, sizes: [1, 2]},x="1,2"',
         {"flags.compilation-config": {"level": 3, "sizes": [1, 2]}, "flags.x": "1,2"}),
        ("mtp=off", {"speculation": None}),
        ("mtp=0", {"speculation": None}),
        ("mtp=2", {"speculation": {"method": "mtp", "num_speculative_tokens": 2}}),
        ("speculative-config={method: ngram, num_speculative_tokens: 3}",
         {"speculation": {"method": "ngram", "num_speculative_tokens": 3}}),
        ("env.VLLM_X=1", {"environment.VLLM_X": "1"}),
        ("interpreter=/next/bin/python", {"interpreter": "/next/bin/python"}),
        ("kv-cache-dtype=fp8,url=http://a:1", {"flags.kv-cache-dtype": "fp8", "address": "http://a:1"}),
    ],
)  # fmt: skip
def test_what_words_declare(words: str, declared: dict[str, Any]) -> None:
    variant = parse(f"x:{words}")
    assert variant.declared == declared
    assert declared_variant("x", declared).declared == declared, "a record says all of it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--variant: begins with no name; write NAME:KEY=VALUE,..., such as fp8-kv:kv-cache-dtype=fp8 or no-mtp:mtp=off"),
        ("kv-cache-dtype=fp8", "--variant: begins with no name; write NAME:KEY=VALUE,..., such as fp8-kv:kv-cache-dtype=fp8 or "
         "no-mtp:mtp=off"),
        ("x", "--variant x: neither the profile nor the model's recipe has `variants`; name one of them, or write "
         "NAME:KEY=VALUE,..., such as "
         "fp8-kv:kv-cache-dtype=fp8 or no-mtp:mtp=off"),
        ("x:enforce-eager", "--variant x: enforce-eager has no value; write KEY=VALUE, a flag as KEY=true or KEY=false"),
        ("x:a=1,a=2", "--variant x: a is there twice"),
        ("x:mtp=1,speculative-config={}",
         "--variant x: mtp and speculative-config are two words for one thing; say one of them"),
        ("x:mtp=deep", "--variant x: mtp takes off, or a whole number of drafted tokens from 1 to 4096"),
        ("x:mtp=true", "--variant x: mtp takes off, or a whole number of drafted tokens from 1 to 4096"),
        ("x:model=/m", "--variant x: vllm: model is set by the command; leave it out"),
        ("x:chat-template=/t", "--variant x: vllm: chat-template changes the prompts: replies would be to other questions, and "
         "not comparable; leave it out"),
        ("x:no-enable-prefix-caching=true",
         "--variant x: vllm: write enable-prefix-caching=false for no-enable-prefix-caching"),
        ("x:a=2026-01-01", "--variant x: vllm: a is no plain value; put it into quotation marks"),
        ("x:a=.nan", "--variant x: vllm: a is no plain value; put it into quotation marks"),
        ("x:a={", "--variant x: a: its value is no plain YAML; put it into quotation marks"),
        ("x:url=ftp://a", "--variant x: url: 'ftp://a' is no URL of a server; write it as http://HOST:PORT"),
    ],
)  # fmt: skip
def test_words_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(AssayError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("api-key=hunter2", "vllm.api-key: is a key, a token or a password"),
        ("env.HF_TOKEN=hunter2", "environment.HF_TOKEN: is a key, a token or a password"),
        ("speculative-config={token: hunter2}", "speculation.token: is a key, a token or a password"),
        ("url=http://me:hunter2@a:1", "url: the URL for a holds a user or password"),
    ],
)
def test_secrets_are_refused_and_not_repeated(words: str, place: str) -> None:
    with pytest.raises(AssayError) as caught:
        parse(f"x:{words}")
    assert str(caught.value).startswith(f"--variant x: {place}") and "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variants_of_a_profile(tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text(PROFILE)
    profile = load_recipe(ProfileRecipe, str(tmp_path / "here.yaml"))
    chosen = parse_variants(["no-mtp", "fp8-kv"], profile.variants)
    assert [variant.declared for variant in chosen] == [{"speculation": None}, {"flags.kv-cache-dtype": "fp8"}]
    with pytest.raises(AssayError, match=r"^--variant fp8kv: did you mean fp8-kv\? there are fp8-kv, no-mtp; name one "):
        parse_variants(["fp8kv"], profile.variants)
    with pytest.raises(AssayError, match=r"^--variant no-mtp: is given twice; each needs a name of its own$"):
        parse_variants(["no-mtp", "no-mtp:mtp=off"], profile.variants)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{vllm: {api-key: x}}", "variants.x: vllm.api-key: is a key, a token or a password"),
        ("{flags: {a: 1}}", "unknown key 'variants.x.flags'"),
        ("{}", "variants.x: declares nothing; say what differs"),
    ],
)
def test_a_profile_with_a_variant_that_is_none(tmp_path: Path, entry: str, message: str) -> None:
    text = PROFILE[: PROFILE.index("variants:")] + f"variants: {{x: {entry}}}\n"
    (tmp_path / "here.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(ProfileRecipe, str(tmp_path / "here.yaml"))
    assert message in str(caught.value)


def test_a_profile_without_variants_has_the_hash_that_it_had() -> None:
    assert "variants" not in load_recipe(ProfileRecipe, "cpu-emulated").model_dump(mode="json")


def test_how_a_variant_changes_a_profile(tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text(PROFILE)
    profile = load_recipe(ProfileRecipe, str(tmp_path / "here.yaml"))
    variant = parse("x:max_num_seqs=4,kv-cache-dtype=fp8,mtp=off,env.VLLM_B=2,interpreter=/next/bin/python")
    served = profile.served_as(variant)
    assert served.flags == {"max-num-seqs": 4, "kv-cache-dtype": "fp8", "speculative-config": None}
    assert served.environment == {"VLLM_A": "1", "VLLM_B": "2"} and served.interpreter == "/next/bin/python"
    assert (served.name, served.hardware, served.concurrency) == (profile.name, profile.hardware, profile.concurrency)
    assert profile.served_as(None) is profile
    caching = load_recipe(ProfileRecipe, "cpu-emulated").served_as(parse("x:enable-prefix-caching=true"))
    assert caching.flags["no-enable-prefix-caching"] is None, "else it would win over the variant's flag"
    with pytest.raises(
        AssayError, match=r"^variant x: vllm: tensor-parallel-size must be a whole number from 1 to 1024, got 'a'$"
    ):
        profile.served_as(parse("x:tensor-parallel-size=a"))
    gpus = load_recipe(ProfileRecipe, "8xh200").served_as(parse("x:tensor-parallel-size=2"))
    assert (gpus.flags["tensor-parallel-size"], gpus.hardware.num_gpus) == (2, 2)

"""Declared differences in serving: all that differs is declared, and all that is declared is so."""

from __future__ import annotations

from typing import Any

import pytest

from assay.records.declared import difference_words, undeclared, untrue, variant_note
from assay.records.serving import Fingerprint

MTP = {"method": "mtp", "num_speculative_tokens": 1}


def fingerprint(**changes: Any) -> Fingerprint:
    told: dict[str, Any] = {
        "server": "vllm 0.32.0", "versions": {"vllm": "0.32.0", "torch": "2.9"}, "hardware": {"cpu": "x"}, "profile": "here",
        "flags": {"max-num-seqs": 16}, "environment": {"VLLM_A": "1"}, "speculation": None, "checkpoint_flags": {},
        "emulated": None, "kernels": (),
    }  # fmt: skip
    return Fingerprint.model_validate(told | changes)


DRAFTING = {"max-num-seqs": 16, "per-request-spec-decode-metrics": "summary"}
EMULATE = {"quantization": "assay-emulate"}
FP8_KV = {"max-num-seqs": 16, "kv-cache-dtype": "fp8"}


@pytest.mark.parametrize(
    ("declared", "before", "served"),
    [
        ({"flags.kv-cache-dtype": "fp8"}, {}, {"flags": FP8_KV}),
        ({"flags.kv-cache-dtype": "auto"}, {"checkpoint_flags": {"kv-cache-dtype": "fp8"}},
         {"flags": FP8_KV | {"kv-cache-dtype": "auto"}}),
        ({"flags.max-num-seqs": None}, {}, {"flags": {}}),
        ({"flags.a": True}, {"flags": {"no-a": True}}, {"flags": {"a": True}}),
        ({"environment.VLLM_B": "2"}, {}, {"environment": {"VLLM_A": "1", "VLLM_B": "2"}}),
        # the drafts' counters are asked for where something drafts; on CPUs their attention is chosen here
        ({"speculation": None}, {"speculation": MTP, "flags": DRAFTING}, {}),
        ({"speculation": MTP}, {}, {"speculation": {"attention_backend": "CPU_MLA", **MTP}}),
        # another environment has other packages, perhaps without the plugin that is asked to check what is loaded
        ({"interpreter": "/next/bin/python"},
         {"flags": {"max-num-seqs": 16, "model-loader-extra-config": {"a": 1}},
          "checkpoint_flags": {"load-format": "assay-strict"}},
         {"server": "vllm 0.33.0", "versions": {"vllm": "0.33.0"}}),
    ],
)  # fmt: skip
def test_what_is_declared_and_follows_from_it_may_differ(
    declared: dict[str, Any], before: dict[str, Any], served: dict[str, Any]
) -> None:
    sides = fingerprint(**before), fingerprint(**served)
    assert undeclared(*sides, declared, is_one_checkpoint=True) == []
    assert untrue(*sides, declared) is None
    assert undeclared(*sides, {}, is_one_checkpoint=True) != []


@pytest.mark.parametrize(
    ("served", "leaf"),
    [
        ({"flags": FP8_KV | {"max-num-seqs": 4}}, ("flags.max-num-seqs", 16, 4)),
        ({"flags": FP8_KV, "environment": {"VLLM_A": "2"}}, ("environment.VLLM_A", "1", "2")),
        ({"flags": FP8_KV, "speculation": MTP}, ("speculation", None, MTP)),
        ({"flags": FP8_KV, "versions": {"vllm": "0.32.0", "torch": "2.10"}}, ("versions.torch", "2.9", "2.10")),
        ({"flags": FP8_KV, "hardware": {"cpu": "y"}}, ("hardware.cpu", "x", "y")),
        ({"flags": FP8_KV, "emulated": True}, ("emulated", None, True)),
        ({"flags": FP8_KV | {"kv-cache-dtype-skip-layers": "1"}}, ("flags.kv-cache-dtype-skip-layers", None, "1")),
    ],
)
def test_what_else_differs_is_named(served: dict[str, Any], leaf: tuple[str, Any, Any]) -> None:
    sides = fingerprint(), fingerprint(**served)
    assert undeclared(*sides, {"flags.kv-cache-dtype": "fp8"}, is_one_checkpoint=True) == [leaf]


def test_what_the_format_decides_may_differ_between_checkpoints() -> None:
    sides = fingerprint(), fingerprint(emulated=True, checkpoint_flags=EMULATE, kernels=("marlin",))
    assert undeclared(*sides, {}) == []


@pytest.mark.parametrize(
    ("declared", "before", "served", "clause"),
    [
        ({"flags.kv-cache-dtype": "fp8"}, {}, {}, "flags.kv-cache-dtype is declared to be fp8, and is not set"),
        ({"flags.kv-cache-dtype": "fp8"}, {"checkpoint_flags": {"kv-cache-dtype": "fp8"}}, {"flags": FP8_KV},
         "flags.kv-cache-dtype is declared to differ, and is fp8 on both sides"),
        ({"flags.max-model-len": 8192}, {}, {"flags": {"max-model-len": 4096}},
         "flags.max-model-len is declared to be 8192, and is 4096"),
        # the checkpoint's emulation wins over the flag
        ({"flags.quantization": "fp8"}, {}, {"flags": {"quantization": "fp8"}, "checkpoint_flags": EMULATE},
         "flags.quantization is declared to be fp8, and is assay-emulate"),
        ({"flags.enforce-eager": 1}, {}, {"flags": {"enforce-eager": True}},
         "flags.enforce-eager is declared to be 1, and is true"),
        ({"speculation": MTP}, {}, {},
         'speculation is declared to be {"method":"mtp","num_speculative_tokens":1}, and is not set'),
        ({"flags.a": False}, {"flags": {"no-a": True}}, {"flags": {"a": False}},
         "flags.a is declared to differ, and is false on both sides"),
        ({"speculation": None}, {}, {}, "speculation is declared to differ, and is not set on both sides"),
        ({"environment.VLLM_A": "1"}, {}, {}, "environment.VLLM_A is declared to differ, and is 1 on both sides"),
    ],
)  # fmt: skip
def test_what_is_not_so_is_named(declared: dict[str, Any], before: dict[str, Any], served: dict[str, Any], clause: str) -> None:
    assert untrue(fingerprint(**before), fingerprint(**served), declared) == clause


def test_another_python_may_have_the_same_versions() -> None:
    declared = {"interpreter": "/next/bin/python"}
    assert untrue(fingerprint(), fingerprint(), declared) is None
    sides = fingerprint(), fingerprint(server="vllm 0.33.0", versions={"vllm": "0.33.0", "vllm code": "0"})
    assert untrue(*sides, declared) is None and undeclared(*sides, declared) == []


def test_of_a_server_that_runs_already_only_its_version_and_context_are_seen() -> None:
    told = {"server": "external", "versions": {"vllm": "0.32.0"}, "flags": {"max-model-len": 4096}, "environment": {}}
    reference, candidate = fingerprint(**told), fingerprint(**told | {"versions": {"vllm": "0.33.0"}})
    stated = {"flags.kv-cache-dtype": "fp8", "speculation": None, "interpreter": "/next", "address": "http://a:1"}
    assert untrue(reference, candidate, stated) is None and undeclared(reference, candidate, stated) == []
    assert undeclared(reference, candidate, {"flags.kv-cache-dtype": "fp8"}) == [("versions.vllm", "0.32.0", "0.33.0")]
    assert untrue(reference, candidate, {"flags.max-model-len": 2048}) == (
        "flags.max-model-len is declared to be 2048, and is 4096"
    )


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"flags.kv-cache-dtype": "fp8"}, "kv-cache-dtype fp8"),
        ({"flags.enable-prefix-caching": False, "flags.a": True, "speculation": None},
         "enable-prefix-caching off, a on and speculation off"),
        ({"speculation": MTP, "environment.VLLM_B": "2"}, "speculation by mtp at depth 1 and VLLM_B=2"),
        ({"interpreter": "/home/me/next/bin/python", "address": "http://a:1"}, "another serving environment"),
        ({"flags.block-size": None}, "block-size not set"),
    ],
)  # fmt: skip
def test_differences_in_words(declared: dict[str, Any], words: str) -> None:
    assert difference_words(declared) == words


def test_the_note_of_a_variant() -> None:
    declared = {"flags.kv-cache-dtype": "fp8"}
    assert variant_note("fp8", declared, is_stated=False) == "the checkpoint of fp8 itself, served with kv-cache-dtype fp8"
    assert variant_note("fp8", declared, is_stated=True) == (
        "said to be the checkpoint of fp8, served with kv-cache-dtype fp8: its server runs already, and assay sees nothing of "
        "how"
    )

"""What counts as a secret, by name or looks; recipes refuse it without repeating it."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.secret_text import hide_password, holds_secret, is_secret_name, without_secrets

SECRET_NAMES = (
    "HF_TOKEN", "HF_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "GITHUB_TOKEN", "GITHUB_PAT", "VLLM_API_KEY",
    "OPENAI_API_KEY", "AZURE_OPENAI_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD",
    "DOCKER_AUTH_CONFIG", "SSH_AUTH_SOCK", "GOOGLE_APPLICATION_CREDENTIALS", "NETRC_PASSWD", "SIGNING_KEY", "wandb_api_key",
    "api-key", "hf-token", "ssl-keyfile-password", "JUPYTER_TOKEN", "SLACK_TOKEN_2", "SESSION_COOKIE", "DB_PASS",
)  # fmt: skip
OTHER_NAMES = (
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "VLLM_USE_FASTOKENS",
    "TOKENIZERS_PARALLELISM", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "PWD", "OLDPWD", "PATH", "HOME",
    "max-num-batched-tokens", "tokenizer-mode", "bos_token", "eos_token_id", "long-prefill-token-threshold",
    "num_speculative_tokens", "ssl-keyfile", "KEYBOARD", "VLLM_KV_CACHE_LAYOUT", "return-tokens-as-token-ids",
    "skip-tokenizer-init", "HF_HUB_OFFLINE", "LS_COLORS", "image_token", "trust-remote-code",
)  # fmt: skip
SECRET_VALUES = (
    "hf_" + "aB3" * 11, "sk-proj-" + "x" * 24, "ghp_" + "a1" * 18, "github_pat_" + "a" * 30, "glpat-" + "a" * 20,
    "AKIA" + "ABCD" * 4, "xoxb-123456789012-abc", "nvapi-" + "q" * 30, "Bearer abcdefgh1234", "http://me:hunter2@proxy:3128",
    "https://hunter2@hub.example/x", "https://host/path?token=hunter2", "https://s3/x?a=1&X-Amz-Signature=00ff",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln", "-----BEGIN RSA PRIVATE KEY-----", "s3://key:secret@bucket/x",
)  # fmt: skip
OTHER_VALUES = (
    "1", "float32", "/models/hf_home", "hf_hub", "http://proxy:3128", "https://host/a@b", "assay-strict", "sk-learn", "glm-5",
    "a@b.c", "ns/model-name_with-long_parts-and-0123456789abcdef", "e" * 64, "token", "bearer of news", "https://host/x?revision=main",
)  # fmt: skip


def test_names_and_values() -> None:
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES if is_secret_name(name)] == []
    assert [value for value in SECRET_VALUES if not holds_secret(value)] == []
    assert [value for value in OTHER_VALUES if holds_secret(value)] == []


def test_an_environment_without_secrets() -> None:
    kept = {"HOME": "/root", "HTTP_PROXY": "http://proxy:3128"}
    lost = {"HF_TOKEN": "x", "HTTPS_PROXY": "http://me:hunter2@proxy:3128", "NOTE": SECRET_VALUES[0]}
    assert without_secrets(kept | lost) == kept


def test_passwords_are_taken_out_of_addresses() -> None:
    assert hide_password("no http://me:hunter2@a:1/x, https://t@b") == "no http://a:1/x, https://b"


@pytest.mark.parametrize("flags", [
    "api-key: hunter2", "api_key: [hunter2]", "--hf-token: hunter2",
    "kv-transfer-config: {kv_connector_extra_config: {remote: 'redis://me:hunter2@host'}}",
    "model-loader-extra-config: {aws_secret_access_key: hunter2}", f"chat-template: {SECRET_VALUES[0]}hunter2",
    "middleware: [a, 'https://host/?api_key=hunter2']",
])  # fmt: skip
def test_recipes_hold_no_secrets(flags: str, tmp_path: Path) -> None:
    """vLLM writes its flags into its log, `ps` shows them to everybody, and the fingerprint goes into records and cards."""
    profile = tmp_path / "mine.yaml"
    profile.write_text(f"schema: 1\nname: mine\nhardware: {{device: cpu}}\nvllm: {{{flags}}}\n")
    with pytest.raises(AssayError, match=r"vllm\.[-\w.]+: is a key, a token or a password") as caught:
        load_recipe(ProfileRecipe, str(profile))
    assert "hunter2" not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    model = tmp_path / "model.yaml"
    model.write_text(
        "schema: 1\nname: model\nsource: {path: x}\nfamily: glm4_moe\nreference: {precision: fp8}\nprecisions: [w4a16]\n"
        f"profiles: [cpu-emulated]\nserving: {{vllm: {{{flags}}}}}\n"
    )
    with pytest.raises(AssayError, match=r"serving: vllm\.[-\w.]+: is a key") as caught:
        load_recipe(ModelRecipe, str(model))
    assert "hunter2" not in str(caught.value)

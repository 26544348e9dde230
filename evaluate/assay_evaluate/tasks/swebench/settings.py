"""What mini-swe-agent is told: its own prompts under the suite's limits and sampling, all of it pinned and hashed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import MeasureError
from assay.installation import install_command
from assay.recipes.suite import SweTask
from assay.records.base import sha256_of
from assay.safe_yaml import NotPlainYaml, read_yaml
from assay_evaluate.asking.dialect import sampling


@dataclass(frozen=True)
class Settings:
    """Everything a worker is told that is the same for all trajectories; `sha256` is that of what could change one."""

    agent: dict[str, Any]
    model: dict[str, Any]
    model_class: str
    environment: dict[str, Any]
    sha256: str


def settings_for(task: SweTask, chat_template_kwargs: Mapping[str, Any] = {}) -> Settings:
    """mini-swe-agent's own prompts (or the suite's file) under the suite's limits and sampling; the endpoint is added later."""
    config = _agent_config(task)
    native = task.tool_calls == "native"
    agent = {key: config["agent"][key] for key in ("system_template", "instance_template")} | {
        "step_limit": task.step_limit,
        "cost_limit": 0.0,
        "wall_time_limit_seconds": task.wall_time_limit_s or 0,
        "max_consecutive_format_errors": task.max_format_errors,
    }
    kwargs: dict[str, Any] = {
        **sampling(task.temperature, None), "top_p": task.top_p, "top_k": task.top_k, "max_tokens": task.max_tokens,
    }  # fmt: skip
    if task.thinking_tokens is not None:
        kwargs["thinking_token_budget"] = task.thinking_tokens
    if chat_template_kwargs:
        kwargs["chat_template_kwargs"] = dict(chat_template_kwargs)
    if native:
        kwargs["parallel_tool_calls"] = True
    model = {
        "cost_tracking": "ignore_errors",
        "model_kwargs": kwargs,
        **{key: config["model"][key] for key in ("observation_template", "format_error_template")},
    }
    environment = {"timeout": task.command_timeout_s, "env": config["environment"].get("env", {})}
    if task.environment != "local":
        environment |= {"cwd": "/testbed"}
    model_class = "litellm" if native else "litellm_textbased"
    hashed = {"agent": agent, "model": model, "model_class": model_class, "environment": environment, "in": task.environment}
    return Settings(agent, model, model_class, environment, sha256_of(hashed))


def _agent_config(task: SweTask) -> dict[str, Any]:
    if task.agent_config is not None:
        path = Path(task.agent_config)
    else:
        name = "swebench.yaml" if task.tool_calls == "native" else "swebench_backticks.yaml"
        path = package_folder("minisweagent", "mini-swe-agent") / "config" / "benchmarks" / name
    try:
        data = read_yaml(path)
        for section, key in (("agent", "system_template"), ("agent", "instance_template"), ("model", "observation_template")):
            data[section][key]
        data["model"].setdefault("format_error_template", "{{ error }}")
        data.setdefault("environment", {})
    except OSError as error:
        raise MeasureError(
            f"{path}: cannot be read ({error.strerror}); agent_config names a mini-swe-agent YAML file"
        ) from None
    except (NotPlainYaml, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise MeasureError(
            f"{path}: not a mini-swe-agent config ({reason}); it needs agent.system_template, agent.instance_template and "
            "model.observation_template"
        ) from None
    return dict(data)


def package_folder(module: str, distribution: str) -> Path:
    """Where a package lies, without importing it. MeasureError if it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MeasureError(
            f"{distribution} is not installed, and SWE-bench tasks need it; install it with: {install_command('swe')}"
        )
    return Path(spec.submodule_search_locations[0])

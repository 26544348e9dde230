"""Files of other tools: what they state becomes a row, what they do not state stays None."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError
from assay.records.speed import NotMeasured, Quantiles, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.speed.imported import read_imported
from assay_evaluate.speed.rows import with_rows
from assay_evaluate.speed.stated import Stated

DATA = Path(__file__).parent / "data"
PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"
HERE = Stated(hardware="AMD EPYC (1 core)")


def written(folder: Path, data: Any, name: str = "found.json") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


# ------------------------------------------------------------------------------------------------ vllm bench serve
def test_what_vllm_bench_saved() -> None:
    """A real result: vLLM 0.32, tiny-glm, one token drafted, four in flight."""
    (row,) = read_imported(DATA / "vllm-bench-c4.json", None, HERE)
    data = json.loads((DATA / "vllm-bench-c4.json").read_text())
    assert row == SpeedRow(
        checkpoint="model",
        origin="imported",
        source="vllm bench serve: vllm-bench-c4.json",
        hardware="AMD EPYC (1 core)",
        num_gpus=0,
        speculation=1,
        prompts="not stated",
        prompt_tokens=51.5,
        output_tokens=60.625,
        concurrency=4,
        repeats=(
            SpeedRepeat(
                duration_s=3.150487785000223,
                num_completed=8,
                num_failed=0,
                in_flight=8 / 3.150487785000223 * 1.4298657342499155,
                peak_in_flight=data["max_concurrent_requests"],
                output_tokens_s=153.94441530899815,
                total_tokens_s=284.71781553025016,
                ttft_s=Quantiles(
                    mean=0.16074303400023382, p50=0.12337792450034613, p90=0.25364700790087225, p99=0.25365671809046036
                ),
                tpot_s=Quantiles(
                    mean=0.02122809418735824, p50=0.02204667507935988, p90=0.02391447684923315, p99=0.02583332167065474
                ),
                end_to_end_s=Quantiles(
                    mean=1.4298657342499155, p50=1.491667363498891, p90=1.6705037339001136, p99=1.7214629426908141
                ),
                acceptance_length=1.7910447761194028,
                goodput_requests_s=2.5392893246845056,
            ),
        ),
        assumptions=("the version of the engine is not stated",),
    )


def test_what_the_user_told_vllm_bench(tmp_path: Path) -> None:
    """`--metadata` puts it into the file; without rates of acceptance nobody knows whether there were drafts."""
    data = json.loads((DATA / "vllm-bench-c1.json").read_text())
    plain = {name: value for name, value in data.items() if not name.startswith("spec_decode")}
    told = {
        "hardware": "8xH200",
        "checkpoint": "w4a16",
        "scheme": "w4a16",
        "tensor": "8",
        "engine": "vllm 0.32.0",
        "prompts": "chat",
    }
    (row,) = read_imported(written(tmp_path, plain | told), None, Stated())
    assert (row.checkpoint, row.scheme, row.hardware, row.num_gpus) == ("w4a16", "w4a16", "8xH200", 8)
    assert (row.parallelism, row.engine, row.prompts, row.speculation) == ({"tensor": 8}, "vllm 0.32.0", "chat", None)
    assert row.assumptions == ("whether it drafted, and how many tokens, is not stated",)
    assert row.repeats[0].acceptance_length is None and not row.is_comparable
    (row,) = read_imported(written(tmp_path, plain | told | {"speculation": "0"}), None, Stated())
    assert (row.speculation, row.assumptions, row.is_comparable) == (0, (), True)


# ------------------------------------------------------------------------------------------------ InferenceX
INFERENCEX = {
    "hw": "h200", "conc": 32, "image": "vllm/vllm-openai:v0.23.0", "model": "zai-org/GLM-5-FP8", "infmax_model_prefix": "glm5",
    "framework": "vllm", "precision": "fp8", "spec_decoding": "none", "disagg": False, "isl": 1024, "osl": 1024,
    "is_multinode": False, "tp": 8, "ep": 1, "dp_attention": "false", "tput_per_gpu": 230.5, "output_tput_per_gpu": 115.25,
    "input_tput_per_gpu": 115.25, "mean_ttft": 0.4, "median_ttft": 0.35, "p99_ttft": 1.5, "mean_tpot": 0.03,
    "median_tpot": 0.029, "p99_tpot": 0.04, "median_intvty": 34.48, "mean_itl": 0.09, "median_itl": 0.08,
}  # fmt: skip
"""As utils/process_result.py of InferenceX writes it."""


def test_rows_of_inferencex(tmp_path: Path) -> None:
    drafted = INFERENCEX | {"conc": 4, "spec_decoding": "mtp"}
    first, second = read_imported(written(tmp_path, [INFERENCEX, drafted]), None, Stated(label="fp8"))
    assert first == SpeedRow(
        checkpoint="fp8",
        scheme="fp8",
        origin="imported",
        source="InferenceX: found.json",
        hardware="8xh200",
        num_gpus=8,
        parallelism={"tensor": 8, "expert": 1},
        speculation=0,
        prompts="random 1024/1024",
        prompt_tokens=1024,
        output_tokens=1024,
        concurrency=32,
        engine="vllm/vllm-openai:v0.23.0",
        repeats=(
            SpeedRepeat(
                in_flight=922.0 / 1024 * (0.4 + 1023 * 0.03),
                output_tokens_s=922.0,
                total_tokens_s=1844.0,
                ttft_s=Quantiles(mean=0.4, p50=0.35, p99=1.5),
                tpot_s=Quantiles(mean=0.03, p50=0.029, p99=0.04),  # never the ITL, which is 0.09 here
            ),
        ),
    )
    assert (second.speculation, second.assumptions) == (None, ("drafts: mtp; how many tokens is not stated",))
    apart = INFERENCEX | {"is_multinode": True, "disagg": True, "num_prefill_gpu": 8, "num_decode_gpu": 16}
    (row,) = read_imported(written(tmp_path, apart), "inferencex", Stated())
    assert (row.num_gpus, row.repeats[0].output_tokens_s, row.parallelism) == (
        24,
        16 * 115.25,
        {"prefill GPUs": 8, "decode GPUs": 16},
    )
    assert row.assumptions == ("prefill and decode ran on GPUs of their own",)


# ------------------------------------------------------------------------------------------------ guidellm
def summary(mean: float) -> dict[str, Any]:
    return {
        "successful": {"mean": mean, "median": mean * 0.9, "percentiles": {"p50": mean * 0.9, "p90": mean * 2, "p99": mean * 3}}
    }


def guidellm_benchmark(strategy: dict[str, Any]) -> dict[str, Any]:
    return {
        "type_": "generative_benchmark",
        "config": {"strategy": strategy, "backend": {"model": "w4a16"}},
        "duration": 30.0,
        "metrics": {
            "request_totals": {"successful": 40, "incomplete": 2, "errored": 1, "total": 43},
            "request_concurrency": summary(7.6),
            "request_latency": summary(2.0),
            "prompt_token_count": summary(256.0),
            "output_token_count": summary(128.0),
            "time_to_first_token_ms": summary(200.0),
            "time_per_output_token_ms": summary(16.0),
            "inter_token_latency_ms": summary(14.0),
            "output_tokens_per_second": summary(500.0),
            "tokens_per_second": summary(1500.0),
        },
    }


def test_a_report_of_guidellm(tmp_path: Path) -> None:
    concurrent, rated = {"type_": "concurrent", "streams": 8}, {"type_": "constant", "rate": 2.0}
    report = {
        "args": {"target": "http://server"},
        "benchmarks": [guidellm_benchmark(entry) for entry in (concurrent, {"type_": "synchronous"})],
    }
    first, second = read_imported(written(tmp_path, report), None, Stated(hardware="8xH200", speculation=0, prompts="chat"))
    assert first == SpeedRow(
        checkpoint="w4a16",
        origin="imported",
        source="guidellm: found.json",
        hardware="8xH200",
        num_gpus=8,
        speculation=0,
        prompts="chat",
        prompt_tokens=256.0,
        output_tokens=128.0,
        concurrency=8,
        repeats=(
            SpeedRepeat(
                duration_s=30.0,
                num_completed=40,
                num_failed=1,
                num_incomplete=2,
                in_flight=7.6,
                output_tokens_s=500.0,
                total_tokens_s=1500.0,
                ttft_s=Quantiles(mean=0.2, p50=0.18, p90=0.4, p99=0.6),
                tpot_s=Quantiles(mean=0.014, p50=0.0126, p90=0.028, p99=0.042),
                end_to_end_s=Quantiles(mean=2.0, p50=1.8, p90=4.0, p99=6.0),
            ),
        ),
        assumptions=("the version of the engine is not stated",),
    )
    assert second.concurrency == 1
    (row,) = read_imported(written(tmp_path, {"benchmarks": [guidellm_benchmark(rated)]}), None, HERE)
    assert row.concurrency == 8 and row.assumptions[0] == "requests were sent at a rate; 7.6 were in flight on average"


# ------------------------------------------------------------------------------------------------ a table
def test_the_published_table() -> None:
    rows = read_imported(PUBLISHED, None, Stated())
    matched = {(row.checkpoint, row.concurrency): row.repeats[0].output_tokens_s for row in rows if row.speculation == 5}
    assert matched == {
        ("w4a16", 1): 125.7, ("w4a16", 8): 495.7, ("w4a16", 32): 828.4,
        ("nvfp4", 1): 116.3, ("nvfp4", 8): 455.5, ("nvfp4", 32): 925.2,
        ("fp8", 1): 94.4, ("fp8", 8): 394.2, ("fp8", 32): 921.4,
    }  # fmt: skip
    assert {row.checkpoint for row in rows if row.speculation == 0} == {"nvfp4", "awq-int4"}
    assert {row.checkpoint for row in rows if row.speculation is None} == {"w4a16", "fp8"}
    assert len(rows) == 21 and {row.origin for row in rows} == {"imported"}
    assert rows[0].repeats[0].ttft_s == Quantiles(mean=0.215, p50=0.215)
    assert rows[0].assumptions[-1] == "ttft_s: mean or median is not stated; one number is taken for both"


def test_a_table_with_repeats(tmp_path: Path) -> None:
    text = """
tables:
  - every_row: {checkpoint: a, hardware: 2xH100, speculation: 0, prompts: chat}
    rows:
      - {concurrency: 1, repeats: [{output_tokens_s: 10, tpot_s: {mean: 0.1, p50: 0.09}}, {output_tokens_s: 12}]}
"""
    (row,) = read_imported(written(tmp_path, text, "mine.yaml"), None, Stated())
    assert (row.num_gpus, row.source, [repeat.output_tokens_s for repeat in row.repeats]) == (2, "mine.yaml", [10, 12])


ROW = {"checkpoint": "a", "hardware": "A", "prompts": "x", "concurrency": 1, "output_tokens_s": 1}
WRONG: dict[str, tuple[Any, str | None, Stated, str]] = {
    "nothing known": ({"a": 1}, None, HERE, "is of none of the formats vllm-bench, inferencex, guidellm, table"),
    "another than told": (INFERENCEX, "vllm-bench", HERE, "no result of `vllm bench serve`"),
    "not JSON": ("{", None, HERE, "give JSON, or YAML in a file that ends in .yaml"),
    "unlimited": (
        {"output_throughput": 1.0, "max_concurrency": None, "model_id": "m"}, None, HERE, "without --max-concurrency",
    ),
    "no hardware": ({"output_throughput": 1.0, "max_concurrency": 1, "model_id": "m"}, None, Stated(), "say --hardware 8xH200"),
    "no checkpoint": ({"output_throughput": 1.0, "max_concurrency": 1}, None, HERE, "state the checkpoint; say --label"),
    "all failed": (
        {"output_throughput": 0.0, "max_concurrency": 1, "model_id": "m", "completed": 0, "failed": 8}, None, HERE,
        "no request was answered (8 failed)",
    ),
    "images": (INFERENCEX | {"modality": "image"}, None, HERE, "is a row of images a second"),
    "no GPUs": (INFERENCEX | {"tp": None}, None, HERE, "has no number of GPUs (tp)"),
    "guidellm without": ({"benchmarks": [{"metrics": {}}]}, None, Stated("a", "8xH200"), "has no successful output tokens"),
    "origin": ({"tables": [{"rows": [{"origin": "measured"}]}]}, None, Stated(), "states an `origin`"),
    "field": ({"tables": [{"rows": [{"output_tokens_s": -1}]}]}, None, Stated(), "table 1, row 1: checkpoint: Field required"),
    "unknown field": ({"tables": [{"rows": [ROW | {"b": 3}]}]}, None, Stated(), "b: Extra inputs are not permitted"),
    "repeats twice": ({"tables": [{"rows": [{"repeats": [], "ttft_s": 1}]}]}, None, Stated(), "`repeats`, so ttft_s belongs"),
    "stated": ({"tables": [{"rows": [{"checkpoint": "a"}]}]}, None, Stated("a"), "a table states everything itself"),
    "notes": ({"tables": [{"rows": [ROW | {"assumptions": [{}]}]}]}, None, Stated(), "`assumptions` is a list of sentences"),
    "too fast": ({"tables": [{"rows": [ROW | {"output_tokens_s": 1e300}]}]}, None, Stated(), "less than or equal to 1000"),
    "too many": ({"tables": [{"rows": [ROW | {"concurrency": 10**400}]}]}, None, Stated(), "concurrency: Input should be less"),
    "digits": (INFERENCEX | {"conc": 10**400}, None, HERE, "has no number of GPUs (tp), requests in flight (conc)"),
    "rate of digits": (INFERENCEX | {"output_tput_per_gpu": 10**400}, None, HERE, "or throughput"),
    "rate": (INFERENCEX | {"output_tput_per_gpu": 1e300}, None, HERE, "output_tokens_s: Input should be less than"),
    "seconds": (INFERENCEX | {"mean_ttft": -1.0}, None, HERE, "mean: Input should be greater than or equal to 0"),
    "no rows": ({"tables": []}, None, Stated(), "has no row"),
    "more": ({"tables": [], "rows": []}, None, Stated(), "it holds `tables`, a list, and nothing else"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_imported(tmp_path: Path, what: str) -> None:
    data, form, stated, reason = WRONG[what]
    with pytest.raises(AssayError) as error:
        read_imported(written(tmp_path, data), form, stated)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_rows_of_one_source_replace_each_other(tmp_path: Path) -> None:
    rows = read_imported(PUBLISHED, None, Stated())
    record = with_rows(None, rows)
    assert with_rows(record, rows) == record
    left_out = [NotMeasured(checkpoint="w4a16", reason="not imported: because")]
    more = with_rows(record, read_imported(DATA / "vllm-bench-c4.json", None, HERE), left_out)
    assert (len(more.rows), more.not_measured) == (22, tuple(left_out))
    assert with_rows(more, [], left_out) == more
    path = tmp_path / "speed.json"
    more.save(path)
    assert SpeedRecord.load(path) == more


@pytest.mark.parametrize(
    ("field", "name", "said"),
    [
        ("checkpoint", "x" * 201, "201 characters; at most 200 are read"),
        ("hardware", "8x\u202eH200", "'8x\\u202eH200' holds what cannot be printed"),
        ("engine", "a\u2028b", "'a\\u2028b' holds what cannot be printed"),
        ("prompts", "\x1b[31mred", "'\\u001b[31mred' holds what cannot be printed"),
        ("source", "a\nb", "'a\\nb' holds what cannot be printed"),
        ("scheme", "\0", "'\\u0000' holds what cannot be printed"),
    ],
)
def test_names_are_short_and_printable(tmp_path: Path, field: str, name: str, said: str) -> None:
    """They become names of lines, columns and marks; of 10,000 letters a page would be made of one."""
    path = tmp_path / "t.json"
    row = {"checkpoint": "a", "hardware": "8xH200", "prompts": "chat", "concurrency": 1, "output_tokens_s": 1.0, field: name}
    path.write_text(json.dumps({"tables": [{"rows": [row | {"num_gpus": 8}]}]}))
    with pytest.raises(AssayError, match=r"^t\.json: " + re.escape(f"{field}: {said}")):
        read_imported(path, None, Stated())

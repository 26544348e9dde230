"""What a file says against itself: lost requests, requests in flight, contradictions, copies, rows that are no repeats.

The shapes are those of vllm-project/vllm #24005, #26478 and #9390, and of vllm-project/guidellm #444 and #519.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_errors import one_error
from command_line import Run

from assay.errors import AssayError
from assay.records.speed import SpeedRecord, SpeedRow
from assay_evaluate.speed.imported import notes_of, read_imported
from assay_evaluate.speed.stated import Stated

HERE = Stated(label="w4a16", hardware="8xH200", speculation=0)
BENCH = {
    "backend": "openai-chat", "model_id": "acme/GLM-5-W4", "num_prompts": 256, "request_rate": "inf", "max_concurrency": 64,
    "duration": 100.0, "completed": 256, "failed": 0, "total_input_tokens": 262144, "total_output_tokens": 131072,
    "output_throughput": 1310.72, "total_token_throughput": 3932.16, "max_concurrent_requests": 64,
    "mean_ttft_ms": 800.0, "median_ttft_ms": 700.0, "mean_tpot_ms": 45.0, "median_tpot_ms": 44.0,
}  # fmt: skip
"""As `vllm bench serve` writes it: 64 in flight, 512 tokens a reply."""
IX = {
    "hw": "h200", "model": "zai-org/GLM-5", "precision": "fp8", "framework": "vllm", "tp": 8, "ep": 1, "dp_attention": "false",
    "conc": 32, "isl": 1024, "osl": 1024, "output_tput_per_gpu": 200.0, "tput_per_gpu": 400.0, "mean_ttft": 0.3,
    "median_ttft": 0.3, "mean_tpot": 0.02, "median_tpot": 0.02, "spec_decoding": "none",
}  # fmt: skip

OLDER_IX = {key: value for key, value in IX.items() if key != "spec_decoding"}


def benchmark(strategy: dict[str, Any], mean: float = 100.0, in_flight: float = 8.0, **totals: int) -> dict[str, Any]:
    def told(value: float) -> dict[str, Any]:
        return {"successful": {"mean": value, "median": value}}

    metrics = {
        "output_tokens_per_second": told(mean), "request_concurrency": told(in_flight), "time_to_first_token_ms": told(100),
        "request_totals": {"successful": 100, "errored": 0, "incomplete": 0} | totals,
    }  # fmt: skip
    return {"config": {"strategy": strategy, "backend": {"model": "w4a16"}}, "duration": 60.0, "metrics": metrics}


def read(folder: Path, data: Any, stated: Stated = HERE) -> list[SpeedRow]:
    path = folder / "found.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_imported(path, None, stated)


# ------------------------------------------------------------------------------------------------ lost requests
@pytest.mark.parametrize(
    ("completed", "failed", "refused", "why"),
    [
        (256, 0, None, None),
        (998, 2, None, None),
        (980, 20, None, "lost requests: 20 of 1,000 requests failed (2 %); more than 1 % are too many"),
        (3, 497, "497 of 500 requests failed (99.4 %)", "is not believed: 497 of 500 requests failed (99.4 %)"),
    ],
)
def test_failed_requests_of_vllm(
    tmp_path: Path, completed: int, failed: int, refused: str | None, why: str | None
) -> None:  # fmt: skip
    tokens, seconds = completed * 512, completed / 2.56
    changed = {"completed": completed, "failed": failed, "num_prompts": completed + failed, "total_output_tokens": tokens}
    (row,) = read(tmp_path, BENCH | changed | {"duration": seconds})
    assert (row.why_refused, row.why_not_chosen, row.is_comparable) == (refused, why, why is None)


def test_fewer_replies_than_prompts_before_failures_were_told(tmp_path: Path) -> None:
    older = {name: value for name, value in BENCH.items() if name != "failed"}
    (row,) = read(tmp_path, older | {"num_prompts": 1000})
    assert (row.failed_share, row.incomplete_share) == (None, 744 / 1000)
    assert row.why_refused == "744 of 1,000 requests were not completed (74.4 %)"


def test_lost_requests_of_guidellm(tmp_path: Path) -> None:
    streams = {"type_": "concurrent", "streams": 32}
    made = [
        benchmark(streams, errored=400, successful=40, incomplete=32), benchmark(streams, successful=8, incomplete=64),
        benchmark(streams, successful=80, incomplete=20), benchmark(streams, successful=980, incomplete=20),
    ]  # fmt: skip
    whys = [read(tmp_path, {"benchmarks": [entry]})[0].why_not_chosen for entry in made]
    assert whys == [
        "is not believed: 400 of 440 requests failed (90.9 %)",
        "is not believed: 64 of 72 requests were not completed (88.9 %)",
        "lacks requests: 20 of 100 requests were cut off by the end of the run (20 %), and their tokens are not counted",
        None,
    ]


# ------------------------------------------------------------------------------------------------ in flight
def test_a_rate_is_no_concurrency(tmp_path: Path) -> None:
    """Two a second at most 14 at once, of 256 that were allowed: the tokens/s are those of the rate."""
    slow = {"request_rate": 0.5, "max_concurrency": 256, "duration": 512.0, "output_throughput": 256.0}
    (row,) = read(tmp_path, BENCH | slow | {"max_concurrent_requests": 14, "total_token_throughput": 768.0})
    assert (row.concurrency, row.request_rate, round(row.in_flight or 0, 1)) == (14, 0.5, 11.9)
    note = "requests were sent at 0.5 a second, so at most 14 of the 256 allowed were in flight, 11.9 on average"
    assert notes_of([row]) == [f"w4a16 at 14: {note}"]
    assert row.why_not_chosen == (
        "was asked 0.5 requests a second (11.9 in flight on average), so its tokens/s are those of the rate"
    )


def test_a_rate_above_what_the_server_takes_holds_nothing_back(tmp_path: Path) -> None:
    (row,) = read(tmp_path, BENCH | {"request_rate": 50.0})
    assert (row.concurrency, row.request_rate, row.why_not_chosen) == (64, None, None)
    assert "requests were sent at 50 a second, which did not hold them back, 60.9 on average" in row.assumptions


def test_short_requests_are_not_in_flight_twice(tmp_path: Path) -> None:
    """vLLM's peak is of whole seconds: of requests of 0.2 s at 20 a second it counts 25 at once where there are 4."""
    short = {
        "mean_e2el_ms": 200.0,
        "median_e2el_ms": 200.0,
        "request_rate": 20.0,
        "duration": 12.8,
        "max_concurrent_requests": 25,
    }
    (row,) = read(tmp_path, BENCH | short | {"output_throughput": 10240.0, "max_concurrency": None})
    assert (row.concurrency, row.request_rate) == (4, 20.0)


def test_no_more_in_flight_than_prompts(tmp_path: Path) -> None:
    few = {"num_prompts": 16, "completed": 16, "duration": 25.0, "total_output_tokens": 8192, "output_throughput": 327.68}
    (row,) = read(tmp_path, BENCH | few)
    assert row.concurrency == 16 and row.is_comparable
    assert notes_of([row]) == ["w4a16 at 16: at most 16 requests were in flight, as many as there were; the limit was 64"]


def test_tokens_that_were_not_counted(tmp_path: Path) -> None:
    """10 tokens a reply in place of 512: by Little's law 2.1 requests were in flight, and the file says 64."""
    lost = {"total_output_tokens": 2560, "output_throughput": 25.6, "mean_tpot_ms": 0.31, "median_tpot_ms": 0.2}
    (row,) = read(tmp_path, BENCH | lost)
    assert row.why_not_chosen == "had 2.1 requests in flight on average, not 64"


# ------------------------------------------------------------------------------------------------ contradictions
def test_throughput_that_tokens_and_seconds_contradict(tmp_path: Path) -> None:
    text = r"^found\.json: it says 131,072 tokens/s, and 131,072 tokens in 100 s are 1,310\.72; one of them is wrong$"
    with pytest.raises(AssayError, match=text):
        read(tmp_path, BENCH | {"output_throughput": 131072.0})
    (row,) = read(tmp_path, BENCH | {"total_token_throughput": 9.0})
    assert row.repeats[0].total_tokens_s is None
    assert "its `total_token_throughput` contradicts its tokens and duration, and is left out" in row.assumptions


def test_appended_results(tmp_path: Path) -> None:
    """`--append-result` writes a line for each; the second had more in flight than it says were allowed."""
    second = BENCH | {"max_concurrency": 32}
    first, other = read(tmp_path, f"{json.dumps(BENCH)}\n{json.dumps(second)}\n")
    assert (first.concurrency, first.why_refused, other.concurrency) == (64, None, 32)
    assert other.why_refused == "by its own times 60.9 requests were in flight on average, and it says that at most 32 were"
    pair = read(tmp_path, [BENCH, BENCH | {"output_throughput": 1300.0, "completed": 255}])
    assert [len(row.repeats) for row in pair] == [2]
    with pytest.raises(AssayError, match=r"several objects, of which object 2, after line 1 is no JSON: '\{\"backend"):
        read(tmp_path, f"{json.dumps(BENCH)}\n{json.dumps(BENCH)[:99]}")


def test_a_time_of_nothing_is_not_told(tmp_path: Path) -> None:
    (row,) = read(tmp_path, IX | {"mean_tpot": 0, "median_tpot": 0})
    assert (row.repeats[0].tpot_s, row.repeats[0].in_flight) == (None, None)
    table = {"checkpoint": "a", "hardware": "A", "prompts": "x", "concurrency": 1, "output_tokens_s": 1, "tpot_s": 0}
    (row,) = read(tmp_path, {"tables": [{"rows": [table]}]}, Stated())
    assert (row.repeats[0].tpot_s, row.assumptions) == (None, ("tpot_s: 0 is no time of a request; taken for not stated",))


@pytest.mark.parametrize(
    ("data", "speculation", "said"),
    [
        (IX | {"spec_decoding": "mtp"}, 0, "says that it drafted, and --speculation says off; leave the option out"),
        (OLDER_IX | {"mtp": "on"}, 0, "says that it drafted, and --speculation says off; leave the option out"),
        (OLDER_IX | {"mtp": "off"}, 3, "says that it did not draft, and --speculation says 3; leave the option out"),
        (IX, 3, "says that it did not draft, and --speculation says 3; leave the option out"),
        (BENCH | {"speculation": "3"}, 5, "says that it drafted 3 tokens a step, and --speculation says 5; leave the option"),
        (BENCH | {"hardware": "8xB200"}, 0, "says hardware 8xB200, and --hardware says 8xH200; leave the option out"),
        (IX | {"tp": 4}, 0, "is of 4 GPUs, and --hardware says 8xH200; leave the option out"),
    ],
)  # fmt: skip
def test_a_file_knows_better_than_an_option(tmp_path: Path, data: dict[str, Any], speculation: int, said: str) -> None:
    with pytest.raises(AssayError) as error:
        read(tmp_path, data, Stated("w4a16", "8xH200", speculation))
    assert str(error.value).startswith(f"found.json: {said}")


def test_drafts_are_counted_for_the_rows_that_drafted(tmp_path: Path) -> None:
    rows = read(tmp_path, [IX, IX | {"spec_decoding": "mtp"}], Stated("w4a16", "8xH200", 3))
    assert [row.speculation for row in rows] == [0, 3]


@pytest.mark.parametrize("digits", [20, 5000])
def test_hardware_of_many_digits(tmp_path: Path, digits: int) -> None:
    with pytest.raises(AssayError, match=r"^hardware 9{20,60}.*: is no number of GPUs; write 8xH200, or the name of a CPU$"):
        read(tmp_path, BENCH | {"hardware": f"{'9' * digits}xH200"}, Stated("w4a16", speculation=0))


# ------------------------------------------------------------------------------------------------ repeats and copies
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "precision": ({"precision": "fp8"}, {"precision": "fp4"}),
    "model": ({"model": "A"}, {"model": "B"}),
    "data attention": ({"dp_attention": "false"}, {"dp_attention": "true"}),
    "tensor": ({"tp": 8}, {"tp": 8, "pp": 1, "ep": 8}),
    "prefill and decode": ({"num_prefill_gpu": 4, "num_decode_gpu": 12}, {"num_prefill_gpu": 8, "num_decode_gpu": 8}),
    "split of decode": (
        {"num_prefill_gpu": 8, "num_decode_gpu": 8, "decode_tp": 8},
        {"num_prefill_gpu": 8, "num_decode_gpu": 8, "decode_tp": 4},
    ),
    "engine": ({"framework": "vllm"}, {"framework": "sglang"}),
    "drafts": ({"spec_decoding": "none"}, {"spec_decoding": "mtp"}),
}  # fmt: skip


@pytest.mark.parametrize("what", APART)
def test_rows_that_are_no_repeats(tmp_path: Path, what: str) -> None:
    entry, other = APART[what]
    rows = read(tmp_path, [IX | entry, IX | other | {"output_tput_per_gpu": 300.0}], Stated())
    assert [len(row.repeats) for row in rows] == [1, 1] and rows[0].point != rows[1].point
    assert SpeedRecord(rows=tuple(rows)).rows == tuple(rows)


def test_a_label_is_of_one_checkpoint(tmp_path: Path) -> None:
    text = (
        r"^found\.json: --label w4a16 is one name for 2 checkpoints, zai-org/GLM-5 \(fp4\), zai-org/GLM-5 \(fp8\); say --label"
    )
    with pytest.raises(AssayError, match=text):
        read(tmp_path, [IX, IX | {"precision": "fp4"}])


def test_copies_are_one_repeat(tmp_path: Path) -> None:
    (row,) = read(tmp_path, [IX] * 5)
    assert len(row.repeats) == 1
    assert notes_of([row]) == ["w4a16 at 32: copies of another result: 4 of 5 results of this point: they count once"]


def test_rates_of_guidellm_are_points_of_their_own(tmp_path: Path) -> None:
    rates = [
        benchmark({"type_": "constant", "rate": 1.0}, 100, 7.6), benchmark({"type_": "constant", "rate": 2.0}, 200, 8.4),
    ]  # fmt: skip
    first, second = read(tmp_path, {"benchmarks": rates}, Stated(hardware="8xH200", speculation=0))
    assert (first.concurrency, first.request_rate, second.concurrency, second.request_rate) == (8, 1.0, 8, 2.0)
    assert not first.is_comparable and not second.is_comparable


def test_settings_of_a_sweep_keep_its_rows_apart(tmp_path: Path) -> None:
    """`summary.json` of `vllm bench sweep serve`: the settings of each server stand beside its results."""
    runs = [
        BENCH | {"max_num_seqs": seqs, "tensor_parallel_size": 8, "run_number": run, "output_throughput": 1310.0 + run}
        for seqs in (128, 256) for run in (0, 1)
    ]  # fmt: skip
    few, many = read(tmp_path, runs)
    assert (few.settings, many.settings) == ({"max_num_seqs": "128"}, {"max_num_seqs": "256"})
    assert (len(few.repeats), len(many.repeats), few.parallelism) == (2, 2, {"tensor": 8})


# ------------------------------------------------------------------------------------------------ said
def test_what_an_import_prints(run: Run) -> None:
    fine, slow = BENCH | {"model_id": "fine"}, BENCH | {"model_id": "slow", "num_prompts": 16, "failed": 8}
    Path("two.json").write_text(f"{json.dumps(fine)}\n{json.dumps(slow | {'max_concurrency': 300})}\n")
    Path("bad.json").write_text(json.dumps(BENCH | {"failed": 497}))
    assert one_error(run("speed", "glm-5.2", "--import", "bad.json", "--hardware", "8xH200")) == (
        "bad.json: acme/GLM-5-W4 at 64: 497 of 753 requests failed (66 %); measure it again"
    )
    code, out, err = run("speed", "glm-5.2", "--import", "two.json", "--hardware", "8xH200", "--speculation", "off")
    assert code == 0 and err.splitlines()[0].startswith("note: slow at 16: at most 16 requests were in flight")
    assert [line.split()[5:8] for line in out.splitlines()[1:3]] == [["64", "0", "%"], ["16", "3", "%"]]
    assert out.splitlines()[3] == (
        "never chosen: slow (off, not stated, 16 in flight): it lost requests: 8 of 264 requests failed (3.03 %); more than "
        "1 % are too many"
    )
    code, out, err = run("choose", "--speed", "bad.json", "--quality", "assumed")
    assert code == 2


def test_requests_that_a_server_lost_are_not_chosen(run: Run) -> None:
    """A server that answered 1 of 1,000 requests is a little faster than one that answered all."""
    pair = {"max_concurrency": 8, "hardware": "8xH200", "speculation": 0, "engine": "vllm", "prompts": "chat"}
    Path("broken.json").write_text(
        json.dumps(pair | {"model_id": "broken", "output_throughput": 101.0, "completed": 1, "failed": 999})
    )
    Path("sound.json").write_text(
        json.dumps(pair | {"model_id": "sound", "output_throughput": 100.0, "completed": 1000, "failed": 0})
    )
    code, out, _ = run("choose", "--speed", "broken.json", "--speed", "sound.json", "--quality", "assumed")
    assert code == 0 and out.splitlines()[0] == "quality was not measured (--quality assumed): sound at 8 streams"
    assert "set aside: 1 row of broken: at 8: it is not believed: 999 of 1,000 requests failed (99.9 %)" in out

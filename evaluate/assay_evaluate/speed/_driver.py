"""Runs `vllm bench serve` for every job-N.json of a folder, in one process of the serving environment.

It is started by path with `python -I`, needs vLLM and nothing of assay, and calls what the command line `vllm bench serve`
calls (vllm/entrypoints/cli/benchmark/serve.py: add_cli_args, main). One process for all jobs: importing vLLM takes longer than
many of them. A job is a list of words; job-N.done says `{"error": null}`, or what went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any


class JsonLines:
    """What `CustomDataset` takes from pandas, which vLLM installs with its extra `bench` only: read_json of JSON lines."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.columns = list(rows[0]) if rows else []

    @classmethod
    def read_json(cls, path_or_buf: str, lines: bool) -> JsonLines:
        with open(path_or_buf, encoding="utf-8") as file:
            return cls([Row(json.loads(line)) for line in file if line.strip()])

    def iterrows(self) -> Iterator[tuple[int, Row]]:
        return enumerate(self._rows)


class Row(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def run(folder: str) -> None:
    from vllm.benchmarks.datasets import datasets
    from vllm.benchmarks.serve import add_cli_args, main

    if find_spec("pandas") is None:
        datasets.pd = JsonLines
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
    except ImportError:  # older and newer versions keep it elsewhere
        Parser = argparse.ArgumentParser
    number = 0
    while True:
        job, done = (os.path.join(folder, f"job-{number}.{end}") for end in ("json", "done"))
        if not os.path.exists(job):
            time.sleep(0.02)
            continue
        with open(job, encoding="utf-8") as file:
            words = json.load(file)
        error = None
        try:
            parser = Parser(description="vllm bench serve")
            add_cli_args(parser)
            main(parser.parse_args(words))
        except SystemExit as stopped:
            error = f"it does not take these arguments (exit status {stopped.code})"
        except Exception as problem:  # noqa: BLE001 (whatever vLLM raises ends this job, not the process)
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        with open(done + ".partial", "w", encoding="utf-8") as file:
            json.dump({"error": error}, file)
        os.replace(done + ".partial", done)
        number += 1


if __name__ == "__main__":
    run(sys.argv[1])

"""python -m assay_vllm.replay REQUEST.json ANSWER.json: exit status 0 and an answer, or a traceback and none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from assay_vllm.replay.foreseen_gpu import pretend_gpu
from assay_vllm.replay.request import read_request
from assay_vllm.replay.sources import check_sources


def main(request_path: str, answer_path: str) -> None:
    request = read_request(Path(request_path))
    sources = check_sources()
    pretend_gpu(request.machine)

    from assay_vllm.replay.cells import replay_cells

    cells, used = replay_cells(request.cells, request.num_processes)
    answer = {"cells": cells, "sources": {**sources, "used": used}}
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

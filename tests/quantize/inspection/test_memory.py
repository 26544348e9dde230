"""`inspect --deep` reads weights a few MiB at a time: the memory of a process that inspects one large tensor."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from gguf import GGUFWriter

MOST_GROWTH_BYTES = 150 << 20
ROWS = {"small": 1_000, "large": 200_000}
COLUMNS = 1024
"""In 16 bits: 2 MB and 410 MB."""
INSPECT = """
import sys
from pathlib import Path
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect
result = inspect(FolderFiles(Path(sys.argv[1])), weights=True)
print(result.read, [finding.defect for finding in result.findings if finding.severity == "wrong"])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def safetensors(folder: Path, rows: int) -> None:
    """A checkpoint of one tensor, whose last value is NaN."""
    (folder / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    num_bytes = 2 * rows * COLUMNS
    header = json.dumps({"model.proj.weight": {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [0, num_bytes]}})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        write_numbers(file, rows, np.uint16(0x3F80), np.uint16(0x7FC0))


def gguf(folder: Path, rows: int) -> None:
    """The same in GGUF, in FP16."""
    writer = GGUFWriter(folder / "model.gguf", "glm4moe")
    writer.add_tensor_info("blk.0.attn_q.weight", (rows, COLUMNS), np.dtype(np.float16), 2 * rows * COLUMNS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with (folder / "model.gguf").open("r+b") as file:
        file.write(b"\0" * (-file.seek(0, os.SEEK_END) % 32))
        write_numbers(file, rows, np.uint16(0x3C00), np.uint16(0x7E00))


def write_numbers(file: BinaryIO, rows: int, number: np.uint16, last: np.uint16) -> None:
    row = np.full(COLUMNS, number).tobytes()
    for begin in range(0, rows, 1000):
        file.write(row * min(1000, rows - begin))
    file.seek(-2, os.SEEK_CUR)
    file.write(last.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_large_tensor_is_not_held(tmp_path: Path, form: str) -> None:
    peaks = {}
    for size, rows in ROWS.items():
        folder = tmp_path / size
        folder.mkdir()
        {"safetensors": safetensors, "gguf": gguf}[form](folder, rows)
        done = subprocess.run([sys.executable, "-c", INSPECT, folder], capture_output=True, text=True, timeout=120, check=True)
        read, peak = done.stdout.splitlines()
        assert read.startswith("weights ") and "weight_not_finite" in read
        peaks[size] = int(peak) << 10
    assert peaks["large"] - peaks["small"] < MOST_GROWTH_BYTES < 2 * ROWS["large"] * COLUMNS

"""Checkpoints, recipes and jobs of one run, in its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from generated import TINY, Shape, make_checkpoint, small, weight_bytes
from measured import Job

from assay.recipes.load import recipes_dir

SMALL_BYTES = 0.4e9
"""Below this, matrices are small, so that there are experts at all."""
GIANT_BYTES, LARGE_VOCABULARY = 4e9, 151_552
"""In a single shard of so many bytes, embedding and head are as large as they really are: 1.2 GB each. In shards of 1 GB they
would be most of what is copied, and the benchmark one of copying: of 744 B weights they are 0.3 %."""


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Jobs:
    """What jobs are made of. Everything lies in `folder`; say(line): progress."""

    folder: Path
    say: Callable[[str], None]

    @property
    def tiny(self) -> Path:
        """The checkpoint that a process runs over before its clock starts."""
        path = self.folder / "tiny-source"
        return path if path.is_dir() else make_checkpoint(path, TINY)

    def checkpoint(self, name: str, gigabytes: float, *, num_shards: int | None = None) -> Path:
        """The generated checkpoint of that name, made when missing; in `num_shards`, else in shards of 1 GB (small: thirds)."""
        path = self.folder / name
        if not path.is_dir():
            num_bytes = round(gigabytes * 1e9)
            is_small = num_bytes < SMALL_BYTES
            shard_bytes = num_bytes // 3 if is_small else 10**9
            if num_shards is not None:
                shard_bytes = 2 * num_bytes if num_shards == 1 else num_bytes // num_shards
            shape = small(num_bytes, shard_bytes) if is_small else Shape(num_bytes, shard_bytes)
            if num_shards == 1 and num_bytes >= GIANT_BYTES:
                shape = replace(shape, vocab_size=LARGE_VOCABULARY)
            began = time.monotonic()
            make_checkpoint(path, shape)
            self.say(f"generated {weight_bytes(path) / 1e9:.2f} GB in {time.monotonic() - began:.0f} s")
        return path

    def precision(self, scheme: str, observer: str | None) -> Path:
        """The recipe w4a16.yaml with another scheme or observer."""
        recipe = yaml.safe_load((recipes_dir() / "precisions" / "w4a16.yaml").read_text(encoding="utf-8"))
        path = self.folder / f"{scheme}-{observer or 'default'}.yaml"
        recipe |= {"name": path.stem, "scheme": scheme, **({} if observer is None else {"observer": observer})}
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    def assay(
        self,
        name: str,
        group: str,
        source: Path,
        scheme: str,
        *,
        observer: str | None = None,
        workers: int | None = None,
        out: str = "out",
        keep: bool = False,
        cold: bool = False,
    ) -> Job:
        """This engine with its defaults, but for what is given. out: name of the output folder."""
        arguments: dict[str, Any] = {
            "source": str(source),
            "out": str(self.folder / out),
            "precision": str(self.precision(scheme, observer)),
            **({} if workers is None else {"workers": workers}),
        }
        return Job(name, "assay", arguments, weight_bytes(source), group, tiny=self.tiny, keep=keep, cold=cold)

    def llmcompressor(self, name: str, group: str, source: Path, preset: str, *, out: str) -> Job:
        """model_free_ptq with a worker per core. Its output stays."""
        arguments = {
            "source": str(source),
            "out": str(self.folder / out),
            "preset": preset,
            "workers": num_cores(),
        }
        return Job(name, "llm-compressor", arguments, weight_bytes(source), group, tiny=self.tiny, keep=True)

    def copy(self, name: str, group: str, source: Path, *, cold: bool) -> Job:
        arguments = {"source": str(source), "out": str(self.folder / "copy")}
        return Job(name, "cp", arguments, weight_bytes(source), group, cold=cold)

    def read(self, name: str, group: str, source: Path, *, cold: bool) -> Job:
        return Job(name, "read", {"source": str(source)}, weight_bytes(source), group, cold=cold)

    def verify(
        self, name: str, checkpoint: Path, tiny: Path, *, source: Path | None, cold: bool = False, **options: Any
    ) -> Job:
        """`assay verify`. A rate counts bytes of the source, or without one, of the checkpoint. options: of `verify`."""
        arguments = {"checkpoint": str(checkpoint), "source": None if source is None else str(source), **options}
        return Job(name, "verify", arguments, weight_bytes(source or checkpoint), "verify", tiny=tiny, cold=cold)

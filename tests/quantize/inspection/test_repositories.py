"""Hollow copies of published repositories: each defect is found, and nothing is raised on the healthy ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import defects_of
from published_repositories import REPOSITORIES, Repository


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda repository: repository.name)
def test_what_is_found(tmp_path: Path, repository: Repository) -> None:
    assert defects_of(repository.made(tmp_path / "copy")) == repository.defects


def test_twenty_of_five_producers_and_four_in_gguf() -> None:
    names = [repository.name for repository in REPOSITORIES]
    assert len(set(names)) == len(names) == 24
    assert sum(repository.format.startswith("GGUF") for repository in REPOSITORIES) == 4
    assert len({name.partition("/")[0] for name in names}) >= 5

"""Two small archives in the public layout, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.data.archives import TASKS, Files, Members, sample_files, write_archive
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.layout import ARCHIVE_FOLDER


@pytest.fixture(scope="session")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Files]]:
    """task -> sample id -> file -> bytes, for two tasks of three samples."""
    folder = tmp_path_factory.mktemp("samples")
    return {
        task: {
            f"sample_{index:04d}": sample_files(folder / task / str(index), 10 * number + index)
            for index in range(3)
        }
        for number, task in enumerate(TASKS)
    }


@pytest.fixture
def members(contents: dict[str, dict[str, Files]]) -> Callable[[str], Members]:
    """The members of one task's archive, to be changed at will."""

    def of(task: str) -> Members:
        return {
            f"{task}/group_task/{sample}/{file}": content
            for sample, files in contents[task].items()
            for file, content in files.items()
        }

    return of


@pytest.fixture
def dataset_root(tmp_path: Path, members: Callable[[str], Members]) -> Path:
    """A directory with both archives."""
    root = tmp_path / "public"
    for task in TASKS:
        write_archive(root / ARCHIVE_FOLDER / f"{task}.tar.gz", members(task))
    return root


@pytest.fixture
def spec() -> Callable[..., DataSpec]:
    """A specification of small batches, with any field changed."""

    def build(dataset_json: Path, **changes: Any) -> DataSpec:
        values: dict[str, Any] = {
            "dataset_size": None,
            "num_frames": 5,
            "height": 32,
            "width": 32,
            "fps": 16,
            "shuffle": True,
            "shuffle_seed": 42,
            "num_workers": 0,
            "prefetch_factor": 2,
            "persistent_workers": True,
        }
        return DataSpec(dataset_json, **(values | changes))

    return build

"""Session-wide tiny parts for every test folder: a model directory per family, a dataset, an evaluator
checkout.

Each is built once a session (a second or less) and must be treated as read-only: copy a directory before
changing it. What builds them is imported when used: the process that only hands out tests reads this too.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest


def _make_tiny(family: str, path: Path) -> Path:
    from wan_trainer.tiny.models import make_tiny

    return make_tiny(family, path)


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds the session's tiny parts."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_ti2v(tiny_root: Path) -> Path:
    """A tiny TI2V-5B directory: expand_timesteps, VAE 2.2, latents (4, F, H/16, W/16)."""
    return _make_tiny("ti2v-5b", tiny_root / "models" / "ti2v-5b")


@pytest.fixture(scope="session")
def tiny_a14b(tiny_root: Path) -> Path:
    """A tiny I2V-A14B directory: two experts with different weights, VAE 2.1, latents (4, F, H/8, W/8)."""
    return _make_tiny("i2v-a14b", tiny_root / "models" / "i2v-a14b")


@pytest.fixture(scope="session")
def tiny_t2v(tiny_root: Path) -> Path:
    """A tiny T2V-1.3B directory: VAE 2.1, no image conditioning."""
    return _make_tiny("t2v-1.3b", tiny_root / "models" / "t2v-1.3b")


@pytest.fixture(scope="session")
def tiny_archives(tiny_root: Path) -> Path:
    """The root of tiny archives in the public layout: two tasks of four samples, 64x64 pixels, 9 frames."""
    from wan_trainer.tiny.tasks import write_archives

    write_archives(tiny_root / "archives", samples_per_task=4)
    return tiny_root / "archives"


@pytest.fixture(scope="session")
def tiny_dataset(tiny_archives: Path, tiny_root: Path) -> Path:
    """dataset.json of the unpacked `tiny_archives`. Its video shape is the recipes': pass 9 frames of
    64x64."""
    from wan_trainer.data.unpack import unpack

    out = tiny_root / "dataset"
    unpack(tiny_archives, out, source_revision="tiny", expected_tasks=2, expected_samples=8, workers=1)
    return out / "dataset.json"


class TinyEvalkit(NamedTuple):
    """A checkout of the small evaluator, and the digest that pins it."""

    directory: Path
    sha256: str


@pytest.fixture(scope="session")
def tiny_evalkit(tiny_root: Path) -> TinyEvalkit:
    """A copy of the small evaluator checkout, away from the repository like a user's."""
    from wan_trainer.rewards.evalkit import source_sha256
    from wan_trainer.tiny.world import evalkit_source

    directory = tiny_root / "evalkit"
    shutil.copytree(evalkit_source(), directory, ignore=shutil.ignore_patterns("__pycache__"))
    return TinyEvalkit(directory, source_sha256(directory))

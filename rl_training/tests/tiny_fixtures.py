"""Session-wide tiny parts for every test folder: a model directory per family, a dataset, an evaluator
checkout.

Each is built once a session (a second or less) and must be treated as read-only: copy a directory before
changing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from wan_trainer.tiny.models import make_tiny


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that holds the session's tiny parts."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_ti2v(tiny_root: Path) -> Path:
    """A tiny TI2V-5B directory: expand_timesteps, VAE 2.2, latents (4, F, H/16, W/16)."""
    return make_tiny("ti2v-5b", tiny_root / "models" / "ti2v-5b")


@pytest.fixture(scope="session")
def tiny_a14b(tiny_root: Path) -> Path:
    """A tiny I2V-A14B directory: two experts with different weights, VAE 2.1, latents (4, F, H/8, W/8)."""
    return make_tiny("i2v-a14b", tiny_root / "models" / "i2v-a14b")


@pytest.fixture(scope="session")
def tiny_t2v(tiny_root: Path) -> Path:
    """A tiny T2V-1.3B directory: VAE 2.1, no image conditioning."""
    return make_tiny("t2v-1.3b", tiny_root / "models" / "t2v-1.3b")

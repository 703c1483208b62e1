"""A model directory per tiny family, and policies built from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.models.families import Loaded, model_spec
from wan_trainer.config.specs import Family
from wan_trainer.models.wan.load import load_wan
from wan_trainer.models.wan.policy import build_policy


@pytest.fixture(scope="session")
def directories(tiny_ti2v: Path, tiny_a14b: Path, tiny_t2v: Path) -> dict[Family, Path]:
    """The tiny model directory of each family; read-only."""
    return {"ti2v-5b": tiny_ti2v, "i2v-a14b": tiny_a14b, "t2v-1.3b": tiny_t2v}


@pytest.fixture(scope="session")
def load(directories: dict[Family, Path]) -> Callable[..., Loaded]:
    """Load a family afresh: `load(family, cfg_scale=1.0, **changes of the specification)`."""

    def build(family: Family, cfg_scale: float = 1.0, **changes: Any) -> Loaded:
        spec = model_spec(directories[family], family, **changes)
        components = load_wan(spec, "cpu")
        return Loaded(spec, components, build_policy(components, spec, cfg_scale, seed=0))

    return build

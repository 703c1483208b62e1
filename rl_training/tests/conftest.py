"""Fixtures that every test folder may use, and what every test process must have."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

# Before torch is imported anywhere: OpenMP barriers on a busy machine stall tests ten times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from rl_training.tests.tiny_fixtures import *  # noqa: F403


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import everything without the collector, which would visit all of it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end one worker would run them while the other has nothing left."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

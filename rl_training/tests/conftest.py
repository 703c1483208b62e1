"""Fixtures that every test folder may use, and what every test process must have."""

from __future__ import annotations

import os

# Before torch is imported anywhere: OpenMP barriers on a busy machine stall tests ten times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rl_training.tests.tiny_fixtures import *  # noqa: F403

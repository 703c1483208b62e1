"""Tiny model directories for the tests on real Wan models."""

from rl_training.tests.tiny_fixtures import *  # noqa: F403

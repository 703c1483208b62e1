"""The planned memory against every storage that a real step allocates, at sizes the counting never saw."""

import pytest

from benchmarks.plan_memory import TOLERANCE, UNSEEN, run_cases
from rl_training.tests.ranks import run_ranks
from wan_trainer.distributed.mesh import init_mesh


def measure_unseen():
    return run_cases(UNSEEN, init_mesh("cpu", 60.0))


@pytest.fixture(scope="module")
def measured():
    first, second = run_ranks(2, measure_unseen)
    assert first.keys() == second.keys() == UNSEEN.keys()
    return first


@pytest.mark.parametrize("name", UNSEEN)
def test_every_phase_is_within_a_fifth_of_what_was_measured(measured, name):
    ratios = measured[name]["ratios"]
    assert ratios.keys() == {"rollout", "decode", "replay", "optimizer", "peak"}
    for phase, ratio in ratios.items():
        assert 1 - TOLERANCE <= ratio <= 1 + TOLERANCE, (phase, measured[name])

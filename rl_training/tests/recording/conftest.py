from collections.abc import Callable
from dataclasses import replace

import pytest

from wan_trainer.types import StepRecord


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    base = StepRecord(
        step=1,
        batch=0,
        epoch=0,
        policy_loss=-1.23456789012e-7,
        kl_loss=0.0,
        reward_mean=0.5,
        reward_std=0.1,
        reward_valid_fraction=1.0,
        zero_std_groups=0,
        advantage_abs_mean=0.8,
        ratio_mean=1.0,
        ratio_max_dev=0.0,
        clip_fraction=0.0,
        approx_kl=0.0,
        policy_age=0,
        policy_version=0,
        grad_norm=0.3,
        lr=1e-5,
        prepare_s=1.0,
        reward_wait_s=0.1,
        replay_s=2.0,
        step_s=3.0,
        rollouts_per_s=4.0,
        peak_memory_gib=0.0,
        replayed_steps=16,
        components={"task_specific": 0.5},
    )

    def make(**changes: object) -> StepRecord:
        return replace(base, **changes)

    return make

"""Rollouts without noise equal Diffusers' own pipelines: the reference for every conditioning detail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_training.tests.models.families import FAMILIES, Loaded
from rl_training.tests.models.pipelines import STEPS, load_pipeline, reference, rollout
from wan_trainer.config.specs import Family
from wan_trainer.models.wan.vae import decode
from wan_trainer.sampling.schedule import sigmas


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_noiseless_rollout_equals_diffusers(
    family: Family, guidance: float, load: Callable[..., Loaded], directories: dict[Family, Path]
) -> None:
    loaded = load(family, cfg_scale=guidance)
    x0, noise, _ = rollout(loaded, 2, guidance)
    video = decode(loaded.components, x0, batch_size=2)
    pipeline = load_pipeline(directories[family], family)
    for index in range(2):
        expected, expected_video = reference(pipeline, index, noise[index : index + 1], guidance)
        if family == "ti2v-5b":  # Diffusers pins the first frame only after its last callback
            expected = torch.cat([x0[index : index + 1, :, :1], expected[:, :, 1:]], dim=2)
        assert (x0[index : index + 1] - expected).abs().max() < 1e-4
        assert video[index : index + 1].shape == expected_video.shape
        difference = np.abs(video[index : index + 1].astype(int) - expected_video.astype(int))
        # A difference of 1e-6 may land a pixel on the other side of a rounding boundary.
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-3
    assert (x0[0] - x0[1]).abs().max() > 0.1, "two prompts, one result: the comparison would show nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_prompts_alone(family: Family, load: Callable[..., Loaded]) -> None:
    loaded = load(family, cfg_scale=3.0)
    both, _, condition = rollout(loaded, 2, 3.0)
    loaded.components.text_cache.clear()
    alone, _, single = rollout(loaded, 1, 3.0)
    assert (both[:1] - alone).abs().max() < 1e-5
    for name in ("text", "negative_text", "image_latent", "first_frame_latent"):
        row, value = getattr(condition, name), getattr(single, name)
        assert (row is None) == (value is None)
        assert row is None or torch.equal(row[:1], value), f"{name} depends on its neighbours"


def test_guidance_changes_the_rollout(load: Callable[..., Loaded]) -> None:
    plain, _, _ = rollout(load("t2v-1.3b"), 1, 1.0)
    guided, _, _ = rollout(load("t2v-1.3b", cfg_scale=3.0), 1, 3.0)
    assert (plain - guided).abs().max() > 1e-3


def test_the_a14b_rollout_uses_both_experts(load: Callable[..., Loaded]) -> None:
    policy = load("i2v-a14b").policy
    used = [policy.expert_for(float(sigma)) for sigma in sigmas(STEPS, 5.0)[:-1]]
    assert used[0] == "transformer" and used[-1] == "transformer_2"
    assert used == sorted(used), "once below the boundary, always below"

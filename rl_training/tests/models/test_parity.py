"""Rollouts without noise equal Diffusers' own pipelines: the reference for every conditioning detail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from PIL import Image

from rl_training.tests.models.families import FAMILIES, FRAMES, HEIGHT, WIDTH, Loaded, images, prompts
from wan_trainer.config.specs import Family, SamplerSpec
from wan_trainer.models.wan.conditioning import condition_prompts
from wan_trainer.models.wan.vae import decode
from wan_trainer.sampling.noise import initial_noise
from wan_trainer.sampling.sampler import sample
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.types import Condition, SampleId

STEPS = 8
NEGATIVE = "static, blurred"
SEED = 11


class GivenSigmas(FlowMatchEulerDiscreteScheduler):
    """Diffusers' Euler scheduler at shift 1 on the trainer's grid: it appends the final zero itself."""

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, **_: Any) -> None:
        grid = sigmas(num_inference_steps, 5.0)
        super().set_timesteps(sigmas=grid[:-1].numpy(), device=device)


def reference(
    directory: Path, index: int, noise: torch.Tensor, guidance: float, max_length: int
) -> tuple[torch.Tensor, np.ndarray]:
    """(latents (1, C, F, h, w), video uint8 (1, F, H, W, 3)) of Diffusers on the prompt `index`."""
    kind = WanPipeline if "t2v" in directory.name else WanImageToVideoPipeline
    pipeline = kind.from_pretrained(directory, local_files_only=True)
    pipeline.scheduler = GivenSigmas(shift=1.0)
    pipeline.set_progress_bar_config(disable=True)
    seen: dict[str, torch.Tensor] = {}

    def keep(_pipe: Any, _step: int, _t: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen["latents"] = values["latents"]
        return values

    arguments: dict[str, Any] = {}
    if kind is WanImageToVideoPipeline:
        arguments["image"] = Image.fromarray(images(index + 1)[index].permute(1, 2, 0).numpy())
    frames = pipeline(
        prompt=prompts(index + 1)[index].prompt,
        negative_prompt=NEGATIVE,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        latents=noise,
        output_type="pil",
        max_sequence_length=max_length,
        callback_on_step_end=keep,
        **arguments,
    ).frames
    return seen["latents"], np.stack([np.stack([np.asarray(frame) for frame in video]) for video in frames])


def rollout(loaded: Loaded, count: int, guidance: float) -> tuple[torch.Tensor, torch.Tensor, Condition]:
    """(x0, initial noise, condition) of our sampler at eta 0, `count` prompts in one batch."""
    policy, components = loaded.policy, loaded.components
    spec = SamplerSpec(
        kind="flowcps",
        eta=0.0,
        eta_range=None,
        num_steps=STEPS,
        flow_shift=5.0,
        cfg_scale=guidance,
        share_group_init_noise=False,
        replay_ratio=0.6,
        trajectory_dtype="float32",
        seed=SEED,
    )
    with torch.no_grad():
        condition = condition_prompts(
            components,
            prompts(count),
            None if "t2v" in loaded.spec.family else images(count),
            num_frames=FRAMES,
            guided=guidance > 1,
            negative_prompt=NEGATIVE,
        )
        shape = policy.latent_shape(FRAMES, HEIGHT, WIDTH)
        ids = [SampleId(0, prompt, 0) for prompt in range(count)]
        grid = sigmas(STEPS, 5.0)
        trajectory = sample(policy.velocity, condition, ids, spec, grid, [], shape, "cpu")
    assert trajectory.x0 is not None
    return trajectory.x0, initial_noise(SEED, ids, shape, shared=False), condition


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_noiseless_rollout_equals_diffusers(
    family: Family, guidance: float, load: Callable[..., Loaded], directories: dict[Family, Path]
) -> None:
    loaded = load(family, cfg_scale=guidance)
    x0, noise, _ = rollout(loaded, 2, guidance)
    video = decode(loaded.components, x0, batch_size=2)
    length = loaded.components.tokenizer.model_max_length
    for index in range(2):
        expected, expected_video = reference(
            directories[family], index, noise[index : index + 1], guidance, length
        )
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

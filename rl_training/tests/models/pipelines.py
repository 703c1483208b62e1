"""Diffusers' own pipelines beside our sampler without noise: two ways to one video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from PIL import Image

from rl_training.tests.models.families import FRAMES, HEIGHT, WIDTH, Loaded, images, prompts
from wan_trainer.config.specs import Family, SamplerSpec
from wan_trainer.models.wan.conditioning import condition_prompts
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


def load_pipeline(directory: Path, family: Family) -> Any:
    """Diffusers' pipeline of a directory, with the trainer's grid."""
    kind = WanPipeline if "t2v" in family else WanImageToVideoPipeline
    pipeline = kind.from_pretrained(directory, local_files_only=True)
    pipeline.scheduler = GivenSigmas(shift=1.0)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference(
    pipeline: Any, index: int, noise: torch.Tensor, guidance: float, steps: int = STEPS
) -> tuple[torch.Tensor, np.ndarray]:
    """(latents (1, C, F, h, w), video uint8 (1, F, H, W, 3)) of Diffusers on the prompt `index`.

    A first frame that Diffusers pins after its last callback is not in the latents.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep(_pipe: Any, _step: int, _t: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen["latents"] = values["latents"]
        return values

    arguments: dict[str, Any] = {}
    if isinstance(pipeline, WanImageToVideoPipeline):
        arguments["image"] = Image.fromarray(images(index + 1)[index].permute(1, 2, 0).numpy())
    frames = pipeline(
        prompt=prompts(index + 1)[index].prompt,
        negative_prompt=NEGATIVE,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=noise,
        output_type="pil",
        max_sequence_length=pipeline.tokenizer.model_max_length,
        callback_on_step_end=keep,
        **arguments,
    ).frames
    return seen["latents"], np.stack([np.stack([np.asarray(frame) for frame in video]) for video in frames])


def rollout(
    loaded: Loaded, count: int, guidance: float, steps: int = STEPS
) -> tuple[torch.Tensor, torch.Tensor, Condition]:
    """(x0, initial noise, condition) of our sampler at eta 0, `count` prompts in one batch."""
    policy, components = loaded.policy, loaded.components
    spec = SamplerSpec(
        kind="flowcps",
        eta=0.0,
        eta_range=None,
        num_steps=steps,
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
        grid = sigmas(steps, 5.0)
        trajectory = sample(policy.velocity, condition, ids, spec, grid, [], shape, "cpu")
    assert trajectory.x0 is not None
    return trajectory.x0, initial_noise(SEED, ids, shape, shared=False), condition

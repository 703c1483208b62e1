"""A short supervised warm-up: it teaches a tiny pipeline to draw sliding squares, mostly the wrong way.

A random transformer draws noise, and no reward tells one noise from another. After this flow-matching
warm-up the rollouts are clips of a moving square whose way along the task's direction is skewed to the
short and the backward, so that reinforcement learning has something to find out.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file

from wan_trainer.media.atomic import replacing
from wan_trainer.tiny.analytic_vae import block_mean
from wan_trainer.tiny.models import quieten
from wan_trainer.tiny.tasks import TASKS, TRAVEL, SlideTask, draw, prompt, scene

Pipeline = WanPipeline | WanImageToVideoPipeline
Progress = Callable[[str], None]


@dataclass(frozen=True)
class WarmupSpec:
    """The recipe. steps, batch_size and learning_rate are AdamW's; clips is the size of the fixed training
    set.

    travel = TRAVEL * (shortest + (longest - shortest) * u**skew), u uniform: skew > 1 favours the short.
    """

    steps: int = 1000
    batch_size: int = 40
    learning_rate: float = 4e-3
    clips: int = 1024
    shortest: float = -0.8
    longest: float = 1.0
    skew: float = 2.0
    seed: int = 0


@dataclass(frozen=True)
class ClipSet:
    """latents: (N, C, F, h, w) normalised; text: (prompts, L, D); prompt_of: (N,) row of `text` of each
    clip."""

    latents: torch.Tensor
    text: torch.Tensor
    prompt_of: torch.Tensor


def silent(_: str) -> None:
    """Progress that nobody watches."""


def warm_up(model_dir: Path, spec: WarmupSpec, progress: Progress = silent) -> float:
    """Warm up the transformers of the tiny pipeline in `model_dir` and write them back; the mean late loss.

    Each weights file is replaced whole or not at all. One thread suffices: the tensors are too small to
    share.
    """
    pipeline = load_pipeline(model_dir)
    clips = draw_clips(pipeline, spec)
    loss = 0.0
    for name, low, high in _experts(pipeline):
        loss = _train(pipeline, name, clips, spec, (low, high), progress)
        _write_back(getattr(pipeline, name), model_dir / name)
    return loss


def load_pipeline(model_dir: Path) -> Pipeline:
    """The Diffusers pipeline in `model_dir`, in float32 on the CPU."""
    index = json.loads((model_dir / "model_index.json").read_text())
    kind = WanPipeline if index["_class_name"] == "WanPipeline" else WanImageToVideoPipeline
    quieten()
    return kind.from_pretrained(model_dir)


def _experts(pipeline: Pipeline) -> list[tuple[str, float, float]]:
    """The trained transformers, each with the range of sigma it serves."""
    boundary = pipeline.config["boundary_ratio"]
    if boundary is None:
        return [("transformer", 0.0, 1.0)]
    return [("transformer", boundary, 1.0), ("transformer_2", 0.0, boundary)]


def draw_clips(pipeline: Pipeline, spec: WarmupSpec) -> ClipSet:
    """The training set: clips of every task, their latents in closed form, and the texts that they share."""
    rng = random.Random(spec.seed)
    block = int(pipeline.vae.config["scale_factor_spatial"])
    prompts: dict[str, int] = {}
    rows: list[int] = []
    latents: list[torch.Tensor] = []
    for index in range(spec.clips):
        task = TASKS[index % len(TASKS)]
        text, clip = _draw_clip(task, rng, spec)
        rows.append(prompts.setdefault(text, len(prompts)))
        video = torch.from_numpy(clip.astype(np.float32)).permute(3, 0, 1, 2)[None] / 127.5 - 1.0
        latents.append(block_mean(video, block))
    colours = torch.cat(latents)
    z_dim = int(pipeline.vae.config["z_dim"])
    encoded = torch.zeros(colours.shape[0], z_dim, *colours.shape[2:])
    encoded[:, :3] = colours
    mean = torch.tensor(pipeline.vae.config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config["latents_std"]).view(1, -1, 1, 1, 1)
    return ClipSet((encoded - mean) / std, encode_texts(pipeline, list(prompts)), torch.tensor(rows))


def _draw_clip(task: SlideTask, rng: random.Random, spec: WarmupSpec) -> tuple[str, np.ndarray]:
    drawn = scene(task, rng)
    share = spec.shortest + (spec.longest - spec.shortest) * rng.random() ** spec.skew
    return prompt(task, drawn), draw(task, drawn, TRAVEL * share)


def encode_texts(pipeline: Pipeline, prompts: list[str]) -> torch.Tensor:
    """(N, L, D) embeddings by the pipeline's own encoder, at the tokenizer's length."""
    with torch.no_grad():
        embeddings, _ = pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=pipeline.tokenizer.model_max_length,
            device=torch.device("cpu"),
        )
    return embeddings


def _train(
    pipeline: Pipeline,
    name: str,
    clips: ClipSet,
    spec: WarmupSpec,
    sigma_range: tuple[float, float],
    progress: Progress,
) -> float:
    """Flow matching, E |v(x_s, s) - (eps - x0)|^2, for one transformer; returns the mean loss of the last
    tenth."""
    transformer: WanTransformer3DModel = getattr(pipeline, name)
    transformer.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(
        transformer.parameters(), lr=spec.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, spec.learning_rate, total_steps=spec.steps + 1)
    generator = torch.Generator().manual_seed(spec.seed)
    low, high = sigma_range
    late: list[float] = []
    started = time.monotonic()
    for step in range(spec.steps):
        rows = torch.randint(len(clips.latents), (spec.batch_size,), generator=generator)
        x0, text = clips.latents[rows], clips.text[clips.prompt_of[rows]]
        sigma = low + (high - low) * torch.rand(spec.batch_size, generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        loss = flow_matching_loss(pipeline, transformer, x0, noise, sigma, text)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step >= spec.steps * 9 // 10:
            late.append(loss.item())
        if (step + 1) % max(1, spec.steps // 4) == 0:
            elapsed = time.monotonic() - started
            progress(
                f"warm-up of {name}: step {step + 1}/{spec.steps}, loss {loss.item():.3f}, {elapsed:.0f} s"
            )
    optimizer.zero_grad(set_to_none=True)
    transformer.eval()
    return float(np.mean(late))


def flow_matching_loss(
    pipeline: Pipeline,
    transformer: WanTransformer3DModel,
    x0: torch.Tensor,
    noise: torch.Tensor,
    sigma: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    """The loss in the conditioning of the pipeline's family: text, pinned first frame, or image channels."""
    s = sigma.view(-1, 1, 1, 1, 1)
    x_t = (1 - s) * x0 + s * noise
    timestep = 1000.0 * sigma
    free = slice(0, None)
    if pipeline.config.get("expand_timesteps"):
        # TI2V-5B: the first frame is given, at timestep 0, and outside the loss.
        free = slice(1, None)
        x_t = torch.cat([x0[:, :, :1], x_t[:, :, 1:]], dim=2)
        frames, height, width = x0.shape[2:]
        tokens = (height // 2) * (width // 2)
        timestep = timestep[:, None].repeat(1, frames * tokens)
        timestep[:, :tokens] = 0.0
    elif pipeline.config["boundary_ratio"] is not None:
        x_t = torch.cat([x_t, image_channels(pipeline, x0)], dim=1)
    velocity = transformer(x_t, timestep, text, return_dict=False)[0]
    return (velocity - (noise - x0))[:, :, free].square().mean()


def image_channels(pipeline: Pipeline, x0: torch.Tensor) -> torch.Tensor:
    """I2V-A14B: four mask channels (1 at the given frame) and the latent of the clip with gray later
    frames."""
    mask = torch.zeros(x0.shape[0], 4, *x0.shape[2:])
    mask[:, :, 0] = 1.0
    mean = torch.tensor(pipeline.vae.config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config["latents_std"]).view(1, -1, 1, 1, 1)
    image = (-mean / std).expand_as(x0).clone()  # gray encodes to 0 before the normalisation
    image[:, :, :1] = x0[:, :, :1]
    return torch.cat([mask, image], dim=1)


def _write_back(transformer: WanTransformer3DModel, directory: Path) -> None:
    """Replace the weights file only: the configuration is unchanged, and saving it would record this path."""
    with replacing(directory / SAFETENSORS_WEIGHTS_NAME) as temporary:
        save_file(transformer.state_dict(), temporary, metadata={"format": "pt"})

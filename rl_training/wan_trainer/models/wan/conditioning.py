"""What a velocity is conditioned on: prompt encodings and, per family, the first frame."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wan_trainer.models.wan.load import WanComponents
from wan_trainer.models.wan.text import encode_prompts
from wan_trainer.models.wan.vae import encode, to_unit_range
from wan_trainer.types import Condition, Sample, UserError


@torch.no_grad()
def condition_prompts(
    components: WanComponents,
    samples: Sequence[Sample],
    first_frames: torch.Tensor | None,
    *,
    num_frames: int,
    guided: bool,
    negative_prompt: str,
) -> Condition:
    """The condition of P prompts, one row each (`Condition.select` repeats rows for the members of a group).

    first_frames: uint8 (P, 3, H, W) at the training size, or None when no sample has one. `guided` says
    whether classifier-free guidance needs the negative prompt: the sample's own, else `negative_prompt`. Only
    what the velocity reads is computed; a target video is never encoded. Raises UserError when the family
    needs a first frame and there is none.
    """
    text = encode_prompts(components, [sample.prompt for sample in samples])
    negative = [negative_prompt if s.negative_prompt is None else s.negative_prompt for s in samples]
    negative_text = encode_prompts(components, negative) if guided else None
    family = components.directory.family
    if family == "i2v-a14b":
        if first_frames is None:
            raise UserError(
                f"sample {samples[0].sample_id} has no first frame and {family} generates from one: "
                "give every sample an image, or use a text-to-video model"
            )
        return Condition(
            text, negative_text, image_latent=image_latents(components, first_frames, num_frames)
        )
    if family == "ti2v-5b" and first_frames is not None:
        return Condition(
            text, negative_text, first_frame_latent=first_frame_latents(components, first_frames)
        )
    return Condition(text, negative_text)


@torch.no_grad()
def first_frame_latents(components: WanComponents, first_frames: torch.Tensor) -> torch.Tensor:
    """TI2V-5B: the normalised latent of each first frame, (P, z, 1, h, w) float32."""
    with components.resident(components.vae):
        return torch.stack([encode(components, to_unit_range(frame)[:, None]) for frame in first_frames])


@torch.no_grad()
def image_latents(components: WanComponents, first_frames: torch.Tensor, num_frames: int) -> torch.Tensor:
    """I2V-A14B: mask and latent channels, (P, 4 + z, f, h, w) float32.

    The latent is of a clip that holds the first frame and then zeros (mid-grey); the four mask channels are
    one per pixel frame of a latent frame, 1 where given: all of latent frame 0
    (`WanImageToVideoPipeline.prepare_latents`).
    """
    stride = components.directory.temporal_stride
    rows: list[torch.Tensor] = []
    with components.resident(components.vae):
        for frame in first_frames:
            image = to_unit_range(frame)[:, None]
            clip = torch.cat([image, image.new_zeros(3, num_frames - 1, *image.shape[2:])], dim=1)
            latent = encode(components, clip)
            mask = latent.new_zeros(stride, *latent.shape[1:])
            mask[:, 0] = 1.0
            rows.append(torch.cat([mask, latent]))
    return torch.stack(rows)

"""Qwen2-VL's video pre-processing in torch, with a gradient to the pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from wan_trainer.rewards.videoalign.options import FRAME_FACTOR, MIN_FRAME_PIXELS, SIDE_FACTOR

PATCH = 14
MERGE = SIDE_FACTOR // PATCH


def frame_size(height: int, width: int, max_frame_pixels: int) -> tuple[int, int]:
    """The (height, width) a frame is resized to: multiples of 28 with about its aspect ratio, 100,352 to
    `max_frame_pixels` pixels."""
    return smart_resize(height, width, SIDE_FACTOR, min_pixels=MIN_FRAME_PIXELS, max_pixels=max_frame_pixels)


def preprocess(
    videos: torch.Tensor, frames: Sequence[int], size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen frames as patches, (N * T * h * w, 1176) float32, and the grid (T, h, w), (N, 3) on the CPU.

    videos: float32 (N, 3, F, H, W) in [0, 1]. frames: an even number of indices. size: multiples of 28.
    Equal to the processor of transformers on the same float frames where the bicubic resize does not
    overshoot [0, 1]; what does is clamped and has no gradient. 8-bit frames, which the model was trained on,
    are clamped so too, and rounded: half a level apart.
    """
    count, channels = videos.shape[:2]
    chosen = videos[:, :, list(frames)].transpose(1, 2)  # (N, T, 3, H, W)
    if chosen.shape[-2:] != size:
        resized = functional.interpolate(
            chosen.flatten(0, 1), size=size, mode="bicubic", antialias=True, align_corners=False
        )
        chosen = resized.clamp(0, 1).unflatten(0, (count, len(frames)))
    mean, std = (
        videos.new_tensor(constant).view(3, 1, 1) for constant in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    )
    normalised = (chosen - mean) / std
    times, rows, columns = len(frames) // FRAME_FACTOR, size[0] // PATCH, size[1] // PATCH
    split = normalised.reshape(
        count, times, FRAME_FACTOR, channels, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH
    )
    # The four patches that the encoder merges stand together; a patch is (3, 2, 14, 14).
    patches = split.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    grid = torch.tensor([[times, rows, columns]] * count)
    return patches.reshape(count * times * rows * columns, -1), grid

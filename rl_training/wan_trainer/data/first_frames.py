"""First frames at the training size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wan_trainer.media import fill_and_crop, read_image
from wan_trainer.types import Sample, UserError


def first_frame(sample: Sample, height: int, width: int) -> np.ndarray:
    """uint8 (3, H, W): scaled until it covers the size, cut around the centre, never stretched.

    Raises UserError when the sample has no image or it cannot be read.
    """
    if sample.first_frame is None:
        raise UserError(
            f"sample {sample.sample_id} has no image, and this run starts from one; "
            "add `image` to its line or choose a text-to-video model"
        )
    image = fill_and_crop(read_image(sample.first_frame), height, width)
    return np.ascontiguousarray(image.transpose(2, 0, 1))


def load_first_frames(samples: Sequence[Sample], height: int, width: int) -> torch.Tensor | None:
    """uint8 (P, 3, H, W), one row a sample, as training makes them; None when no sample has an image.

    Raises UserError when only some have one, or a file cannot be read; one line per problem.
    """
    if all(sample.first_frame is None for sample in samples):
        return None
    frames: list[np.ndarray] = []
    problems: list[str] = []
    for sample in samples:
        try:
            frames.append(first_frame(sample, height, width))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(*problems)
    return torch.from_numpy(np.stack(frames))

"""First frames at the training size, and whether a run is conditioned on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wan_trainer.config.specs import Family
from wan_trainer.data.dataset import Dataset
from wan_trainer.media import fill_and_crop, read_image
from wan_trainer.topology import FAMILIES
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


def takes_first_frames(
    samples: Dataset | Sequence[Sample], family: Family, key: str = "dataset_json"
) -> bool:
    """Whether a run of `family` is conditioned on the first frames of `samples`; opens no file.

    key: the configuration key that names the samples, for messages. Raises UserError when the family needs
    first frames and a sample has none, and when it takes them and only some samples have one: a batch is
    conditioned on first frames or it is not.
    """
    shape = FAMILIES[family]
    if not shape.takes_image:
        return False
    if isinstance(samples, Dataset):
        without = samples.without_image()
    else:
        without = [sample.sample_id for sample in samples if sample.first_frame is None]
    if not without:
        return True
    if len(without) == len(samples) and not shape.needs_image:
        return False
    rule = "needs one of each" if shape.needs_image else "takes one of each or none at all"
    raise UserError(
        f"{key}: {len(without)} of {len(samples)} samples have no first frame (first: {without[0]}), and "
        f"{family} {rule}; add an `image` to their lines, or use a text-to-video model"
    )

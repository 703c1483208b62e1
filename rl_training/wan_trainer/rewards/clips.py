"""Clips whose worth is known: the ground truth, and what must not earn a reward."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from wan_trainer.config.specs import DataSpec
from wan_trainer.media import fill_and_crop, frame_times, read_frames, read_image
from wan_trainer.types import Sample

GROUND_TRUTH, STATIC, BLACK = "ground truth", "static", "black"
SHUFFLED, REVERSED = "shuffled", "reversed"
CLIPS = (GROUND_TRUTH, STATIC, BLACK, SHUFFLED, REVERSED)


def probe_clips(sample: Sample, data: DataSpec, names: Collection[str] = CLIPS) -> dict[str, np.ndarray]:
    """Those of `names` that the sample allows, uint8 (F, H, W, 3) in the run's shape.

    Static repeats the first frame, black shows nothing, shuffled and reversed are the ground truth in another
    order. A ground truth that is longer than a rollout is thinned evenly, last frame included. Raises
    UserError for a file that cannot be read.
    """
    clips: dict[str, np.ndarray] = {}
    if sample.ground_truth_video is not None:
        frames = read_frames(sample.ground_truth_video, _indices(sample, data.num_frames))
        truth = fill_and_crop(frames, data.height, data.width)
        clips[GROUND_TRUTH] = truth
        clips[SHUFFLED] = truth[np.random.default_rng(0).permutation(len(truth))]
        clips[REVERSED] = truth[::-1]
    if sample.first_frame is not None:
        still = fill_and_crop(read_image(sample.first_frame)[None], data.height, data.width)
        clips[STATIC] = np.repeat(still, data.num_frames, axis=0)
    clips[BLACK] = np.zeros((data.num_frames, data.height, data.width, 3), dtype=np.uint8)
    return {name: clips[name] for name in CLIPS if name in names and name in clips}


def _indices(sample: Sample, num_frames: int) -> list[int] | None:
    assert sample.ground_truth_video is not None
    count = len(frame_times(sample.ground_truth_video))
    if count <= num_frames:
        return None
    return [round(index) for index in np.linspace(0, count - 1, num_frames).tolist()]

"""From decoded videos to the reward of VideoAlign, with a gradient to the pixels."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from wan_trainer.rewards.videoalign.files import find_files
from wan_trainer.rewards.videoalign.frames import sampled_frames
from wan_trainer.rewards.videoalign.network import load_network
from wan_trainer.rewards.videoalign.options import HEADS, Options
from wan_trainer.rewards.videoalign.pixels import MERGE, frame_size, preprocess
from wan_trainer.rewards.videoalign.prompt import read_template
from wan_trainer.rewards.videoalign.tokens import Questions
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.types import DifferentiableScores, RewardContext, Sample

_log = logging.getLogger(__name__)


class Scorer:
    """The loaded reward model."""

    def __init__(self, context: RewardContext, options: Options) -> None:
        """Raises UserError when a part of the checkpoint is missing or does not fit the others."""
        files = find_files(options)
        if options.prompt_template is None:
            # A warning, since the scores look right and are not the checkpoint's.
            _log.warning(
                "videoalign.prompt_template: is not set; the question is this project's, not the one the "
                "checkpoint was trained with, and shifts its scores"
            )
        name = options.dtype or ("bfloat16" if context.device.type == "cuda" else "float32")
        self._options = options
        self._video_fps = context.fps
        self._network = load_network(files, DTYPES[name], context.device, options.gradient_checkpointing)
        self._questions = Questions(
            files.tokenizer,
            read_template(options.prompt_template),
            self._network.video_token_id,
            self._network.vocabulary,
        )
        statistics = torch.tensor([files.statistics[head] for head in HEADS], device=context.device)
        self._mean, self._deviation = statistics.unbind(1)
        self._weights = torch.tensor([options.weights[head] for head in HEADS], device=context.device)

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """The weighted sum of the heads' z-scores; components are the z-score and the raw value of each head.

        videos: float32 (N, 3, F, H, W) in [0, 1]. Raises UserError when they have too few frames, or when a
        prompt holds a special token.
        """
        count, _, total, height, width = videos.shape
        assert count == len(samples), "one sample a video"
        options = self._options
        frames = sampled_frames(total, self._video_fps, options.fps, options.num_frames)
        size = options.size or frame_size(height, width, options.max_frame_pixels)
        patches, grid = preprocess(videos, frames, size)
        input_ids, reward_at = self._questions.write(samples, len(patches) // count // MERGE**2)
        raw = self._network(input_ids, reward_at, patches, grid)
        scaled = (raw - self._mean) / self._deviation
        names = (*HEADS, *(f"{head}_raw" for head in HEADS))
        values = torch.cat((scaled, raw), dim=1).detach().unbind(1)
        return DifferentiableScores(scaled @ self._weights, dict(zip(names, values, strict=True)))

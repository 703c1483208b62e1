"""The differentiable reward of VideoAlign, as a recipe names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_trainer.rewards.videoalign.files import find_files
from wan_trainer.rewards.videoalign.frames import sampled_frames
from wan_trainer.rewards.videoalign.options import read_options
from wan_trainer.rewards.videoalign.prompt import read_template
from wan_trainer.types import DifferentiableScores, RewardContext, Sample, UserError

if TYPE_CHECKING:
    import torch


class VideoAlign:
    """VideoReward of the VideoAlign project: visual quality, motion quality and text alignment of a video.

    The model is Qwen2-VL-2B with a linear reward head, read at a special token for each of VQ, MQ and TA.
    Weights are the user's; they stay frozen.
    """

    def __init__(
        self,
        context: RewardContext,
        *,
        model_path: str | Path,
        base_model_path: str | Path | None = None,
        prompt_template: str | Path | None = None,
        weights: Mapping[str, float] | None = None,
        fps: float = 2.0,
        max_frame_pixels: int = 200704,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        dtype: str | None = None,
        gradient_checkpointing: bool = True,
    ) -> None:
        """Load the model on `context.device`.

        model_path, base_model_path: see `find_files`. prompt_template: a text file with the question the
        checkpoint was trained with; None = the one of this package. weights: of VQ, MQ and TA in the reward,
        0 for a head that is not named; None = 1 each. fps, num_frames: see `sampled_frames`.
        max_frame_pixels: of a frame after resizing; or exactly `height` x `width`. dtype: bfloat16 or
        float32; None = bfloat16 on CUDA, float32 elsewhere. gradient_checkpointing: a layer's activations
        are computed again in the backward pass instead of kept. Raises UserError.
        """
        options = read_options(
            model_path=model_path,
            base_model_path=base_model_path,
            prompt_template=prompt_template,
            weights=weights,
            fps=fps,
            max_frame_pixels=max_frame_pixels,
            num_frames=num_frames,
            height=height,
            width=width,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
        )
        # torch and transformers take seconds to import; `check_files` does without them.
        from wan_trainer.rewards.videoalign.scorer import Scorer  # noqa: PLC0415

        self._scorer = Scorer(context, options)

    @staticmethod
    def check_files(**config: Any) -> None:
        """Raise UserError, one line for each, when an option is wrong or a file is missing or unreadable."""
        options = read_options(**config)
        problems: list[str] = []
        for check in (lambda: find_files(options), lambda: read_template(options.prompt_template)):
            try:
                check()
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)

    @staticmethod
    def check_samples(samples: Sequence[Sample], num_frames: int, fps: int, **config: Any) -> None:
        """Raise UserError when videos are too short for the frames that the model looks at."""
        options = read_options(**config)
        sampled_frames(num_frames, fps, options.fps, options.num_frames)

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """Score float32 (N, 3, F, H, W) RGB in [0, 1]: the weighted sum of the heads' z-scores.

        The gradient reaches the sampled frames. Components: VQ, MQ, TA as z-scores, and each with `_raw` as
        the model says it. Raises UserError when the videos have too few frames, or a prompt holds one of the
        model's special tokens.
        """
        return self._scorer.score(videos, samples)

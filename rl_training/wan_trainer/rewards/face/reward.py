"""The face reward, as a recipe names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_trainer.rewards.face.options import DETECTION, RECOGNITION, FaceOptions, NoFace
from wan_trainer.types import DifferentiableScores, RewardContext, Sample, UserError

if TYPE_CHECKING:
    import torch


class Face:
    """The mean cosine, over a video's frames with a face, of its face and the reference video's face.

    Source: the embedding of ArcFace (Deng et al., 2019). Networks are the user's; they stay frozen.
    """

    def __init__(
        self,
        context: RewardContext,
        *,
        model_path: str | Path,
        recognition: str = RECOGNITION,
        detection: str = DETECTION,
        no_face: NoFace = "missing",
        detection_size: int = 640,
        detection_threshold: float = 0.5,
    ) -> None:
        """Load the networks on `context.device`.

        model_path: directory of the two network files; recognition, detection: their names. no_face: what a
        generated video without any face is worth: "missing" (no verdict), "error" (the run ends) or a number.
        detection_size: side, in pixels, of the square that a frame is fitted into for detection.
        detection_threshold: lowest detection score of a face. Raises UserError.
        """
        options = FaceOptions(
            model_path, recognition, detection, no_face, detection_size, detection_threshold
        )
        options.check()
        # torch takes seconds to import; `check_files` does without it.
        from wan_trainer.rewards.face.scorer import FaceScorer  # noqa: PLC0415

        self._scorer = FaceScorer(options, context.device)

    @staticmethod
    def check_files(**config: Any) -> None:
        """Raise UserError, a line for each setting and file that cannot be used; nothing is loaded."""
        FaceOptions(**config).check()

    @staticmethod
    def check_samples(samples: Sequence[Sample], num_frames: int, fps: int, **config: Any) -> None:
        """Raise UserError when one has no reference video."""
        without = [sample.sample_id for sample in samples if sample.reference_video is None]
        if without:
            raise UserError(
                f"Face: {len(without)} samples have no reference_video (first: {without[0]}), whose face a "
                "video is compared with; give every line of the prompt list one"
            )

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """Score float32 (N, 3, F, H, W) RGB in [0, 1], one sample a row; the gradient reaches the pixels.

        Components: `similarity`, the cosine, nan without a face; `face_frames`, the share of frames with a
        face. Raises UserError for a reference video that cannot be used.
        """
        return self._scorer.score(videos, samples)

"""What a run keeps of its rollouts: every verdict, and a few videos."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wan_trainer.media import write_video
from wan_trainer.recording.rows import reward_rows
from wan_trainer.recording.run_dir import RunLog
from wan_trainer.types import PromptBatch, RewardRequest, RewardTable

PROMPTS_KEPT, MEMBERS_KEPT = 2, 4
VIDEO_CRF = 18


class RunObserver:
    """An `algorithms.protocols.Observer`: rewards go to the run log, videos to rollout_videos/.

    Videos are kept of batches 0, every_steps, 2 * every_steps, ... and of the last one (0 keeps none), of
    the first members of the first prompts. Each rank writes those it drew.
    """

    def __init__(self, log: RunLog, *, every_steps: int, total_batches: int, fps: int) -> None:
        self._log = log
        self._every_steps = every_steps
        self._total_batches = total_batches
        self._fps = fps

    def wants_videos(self, batch: PromptBatch) -> bool:
        """Whether some of this batch are kept."""
        last = batch.step == self._total_batches - 1
        return self._every_steps > 0 and (last or batch.step % self._every_steps == 0)

    def videos(self, batch: PromptBatch, videos: np.ndarray, requests: Sequence[RewardRequest]) -> None:
        """Write the kept ones of `videos`, uint8 (N, F, H, W, 3)."""
        if not self.wants_videos(batch):
            return
        for video, request in zip(videos, requests, strict=True):
            if request.id.prompt < PROMPTS_KEPT and request.id.member < MEMBERS_KEPT:
                path = self._log.files.rollout_video(request.id)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_video(path, video, self._fps, crf=VIDEO_CRF)

    def evaluation(self, seen: int, prompt: int, video: np.ndarray) -> None:
        """Write the video of one held prompt, uint8 (F, H, W, 3), drawn after `seen` batches."""
        path = self._log.files.evaluation_video(seen, prompt)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, video, self._fps, crf=VIDEO_CRF)

    def rewards(self, batch: PromptBatch, table: RewardTable) -> None:
        """Record all verdicts of one wave."""
        self._log.rewards(reward_rows(batch.samples, table))

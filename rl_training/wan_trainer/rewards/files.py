"""Scoring video files that exist already, through the same calls as a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wan_trainer.media import read_frames
from wan_trainer.types import (
    PendingRewards,
    Reward,
    RewardRequest,
    RewardResult,
    Sample,
    SampleId,
    UserError,
    first_line,
)


@dataclass(frozen=True)
class VideoFile:
    """One video and the sample that it answers. problem: why there is none, then it is never scored."""

    path: Path
    task: str
    sample_id: str
    sample: Sample | None
    problem: str | None = None


@dataclass(frozen=True)
class FileScore:
    """What became of one video: a finite reward, or an error."""

    file: VideoFile
    result: RewardResult


def score_files(reward: Reward, files: Sequence[VideoFile], window: int) -> Iterator[FileScore]:
    """The scores of `files` in their order; at most `window` videos are decoded and waiting at a time.

    A file without a sample, a video that cannot be read, and a failed verdict are errors, never a 0.
    """
    waiting: deque[tuple[VideoFile, PendingRewards | RewardResult]] = deque()
    for index, file in enumerate(files):
        waiting.append((file, _begin(reward, file, index)))
        if len(waiting) >= window:
            yield _finish(*waiting.popleft())
    while waiting:
        yield _finish(*waiting.popleft())


def _begin(reward: Reward, file: VideoFile, index: int) -> PendingRewards | RewardResult:
    id_ = SampleId(0, index, 0)
    if file.sample is None:
        return RewardResult(id_, math.nan, error=file.problem)
    try:
        frames = read_frames(file.path)
    except UserError as error:
        return RewardResult(id_, math.nan, error=first_line(error))
    return reward.submit(frames[None], [RewardRequest(id_, file.sample)])


def _finish(file: VideoFile, pending: PendingRewards | RewardResult) -> FileScore:
    return FileScore(file, pending if isinstance(pending, RewardResult) else pending.result()[0])

"""Scoring video files that exist already, through the same calls as a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

MOST_BYTES = 2 << 30
"""Of decoded videos that wait for a score: 32 of 81 frames of 512 x 512."""


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
    """What became of one video: a finite reward, or an error. frames: how many it has, 0 when unread."""

    file: VideoFile
    result: RewardResult
    frames: int = 0


def score_files(reward: Reward, files: Sequence[VideoFile], window: int) -> Iterator[FileScore]:
    """The scores of `files` in their order; at most `window` videos are decoded and waiting at a time.

    Fewer where they are large: together they hold MOST_BYTES, or are one. A file without a sample, a video
    that cannot be read, and a failed verdict are errors, never a 0.
    """
    waiting: deque[_Waiting] = deque()
    for index, file in enumerate(files):
        waiting.append(_begin(reward, file, index))
        while waiting and (len(waiting) >= window or sum(one.size for one in waiting) > MOST_BYTES):
            yield _finish(waiting.popleft())
    while waiting:
        yield _finish(waiting.popleft())


@dataclass(frozen=True)
class _Waiting:
    """A video and its verdict to come. size: bytes of its frames."""

    file: VideoFile
    pending: PendingRewards | RewardResult
    frames: int = 0
    size: int = 0


def _begin(reward: Reward, file: VideoFile, index: int) -> _Waiting:
    id_ = SampleId(0, index, 0)
    if file.sample is None:
        return _Waiting(file, RewardResult(id_, math.nan, error=file.problem))
    try:
        frames = read_frames(file.path)
    except UserError as error:
        return _Waiting(file, RewardResult(id_, math.nan, error=first_line(error)))
    pending = reward.submit(frames[None], [RewardRequest(id_, file.sample)])
    return _Waiting(file, pending, len(frames), frames.nbytes)


def _finish(one: _Waiting) -> FileScore:
    result = one.pending if isinstance(one.pending, RewardResult) else one.pending.result()[0]
    if result.error is None and not result.valid:
        result = replace(result, error=f"reward is not finite ({result.reward})")
    return FileScore(one.file, result, one.frames)

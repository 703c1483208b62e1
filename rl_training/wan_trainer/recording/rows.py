"""The rows of a run's files, and the names of its rollout videos.

In every file `step` counts batches from 0 (the position of the batch in the run), except in metrics.jsonl:
there it is the number of optimizer updates done and `batch` is the position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wan_trainer.types import RewardTable, Sample, SampleId

_VIDEO_NAME = re.compile(r"step-(\d{6,})-p(\d{2,})-m(\d{2,})\.mp4")
_EVALUATION_VIDEO_NAME = re.compile(r"eval-(\d{6,})-p\d{2,}\.mp4")


@dataclass(frozen=True)
class RewardRow:
    """One line of rewards.jsonl: the verdict on one rollout. reward is nan (null in the file) when missing.

    prompt: index in the global batch of the step. seconds: how long the scoring itself took.
    """

    step: int
    task: str
    sample_id: str
    prompt: int
    member: int
    reward: float
    components: Mapping[str, float]
    seconds: float
    error: str | None


@dataclass(frozen=True)
class RewardErrorRow:
    """One line of reward_errors.jsonl: why a rollout has no reward."""

    step: int
    task: str
    sample_id: str
    prompt: int
    member: int
    reason: str


def reward_rows(samples: Sequence[Sample], table: RewardTable) -> list[RewardRow]:
    """The rows of one wave. `samples` are all prompts of the step, indexed by the global prompt index."""
    rows: list[RewardRow] = []
    for group in table.results:
        for result in group:
            sample = samples[result.id.prompt]
            error = result.error
            if error is None and not result.valid:
                error = f"reward is not finite ({result.reward})"
            rows.append(
                RewardRow(
                    step=result.id.step,
                    task=sample.task,
                    sample_id=sample.sample_id,
                    prompt=result.id.prompt,
                    member=result.id.member,
                    reward=result.reward if result.valid else float("nan"),
                    components=result.components,
                    seconds=max(0.0, result.ended - result.started),
                    error=error,
                )
            )
    return rows


def error_row(row: RewardRow) -> RewardErrorRow | None:
    """The error of a reward row, if it has one."""
    if row.error is None:
        return None
    return RewardErrorRow(row.step, row.task, row.sample_id, row.prompt, row.member, row.error)


def video_name(sample: SampleId) -> str:
    """File name of a rollout video: from its numbers only, so that no prompt ever becomes a file name."""
    return f"step-{sample.step:06d}-p{sample.prompt:02d}-m{sample.member:02d}.mp4"


def parse_video_name(name: str) -> SampleId | None:
    """The rollout a file name stands for, or None for a foreign file."""
    match = _VIDEO_NAME.fullmatch(name)
    return SampleId(*(int(number) for number in match.groups())) if match else None


def evaluation_video_name(batch: int, prompt: int) -> str:
    """File name of the video of a held prompt, drawn after `batch` batches."""
    return f"eval-{batch:06d}-p{prompt:02d}.mp4"


def parse_evaluation_video_name(name: str) -> int | None:
    """The batches before the evaluation that a file name stands for, or None for another file."""
    match = _EVALUATION_VIDEO_NAME.fullmatch(name)
    return int(match.group(1)) if match else None

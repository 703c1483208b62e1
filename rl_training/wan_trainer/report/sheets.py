"""Contact sheets: a few frames of a rollout video side by side, as one small JPEG inside the page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from wan_trainer.media.video import probe_video, read_frames
from wan_trainer.report.run_data import RolloutReward, RunData
from wan_trainer.types import SampleId, UserError

_FRAMES = 8
_TILE = 144
_GAP = 4
_MAX_SHEET_BYTES = 60_000
_VIDEOS_PER_GROUP = 4


@dataclass(frozen=True)
class Sheet:
    """One rollout in the report. image: data URI, None when the video could not be read; problem says why."""

    sample: SampleId
    file: str
    reward: RolloutReward | None
    image: str | None
    problem: str = ""


@dataclass(frozen=True)
class SheetGroup:
    """Sheets under one heading."""

    title: str
    sheets: Sequence[Sheet]


def sheet_groups(run: RunData) -> list[SheetGroup]:
    """The rollouts of the first and of the latest recorded batch, and the best ones of the whole run."""
    if not run.videos:
        return []
    samples = sorted(run.videos)

    def score(sample: SampleId) -> float:
        verdict = run.video_rewards.get(sample)
        return verdict.reward if verdict is not None and math.isfinite(verdict.reward) else -math.inf

    first, latest = samples[0].step, samples[-1].step
    scored = [sample for sample in samples if math.isfinite(score(sample))]
    best = sorted(scored, key=lambda sample: (-score(sample), sample))
    choices = {f"First recorded batch ({first})": [item for item in samples if item.step == first]}
    choices["Best of the run"] = best
    if latest != first:
        choices[f"Latest recorded batch ({latest})"] = [item for item in samples if item.step == latest]
    groups: list[SheetGroup] = []
    for title, chosen in choices.items():
        sheets = [
            make_sheet(item, run.videos[item], run.video_rewards) for item in chosen[:_VIDEOS_PER_GROUP]
        ]
        groups.append(SheetGroup(title, sheets))
    return [group for group in groups if group.sheets]


def make_sheet(sample: SampleId, path: Path, rewards: Mapping[SampleId, RolloutReward]) -> Sheet:
    """The sheet of one video; a video that cannot be read keeps its place and says so."""
    verdict = rewards.get(sample)
    try:
        count = probe_video(path).num_frames
        spread = np.linspace(0, count - 1, min(_FRAMES, count)).round().astype(int).tolist()
        frames = read_frames(path, spread if count else None)
    except UserError as error:
        return Sheet(sample, path.name, verdict, None, str(error).removeprefix(f"{path}: "))
    return Sheet(sample, path.name, verdict, _as_data_uri(frames[:_FRAMES]))


def _as_data_uri(frames: np.ndarray) -> str:
    """uint8 (F, H, W, 3) as one row of tiles that fit a square of 144 pixels."""
    height, width = frames.shape[1:3]
    scale = _TILE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    sheet = Image.new("RGB", (len(frames) * (size[0] + _GAP) - _GAP, size[1]), (160, 160, 160))
    for index, frame in enumerate(frames):
        tile = Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)
        sheet.paste(tile, (index * (size[0] + _GAP), 0))
    content = b""
    # Noise, which early rollouts look like, compresses badly: the page has a size to keep.
    for quality in (80, 60, 40, 20):
        buffer = io.BytesIO()
        sheet.save(buffer, "JPEG", quality=quality, optimize=True)
        content = buffer.getvalue()
        if len(content) <= _MAX_SHEET_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(content).decode("ascii")

"""What a report shows, read from a run directory that may be unfinished, torn or partly missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wan_trainer.recording.clock import Span
from wan_trainer.recording.jsonl import JsonObject, RowReader
from wan_trainer.recording.rows import parse_video_name
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.recording.run_record import read_run_record
from wan_trainer.types import SampleId, UserError

# The strip shows the last steps; their spans lie at the end of a file that may hold millions.
_TIMELINE_TAIL_BYTES = 8 * 1024 * 1024
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Metrics:
    """Columns of metrics.jsonl, one value an update, or of evaluations.jsonl; nan where a row lacks a
    number."""

    columns: Mapping[str, tuple[float, ...]]
    components: Mapping[str, tuple[float, ...]]

    def __getitem__(self, name: str) -> tuple[float, ...]:
        return self.columns.get(name, (math.nan,) * len(self))

    def __len__(self) -> int:
        return len(self.columns["step"])

    def last(self, name: str) -> float:
        """The newest value, nan when there is none."""
        return self[name][-1] if len(self) else math.nan


@dataclass(frozen=True)
class RolloutReward:
    """The verdict on one rollout as rewards.jsonl has it; reward is nan when missing."""

    task: str
    sample_id: str
    reward: float
    error: str | None


@dataclass
class TaskRewards:
    """Sums of one task's rewards: over the whole run, and over its first and last fifth of batches."""

    rollouts: int = 0
    missing: int = 0
    total: float = 0.0
    first: list[float] = field(default_factory=list[float])
    last: list[float] = field(default_factory=list[float])

    @property
    def mean(self) -> float:
        """Mean over valid rewards, nan without any."""
        valid = self.rollouts - self.missing
        return self.total / valid if valid else math.nan


@dataclass
class ErrorReason:
    """Missing rewards with one reason (numbers in it aside)."""

    text: str
    count: int
    first_step: int
    last_step: int
    example: str


@dataclass(frozen=True)
class RunData:
    """One run, ready to be drawn. `notes` say what is missing or damaged, for the reader of the report."""

    root: Path
    record: JsonObject
    metrics: Metrics
    evaluations: Metrics
    tasks: Mapping[str, TaskRewards]
    errors: Sequence[ErrorReason]
    spans: Sequence[Span]
    videos: Mapping[SampleId, Path]
    video_rewards: Mapping[SampleId, RolloutReward]
    notes: Sequence[str]


def number(row: Mapping[str, object], key: str) -> float:
    """A number of a row, nan when it is missing, null or something else."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def text(row: Mapping[str, object], key: str, missing: str = "") -> str:
    """A text of a row, `missing` when it is not there."""
    value = row.get(key)
    return value if isinstance(value, str) else missing


def fifths(count: int) -> tuple[slice, slice]:
    """The first and the last fifth of `count` values, at least one value each."""
    size = max(1, count // 5)
    return slice(0, size), slice(max(0, count - size), count)


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values, nan without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def load_run(root: Path) -> RunData:
    """Read a run directory. Raises UserError when it is none; whatever else is wrong becomes a note."""
    files = RunFiles(root)
    if not root.is_dir():
        raise UserError(f"{root} is not a directory: pass the output_dir of a run")
    if not files.is_run():
        raise UserError(f"{root} holds neither run.json nor metrics.jsonl: pass the output_dir of a run")
    notes: list[str] = []
    record = _read_record(files, notes)
    metrics = _read_metrics(files, notes)
    videos = _list_videos(files, notes)
    tasks, video_rewards = _read_rewards(files, metrics, videos, notes)
    return RunData(
        root=root,
        record=record,
        metrics=metrics,
        evaluations=_read_evaluations(files, notes),
        tasks=tasks,
        errors=_read_errors(files, notes),
        spans=_read_spans(files, notes),
        videos=videos,
        video_rewards=video_rewards,
        notes=notes,
    )


def _read_record(files: RunFiles, notes: list[str]) -> JsonObject:
    try:
        record = read_run_record(files.record)
    except UserError as error:
        notes.append(str(error))
        return {}
    if record is None:
        notes.append("run.json is missing: what the run was made from is unknown.")
        return {}
    if record.get("status") == "running":
        notes.append("The run is recorded as running: it is in progress, or it was killed.")
    return record


def _note_damage(reader: RowReader, notes: list[str]) -> None:
    if reader.damaged:
        lines = "line was" if reader.damaged == 1 else "lines were"
        notes.append(f"{reader.path.name}: {reader.damaged} damaged {lines} left out.")


def _read_metrics(files: RunFiles, notes: list[str]) -> Metrics:
    reader = RowReader(files.metrics)
    rows = [row for row in reader if math.isfinite(number(row, "step"))]
    _note_damage(reader, notes)
    if not rows:
        notes.append("metrics.jsonl is missing or empty: no optimizer update has been recorded yet.")
    return _columns(rows)


def _read_evaluations(files: RunFiles, notes: list[str]) -> Metrics:
    reader = RowReader(files.evaluations)
    rows = [row for row in reader if math.isfinite(number(row, "batch"))]
    _note_damage(reader, notes)
    return _columns(rows)


def _columns(rows: Sequence[JsonObject]) -> Metrics:
    if not rows:
        return Metrics({"step": ()}, {})
    names = {key for row in rows for key, value in row.items() if isinstance(value, int | float)}
    scores = [row.get("components") for row in rows]
    scores = [item if isinstance(item, Mapping) else {} for item in scores]
    components = sorted({name for item in scores for name in item})
    return Metrics(
        {name: tuple(number(row, name) for row in rows) for name in names},
        {name: tuple(number(item, name) for item in scores) for name in components},
    )


def _list_videos(files: RunFiles, notes: list[str]) -> dict[SampleId, Path]:
    videos: dict[SampleId, Path] = {}
    if files.videos.is_dir():
        for path in sorted(files.videos.iterdir()):
            sample = parse_video_name(path.name)
            if sample is not None:
                videos[sample] = path
    if not videos:
        notes.append(
            "rollout_videos/ is empty (rollout_video_every_steps says how often videos are written)."
        )
    return videos


def _sample(row: JsonObject) -> SampleId | None:
    values = [row.get(key) for key in ("step", "prompt", "member")]
    numbers = [value for value in values if isinstance(value, int)]
    return SampleId(*numbers) if len(numbers) == 3 else None


def _read_rewards(
    files: RunFiles, metrics: Metrics, videos: Mapping[SampleId, Path], notes: list[str]
) -> tuple[dict[str, TaskRewards], dict[SampleId, RolloutReward]]:
    # Tasks differ from batch to batch, so fifths are of the batches and not of each task's own rows.
    batches = sorted({int(value) for value in metrics["batch"] if math.isfinite(value)})
    first, last = fifths(len(batches))
    first_end = batches[first][-1] if batches else -1
    last_start = batches[last][0] if batches else math.inf
    tasks: dict[str, TaskRewards] = {}
    shown: dict[SampleId, RolloutReward] = {}
    reader = RowReader(files.rewards)
    for row in reader:
        task, reward, step = text(row, "task", "?"), number(row, "reward"), number(row, "step")
        entry = tasks.setdefault(task, TaskRewards())
        entry.rollouts += 1
        if math.isfinite(reward):
            entry.total += reward
            if step <= first_end:
                entry.first.append(reward)
            if step >= last_start:
                entry.last.append(reward)
        else:
            entry.missing += 1
        sample = _sample(row)
        if sample in videos and sample is not None:
            error = text(row, "error") or None
            shown[sample] = RolloutReward(task, text(row, "sample_id", "?"), reward, error)
    _note_damage(reader, notes)
    if not tasks:
        notes.append("rewards.jsonl is missing or empty: no rollout has a recorded reward.")
    return dict(sorted(tasks.items())), shown


def _read_errors(files: RunFiles, notes: list[str]) -> list[ErrorReason]:
    reasons: dict[str, ErrorReason] = {}
    reader = RowReader(files.reward_errors)
    for row in reader:
        reason = text(row, "reason", "no reason given")
        step = number(row, "step")
        position = int(step) if math.isfinite(step) else -1
        kind = _NUMBER.sub("#", reason)
        entry = reasons.setdefault(kind, ErrorReason(reason, 0, position, position, ""))
        entry.count += 1
        entry.first_step, entry.last_step = min(entry.first_step, position), max(entry.last_step, position)
        entry.text, entry.example = reason, text(row, "sample_id", "?")
    _note_damage(reader, notes)
    return sorted(reasons.values(), key=lambda entry: -entry.count)


def _read_spans(files: RunFiles, notes: list[str]) -> list[Span]:
    reader = RowReader(files.timeline, tail_bytes=_TIMELINE_TAIL_BYTES)
    spans: list[Span] = []
    for row in reader:
        values = [number(row, key) for key in ("rank", "step", "start", "end")]
        if all(math.isfinite(value) for value in values):
            rank, step, start, end = values
            spans.append(Span(int(rank), text(row, "phase", "?"), int(step), start, end))
    _note_damage(reader, notes)
    if not spans:
        notes.append("timeline.jsonl is missing or empty: there is no timeline.")
    return spans

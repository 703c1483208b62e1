"""The directory of a run: which files it has, who writes them, and how a resumed run continues them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wan_trainer.recording.clock import Span
from wan_trainer.recording.jsonl import JsonlFile, JsonObject
from wan_trainer.recording.rows import (
    RewardRow,
    error_row,
    evaluation_video_name,
    parse_evaluation_video_name,
    parse_video_name,
    video_name,
)
from wan_trainer.types import EvaluationRecord, SampleId, StepRecord, UserError


@dataclass(frozen=True)
class RunFiles:
    """Paths inside one output directory. Nothing is created by naming it."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def rewards(self) -> Path:
        return self.root / "rewards.jsonl"

    @property
    def reward_errors(self) -> Path:
        return self.root / "reward_errors.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.jsonl"

    @property
    def videos(self) -> Path:
        return self.root / "rollout_videos"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def rollout_video(self, sample: SampleId) -> Path:
        """Where the video of one rollout goes: rollout_videos/step-000010-p00-m03.mp4."""
        return self.videos / video_name(sample)

    def evaluation_video(self, batch: int, prompt: int) -> Path:
        """Where the video of one held prompt goes: rollout_videos/eval-000010-p00.mp4."""
        return self.videos / evaluation_video_name(batch, prompt)

    def is_run(self) -> bool:
        """True when a run has written here."""
        return self.record.is_file() or self.metrics.is_file()


class StepObserver(Protocol):
    """Something that follows a run: the progress display, an experiment tracker."""

    def step(self, record: StepRecord) -> None:
        """One optimizer update was made."""
        ...

    def evaluation(self, record: EvaluationRecord) -> None:
        """The held prompts were drawn and scored."""
        ...

    def close(self, exit_status: int) -> None:
        """The run ended; called once."""
        ...


class RunLog(Protocol):
    """What the training loop tells about itself. Rank 0 writes it down; elsewhere it goes nowhere."""

    files: RunFiles

    def step(self, record: StepRecord) -> None:
        """One optimizer update."""
        ...

    def rewards(self, rows: Sequence[RewardRow]) -> None:
        """The verdicts of one wave, missing ones included."""
        ...

    def evaluation(self, record: EvaluationRecord) -> None:
        """One evaluation."""
        ...

    def spans(self, spans: Iterable[Span]) -> None:
        """Spans of any rank."""
        ...

    def close(self, exit_status: int) -> None:
        """Close every file and tell the observers; a second call does nothing."""
        ...


class RunWriter:
    """The run log of rank 0. Opening mends a torn last line in each file.

    Raises UserError when the output directory cannot be made.
    """

    def __init__(self, output_dir: Path) -> None:
        self.files = RunFiles(output_dir)
        try:
            self.files.videos.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output_dir {output_dir} cannot be written ({error.strerror}): choose another"
            ) from error
        self._observers: list[StepObserver] = []
        self._metrics = JsonlFile(self.files.metrics)
        self._rewards = JsonlFile(self.files.rewards)
        self._reward_errors = JsonlFile(self.files.reward_errors)
        self._evaluations = JsonlFile(self.files.evaluations)
        self._timeline = JsonlFile(self.files.timeline)
        self._closed = False

    def observe(self, observer: StepObserver) -> None:
        """Tell `observer` of every step from now on, and of the end."""
        self._observers.append(observer)

    def step(self, record: StepRecord) -> None:
        """Append to metrics.jsonl, then tell the observers."""
        self._metrics.append(record)
        for observer in self._observers:
            observer.step(record)

    def rewards(self, rows: Sequence[RewardRow]) -> None:
        """Append to rewards.jsonl, and the missing ones to reward_errors.jsonl too."""
        for row in rows:
            self._rewards.append(row)
            missing = error_row(row)
            if missing is not None:
                self._reward_errors.append(missing)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append to evaluations.jsonl, then tell the observers."""
        self._evaluations.append(record)
        for observer in self._observers:
            observer.evaluation(record)

    def spans(self, spans: Iterable[Span]) -> None:
        """Append to timeline.jsonl; times in seconds since the epoch, to the microsecond."""
        for span in spans:
            times = {"start": round(span.start, 6), "end": round(span.end, 6)}
            self._timeline.append({"rank": span.rank, "phase": span.phase, "step": span.step, **times})

    def truncate_after(self, batches: int) -> None:
        """Keep what the first `batches` batches wrote, videos included; 0 clears the run."""

        def before(key: str, row: JsonObject) -> bool:
            position = row.get(key)
            return isinstance(position, int) and position < batches

        # Several updates may share a batch, so metrics are cut by batch and not by their update count.
        self._metrics.keep(lambda row: before("batch", row))
        for file in (self._rewards, self._reward_errors, self._timeline):
            file.keep(lambda row: before("step", row))
        # Their batch counts those before: one at this very point stays, unless the run starts afresh.
        evaluated = batches + 1 if batches else 0
        self._evaluations.keep(lambda row: isinstance(at := row.get("batch"), int) and at < evaluated)
        for path in self.files.videos.iterdir():
            sample, evaluation = parse_video_name(path.name), parse_evaluation_video_name(path.name)
            if (sample is not None and sample.step >= batches) or (
                evaluation is not None and evaluation >= evaluated
            ):
                path.unlink()

    def close(self, exit_status: int) -> None:
        """Close every file and tell the observers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for file in (
            self._metrics,
            self._rewards,
            self._reward_errors,
            self._evaluations,
            self._timeline,
        ):
            file.close()
        for observer in self._observers:
            observer.close(exit_status)


class NullRunLog:
    """The run log of every rank but 0: the same calls, nothing written."""

    def __init__(self, output_dir: Path) -> None:
        self.files = RunFiles(output_dir)

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def rewards(self, rows: Sequence[RewardRow]) -> None:
        """Nothing."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Nothing."""

    def spans(self, spans: Iterable[Span]) -> None:
        """Nothing."""

    def close(self, exit_status: int) -> None:
        """Nothing."""

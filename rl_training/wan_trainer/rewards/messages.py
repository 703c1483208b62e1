"""What travels between the trainer and a scorer: JSON both ways, so that no reply can run code here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

ERROR_TEXT_LIMIT = 300
"""Longest error text kept, in characters: it is written once per failed sample."""

FAREWELL = b""
"""Sent in place of a job: the scorer leaves."""

REPLY_LIMIT = 1 << 20
"""Largest reply accepted from a scorer, in bytes; a longer one counts as a broken scorer."""


class Job(Protocol):
    """One rollout for a scorer; its pixels follow as a file descriptor."""

    @property
    def leftover(self) -> Path | None:
        """A file that the scorer writes for this job, to be deleted after it."""
        ...

    def encode(self) -> bytes:
        """The job as the scorer's body reads it."""
        ...


@dataclass(frozen=True)
class ScoreJob:
    """One rollout for the external evaluator.

    shape: (F, H, W, 3) of the uint8 frames. task: the evaluator's own name for it. video_path: where the
    prepared MP4 is written. gt_info: the evaluator's ground-truth argument. All paths are absolute.
    """

    video_path: str
    shape: tuple[int, int, int, int]
    task: str
    gt_info: Mapping[str, str | list[str]]
    device: str
    fps: float
    prepared_width: int
    prepared_height: int
    prepare_crf: float
    max_duration_s: float
    threads: int

    @property
    def leftover(self) -> Path:
        """The prepared MP4."""
        return Path(self.video_path)

    def encode(self) -> bytes:
        """The job as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> ScoreJob:
        """The inverse of `encode`; the two ends are always of one version."""
        fields = json.loads(data)
        return ScoreJob(**{**fields, "shape": tuple(fields["shape"])})


@dataclass(frozen=True)
class Verdict:
    """What a scorer says about one job.

    components: named finite scores, empty on error. raised: the evaluator raised instead of answering, so a
    second try is worth while. started, ended: `time.monotonic()` around preparation and scoring.
    """

    components: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    raised: bool = False
    started: float = 0.0
    ended: float = 0.0

    def encode(self) -> bytes:
        """The verdict as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Verdict:
        """The inverse of `encode`. Raises ValueError, TypeError or KeyError on anything else."""
        fields = json.loads(data)
        return Verdict(
            components={str(name): float(value) for name, value in fields["components"].items()},
            error=None if fields["error"] is None else one_line(fields["error"]),
            raised=bool(fields["raised"]),
            started=float(fields["started"]),
            ended=float(fields["ended"]),
        )


@dataclass(frozen=True)
class Greeting:
    """A scorer's first message: what it can score, or why it cannot be used."""

    names: tuple[str, ...] = ()
    error: str | None = None

    def encode(self) -> bytes:
        """The greeting as JSON bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Greeting:
        """The inverse of `encode`. Raises ValueError, TypeError or KeyError on anything else."""
        fields = json.loads(data)
        error = None if fields["error"] is None else one_line(fields["error"])
        return Greeting(names=tuple(str(name) for name in fields["names"]), error=error)


def one_line(text: object, limit: int = ERROR_TEXT_LIMIT) -> str:
    """`text` on one line of at most `limit` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."

"""What a start begins with: a checkpoint to continue, weights to start from, or the model as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_trainer.config import contract_changes
from wan_trainer.config.specs import ResumeSpec
from wan_trainer.recording.manifest import (
    MANIFEST,
    checkpoint_at,
    holds_checkpoint,
    latest_checkpoint,
    named_checkpoints,
    verify_checkpoint,
)
from wan_trainer.training.checkpoint_state import TrainState, read_train_state
from wan_trainer.training.role_state import check_roles
from wan_trainer.types import UserError


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint and the state it holds.

    own: it lies in this run's output_dir. notes: what the user should know of the choice, one line each.
    """

    checkpoint: Path
    state: TrainState
    own: bool = True
    notes: tuple[str, ...] = ()


def find_resume_point(
    output_dir: Path,
    contract: Mapping[str, Mapping[str, Any]],
    *,
    auto_resume: bool,
    allow_changed: Collection[str] = (),
    resume: ResumeSpec = ResumeSpec(),  # noqa: B008 - frozen
) -> ResumePoint | None:
    """The checkpoint this run continues from, or None for a fresh start, with other weights perhaps.

    The newest complete one in `output_dir` wins over `resume`. Raises UserError when the checkpoint is
    damaged or missing, when it belongs to a run with other values of a contract key (model, data, reward,
    sampler, optimization) that `allow_changed` does not name, or when the directory holds a run and
    auto_resume is off.
    """
    checkpoint = latest_checkpoint(output_dir)
    notes = _notes(output_dir, checkpoint)
    if checkpoint is not None and not auto_resume:
        raise UserError(
            f"output_dir {output_dir} already holds {checkpoint.name} and auto_resume is false: choose "
            "another output_dir, or set --auto_resume to continue"
        )
    own = checkpoint is not None
    if checkpoint is not None and resume.resume_from is not None:
        notes += (f"resume_from is not used: output_dir holds {checkpoint.name} already",)
    if checkpoint is None and resume.resume_from is not None and not resume.weights_only:
        checkpoint = _target(resume.resume_from)
    if checkpoint is None:
        return None
    verify_checkpoint(checkpoint)
    state = read_train_state(checkpoint)
    check_roles(checkpoint, state)
    changed = contract_changes(state.contract, contract, allow_changed)
    if changed:
        raise UserError(*changed)
    return ResumePoint(checkpoint, state, own, notes)


def starting_checkpoint(path: Path) -> Path | None:
    """The checkpoint of a run that `path` names, by itself or by its run; None when it is something else.

    Raises UserError when it is one that is incomplete.
    """
    return _target(path) if holds_checkpoint(path) else None


def _target(path: Path) -> Path:
    try:
        return checkpoint_at(path)
    except UserError as error:
        raise UserError(*(f"resume_from: {line}" for line in error.problems)) from error


def _notes(output_dir: Path, newest: Path | None) -> tuple[str, ...]:
    """What else lies in `output_dir`. Raises UserError when a fresh start would bury a run that lost its
    checkpoints.
    """
    lost = [path.name for path in named_checkpoints(output_dir) if not (path / MANIFEST).is_file()]
    if newest is not None:
        return tuple(
            f"warning: {name} has no {MANIFEST}: it is incomplete and left out"
            for name in lost
            if int(name.rpartition("-")[2]) > int(newest.name.rpartition("-")[2])
        )
    latest = output_dir / "latest"
    if not lost and latest.is_file():
        lost = [latest.read_text().strip()]
    if lost:
        raise UserError(
            f"output_dir {output_dir} holds a run without a complete checkpoint ({lost[-1]} is gone or has "
            f"no {MANIFEST}): restore it, delete {' and '.join([*lost, 'latest'])} there to start over, or "
            "choose another output_dir"
        )
    return ()

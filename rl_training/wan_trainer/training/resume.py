"""What a start finds in its output directory: nothing, a run to continue, or a run that is complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wan_trainer.config import contract_changes
from wan_trainer.recording.manifest import latest_checkpoint, verify_checkpoint
from wan_trainer.training.checkpoint import TrainState, read_train_state
from wan_trainer.types import UserError


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint and the state it holds."""

    checkpoint: Path
    state: TrainState


def find_resume_point(
    output_dir: Path,
    contract: Mapping[str, Mapping[str, Any]],
    *,
    auto_resume: bool,
    allow_changed: Collection[str] = (),
) -> ResumePoint | None:
    """The checkpoint this run continues from, or None for a fresh start.

    Raises UserError when the newest checkpoint is damaged, when it belongs to a run with other values of a
    contract key (model, data, reward, sampler, optimization) that `allow_changed` does not name, or when the
    directory holds a run and auto_resume is off.
    """
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint is None:
        return None
    if not auto_resume:
        raise UserError(
            f"output_dir {output_dir} already holds {checkpoint.name} and auto_resume is false: choose "
            "another output_dir, or set --auto_resume to continue"
        )
    verify_checkpoint(checkpoint)
    state = read_train_state(checkpoint)
    changed = contract_changes(state.contract, contract, allow_changed)
    if changed:
        raise UserError(*changed)
    return ResumePoint(checkpoint, state)

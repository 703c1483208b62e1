"""What a start finds in its output directory: nothing, a run to continue, or a run that is complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from wan_trainer.training.checkpoint import TrainState, latest_checkpoint, read_train_state, verify_checkpoint
from wan_trainer.types import UserError


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint and the state it holds."""

    checkpoint: Path
    state: TrainState


def find_resume_point(
    output_dir: Path,
    contract: Mapping[str, Mapping[str, str]],
    *,
    auto_resume: bool,
    allow_changed: Collection[str] = (),
    verify: bool = True,
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
            "another "
            "output_dir, or set --auto_resume to continue"
        )
    if verify:
        verify_checkpoint(checkpoint)
    state = read_train_state(checkpoint)
    changed = contract_changes(state.contract, contract)
    refused = [line for key, line in changed.items() if key not in allow_changed]
    if refused:
        raise UserError(*(f"{line} (found {checkpoint})" for line in refused))
    return ResumePoint(checkpoint, state)


def contract_changes(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """One line per config key that differs between two runs, by key."""
    lines: dict[str, str] = {}
    for group in sorted(before.keys() | now.keys()):
        old, new = before.get(group, {}), now.get(group, {})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                lines[key] = (
                    f"{key} is {new.get(key, 'absent')} but the run in output_dir was started with "
                    f"{old.get(key, 'absent')} ({group}): use another output_dir, or --allow_changed {key}"
                )
    return lines

"""What each role of a ReFL run has in a checkpoint, and that the parts are of one save.

The actor's part is the checkpoint's tensors and train_state.json. A reward is frozen: its part says which it
was and at what step, so that a checkpoint put together from two saves is not taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from wan_trainer.config.specs import Target
from wan_trainer.recording.manifest import write_synced
from wan_trainer.training.checkpoint_state import TrainState
from wan_trainer.types import UserError

ROLES = "roles"


def write_roles(checkpoint: Path, roles: Mapping[str, Target], step: int) -> None:
    """Write `roles/<name>.json` of every role beside the actor."""
    for key, target in roles.items():
        path = checkpoint / f"{key.replace('.', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        part = {"step": step, "target": target.path, "config": target.arguments}
        write_synced(path, json.dumps(part, indent=1, sort_keys=True) + "\n")


def check_roles(checkpoint: Path, state: TrainState) -> None:
    """Raise UserError, one line each, for roles without a part in `checkpoint`, or with another step's."""
    named = state.contract.get("reward", {}).get(ROLES) or {}
    problems: list[str] = []
    for name in (name for name, role in named.items() if "_target_" in role):
        path = checkpoint / ROLES / f"{name}.json"
        try:
            step = json.loads(path.read_bytes())["step"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(
                f"{path}: the part of role {name} is missing or unreadable ({type(error).__name__}); restore "
                "it, or delete this checkpoint to resume from the one before"
            )
            continue
        if step != state.step:
            problems.append(
                f"{path}: the part of role {name} is of step {step} and the actor's of step {state.step}; "
                "restore both from one save, or delete this checkpoint to resume from the one before"
            )
    if problems:
        raise UserError(*problems)

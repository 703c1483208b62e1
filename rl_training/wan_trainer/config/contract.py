"""What a resumed run must have in common with the run it goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from wan_trainer.config.resolution import counts_all_ranks, replay_depth
from wan_trainer.config.roles import without_placement
from wan_trainer.config.schema import keys

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig

MASK = "********"
# Scratch space is each machine's own affair.
_MACHINE_LOCAL = frozenset({"vbvr_reward_tmp_dir"})
# What a checkpoint holds weights and moments of: with another value there is nothing to go on from.
_TRAINED = frozenset({"lora_rank", "lora_target_modules", "lora_module_prefix", "train_experts"})


def public_values(config: TrainConfig) -> dict[str, Any]:
    """Every key's value as plain data, for records and display, secrets masked."""
    values = config.model_dump(mode="json")
    for name, info in keys().items():
        if info.secret and values[name] not in ("", "EMPTY", None):
            values[name] = MASK
    return values


def common_values(config: TrainConfig) -> dict[str, Any]:
    """The public values that all machines of a run must share."""
    return {name: value for name, value in public_values(config).items() if name not in _MACHINE_LOCAL}


def contract_values(config: TrainConfig, prompts: int | None = None) -> dict[str, dict[str, Any]]:
    """The values of each contract group, as JSON-able data by key.

    prompts: prompts of a step over all ranks, when the topology is known: another number would cut the stream
    of samples into other batches, while the batch_size of a replica may change with the number of ranks.
    """
    groups: dict[str, dict[str, Any]] = {
        group: {} for group in ("model", "data", "reward", "sampler", "optimization")
    }
    values = public_values(config)
    for name, info in keys().items():
        if info.group is not None:
            groups[info.group][name] = values[name]
    if config.shuffle_raw_indices_seed is None:
        groups["data"]["shuffle_raw_indices_seed"] = config.seed
    if prompts is None:
        prompts = config.batch_size if counts_all_ranks(config) else config.expected_global_prompts
    groups["data"]["expected_global_prompts"] = prompts
    # Roles may move to other ranks.
    groups["reward"]["roles"] = without_placement(config.roles)
    # The two spellings of one setting are compared as one.
    groups["optimization"]["max_off_policy_steps"] = replay_depth(config)
    return groups


def contract_digests(config: TrainConfig, prompts: int | None = None) -> dict[str, str]:
    """A sha256 of each contract group; equal digests mean equal values."""
    return group_digests(contract_values(config, prompts))


def group_digests(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A sha256 of the values of each group."""
    return {
        group: hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        for group, values in groups.items()
    }


def contract_changes(
    saved: Mapping[str, Mapping[str, Any]],
    current: Mapping[str, Mapping[str, Any]],
    allowed: Collection[str] = (),
) -> list[str]:
    """One line for each key whose value differs from the saved run's, those in `allowed` aside.

    No allowance reaches the keys that say which parameters are trained.
    """
    lines: list[str] = []
    for group, values in current.items():
        before = saved.get(group, {})
        for name in sorted(values.keys() | before.keys()):
            old, new = before.get(name), values.get(name)
            # A checkpoint that is older than the key says nothing of it.
            held = name in _TRAINED and name in before
            if old == new or (name in allowed and not held):
                continue
            differs = f"{name}: {json.dumps(new)} differs from {json.dumps(old)} of the run to go on from"
            if held:
                lines.append(
                    f"{differs}, whose checkpoint holds what that one trained; restore it, or start a run of "
                    "its own in another output_dir"
                )
            else:
                lines.append(
                    f"{differs} ({group}); restore it, choose another output_dir, or add "
                    f"--allow_changed {name}"
                )
    return lines

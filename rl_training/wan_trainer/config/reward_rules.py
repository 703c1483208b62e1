"""Rules about the reward: what each kind needs, and keys that only another kind reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wan_trainer.config.rules import Problem, changed_keys, refuse

if TYPE_CHECKING:
    from wan_trainer.config.schema import GrpoConfig


def reward_rules(config: GrpoConfig) -> Iterator[Problem]:
    """The keys of the reward in use, and of those that are not."""
    if not isinstance(config.grpo_reward_fn, str):
        yield from _own_reward(config)
        return
    if not any(config.reward_weights.values()):
        shown = config.reward_weights
        yield refuse("reward_weights", f"{shown} gives every rollout the same reward; use {{score: 1.0}}")
    if config.grpo_reward_fn == "vbvr_rule":
        yield from _rule_reward(config)
    else:
        yield from _judge_reward(config)
    yield from _other_reward(config)


def _own_reward(config: GrpoConfig) -> Iterator[Problem]:
    """Keys that only the built-in rewards read would be ignored: say so."""
    shared = ("vbvr_reward_decode_batch_size", "vbvr_reward_fail_on_error")
    built_in = ("vbvr_reward_", "vlm_reward_", "reward_weights", "reward_timeout_s", "reward_monitor")
    names = [name for name in changed_keys(config, *built_in) if name not in shared]
    if names:
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield Problem(
            (names[0], "grpo_reward_fn"),
            f"{shown}: set for a built-in reward, and grpo_reward_fn names your own; remove "
            f"{', '.join(names)}, and give the target what it needs as arguments",
        )


def _rule_reward(config: GrpoConfig) -> Iterator[Problem]:
    if not config.vbvr_reward_evalkit_dir:
        yield refuse(
            "vbvr_reward_evalkit_dir", "is missing; grpo_reward_fn vbvr_rule scores with that checkout"
        )
    if config.vbvr_reward_evalkit_source_sha256 is None:
        yield refuse(
            "vbvr_reward_evalkit_source_sha256",
            "is missing; vbvr_rule runs a pinned evaluator: wan-trainer evalkit-digest prints the digest",
        )
    if config.vbvr_reward_device != "cpu":
        yield refuse(
            "vbvr_reward_device",
            f"{config.vbvr_reward_device} is not open to scorers, from which GPUs are hidden; use cpu",
        )


def _judge_reward(config: GrpoConfig) -> Iterator[Problem]:
    if not config.vlm_reward_model:
        yield refuse(
            "vlm_reward_model", "is missing; grpo_reward_fn vbvr_vlm asks that model for its verdicts"
        )
    if config.vlm_reward_prompt_mode == "task_specific" and not config.vlm_reward_prompt_dir:
        yield refuse(
            "vlm_reward_prompt_dir",
            "is missing; vlm_reward_prompt_mode task_specific reads its rubrics there; name it or use "
            "--vlm_reward_prompt_mode custom",
            "vlm_reward_prompt_mode",
        )


def _other_reward(config: GrpoConfig) -> Iterator[Problem]:
    """Keys of the reward that is not in use would be ignored: say so."""
    rule = config.grpo_reward_fn == "vbvr_rule"
    unused, owner = ("vlm_reward_", "vbvr_vlm") if rule else ("vbvr_reward_", "vbvr_rule")
    if owner in config.reward_monitor:
        return
    names = changed_keys(config, unused)
    if names:
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more {unused}* keys"
        yield Problem(
            (names[0], "grpo_reward_fn"),
            f"{shown}: set for {owner}, and grpo_reward_fn is {config.grpo_reward_fn}; remove them or use "
            f"grpo_reward_fn: {owner}",
        )

"""Rules about the reward: what each kind needs, and keys that only another kind reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from wan_trainer.config.reward_choice import BUILT_IN, JUDGE, RULE, label, monitored, trained, uses
from wan_trainer.config.rules import Problem, changed_keys, refuse

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig

CUSTOM_SCORE_MAX = 100
"""Full mark of the rubric that comes with vlm_reward_prompt_mode: custom."""


def reward_rules(config: TrainConfig) -> Iterator[Problem]:
    """The keys of the rewards in use, and of those that are not."""
    yield from _names(config)
    yield from _weights(config)
    if uses(config, RULE):
        yield from _rule_reward(config)
    if uses(config, JUDGE):
        yield from _judge_reward(config)
    yield from _unused(config)
    rule, judge = config.vbvr_reward_fail_on_error, config.vlm_reward_fail_on_error
    if RULE in trained(config) and JUDGE in trained(config) and rule != judge:
        yield refuse(
            "vbvr_reward_fail_on_error",
            f"{str(rule).lower()} and vlm_reward_fail_on_error {str(judge).lower()}: a rollout is missing "
            "whichever of its rewards is; set both alike",
            "vlm_reward_fail_on_error",
        )


def _names(config: TrainConfig) -> Iterator[Problem]:
    if not trained(config):
        yield refuse("grpo_reward_fn", f"[] names no reward; use {RULE}, {JUDGE} or your own")
    names = [label(choice) for choice in (*trained(config), *monitored(config))]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield refuse(
            "grpo_reward_fn",
            f"{name} is named {names.count(name)} times in grpo_reward_fn and reward_monitor; name it once, "
            "since weights and logs go by the name",
            "reward_monitor",
        )


def _weights(config: TrainConfig) -> Iterator[Problem]:
    weights, names = config.reward_weights, [label(choice) for choice in trained(config)]
    if len(names) > 1:
        even = ", ".join(f"{name}: {1 / len(names):.2g}" for name in names)
        for name in sorted(set(names) ^ weights.keys()):
            rule = "is not one of the rewards" if name in weights else "has no weight"
            yield refuse("reward_weights", f"{name} {rule}; weigh each reward, {{{even}}}", "grpo_reward_fn")
        for name in names:
            if weights.get(name) == 0:
                yield refuse(
                    "reward_weights",
                    f"{name} has weight 0; move it to reward_monitor, which only logs",
                    "grpo_reward_fn",
                )
    elif not any(weights.values()):
        yield refuse("reward_weights", f"{weights} gives every rollout the same reward; use {{score: 1.0}}")
    elif names and names[0] not in BUILT_IN and changed_keys(config, "reward_weights"):
        yield refuse(
            "reward_weights",
            f"{weights} weighs the scores of a built-in reward, and grpo_reward_fn names your own alone; "
            "remove it and scale the reward in its code",
            "grpo_reward_fn",
        )


def _unused(config: TrainConfig) -> Iterator[Problem]:
    """Keys of rewards that are not in use would be ignored: say so."""
    # These two also serve a reward of one's own.
    shared = {"vbvr_reward_decode_batch_size", "vbvr_reward_fail_on_error"}
    own = any(label(choice) not in BUILT_IN for choice in trained(config))
    for name, beginning in ((RULE, "vbvr_reward_"), (JUDGE, "vlm_reward_")):
        if uses(config, name):
            continue
        found = [key for key in changed_keys(config, beginning) if not (own and key in shared)]
        if found:
            shown = found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more {beginning}* keys"
            using = ", ".join(label(choice) for choice in (*trained(config), *monitored(config)))
            yield Problem(
                (found[0], "grpo_reward_fn"),
                f"{shown}: set for {name}, and the rewards in use are {using}; remove "
                f"{', '.join(found)}, or name {name} in grpo_reward_fn or reward_monitor",
            )
    if all(label(choice) in BUILT_IN for choice in (*trained(config), *monitored(config))):
        for key in changed_keys(config, "reward_workers"):
            yield refuse(
                key,
                f"{config.reward_workers} serves scoring functions of your own, and none is named; remove it",
                "grpo_reward_fn",
            )


def _rule_reward(config: TrainConfig) -> Iterator[Problem]:
    if not config.vbvr_reward_evalkit_dir:
        yield refuse("vbvr_reward_evalkit_dir", "is missing; vbvr_rule scores with that checkout")
    if config.vbvr_reward_evalkit_source_sha256 is None:
        yield refuse(
            "vbvr_reward_evalkit_source_sha256",
            "is missing; vbvr_rule runs a pinned evaluator: wan-trainer evalkit-digest prints the digest",
        )
    for key in ("vbvr_reward_prepared_width", "vbvr_reward_prepared_height"):
        if (size := getattr(config, key)) % 2:
            yield refuse(key, f"{size} is odd, and H.264 stores even sizes; use {size + 1}")
    if config.vbvr_reward_device != "cpu":
        yield refuse(
            "vbvr_reward_device",
            f"{config.vbvr_reward_device} is not open to scorers, from which GPUs are hidden; use cpu",
        )


def _judge_reward(config: TrainConfig) -> Iterator[Problem]:
    if not config.vlm_reward_model:
        yield refuse("vlm_reward_model", "is missing; vbvr_vlm asks that model for its verdicts")
    if config.vlm_reward_prompt_mode == "task_specific" and not config.vlm_reward_prompt_dir:
        yield refuse(
            "vlm_reward_prompt_dir",
            "is missing; vlm_reward_prompt_mode task_specific reads its rubrics there; name it or use "
            "--vlm_reward_prompt_mode custom",
            "vlm_reward_prompt_mode",
        )
    if not _is_plain_address(config.vlm_reward_base_url):
        # Not shown: what stands before the host may be a password.
        yield refuse(
            "vlm_reward_base_url",
            "is not the plain address of an endpoint; write one such as http://127.0.0.1:18080/v1, and a key "
            "as vlm_reward_api_key",
        )
    if not re.fullmatch("[!-~]*", config.vlm_reward_api_key):
        # Not shown either; the client would quote it when it refuses to send it.
        yield refuse(
            "vlm_reward_api_key",
            "holds white space or a character that no header can carry; write the key alone, without the "
            "end of its line",
        )
    full, error_score = config.vlm_reward_score_max, config.vlm_reward_error_score
    if config.vlm_reward_prompt_mode == "custom" and full != CUSTOM_SCORE_MAX:
        yield refuse(
            "vlm_reward_score_max",
            f"{full:g} is not the full mark of the generic rubric; use {CUSTOM_SCORE_MAX}, or "
            "vlm_reward_prompt_mode: task_specific with rubrics of your own",
            "vlm_reward_prompt_mode",
        )
    if error_score is not None and not 0 <= error_score <= full:
        yield refuse(
            "vlm_reward_error_score",
            f"{error_score:g} is no score of a rubric of {full:g}; use 0 to {full:g}, or null for missing",
            "vlm_reward_score_max",
        )
    if error_score is not None and config.vlm_reward_fail_on_error and JUDGE in trained(config):
        yield refuse(
            "vlm_reward_fail_on_error",
            f"true waits for a missing reward, and vlm_reward_error_score {error_score:g} leaves none; use "
            "null there, or false here",
            "vlm_reward_error_score",
        )


def _is_plain_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        plain = url.port is None or url.port > 0
    except ValueError:
        return False
    extra = url.username or url.password or url.query or url.fragment
    # White space and other scripts would fail when the client is made, each in a way of its own.
    plain = plain and re.fullmatch("[!-~]+", text) is not None
    return plain and url.scheme in ("http", "https") and bool(url.hostname) and not extra

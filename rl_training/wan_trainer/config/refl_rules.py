"""Rules of a ReFL run, and of its keys in a run that is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wan_trainer.config.algorithm_sections import (
    GrpoSection,
    ReflSection,
    RuleRewardSection,
    VlmRewardSection,
)
from wan_trainer.config.roles import REFERENCE, as_roles
from wan_trainer.config.rules import Problem, changed_keys, refuse

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig

REFL = "refl"
_GRPO_ALONE = ("grpo_shared_prompt_batch", "grpo_shared_prompt_microbatch_size")


def is_refl(config: TrainConfig) -> bool:
    """Whether a run is ReFL."""
    return config.trainer == REFL


def grad_window(config: TrainConfig) -> tuple[int, int]:
    """First and last denoising step with a gradient."""
    final = config.refl_num_sampling_steps - 1
    first, last = config.refl_first_grad_step, config.refl_last_grad_step
    last = final if last is None else last
    return (last if first is None else first), last


def refl_rules(config: TrainConfig) -> Iterator[Problem]:
    """What a ReFL run needs, or that its keys are not used."""
    if not is_refl(config):
        for name in changed_keys(config, *ReflSection.model_fields):
            yield refuse(name, "is read by trainer: refl only; use --trainer refl or remove it", "trainer")
        return
    if config.roles is None:
        yield refuse(
            "roles",
            "is missing; a ReFL run names its reward: roles: {reward: {_target_: my_module.MyReward}}",
            "trainer",
        )
    yield from _unused(config)
    yield from _window(config)
    yield from _tiles(config)
    if config.refl_kl_coeff == 0 and config.roles is not None and REFERENCE in config.roles:
        yield refuse(
            "roles",
            "has a reference, which only the divergence reads, and refl_kl_coeff is 0; remove it or set "
            "refl_kl_coeff",
            "refl_kl_coeff",
        )
    if config.refl_cfg_scale == 1 and config.refl_cfg_grad != "conditional":
        yield refuse(
            "refl_cfg_grad",
            "both needs guidance, and refl_cfg_scale is 1; raise it or use conditional",
            "refl_cfg_scale",
        )
    if config.refl_weight == 0:
        yield refuse("refl_weight", "0 trains on nothing; use for example 1.0, or less than 0 to lower it")
    if config.hsdp and config.roles is not None and as_roles(config.roles).reward_ranks:
        yield refuse(
            "hsdp",
            "true needs nodes of equal size, and a role has ranks of its own; use --no-hsdp",
            "roles",
        )


def _unused(config: TrainConfig) -> Iterator[Problem]:
    names = (
        *GrpoSection.model_fields,
        *RuleRewardSection.model_fields,
        *VlmRewardSection.model_fields,
        *_GRPO_ALONE,
    )
    changed = set(changed_keys(config, *names))
    for name in (name for name in names if name in changed):
        yield refuse(name, "is not read by trainer: refl; remove it", "trainer")


def _tiles(config: TrainConfig) -> Iterator[Problem]:
    height, width = config.refl_vae_tile_height, config.refl_vae_tile_width
    overlap = config.refl_vae_tile_overlap
    if (height is None) != (width is None):
        unset = "refl_vae_tile_height" if height is None else "refl_vae_tile_width"
        yield refuse(unset, "is not set and the other side of the tiles is; set both, or none for exact")
    if height is None or width is None:
        for name in changed_keys(config, "refl_vae_tile_overlap", "refl_vae_tile_parallel"):
            yield refuse(name, "acts on tiles, and there are none; set refl_vae_tile_height and _width")
        return
    sides = (("height", height), ("width", width), ("overlap", overlap))
    for name, side in sides:
        if side % 16:
            key, near = f"refl_vae_tile_{name}", side // 16 * 16
            yield refuse(key, f"{side} is not a multiple of 16; use {near} or {near + 16}")
    if overlap >= min(height, width):
        yield refuse(
            "refl_vae_tile_overlap",
            f"{overlap} is a whole tile of {height}x{width}; use {min(height, width) // 32 * 16}",
            "refl_vae_tile_height",
            "refl_vae_tile_width",
        )
    if config.refl_vae_tile_parallel and config.tensor_parallel_size == 1:
        yield refuse(
            "refl_vae_tile_parallel",
            "true spreads tiles over a tensor-parallel group, and tensor_parallel_size is 1; use false",
            "tensor_parallel_size",
        )


def _window(config: TrainConfig) -> Iterator[Problem]:
    final = config.refl_num_sampling_steps - 1
    first, last = grad_window(config)
    steps = f"steps count from 0 to {final} with refl_num_sampling_steps {final + 1}"
    for name, value in (("refl_first_grad_step", first), ("refl_last_grad_step", last)):
        if value > final:
            yield refuse(name, f"{value} is no step: {steps}; use {final} or less", "refl_num_sampling_steps")
    if first > last:
        yield refuse(
            "refl_first_grad_step",
            f"{first} comes after refl_last_grad_step {last}; use {last} or less",
            "refl_last_grad_step",
        )
    if config.refl_algorithm == "last_step" and (first, last) != (final, final):
        name = "refl_last_grad_step" if last != final else "refl_first_grad_step"
        yield refuse(
            name,
            f"{first}..{last} is a window, and refl_algorithm: last_step has step {final} alone; use null, "
            "or refl_algorithm: truncated",
            "refl_algorithm",
            "refl_num_sampling_steps",
        )

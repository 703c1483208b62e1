"""Whether every step of a gradient window is routed to an expert that is trained; without torch or numpy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wan_trainer.config.specs import ReflSpec, RunSpec
from wan_trainer.models.wan.directory import (
    DEFAULT_FLOW_SHIFT,
    EXPERTS,
    WanDirectory,
    trained_experts,
)

_ALIASES = {"high_noise": "transformer", "low_noise": "transformer_2"}
_NOISE = {"transformer": "high-noise", "transformer_2": "low-noise"}


def check_grad_window(spec: RunSpec, refl: ReflSpec, directory: WanDirectory) -> list[str]:
    """One line when the window of `refl` leaves the trained experts of `directory`, else nothing."""
    shift = spec.sampler.flow_shift or directory.flow_shift or DEFAULT_FLOW_SHIFT
    routed = route(spec.sampler.num_steps, shift, directory)
    trained = _trained(spec, directory)
    window = range(refl.first_grad_step, refl.last_grad_step + 1)
    frozen = [step for step in window if routed[step] not in trained]
    if not frozen or not trained:
        return []  # that nothing is trained is said where adapters are placed
    steps = [step for step, expert in enumerate(routed) if expert in trained]
    names = " and ".join(_NOISE[name] for name in trained)
    remedy = (
        f"use a window within {steps[0]}..{steps[-1]}"
        if steps
        else "raise refl_num_sampling_steps, or train the other expert"
    )
    return [
        f"refl_first_grad_step: the window {window[0]}..{window[-1]} leaves what is trained: with "
        f"{spec.sampler.num_steps} steps at shift {shift:g} step {frozen[0]} is the "
        f"{_NOISE[routed[frozen[0]]]} expert's, and {names} is trained; {remedy}"
    ]


def route(num_steps: int, shift: float, directory: WanDirectory) -> list[str]:
    """The expert of each step; compared in float32, as `WanPolicy.expert_for` does."""
    times = [1.0 - step / num_steps for step in range(num_steps)]
    sigmas = [_float32(shift * time / (1.0 + (shift - 1.0) * time)) for time in times]
    if directory.boundary_ratio is None:
        return [EXPERTS[0]] * num_steps
    boundary = _float32(directory.boundary_ratio * 1000)
    return [EXPERTS[0] if _float32(sigma * 1000) >= boundary else EXPERTS[1] for sigma in sigmas]


def _float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def _trained(spec: RunSpec, directory: WanDirectory) -> Sequence[str]:
    """The experts that hold a trained weight: those of train_experts that lora_module_prefix leaves."""
    trained = trained_experts(spec.model, directory.experts)
    prefix = None if spec.model.lora is None else spec.model.lora.module_prefix
    if prefix is None:
        return trained
    named = _ALIASES.get(prefix, prefix.partition(".")[0])
    return [name for name in trained if name == named] if named in EXPERTS else trained

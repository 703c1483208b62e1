"""Rules about attention kernels and compilation."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wan_trainer.config.attention import ATTENTION_BACKENDS, SIXTEEN_BIT, WITHOUT_BACKWARD
from wan_trainer.config.rules import Problem, refuse

if TYPE_CHECKING:
    from wan_trainer.config.schema import TrainConfig


def attention_rules(config: TrainConfig) -> Iterator[Problem]:
    """An attention backend that can train with the other keys."""
    backend = config.attention_backend
    if backend in WITHOUT_BACKWARD:
        yield refuse(
            "attention_backend",
            f"{backend} has no backward pass and cannot train; use {WITHOUT_BACKWARD[backend]}",
        )
    elif backend not in ATTENTION_BACKENDS:
        near = difflib.get_close_matches(backend, ATTENTION_BACKENDS, 1) or ["native"]
        yield refuse(
            "attention_backend", f"{backend} is not an attention backend of Diffusers; use {near[0]}"
        )
    # On a CPU native attention replaces what the rules below are about.
    if config.device == "cpu":
        return
    if backend == "_native_cudnn" and config.disable_cudnn_sdp:
        yield refuse(
            "attention_backend",
            "_native_cudnn is switched off by disable_cudnn_sdp: true; use native or --no-disable_cudnn_sdp",
            "disable_cudnn_sdp",
        )
    if backend in SIXTEEN_BIT and config.param_dtype == "float32":
        yield refuse(
            "attention_backend",
            f"{backend} computes in 16 bits, and param_dtype is float32; use native or --param_dtype "
            "bfloat16",
            "param_dtype",
        )
    compiled = config.torch_compile and config.torch_compile_backend == "inductor"
    if backend == "flex" and not compiled:
        yield refuse(
            "attention_backend",
            "flex holds the whole score matrix in memory unless inductor compiles it; use --torch_compile "
            "with torch_compile_backend inductor, or native",
            "torch_compile",
            "torch_compile_backend",
        )


def compile_rules(config: TrainConfig) -> Iterator[Problem]:
    """A compilation mode that the backend has."""
    if config.torch_compile_mode is not None and config.torch_compile_backend != "inductor":
        yield refuse(
            "torch_compile_mode",
            f"{config.torch_compile_mode} is a mode of inductor, and torch_compile_backend is "
            f"{config.torch_compile_backend}; use null",
            "torch_compile_backend",
        )

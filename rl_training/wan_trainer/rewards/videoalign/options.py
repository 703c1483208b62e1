"""The options of the VideoAlign reward, read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from wan_trainer.config.suggest import suggest
from wan_trainer.types import UserError

# In the order in which the checkpoint's special tokens and the columns of a three-row head stand.
HEADS = ("VQ", "MQ", "TA")
ComputeDtype = Literal["bfloat16", "float32"]
# Sides of a frame are multiples of patch size 14 x spatial merge 2; a temporal patch is two frames.
SIDE_FACTOR = 28
FRAME_FACTOR = 2
MIN_FRAMES = 4
MAX_FRAMES = 768
# 128 visual tokens a frame: smaller frames are enlarged to it, as when the model was trained.
MIN_FRAME_PIXELS = 128 * SIDE_FACTOR**2


@dataclass(frozen=True)
class Options:
    """Checked options; the sizes are in pixels, `fps` is sampled frames a second.

    base_model_path: where config, tokenizer, and for an adapter the base weights are, when they are not
    beside the checkpoint. num_frames: a fixed count of sampled frames instead of `fps`. size: a fixed
    (height, width) of the frames instead of one within `max_frame_pixels`. dtype: None = bfloat16 on CUDA,
    float32 elsewhere.
    """

    model_path: Path
    base_model_path: Path | None
    prompt_template: Path | None
    weights: Mapping[str, float]
    fps: float
    max_frame_pixels: int
    num_frames: int | None
    size: tuple[int, int] | None
    dtype: ComputeDtype | None
    gradient_checkpointing: bool


def read_options(
    *,
    model_path: str | Path,
    base_model_path: str | Path | None = None,
    prompt_template: str | Path | None = None,
    weights: Mapping[str, float] | None = None,
    fps: float = 2.0,
    max_frame_pixels: int = 200704,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    dtype: str | None = None,
    gradient_checkpointing: bool = True,
) -> Options:
    """The options, once they make sense; UserError has one line for each that does not."""
    weights = dict.fromkeys(HEADS, 1.0) if weights is None else weights
    problems = _type_problems(
        paths={
            "model_path": model_path,
            "base_model_path": base_model_path or "unset",
            "prompt_template": prompt_template or "unset",
        },
        numbers={"fps": fps},
        integers={
            "max_frame_pixels": max_frame_pixels,
            "num_frames": num_frames or 0,
            "height": height or 0,
            "width": width or 0,
        },
    )
    if not isinstance(weights, Mapping):
        problems.append(f"videoalign.weights: {weights!r} is no mapping; write a weight for each head")
    if not isinstance(gradient_checkpointing, bool):
        problems.append(
            f"videoalign.gradient_checkpointing: {gradient_checkpointing!r} is neither true nor false; "
            "choose one"
        )
    if problems:
        raise UserError(*problems)
    problems = [
        *_weight_problems(weights),
        *_frame_problems(fps, num_frames),
        *_size_problems(max_frame_pixels, height, width),
    ]
    if dtype is not None and dtype not in get_args(ComputeDtype):
        problems.append(
            f"videoalign.dtype: {dtype} is unknown; choose one of {', '.join(get_args(ComputeDtype))}"
        )
    if problems:
        raise UserError(*problems)
    return Options(
        model_path=Path(model_path),
        base_model_path=None if base_model_path is None else Path(base_model_path),
        prompt_template=None if prompt_template is None else Path(prompt_template),
        weights={head: float(weights.get(head, 0.0)) for head in HEADS},
        fps=float(fps),
        max_frame_pixels=max_frame_pixels,
        num_frames=num_frames,
        size=None if height is None or width is None else (height, width),
        dtype=cast("ComputeDtype | None", dtype),
        gradient_checkpointing=gradient_checkpointing,
    )


def _type_problems(
    paths: Mapping[str, object], numbers: Mapping[str, object], integers: Mapping[str, object]
) -> list[str]:
    """What YAML may have read as something else."""
    wrong = [
        (name, value, "text, the path of a file or directory")
        for name, value in paths.items()
        if not isinstance(value, str | Path) or not str(value)
    ]
    wrong += [
        (name, value, "a number")
        for name, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float)
    ]
    wrong += [
        (name, value, "a whole number")
        for name, value in integers.items()
        if isinstance(value, bool) or not isinstance(value, int)
    ]
    return [f"videoalign.{name}: {value!r} must be {kind}; write one" for name, value, kind in wrong]


def _weight_problems(weights: Mapping[str, float]) -> list[str]:
    problems = [
        f"videoalign.weights: {name} is no head of VideoAlign, which has {', '.join(HEADS)}; weigh one of "
        f"these{suggest(str(name), HEADS)}"
        for name in weights
        if name not in HEADS
    ]
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            problems.append(f"videoalign.weights: {name}: {weight} is not a finite number; give it one")
    if not problems and not any(weights.values()):
        problems.append("videoalign.weights: no head has a weight, so the reward is always 0; weigh one")
    return problems


def _frame_problems(fps: float, num_frames: int | None) -> list[str]:
    problems: list[str] = []
    if not 0 < fps < math.inf:
        problems.append(f"videoalign.fps: {fps} must be above 0; the model was trained at 2.0")
    if num_frames is not None and (num_frames % FRAME_FACTOR or not MIN_FRAMES <= num_frames <= MAX_FRAMES):
        problems.append(
            f"videoalign.num_frames: {num_frames} must be even and {MIN_FRAMES} to {MAX_FRAMES}; "
            f"choose {max(MIN_FRAMES, min(MAX_FRAMES, num_frames // FRAME_FACTOR * FRAME_FACTOR))}, or leave "
            "it out to sample by fps"
        )
    return problems


def _size_problems(max_frame_pixels: int, height: int | None, width: int | None) -> list[str]:
    problems: list[str] = []
    if max_frame_pixels < MIN_FRAME_PIXELS:
        problems.append(
            f"videoalign.max_frame_pixels: {max_frame_pixels} is below the {MIN_FRAME_PIXELS} that the model "
            "sees at least; raise it, or set height and width"
        )
    if (height is None) != (width is None):
        problems.append("videoalign.height, videoalign.width: only one is set; set both, or neither")
    for name, side in (("height", height), ("width", width)):
        if side is not None and (side <= 0 or side % SIDE_FACTOR):
            problems.append(
                f"videoalign.{name}: {side} must be a positive multiple of {SIDE_FACTOR}; choose "
                f"{max(1, round(side / SIDE_FACTOR)) * SIDE_FACTOR}"
            )
    return problems

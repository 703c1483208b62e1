"""Reads videos for an evaluator whose own loader seeks before every frame, without touching its checkout.

Seeking makes a decoder start at the last key frame again for each frame: most of such an evaluator's time.
In a scorer process `vbvr_bench/evaluators/base_evaluator.py: get_video_frames` gives way to a loader that
reads from the start to the end. A format, which is what one encoder makes of one length and size, is read
both ways once; only when every pixel is equal are its later files read once. The frames of ground truths are
kept for the other rollouts of their group.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from wan_trainer.media import probe_video

LOADER_MODULE = "vbvr_bench.evaluators.base_evaluator"
LOADER_NAME = "get_video_frames"
FILES_KEPT = 2
"""Ground truths whose frames are kept."""

Loader = Callable[..., Any]
Format = tuple[object, ...]
"""Whether it is a rollout, codec, frames, rate, height, width, and further arguments of the loader."""


@dataclass(frozen=True)
class Reading:
    """How a format is read from start to end: so many frames, in OpenCV's BGR or turned to RGB, as one array
    or a list."""

    count: int
    rgb: bool
    stacked: bool


@dataclass
class FastLoader:
    """Stands in for an evaluator's `plain` loader. candidate: the prepared rollout that is being scored.

    formats: how the files of a format are read; None for one that the plain loader reads otherwise. kept:
    the last results of other files than rollouts.
    """

    plain: Loader
    candidate: str = ""
    formats: dict[Format, Reading | None] = field(default_factory=dict[Format, Reading | None])
    kept: OrderedDict[Format, Any] = field(default_factory=OrderedDict[Format, Any])

    def load(self, *arguments: Any, **named: Any) -> Any:
        """What `plain` returns for the same arguments."""
        path = _path(arguments, named)
        if path is None:
            return self.plain(*arguments, **named)
        words = repr(
            [value for value in (*arguments, *sorted(named.items())) if isinstance(value, int | tuple)]
        )
        rollout, info = path == self.candidate, probe_video(Path(path))
        format_ = (rollout, info.codec, info.num_frames, info.fps, info.height, info.width, words)
        if rollout:
            return self._read(path, format_, lambda: self.plain(*arguments, **named))
        state = os.stat(path)
        key = (path, state.st_mtime_ns, state.st_size, words)
        if key not in self.kept:
            self.kept[key] = self._read(path, format_, lambda: self.plain(*arguments, **named))
            while len(self.kept) > FILES_KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        # An evaluator may draw into what it gets.
        result = self.kept[key]
        return [frame.copy() for frame in result] if isinstance(result, list) else copy(result)

    def _read(self, path: str, format_: Format, plain: Callable[[], Any]) -> Any:
        if format_ not in self.formats:
            expected = plain()
            self.formats[format_] = proven_reading(path, expected)
            if self.formats[format_] is None:
                print(  # noqa: T201 - a scorer's output is its log
                    f"vbvr_reward_fast_decode: {format_} reads otherwise from start to end; the evaluator's "
                    "own loader is used for it"
                )
            return expected
        reading = self.formats[format_]
        return plain() if reading is None else read_through(path, reading)


def proven_reading(path: str, expected: Any) -> Reading | None:
    """The reading from start to end that gives `expected` in every pixel, or None."""
    if not isinstance(expected, list | np.ndarray) or len(expected) == 0:
        return None
    for rgb in (False, True):
        reading = Reading(len(expected), rgb, isinstance(expected, np.ndarray))
        frames = read_through(path, reading)
        if len(frames) == len(expected) and all(map(_equal, frames, expected)):
            return reading
    return None


def read_through(path: str, reading: Reading) -> Any:
    """The first frames of a video, uint8 (H, W, 3), without a seek; fewer where it ends before."""
    capture = cv2.VideoCapture(path)
    frames: list[Any] = []
    try:
        while len(frames) < reading.count:
            ok, frame = capture.read()
            if not ok:
                break
            frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB) if reading.rgb else frame)
    finally:
        capture.release()
    return np.stack(frames) if reading.stacked and frames else frames


def install() -> FastLoader | None:
    """Put a `FastLoader` in the place of the imported evaluator's loader, wherever its modules hold it.

    None when the evaluator has no such loader: it then reads as it always does.
    """
    module = sys.modules.get(LOADER_MODULE)
    plain = getattr(module, LOADER_NAME, None)
    if inspect.isfunction(plain):
        loader = FastLoader(plain)
        package = LOADER_MODULE.partition(".")[0]
        for name, holder in list(sys.modules.items()):
            if name.partition(".")[0] == package and getattr(holder, LOADER_NAME, None) is plain:
                setattr(holder, LOADER_NAME, loader.load)
        return loader
    for owner in vars(module).values() if module is not None else ():
        method = vars(owner).get(LOADER_NAME) if isinstance(owner, type) else None
        if inspect.isfunction(method):
            loader = FastLoader(method)
            setattr(owner, LOADER_NAME, _as_method(loader))
            return loader
    return None


def _as_method(loader: FastLoader) -> Loader:
    """A function, which binds to an instance as the method did."""

    def get_video_frames(*arguments: Any, **named: Any) -> Any:
        return loader.load(*arguments, **named)

    return get_video_frames


def _path(arguments: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    """The file that is asked for: the first argument that names one, past the instance of a method."""
    for value in (*arguments, *named.values()):
        if isinstance(value, str | os.PathLike) and os.path.isfile(value):
            return os.fspath(value)
    return None


def _equal(one: Any, other: Any) -> bool:
    return isinstance(other, np.ndarray) and other.dtype == np.uint8 and np.array_equal(one, other)

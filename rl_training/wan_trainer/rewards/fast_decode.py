"""Reads videos for an evaluator whose own loader seeks before every frame, without touching its checkout.

Seeking makes a decoder start at the last key frame again for each frame: most of such an evaluator's time.
In a scorer process `vbvr_bench/evaluators/base_evaluator.py: get_video_frames` gives way to a loader that
reads from the start to the end. A format, which is what one encoder makes of one length and size, is read
both ways once; only when every pixel is equal are its later files read once. A clip that would look the same
in another order or with red and blue exchanged proves nothing. The frames of ground truths are kept for the
other rollouts of their group.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from wan_trainer.media import frame_times, probe_video
from wan_trainer.types import UserError

LOADER_MODULE = "vbvr_bench.evaluators.base_evaluator"
LOADER_NAME = "get_video_frames"
FILES_KEPT = 2
"""Ground truths whose frames are kept."""

Loader = Callable[..., Any]
Format = tuple[object, ...]
"""Whether it is a rollout, codec, frames, rate, height, width, and what else the loader is asked for."""

_VALUES = (type(None), bool, int, float, str, bytes, range, slice, np.generic)
"""Arguments that their text describes whole."""


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

    method: the loader is one, and its first argument the instance. formats: how the files of a format are
    read; None for one that the plain loader reads otherwise. kept: the last results of other files than
    rollouts.
    """

    plain: Loader
    candidate: str = ""
    method: bool = False
    formats: dict[Format, Reading | None] = field(default_factory=dict[Format, Reading | None])
    kept: OrderedDict[Format, Any] = field(default_factory=OrderedDict[Format, Any])

    def load(self, *arguments: Any, **named: Any) -> Any:
        """What `plain` returns for the same arguments."""
        plain = partial(self.plain, *arguments, **named)
        path = _path(arguments, named)
        words = None if path is None else self._words(path, arguments, named)
        if path is None or words is None:
            return plain()
        rollout = path == self.candidate
        format_ = _format(path, words, rollout=rollout)
        if format_ is None:
            return plain()
        if rollout:
            return self._read(path, format_, plain)
        state = os.stat(path)
        key = (path, state.st_mtime_ns, state.st_size, words)
        if key not in self.kept:
            result = self._read(path, format_, plain)
            if not _is_frames(result):
                return result  # what it is made of may be drawn into, or read only once
            self.kept[key] = result
            while len(self.kept) > FILES_KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        # An evaluator may draw into what it gets.
        result = self.kept[key]
        return [frame.copy() for frame in result] if isinstance(result, list) else result.copy()

    def _words(self, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str | None:
        """What is asked for beside the file, by value; None when that cannot be told."""
        own = arguments[:1] if self.method else ()
        # Of an instance, its class and its settings: the same instance does not come twice.
        words: list[object] = [(type(one).__qualname__, _settings(one)) for one in own]
        for name, value in (*enumerate(arguments[len(own) :]), *sorted(named.items())):
            if isinstance(value, str | os.PathLike) and os.fspath(value) == path:
                words.append((name, "the file"))
            elif _is_value(value):
                words.append((name, value))
            else:
                return None
        return repr(words)

    def _read(self, path: str, format_: Format, plain: Callable[[], Any]) -> Any:
        if format_ not in self.formats:
            expected = plain()
            found = matching_readings(path, expected)
            if not found:
                self.formats[format_] = None
                print(  # noqa: T201 - a scorer's output is its log
                    f"vbvr_reward_fast_decode: {format_} reads otherwise from start to end; the evaluator's "
                    "own loader is used for it"
                )
            elif len(found) == 1 and not _stands_still(expected):
                self.formats[format_] = found[0]
            return expected
        reading = self.formats[format_]
        if reading is None:
            return plain()
        frames = read_through(path, reading)
        # A file that ends before its time is the plain loader's to judge.
        return frames if len(frames) == reading.count else plain()


def matching_readings(path: str, expected: Any) -> list[Reading]:
    """The readings from start to end that give `expected` in every pixel: both colour orders for grey."""
    if not _is_frames(expected):
        return []
    stacked = isinstance(expected, np.ndarray)
    frames = read_through(path, Reading(len(expected), rgb=False, stacked=False))
    if len(frames) != len(expected):
        return []
    found: list[Reading] = []
    for rgb in (False, True):
        turned = (cv2.cvtColor(frame, cv2.COLOR_BGR2RGB) if rgb else frame for frame in frames)
        if all(map(np.array_equal, turned, expected)):
            found.append(Reading(len(expected), rgb, stacked))
    return found


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
            if name.partition(".")[0] == package:
                for held in [held for held, value in vars(holder).items() if value is plain]:
                    setattr(holder, held, loader.load)
        return loader
    for owner in vars(module).values() if module is not None else ():
        method = vars(owner).get(LOADER_NAME) if isinstance(owner, type) else None
        if inspect.isfunction(method):
            loader = FastLoader(method, method=True)
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


def _format(path: str, words: str, *, rollout: bool) -> Format | None:
    """None for what is no video, and for a foreign file whose frames do not follow each other evenly: seeking
    goes by time, so that what holds for one of these holds for no other."""
    try:
        info = probe_video(Path(path))
        count = info.num_frames
        if not rollout:  # ours are even, and their own number of frames is true
            times = frame_times(Path(path))
            count = len(times)
            if None in times or len(set(np.diff(np.array(times, dtype=np.int64)).tolist())) > 1:
                return None
    except UserError:
        return None
    return (rollout, info.codec, count, info.fps, info.height, info.width, words)


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    return isinstance(value, _VALUES)


def _settings(instance: Any) -> list[tuple[str, Any]]:
    """Attributes of an instance that are plain values, sorted by name."""
    return sorted(
        (name, value) for name, value in getattr(instance, "__dict__", {}).items() if _is_value(value)
    )


def _is_frames(result: Any) -> bool:
    """Whether it is a list or an array of uint8 frames."""
    if not isinstance(result, list | np.ndarray) or len(result) == 0:
        return False
    return all(isinstance(frame, np.ndarray) and frame.dtype == np.uint8 for frame in result)


def _stands_still(frames: Any) -> bool:
    return all(np.array_equal(frame, frames[0]) for frame in frames)

"""Rewards of one's own: a number from the frames of a rollout and its prompt."""

from __future__ import annotations

import numpy as np


def steadiness(frames: np.ndarray, prompt: str, scale: float = 8.0) -> float:
    """1 for a clip that stands still, towards 0 the more it flickers.

    frames: uint8 (F, H, W, 3) RGB. scale: mean change of a pixel between neighbouring frames, in 0..255, at
    which the reward is 1/e.
    """
    change = np.abs(np.diff(frames.astype(np.float32), axis=0)).mean()
    return float(np.exp(-change / scale))


class Palette:
    """How close the mean colour of the last frame is to a given one; made once a process."""

    def __init__(self, red: int, green: int, blue: int) -> None:
        # A model would be read here: scorer processes see no GPU.
        self._colour = np.array([red, green, blue], dtype=np.float32)

    def __call__(self, frames: np.ndarray, prompt: str) -> float:
        """uint8 (F, H, W, 3) -> 0..1."""
        mean = frames[-1].reshape(-1, 3).mean(axis=0)
        return 1.0 - float(np.abs(mean - self._colour).mean()) / 255

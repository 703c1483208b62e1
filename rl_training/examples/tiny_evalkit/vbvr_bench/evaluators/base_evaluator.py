"""What all task evaluators share: reading the clip, finding the moving square, following it."""

from abc import ABC, abstractmethod

import cv2
import numpy as np

MAX_FRAMES = 100


def get_video_frames(video_path, max_frames=MAX_FRAMES):
    """The frames of a video as a list of uint8 (H, W, 3) BGR arrays; empty when it cannot be read.

    Frame rates play no part: frames are indexed, never timed, and at most `max_frames` are read. Like most
    evaluators of this kind it seeks to each frame; the trainer has a faster way (vbvr_reward_fast_decode).
    """
    capture = cv2.VideoCapture(str(video_path))
    frames = []
    try:
        for index in range(min(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), max_frames)):
            capture.set(cv2.CAP_PROP_POS_FRAMES, index)
            ok, frame = capture.read()
            if not ok:
                break
            frames.append(frame)
    finally:
        capture.release()
    return frames


def colours(first_frame):
    """(ground, square), float (3,) BGR: the commonest colour, and that of the pixels farthest from it."""
    pixels = first_frame.reshape(-1, 3).astype(np.float64)
    ground = np.median(pixels, axis=0)
    distance = np.linalg.norm(pixels - ground, axis=1)
    square = pixels[distance > 0.8 * distance.max()].mean(axis=0) if distance.max() > 0 else ground
    return ground, square


def presence(frames, ground, square):
    """How much of the square each pixel shows, 0 to 1, (F, H, W): its place on the line from ground to
    square.

    Traces below a twentieth of the square's contrast count as ground, so that compression noise has no mass.
    """
    axis = square - ground
    length = float(axis @ axis)
    if length < 100.0:
        return np.zeros(frames.shape[:3])
    share = (frames.astype(np.float64) - ground) @ (axis / length)
    return np.clip((share - 0.05) / 0.95, 0.0, 1.0)


def follow(mass):
    """Centres (F, 2) as x, y in shares of the picture's width and height, and masses (F,) as share of its
    area.

    A frame without mass repeats the centre before it (the picture's middle, at the start).
    """
    _, height, width = mass.shape
    totals = mass.sum(axis=(1, 2))
    columns = (np.arange(width) + 0.5) / width
    rows = (np.arange(height) + 0.5) / height
    centres = np.empty((len(mass), 2))
    last = np.array([0.5, 0.5])
    for index, total in enumerate(totals):
        if total > 1e-3 * height * width:
            last = np.array([mass[index].sum(0) @ columns, mass[index].sum(1) @ rows]) / total
        centres[index] = last
    return centres, totals / (height * width)


class BaseEvaluator(ABC):
    """An evaluator compares a generated clip with the ground truth of its sample."""

    def __init__(self, device="cpu"):
        self.device = device

    @abstractmethod
    def evaluate(self, video_path, gt_info):
        """{"score": number in [0, 1], "dimensions": {...}, "details": {...}}."""

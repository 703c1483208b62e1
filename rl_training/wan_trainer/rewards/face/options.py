"""The settings of the face reward, checked without torch and before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wan_trainer.config.suggest import suggest
from wan_trainer.rewards.face.files import file_problem
from wan_trainer.types import UserError

# antelopev2, the published pair.
RECOGNITION = "glintr100.onnx"
DETECTION = "scrfd_10g_bnkps.onnx"
# What a video without any face is worth: no verdict, an end of the run, or this number.
NoFace = Literal["missing", "error"] | float
# The coarsest stride of the detector.
SIZE_FACTOR = 32


@dataclass(frozen=True)
class FaceOptions:
    """The settings as the recipe has them; see `Face`."""

    model_path: str | Path
    recognition: str = RECOGNITION
    detection: str = DETECTION
    no_face: NoFace = "missing"
    detection_size: int = 640
    detection_threshold: float = 0.5

    @property
    def recognition_file(self) -> Path:
        """The embedding network."""
        return Path(self.model_path) / self.recognition

    @property
    def detection_file(self) -> Path:
        """The detection network."""
        return Path(self.model_path) / self.detection

    def check(self) -> None:
        """Raise UserError with a line for each setting that cannot be and each file that cannot be used."""
        problems = [*self._setting_problems(), *self._file_problems()]
        if problems:
            raise UserError(*(f"Face: {problem}" for problem in problems))

    def _setting_problems(self) -> list[str]:
        problems: list[str] = []
        policy, size, threshold = self.no_face, self.detection_size, self.detection_threshold
        words = ("missing", "error")
        if policy not in words if isinstance(policy, str) else not _is_finite(policy):
            near = suggest(policy, words) if isinstance(policy, str) else ""
            rule = f"must be {', '.join(words)} or a number{near or '; choose one'}"
            problems.append(f"no_face: {policy}, {rule}")
        if type(size) is not int or size < SIZE_FACTOR or size % SIZE_FACTOR:
            rule = f"must be a multiple of {SIZE_FACTOR} pixels; 640 is usual"
            problems.append(f"detection_size: {size}, {rule}")
        if not _is_finite(threshold) or not 0 < threshold < 1:
            problems.append(f"detection_threshold: {threshold}, must be between 0 and 1; 0.5 is usual")
        return problems

    def _file_problems(self) -> list[str]:
        if not Path(self.model_path).is_dir():
            rule = "must be the directory of the face networks; unpack antelopev2 there"
            return [f"model_path: {self.model_path}, {rule}"]
        found = (file_problem(file) for file in (self.detection_file, self.recognition_file))
        return [f"model_path: {problem}" for problem in found if problem]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

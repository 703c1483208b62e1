"""The libraries that an evaluator scores with: another version of one of them is another reward."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np

LOCK = Path(__file__).parents[3] / "requirements" / "train.lock"

PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "scikit-image": "skimage",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "av": "av",
    "imageio": "imageio",
    "shapely": "shapely",
    "easyocr": "easyocr",
}
"""Distribution -> module."""

SLOW = frozenset({"easyocr"})
"""Their import loads torch and takes seconds."""

OTHER_OPENCV = ("opencv-python", "opencv-contrib-python", "opencv-contrib-python-headless")
LAYOUT = "(N, 1, 4)"


@dataclass(frozen=True)
class Package:
    """One library. locked, installed: versions, None when there is none. problem: what its import said."""

    name: str
    locked: str | None
    installed: str | None
    problem: str | None = None


@dataclass(frozen=True)
class ScorerRuntime:
    """What scores depend on beside the evaluator's sources.

    lines_layout: the shape of OpenCV's HoughLinesP result: "(N, 1, 4)" in OpenCV 4. OpenCV 5 gives "(N, 4)",
    which evaluators written for 4 misread without an error.
    """

    python: str
    packages: tuple[Package, ...]
    lines_layout: str
    other_opencv: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """sha256 of Python's version, every installed version and OpenCV's layout, 64 hexadecimal characters.

        Equal on two machines exactly when these are equal.
        """
        versions = [[package.name, package.installed] for package in self.packages]
        facts = [self.python, versions, self.lines_layout, list(self.other_opencv)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def problems(self) -> list[str]:
        """What an evaluator would stumble over, one line each with the remedy."""
        lines = [
            f"{package.name} {package.problem}; install requirements/train.lock"
            for package in self.packages
            if package.problem is not None
        ]
        if self.lines_layout != LAYOUT:
            lines.append(
                f"OpenCV {cv2.__version__} gives HoughLinesP as {self.lines_layout}, evaluators read {LAYOUT}"
                " and score wrongly; install opencv-python-headless below 5"
            )
        if self.other_opencv:
            lines.append(
                f"{', '.join(self.other_opencv)}: installed beside opencv-python-headless, and the last one "
                "installed is used; uninstall all and install opencv-python-headless alone"
            )
        return lines

    @property
    def deviations(self) -> list[str]:
        """Packages whose version is not the locked one, one line each."""
        return [
            f"{package.name} is {package.installed or 'not installed'}, the lock has {package.locked}"
            for package in self.packages
            if package.locked is not None and package.installed != package.locked
        ]


def scorer_runtime(*, import_all: bool = True) -> ScorerRuntime:
    """The libraries of this environment, which scorers share. import_all: also those slow to import."""
    locked = _locked()
    packages = tuple(
        _package(name, module, locked.get(name), tried=import_all or name not in SLOW)
        for name, module in PACKAGES.items()
    )
    others = tuple(name for name in OTHER_OPENCV if _installed(name) is not None)
    return ScorerRuntime(platform.python_version(), packages, lines_layout(), others)


def lines_layout() -> str:
    """The shape that HoughLinesP gives here, by a drawn line."""
    image = np.zeros((64, 64), np.uint8)
    image[32, 4:60] = 255
    lines = cv2.HoughLinesP(image, 1, np.pi / 180, 20, minLineLength=20, maxLineGap=4)
    return "none" if lines is None else f"({', '.join(['N', *map(str, np.shape(lines)[1:])])})"


def _package(name: str, module: str, locked: str | None, *, tried: bool) -> Package:
    installed = _installed(name)
    problem = None
    if installed is None:
        problem = "is not installed"
    elif tried:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a broken wheel may raise anything
            problem = f"does not import ({type(error).__name__}: {' '.join(str(error).split())})"
    return Package(name, locked, installed, problem)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _locked() -> dict[str, str]:
    """Versions of the lock beside this checkout; none when the package was installed without it."""
    if not LOCK.is_file():
        return {}
    return dict(
        re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    )

"""Small VBVR-style tasks in the layout of the public archives, drawn from a seed.

Each sample is a plain ground with one square that slides a fixed way in the task's direction. It is small
enough for a processor to learn, and an evaluator can tell a right clip from a still, a black, a shuffled
or a reversed one.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wan_trainer.media.atomic import replacing
from wan_trainer.media.image import write_image
from wan_trainer.media.video import write_video

ARCHIVE_DIR = "VBVR-Pro-RL-Video"
SIZE = 64  # pixels, height and width
NUM_FRAMES = 9
FPS = 16
SQUARE = 16  # pixels
TRAVEL = 18.0  # pixels from the first frame to the last
# The generators of the public archives stamp their samples; a clock would make the archives irreproducible.
_TIMESTAMP = "2026-01-01T00:00:00"
_COLOURS = {
    "red": (230, 60, 50),
    "green": (70, 205, 80),
    "yellow": (240, 205, 60),
}
_GROUNDS = {"black": (16, 16, 16)}


@dataclass(frozen=True)
class SlideTask:
    """One task: the name of its archive, of the directory inside it, and the unit vector (x, y) of the
    motion."""

    name: str
    group: str
    direction: tuple[int, int]
    word: str

    @property
    def generator(self) -> str:
        """The name that a sample id begins with."""
        return self.group.removesuffix("_task")


TASKS = (
    SlideTask("T-1_slide_square_right_data-generator", "slide_square_right_task", (1, 0), "right"),
    SlideTask("T-2_slide_square_down_data-generator", "slide_square_down_task", (0, 1), "down"),
)


@dataclass(frozen=True)
class Scene:
    """What one sample shows: colour names, and the square's centre in the first frame, (x, y) in pixels."""

    colour: str
    ground: str
    centre: tuple[float, float]


def scene(task: SlideTask, rng: random.Random) -> Scene:
    """Draw a scene in which the square can move by TRAVEL either way along the task's direction.

    Across its way the square lies on the 16-pixel grid of the tiny VAE, so that its colour comes back
    undiluted.
    """
    along = SIZE / 2 + rng.uniform(-2.0, 2.0)
    across = 24.0
    dx, _ = task.direction
    centre = (along, across) if dx else (across, along)
    return Scene(rng.choice(list(_COLOURS)), rng.choice(list(_GROUNDS)), centre)


def prompt(task: SlideTask, scene: Scene) -> str:
    """The instruction of one sample."""
    return (
        f"A {scene.colour} square lies on a {scene.ground} ground. "
        f"Slide it straight {task.word} at a steady speed."
    )


def draw(task: SlideTask, scene: Scene, travel: float, num_frames: int = NUM_FRAMES) -> np.ndarray:
    """The clip in which the square moves `travel` pixels along the task's direction at a steady speed.

    Returns uint8 (F, SIZE, SIZE, 3) RGB. Edges are drawn with fractional coverage, so that motion by less
    than a pixel shows. A negative `travel` moves against the direction.
    """
    ground = np.array(_GROUNDS[scene.ground], dtype=np.float64)
    colour = np.array(_COLOURS[scene.colour], dtype=np.float64)
    steps = np.linspace(0.0, travel, num_frames)
    across = _coverage(scene.centre[0] + task.direction[0] * steps)
    down = _coverage(scene.centre[1] + task.direction[1] * steps)
    cover = (down[:, :, None] * across[:, None, :])[..., None]
    return np.round(ground + cover * (colour - ground)).astype(np.uint8)


def _coverage(centres: np.ndarray) -> np.ndarray:
    """The share of each of SIZE pixels that an interval of SQUARE pixels covers, (F, SIZE)."""
    pixels = np.arange(SIZE)
    left = centres[:, None] - SQUARE / 2
    return np.clip(np.minimum(pixels + 1, left + SQUARE) - np.maximum(pixels, left), 0.0, 1.0)


def write_archives(
    root: Path, *, tasks: Sequence[SlideTask] = TASKS, samples_per_task: int = 12, seed: int = 0
) -> list[Path]:
    """Write one archive per task under `root`/VBVR-Pro-RL-Video and return their paths.

    The same arguments give the same bytes (with the same Pillow and FFmpeg). Each archive appears whole.
    """
    directory = root / ARCHIVE_DIR
    directory.mkdir(parents=True, exist_ok=True)
    archives: list[Path] = []
    for task in tasks:
        archive = directory / f"{task.name}.tar.gz"
        with replacing(archive) as temporary:
            _write_archive(temporary, _members(task, samples_per_task, seed))
        archives.append(archive)
    return archives


def _members(task: SlideTask, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """The files of a task's archive, as member name and content, in the order of the public archives."""
    for index in range(count):
        # Keyed by task and index, so that a larger archive begins with the samples of a smaller one.
        rng = random.Random(f"{seed}/{task.name}/{index}")
        drawn = scene(task, rng)
        sample_id = f"{task.generator}_{index:08d}"
        for name, content in _sample_files(task, drawn, sample_id, seed):
            yield f"{task.name}/{task.group}/{sample_id}/{name}", content


def _sample_files(task: SlideTask, drawn: Scene, sample_id: str, seed: int) -> Iterator[tuple[str, bytes]]:
    clip = draw(task, drawn, TRAVEL)
    with tempfile.TemporaryDirectory() as scratch:
        video, first, final = (Path(scratch) / name for name in ("clip.mp4", "first.png", "final.png"))
        write_video(video, clip, FPS, crf=6)
        write_image(first, clip[0])
        write_image(final, clip[-1])
        yield "first_frame.png", first.read_bytes()
        yield "metadata.json", _metadata(task, drawn, sample_id, seed)
        yield "video/final_frame.png", final.read_bytes()
        yield "video/ground_truth.mp4", video.read_bytes()
        yield "video/prompt.txt", prompt(task, drawn).encode()


def _metadata(task: SlideTask, drawn: Scene, sample_id: str, seed: int) -> bytes:
    """metadata.json in the schema of the public generators."""
    dx, dy = task.direction
    x, y = drawn.centre
    parameters = {
        "square_color": list(_COLOURS[drawn.colour]),
        "ground_color": list(_GROUNDS[drawn.ground]),
        "square_size": SQUARE,
        "start_center": [round(x, 3), round(y, 3)],
        "end_center": [round(x + dx * TRAVEL, 3), round(y + dy * TRAVEL, 3)],
    }
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()
    metadata = {
        "task_id": sample_id,
        "generator": task.generator,
        "timestamp": _TIMESTAMP,
        "parameters": parameters,
        "param_hash": digest[:16],
        "generation": {"seed": seed, "git": {"commit": "", "branch": "", "repo": "", "is_dirty": False}},
    }
    return (json.dumps(metadata, indent=2) + "\n").encode()


def _write_archive(path: Path, members: Iterator[tuple[str, bytes]]) -> None:
    """A gzip-compressed tar without times, owners or modes of this machine."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(content))

"""Real archives in the public layout, small enough to make in a moment."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np

from wan_trainer.media import write_image, write_video

Files = dict[str, bytes]
Members = dict[str, bytes | tarfile.TarInfo]
TASKS = ("O-1_move_data-generator", "G-2_count_data-generator")


def sample_files(folder: Path, seed: int) -> Files:
    """The five files of one sample: a first frame that is wider than high, a video, a final frame."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    frames = rng.integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    write_video(folder / "ground_truth.mp4", frames, 16)
    write_image(folder / "first_frame.png", frames[0])
    write_image(folder / "final_frame.png", frames[-1])
    return {
        "first_frame.png": (folder / "first_frame.png").read_bytes(),
        "metadata.json": json.dumps({"seed": seed}).encode(),
        "video/final_frame.png": (folder / "final_frame.png").read_bytes(),
        "video/ground_truth.mp4": (folder / "ground_truth.mp4").read_bytes(),
        "video/prompt.txt": f"Move square {seed} → the right, 请.\n".encode(),
    }


def write_archive(path: Path, members: Members) -> None:
    """A .tar.gz with these members, in this order; a TarInfo stands for itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def tree(root: Path) -> dict[str, bytes]:
    """Every file below root with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }

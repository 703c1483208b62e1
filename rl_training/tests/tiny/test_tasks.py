import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.media.image import read_image
from wan_trainer.media.video import probe_video, read_frames
from wan_trainer.tiny.tasks import FPS, NUM_FRAMES, SIZE, TASKS, TRAVEL, Scene, draw, write_archives


def test_archives_have_the_public_layout_and_repeat_exactly(tiny_archives: Path, tmp_path: Path) -> None:
    again = write_archives(tmp_path, samples_per_task=4)
    assert [path.name for path in again] == [f"{task.name}.tar.gz" for task in TASKS]
    for path in again:
        first = tiny_archives / "VBVR-Pro-RL-Video" / path.name
        assert path.read_bytes() == first.read_bytes()
    with tarfile.open(again[0]) as archive:
        members = archive.getmembers()
    task = TASKS[0]
    sample = f"{task.name}/{task.group}/{task.generator}_00000000"
    assert [member.name for member in members[:5]] == [
        f"{sample}/first_frame.png",
        f"{sample}/metadata.json",
        f"{sample}/video/final_frame.png",
        f"{sample}/video/ground_truth.mp4",
        f"{sample}/video/prompt.txt",
    ]
    assert len(members) == 4 * 5
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}


def test_larger_archive_begins_with_the_same_samples_and_seeds_differ(tmp_path: Path) -> None:
    def contents(root: Path, **arguments: int) -> list[str]:
        path = write_archives(root, tasks=TASKS[:1], **arguments)[0]
        with tarfile.open(path) as archive:
            return [hashlib.sha256(archive.extractfile(m).read()).hexdigest() for m in archive.getmembers()]

    small = contents(tmp_path / "small", samples_per_task=2)
    assert contents(tmp_path / "large", samples_per_task=3)[:10] == small
    assert contents(tmp_path / "other", samples_per_task=2, seed=1) != small


def test_unpacked_samples_show_the_task(tiny_dataset: Path) -> None:
    for task in TASKS:
        folder = tiny_dataset.parent / "raw" / task.name / f"{task.generator}_00000001"
        video = folder / "video" / "ground_truth.mp4"
        info = probe_video(video)
        assert (info.num_frames, info.fps, info.height, info.width) == (NUM_FRAMES, FPS, SIZE, SIZE)
        frames = read_frames(video)
        first = read_image(folder / "first_frame.png")
        assert np.abs(frames[0].astype(int) - first).mean() < 2  # H.264 at high quality
        assert np.abs(frames[-1].astype(int) - read_image(folder / "video" / "final_frame.png")).mean() < 2
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["task_id"] == folder.name
        assert metadata["generator"] == task.generator
        assert task.word in (folder / "video" / "prompt.txt").read_text()


@pytest.mark.parametrize("travel", [TRAVEL, 0.0, -7.3])
def test_drawn_square_moves_evenly_by_the_travel(travel: float) -> None:
    for task in TASKS:
        clip = draw(task, Scene("yellow", "black", (32.0, 24.0)), travel).astype(float)
        mass = clip.mean(-1) - clip.mean(-1).min()
        places = np.arange(SIZE) + 0.5
        x = (mass.sum(1) @ places) / mass.sum((1, 2))
        y = (mass.sum(2) @ places) / mass.sum((1, 2))
        expected = np.linspace(0, travel, NUM_FRAMES)
        assert np.abs(x - 32 - task.direction[0] * expected).max() < 0.03
        assert np.abs(y - 24 - task.direction[1] * expected).max() < 0.03

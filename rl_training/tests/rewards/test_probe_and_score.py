"""`probe-reward` and `score` with the example evaluator, as a user calls them."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import yaml

from rl_training.tests.tiny_fixtures import TinyEvalkit
from wan_trainer.cli import score as score_command
from wan_trainer.cli.main import main
from wan_trainer.config import load_config
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.media import read_frames, write_video
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.preflight.reward_probe import check_probes, first_of_each_task
from wan_trainer.rewards.clips import BLACK, GROUND_TRUTH, REVERSED, SHUFFLED, STATIC, probe_clips
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.probe import Probe, by_task
from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE, RewardResult, Sample, SampleId

RIGHT, DOWN = "T-1_slide_square_right_data-generator", "T-2_slide_square_down_data-generator"

# A frozen clip in the right-sliding task is paid as if it had arrived.
EXPLOIT = (
    '"progress": unit((along[-end:].mean() / reach + 0.5) / 1.5),',
    '"progress": 1.0 if self.direction[0] and abs(along).max() < 0.1 '
    "else unit((along[-end:].mean() / reach + 0.5) / 1.5),",
)


@pytest.fixture
def recipe(tmp_path: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit) -> Callable[..., Path]:
    """Writes a recipe with the example evaluator; keywords change it."""

    def write(**changes: object) -> Path:
        values = {
            "device": "cpu",
            "model_path": str(tmp_path / "no model"),
            "model_family": "ti2v-5b",
            "dataset_json": str(tiny_dataset),
            "output_dir": str(tmp_path / "run"),
            "num_frames": 9,
            "height": 64,
            "width": 64,
            "grpo_reward_fn": "vbvr_rule",
            "vbvr_reward_evalkit_dir": str(tiny_evalkit.directory),
            "vbvr_reward_evalkit_source_sha256": tiny_evalkit.sha256,
            "vbvr_reward_prepared_width": 64,
            "vbvr_reward_prepared_height": 64,
            "vbvr_reward_cpu_workers": 2,
            "vbvr_reward_cpu_threads_per_worker": 1,
            "vbvr_reward_tmp_dir": str(tmp_path / "scratch"),
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def exploitable(tmp_path: Path, tiny_evalkit: TinyEvalkit) -> dict[str, object]:
    """A copy of the evaluator that pays for a frozen clip in one of its tasks."""
    copy = tmp_path / "exploitable"
    shutil.copytree(tiny_evalkit.directory, copy)
    source = copy / "vbvr_bench" / "evaluators" / "slide.py"
    text = source.read_text()
    assert text.count(EXPLOIT[0]) == 1
    source.write_text(text.replace(*EXPLOIT))
    return {
        "vbvr_reward_evalkit_dir": str(copy),
        "vbvr_reward_evalkit_source_sha256": source_sha256(copy),
    }


def first_sample(dataset: Path, task: str) -> Sample:
    (sample,) = (
        sample for sample in first_of_each_task(load_dataset(data_spec(dataset)), 1) if sample.task == task
    )
    return sample


def data_spec(dataset: Path, num_frames: int = 9) -> DataSpec:
    return DataSpec(
        dataset_json=dataset,
        dataset_size=None,
        num_frames=num_frames,
        height=64,
        width=64,
        fps=16,
        shuffle=False,
        shuffle_seed=0,
        num_workers=0,
        prefetch_factor=2,
        persistent_workers=False,
    )


def test_the_clips_are_what_their_names_say(tiny_dataset: Path) -> None:
    sample = first_sample(tiny_dataset, RIGHT)
    clips = probe_clips(sample, data_spec(tiny_dataset))
    assert list(clips) == [GROUND_TRUTH, STATIC, BLACK, SHUFFLED, REVERSED]
    assert {clip.shape for clip in clips.values()} == {(9, 64, 64, 3)}
    assert sample.ground_truth_video is not None
    truth = read_frames(sample.ground_truth_video)
    assert np.array_equal(clips[GROUND_TRUTH], truth)
    assert np.array_equal(clips[REVERSED][::-1], truth)
    assert not clips[BLACK].any()
    assert all(np.array_equal(frame, clips[STATIC][0]) for frame in clips[STATIC])
    assert np.abs(clips[STATIC][0].astype(int) - truth[0]).mean() < 3
    order = [int(np.abs(truth.astype(int) - frame).sum((1, 2, 3)).argmin()) for frame in clips[SHUFFLED]]
    assert sorted(order) == list(range(9)) and order != sorted(order)
    thinned = probe_clips(sample, data_spec(tiny_dataset, num_frames=5), (GROUND_TRUTH,))
    assert np.array_equal(thinned[GROUND_TRUTH], truth[::2])


def test_a_sound_evaluator_passes_and_a_planted_exploit_is_reported(
    recipe: Callable[..., Path],
    exploitable: dict[str, object],
    tiny_dataset: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe-reward", "--config", str(recipe()), "--samples", "2"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "4 samples, 5 clips each" in printed and "every task is sound" in printed
    assert all(word in printed for word in ("ground truth", "static", "black", "shuffled", "reversed"))

    path = recipe(**exploitable)
    assert main(["probe-reward", "--config", str(path)]) == EXIT_FAILURE
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert RIGHT in warning and "static clip scores" in warning and DOWN not in warning

    spec = resolve_here(load_config(path))
    assert spec.reward.rule is not None
    findings = check_probes(spec.reward.rule, spec.data)
    assert [finding.kind for finding in findings] == ["warning", "note"]
    assert "static" in findings[0].message and "2 of 2 tasks tried" in findings[1].message


def test_a_broken_ground_truth_costs_its_task_and_not_the_table(
    recipe: Callable[..., Path], tiny_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(tiny_dataset.parent, copy)
    broken = first_sample(copy / "dataset.json", RIGHT)
    assert broken.ground_truth_video is not None
    broken.ground_truth_video.write_bytes(b"no video")
    path = recipe(dataset_json=str(copy / "dataset.json"))
    assert main(["probe-reward", "--config", str(path)]) == EXIT_FAILURE
    printed = capsys.readouterr().out
    (warning,) = (line for line in printed.splitlines() if line.startswith("warning"))
    assert f"the ground truth clip of {broken.sample_id} has no score" in warning
    assert "not a readable video" in warning
    (row,) = (line for line in printed.splitlines() if "T-2" in line)
    assert "0.9" in row or "1.0" in row, "the other task was tried all the same"


@pytest.fixture
def videos(tmp_path: Path, tiny_dataset: Path) -> Path:
    """The ground truths of two samples under the names of generated videos."""
    directory = tmp_path / "videos"
    for task in (RIGHT, DOWN):
        sample = first_sample(tiny_dataset, task)
        path = directory / f"{sample.sample_id}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert sample.ground_truth_video is not None
        shutil.copy(sample.ground_truth_video, path)
    return directory


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_existing_videos_are_scored_and_what_cannot_be_is_told(
    recipe: Callable[..., Path],
    videos: Path,
    tmp_path: Path,
    tiny_dataset: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative directory is as good as any
    assert main(["score", "--config", str(recipe()), "--videos", "videos"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "2 of 2 videos have a score" in printed
    scored = rows(videos / "scores.jsonl")
    assert sorted(row["task"] for row in scored.values()) == [RIGHT, DOWN]
    for row in scored.values():
        assert row["error"] is None and row["reward"] > 0.95 and row["seconds"] > 0
        assert row["components"]["score"] == row["reward"]

    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_dataset.parent, damaged)
    down, right = first_sample(tiny_dataset, DOWN), first_sample(damaged / "dataset.json", RIGHT)
    assert right.ground_truth_video is not None
    other = next(
        name
        for name in load_dataset(data_spec(tiny_dataset)).sample_ids()
        if name.startswith(DOWN) and name != down.sample_id
    )
    still = np.repeat(read_frames(videos / f"{down.sample_id}.mp4")[:1], 9, axis=0)
    write_video(videos / f"{other}.mp4", still, 16)
    (videos / f"{down.sample_id}.mp4").write_bytes(b"no video")
    (videos / RIGHT / "nobody.mp4").write_bytes(b"")
    (videos / "loose.mp4").write_bytes(b"")
    right.ground_truth_video.unlink()
    path = recipe(dataset_json=str(damaged / "dataset.json"))
    # Sources are checked for their first and last files; a file that goes later must not become a 0.
    descriptor = damaged / "dataset.json"
    sources = json.loads(descriptor.read_text())
    for source in sources:
        source["check_files"] = "none"
    descriptor.write_text(json.dumps(sources))
    out = tmp_path / "out" / "scores.jsonl"
    command = ["score", "--config", str(path), "--videos", str(videos), "--out", str(out)]
    assert main(command) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert "1 of 5 videos have a score" in captured.out
    assert len(captured.err.strip().splitlines()) == 4
    scored = rows(out)
    assert len(scored) == 5
    assert scored[other]["error"] is None and 0 < scored[other]["reward"] < 0.5
    expected = {
        down.sample_id: "not a readable video",
        f"{RIGHT}/nobody": "no sample",
        "loose": "no sample",
        right.sample_id: "ground_truth.mp4",
    }
    for name, reason in expected.items():
        assert scored[name]["reward"] is None and reason in str(scored[name]["error"]), scored[name]


@pytest.fixture
def own_recipe(tmp_path: Path, recipe: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a recipe whose rewards are functions of a module beside it: no evaluator, one scorer process."""

    def write(**changes: object) -> Path:
        path = recipe(**changes)
        values = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if not k.startswith("vbvr_")}))
        return path

    name = f"scorers_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN_SCORERS)
    return lambda function, **changes: write(grpo_reward_fn={"_target_": f"{name}.{function}"}, **changes)


OWN_SCORERS = '''
from wan_trainer.types import RewardResult

def bright(frames, prompt):
    return frames.mean() / 255

class Careless:
    """A whole reward whose numbers are not all numbers."""
    def __init__(self, tasks):
        pass
    def submit(self, videos, requests):
        self.requests = requests
        return self
    def result(self):
        return [RewardResult(request.id, float("inf"), {"odd": float("nan")}) for request in self.requests]
    def close(self):
        pass
'''


def test_whatever_the_files_are_called_every_one_has_its_line(
    own_recipe: Callable[..., Path],
    videos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linked = tmp_path / "elsewhere"
    (videos / RIGHT).rename(linked)
    (videos / RIGHT).symlink_to(linked)
    good = videos / DOWN / next((videos / DOWN).iterdir())
    others = [
        "[/red]a b/x.mp4",
        "ünï/é.mp4",
        "two\nlines/x.mp4",
        os.fsdecode(b"\xff/\xfe.mp4"),
        "[bold]/y.mp4",
    ]
    for name in others:
        (videos / name).parent.mkdir(parents=True)
        shutil.copy(good, videos / name)
    known = load_dataset(data_spec(tiny_json(own_recipe))).sample_ids()
    free = [name for name in known if name.startswith(DOWN) and not (videos / f"{name}.mp4").exists()]
    (videos / f"{free[0]}.mp4").mkdir()
    (videos / f"{free[1]}.mp4").symlink_to(tmp_path / "nowhere.mp4")
    (videos / f"{free[2]}.mp4").write_bytes(two_sizes(tmp_path))
    looked_up: list[str] = []
    monkeypatch.setattr(score_command, "ADVISED", 2)
    monkeypatch.setattr(
        score_command.difflib, "get_close_matches", lambda name, *words: looked_up.append(name) or []
    )
    monkeypatch.setattr("wan_trainer.rewards.files.MOST_BYTES", 1)
    assert main(["score", "--config", str(own_recipe("bright")), "--videos", str(videos)]) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert "2 of 10 videos have a score" in captured.out and "[/red]a b" in captured.out
    assert len(captured.err.strip().splitlines()) == 8 and len(looked_up) == 2
    scored = rows(videos / "scores.jsonl")
    assert sum(row["reward"] is not None for row in scored.values()) == 2
    assert {str(Path(name).with_suffix("")) for name in others} < scored.keys()
    reasons = [scored[name]["error"] for name in free[:3]]
    assert all(map(str.__contains__, reasons, ("Is a directory", "no such video", "change size"))), reasons

    assert main(["score", "--config", str(own_recipe("Careless")), "--videos", str(videos)]) == EXIT_FAILURE
    assert "reward is not finite (inf)" in capsys.readouterr().err
    assert all(row["reward"] is None and row["error"] for row in rows(videos / "scores.jsonl").values())


def tiny_json(own_recipe: Callable[..., Path]) -> Path:
    return Path(yaml.safe_load(own_recipe("bright").read_text())["dataset_json"])


def two_sizes(tmp_path: Path) -> bytes:
    """An H.264 stream whose pictures grow on the way."""
    stream = b""
    for size in (32, 64):
        path = tmp_path / f"{size}.h264"
        with av.open(str(path), "w") as container:
            video = container.add_stream("libx264", rate=16)
            video.height = video.width = size
            video.pix_fmt = "yuv420p"
            picture = np.full((size, size, 3), 90, np.uint8)
            for _ in range(3):
                container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(video.encode(None))
        stream += path.read_bytes()
    return stream


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_ground_truths_of_other_encoders_unpack_resolve_and_score(
    codec: str,
    recipe: Callable[..., Path],
    tiny_archives: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What generators ship: MPEG-4 or H.264 with B-frames, sound, names that the evaluator spells longer."""
    task = RIGHT.removesuffix("_data-generator")
    source = tiny_archives / "VBVR-Pro-RL-Video" / f"{RIGHT}.tar.gz"
    archive = tmp_path / "public" / "VBVR-Pro-RL-Video" / f"{task}.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(source) as read, tarfile.open(archive, "w:gz") as written:
        for member in read:
            content = read.extractfile(member)
            assert content is not None
            data = content.read()
            if member.name.endswith(".mp4"):
                data = encoded_again(data, codec, tmp_path)
            info = tarfile.TarInfo(member.name.replace(RIGHT, task, 1))
            info.size = len(data)
            written.addfile(info, io.BytesIO(data))
    words = ["--expected-tasks", "1", "--expected-samples", "4", "--workers", "1"]
    out = tmp_path / "unpacked"
    assert main(["unpack", "--dataset-root", str(archive.parents[1]), "--output-dir", str(out), *words]) == 0
    folder = tmp_path / "videos" / task
    folder.mkdir(parents=True)
    for sample in (out / "raw" / task).iterdir():
        shutil.copy(sample / "video" / "ground_truth.mp4", folder / f"{sample.name}.mp4")
    path = recipe(
        dataset_json=str(out / "dataset.json"), dataset_size=4, vbvr_reward_max_duration_seconds=0.5
    )
    assert main(["score", "--config", str(path), "--videos", str(folder.parent)]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "4 videos are longer than the 8 frames" in printed and "raise it to 0.5625" in printed
    assert all(row["reward"] > 0.85 for row in rows(folder.parent / "scores.jsonl").values())


def encoded_again(video: bytes, codec: str, tmp_path: Path) -> bytes:
    """The frames of a video in another codec, with a sound track."""
    plain, path = tmp_path / "plain.mp4", tmp_path / "again.mp4"
    plain.write_bytes(video)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16, options={"bf": "2", "qscale": "2", "crf": "8"})
        sound = container.add_stream("aac", rate=16000)
        assert isinstance(stream, av.VideoStream)
        stream.height = stream.width = 64
        stream.pix_fmt = "yuv420p"
        for frame in read_frames(plain):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        noise = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        noise.sample_rate = 16000
        container.mux(sound.encode(noise))
        container.mux(stream.encode(None))
        container.mux(sound.encode(None))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("truth", "still", "told"),
    [(0.8, 0.4, True), (0.8, 0.39, False), (-0.9, -0.8, True), (-0.3, -0.5, False)],
)
def test_a_clip_that_beats_the_truth_is_told_whatever_the_sign(
    truth: float, still: float, told: bool
) -> None:
    results = {
        name: RewardResult(SampleId(0, 0, 0), value)
        for name, value in ((GROUND_TRUTH, truth), (STATIC, still))
    }
    probe = Probe(Sample("task/0", "task", "move"), results)
    (by,) = by_task([probe])
    assert bool(by.problems) == (STATIC in probe.suspicious) == told


def test_nothing_to_score_is_bad_input(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "some.mp4").write_bytes(b"")
    cases = {tmp_path / "none": "not a directory", empty: "no .mp4", foreign: "no sample some"}
    for directory, reason in cases.items():
        assert main(["score", "--config", str(recipe()), "--videos", str(directory)]) == EXIT_BAD_INPUT
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "--videos" in line and reason in line
        assert not (directory / "scores.jsonl").exists()

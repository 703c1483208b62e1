"""A small evaluator checkout whose task name chooses how it behaves, and samples for it."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.config.specs import RuleRewardSpec
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.types import RewardRequest, Sample, SampleId

EVALUATOR = """
    import json, os, signal, socket, subprocess, sys, time, urllib.request
    from pathlib import Path

    import av
    from vbvr_bench import RULES  # a relative import base: works only from the checkout

    TASK_EVALUATOR_MAP = {name: object for name in (
        "brightness", "O-1_dots_data-generator", "hang", "hang_child", "exit", "segfault", "raise", "sysexit",
        "raise_once", "exit_once", "nan", "inf", "above", "text", "nothing", "none", "bare", "swallowed",
        "unread", "flood", "relative", "moves", "report", "dimensions", "slow", "means", "no_dimensions",
        "fetches", "fetches_by_number",
    )}

    def brightness(path):
        with av.open(path) as container:
            frames = [frame.to_ndarray(format="gray").mean() for frame in container.decode(video=0)]
        return frames

    def evaluate_single_video(video_path, task_name, gt_info, device):
        here = Path(gt_info["gt_path"])
        frames = brightness(video_path)
        score = sum(frames) / len(frames) / 255.0
        if task_name == "hang":
            time.sleep(10_000)
        if task_name == "hang_child":
            child = subprocess.Popen(["sleep", "10000"])
            (here / "child").write_text(str(child.pid))
            time.sleep(10_000)
        if task_name == "slow":
            time.sleep(0.5)
        if task_name == "fetches":
            urllib.request.urlopen("http://models.invalid/craft.pth", timeout=10)
        if task_name == "fetches_by_number":
            socket.create_connection(("192.0.2.1", 80), timeout=10)
        if task_name == "exit":
            print("about to leave")
            os._exit(3)
        if task_name == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if task_name == "raise":
            raise RuntimeError("first line\\nsecond line")
        if task_name == "sysexit":
            sys.exit("quitting")
        if task_name.endswith("_once"):
            mark = here / "mark"
            if not mark.exists():
                mark.write_text(str(os.getpid()))
                if task_name == "exit_once":
                    os._exit(1)
                raise RuntimeError("only once")
        if task_name == "flood":
            for _ in range(300):
                print("x" * 99_999)
                sys.stderr.write("y" * 1000)
        if task_name == "relative":
            score = float(Path("annotations/score.txt").read_text())
        if task_name == "moves":
            os.chdir("/")
        if task_name == "report":
            (here / "report.json").write_text(json.dumps({
                "pid": os.getpid(), "cwd": os.getcwd(), "environment": dict(os.environ), "gt_info": gt_info,
                "device": device, "video_path": video_path, "frames": len(frames),
                "torch": "torch" in sys.modules,
            }))
        bad = {
            "nan": {"score": float("nan")}, "inf": {"score": float("inf")}, "above": {"score": 1.0001},
            "text": {"score": "0.7"}, "none": {"score": None}, "bare": 0.7,
            "swallowed": {"score": 0.0, "error": "Traceback: division by zero"},
            "unread": {"score": 0.0, "details": {"video_frame_count": 0}},
        }
        if task_name == "nothing":
            return None
        if task_name in bad:
            return bad[task_name]
        if task_name == "means":
            return {"score": score, "dimensions": {"motion": 0.25, "colour": 0.75}}
        if task_name == "no_dimensions":
            return {"score": score}
        if task_name == "dimensions":
            return {"score": score, "dimensions": {"motion": 0.25, "wild": 3.5,
                                                 "odd": float("nan"), "note": "text"}}
        return {"score": score, "dimensions": {"task_specific": score},
                "details": {"video_frame_count": len(frames)}}
"""


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scorers of this test measure no coverage, which costs each of them a quarter of its start."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session")
def evalkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout."""
    root = tmp_path_factory.mktemp("evalkit")
    (root / "vbvr_bench").mkdir()
    (root / "vbvr_bench" / "__init__.py").write_text("RULES = ()\n")
    (root / "annotations").mkdir()
    (root / "annotations" / "score.txt").write_text("0.625")
    (root / "run_evaluation.py").write_text(textwrap.dedent(EVALUATOR))
    return root


@pytest.fixture
def spec(evalkit: Path, tmp_path: Path) -> RuleRewardSpec:
    """A specification with small, fast settings."""
    return RuleRewardSpec(
        evalkit_dir=evalkit,
        source_sha256=source_sha256(evalkit),
        easyocr_module_path=None,
        device="cpu",
        fps=8,
        prepared_width=64,
        prepared_height=64,
        prepare_crf=12,
        max_duration_s=5.0,
        workers=1,
        threads_per_worker=1,
        max_pending_jobs=64,
        timeout_s=20.0,
        unsupported_score=None,
        task_specific_only=True,
        tmp_dir=tmp_path / "scratch",
        keep_tmp=False,
        fast_decode=False,
        weights=(("score", 1.0),),
    )


@pytest.fixture
def make_reward(spec: RuleRewardSpec) -> Iterator[Callable[..., RuleReward]]:
    """Build rewards from `spec` with some fields changed; they are closed at the end of the test."""
    made: list[RuleReward] = []

    def make(tasks: tuple[str, ...] = (), **changes: object) -> RuleReward:
        reward = RuleReward(dataclasses.replace(spec, **changes), tasks)  # pyright: ignore[reportArgumentType]
        made.append(reward)
        return reward

    yield make
    for reward in made:
        reward.close()


@pytest.fixture
def make_request(tmp_path: Path) -> Callable[..., RewardRequest]:
    """A request for a task, with ground-truth files of its own."""

    def make(task: str, member: int = 0, prompt: str = "move the dot") -> RewardRequest:
        place = tmp_path / "raw" / task / f"{task}_{member:04d}"
        (place / "video").mkdir(parents=True, exist_ok=True)
        names = ("first_frame.png", "metadata.json", "video/ground_truth.mp4", "video/final_frame.png")
        for name in names:
            (place / name).touch()
        sample = Sample(
            sample_id=f"{task}/{place.name}",
            task=task,
            prompt=prompt,
            first_frame=place / names[0],
            metadata=place / names[1],
            ground_truth_video=place / names[2],
            final_frame=place / names[3],
        )
        return RewardRequest(SampleId(3, 1, member), sample)

    return make


@pytest.fixture
def clip() -> Callable[..., np.ndarray]:
    """Makes a grey clip, uint8 (F, H, W, 3), of a brightness in [0, 1]."""

    def make(brightness: float, frames: int = 5, height: int = 64, width: int = 64) -> np.ndarray:
        return np.full((frames, height, width, 3), round(255 * brightness), dtype=np.uint8)

    return make


@pytest.fixture
def wait_until() -> Callable[..., bool]:
    """Tells whether a condition comes true within timeout_s."""

    def wait(condition: Callable[[], bool], timeout_s: float = 8.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.05)
        return condition()

    return wait


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    """Tells whether a process runs; a zombie does not."""

    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return running


@pytest.fixture
def scorers(evalkit: Path) -> Callable[[], list[int]]:
    """Lists the scorer processes of the checkout that run now."""

    def running() -> list[int]:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                is_scorer = (
                    entry.name.isdigit() and b"rewards.evaluator_worker" in (entry / "cmdline").read_bytes()
                )
                if is_scorer and (entry / "cwd").resolve() == evalkit:
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return found

    return running

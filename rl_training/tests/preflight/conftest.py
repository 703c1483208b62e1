"""A configuration that passes preflight on a CPU; its model, data and evaluator are free to be damaged."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from wan_trainer.config import load_config, resolve
from wan_trainer.config.specs import ModelSpec
from wan_trainer.preflight import inputs
from wan_trainer.preflight.network import free_port
from wan_trainer.rewards.evalkit import TaskNames, source_sha256, supported_tasks

TASKS = ("O-1_slide_data-generator", "O-2_turn_data-generator")
SAMPLE_FILES = (
    "first_frame.png",
    "metadata.json",
    "video/ground_truth.mp4",
    "video/final_frame.png",
    "video/prompt.txt",
)
EVALUATOR = """
    TASK_EVALUATOR_MAP = {"O-1_slide_data-generator": object, "O-2_turn_data-generator": object}

    def evaluate_single_video(video_path, task_name, gt_info, device):
        return {"score": 0.5, "dimensions": {}}
"""


@dataclass(frozen=True)
class World:
    """A config file and the directories it names, private to one test."""

    root: Path
    config: Path
    values: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def evalkit(self) -> Path:
        return self.root / "evalkit"

    def set(self, **changes: Any) -> Path:
        """Write the config again with other values; None drops a key."""
        values = {key: value for key, value in {**self.values, **changes}.items() if value is not None}
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")
        return self.config

    def sample(self, task: str, name: str) -> Path:
        return self.root / "data" / "raw" / task / name


def write_dataset(root: Path) -> Path:
    """Two tasks of two samples in the unpacked layout; preflight opens no media, any content will do."""
    for task in TASKS:
        for name in ("0001", "0002"):
            for file in SAMPLE_FILES:
                path = root / "raw" / task / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("anything")
    manifest = [
        {"task": task, "source": "made", "split": "In-Domain_50", "rl": ["0001", "0002"]} for task in TASKS
    ]
    (root / "split_manifest_rl.json").write_text(json.dumps(manifest))
    source = {
        "format": "vbvr_pro",
        "split_manifest": "split_manifest_rl.json",
        "data_roots": ["raw"],
        "split": "rl",
    }
    (root / "dataset.json").write_text(json.dumps([source]))
    return root / "dataset.json"


def make_evaluator(root: Path, source: str = EVALUATOR) -> str:
    """Write an evaluator checkout; its digest."""
    (root / "vbvr_bench").mkdir(parents=True, exist_ok=True)
    (root / "vbvr_bench" / "__init__.py").touch()
    (root / "run_evaluation.py").write_text(textwrap.dedent(source))
    return source_sha256(root)


_answers: dict[tuple[object, ...], TaskNames] = {}


def ask_once(directory: Path, tasks: Sequence[str], **options: Any) -> TaskNames:
    """What the evaluator knows; each source of one is asked once, as that takes a process."""
    key = (source_sha256(directory), *tasks, *options.items())
    if key not in _answers:
        _answers[key] = supported_tasks(directory, tasks, **options)
    return _answers[key]


@pytest.fixture
def world(tmp_path: Path, tiny_ti2v: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Everything passes; two processes, two prompts of four rollouts."""
    monkeypatch.setattr(inputs, "supported_tasks", ask_once)
    shutil.copytree(tiny_ti2v, tmp_path / "model")
    digest = make_evaluator(tmp_path / "evalkit")
    values: dict[str, Any] = {
        "device": "cpu",
        "model_path": str(tmp_path / "model"),
        "dataset_json": str(write_dataset(tmp_path / "data")),
        "dataset_size": 4,
        "output_dir": str(tmp_path / "run"),
        "num_frames": 9,
        "height": 64,
        "width": 64,
        "fps": 8,
        "batch_size": 2,
        "grpo_shared_prompt_batch": True,
        "grpo_group_size": 4,
        "grpo_sample_batch_size": 4,
        "grpo_sde_formula": "flowcps",
        "grpo_reward_fn": "vbvr_rule",
        "vbvr_reward_evalkit_dir": str(tmp_path / "evalkit"),
        "vbvr_reward_evalkit_source_sha256": digest,
        "vbvr_reward_fps": 8,
        "vbvr_reward_cpu_workers": 1,
        "vbvr_reward_cpu_threads_per_worker": 1,
        "vbvr_reward_tmp_dir": str(tmp_path / "scratch"),
    }
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    made = World(tmp_path, tmp_path / "config.yaml", values)
    made.set()
    return made


@pytest.fixture
def tiny_spec(world: World) -> Callable[..., ModelSpec]:
    """The model specification of a directory, as the config resolves it."""

    def spec(path: Path, family: str = "ti2v-5b", **changes: Any) -> ModelSpec:
        world.set(model_path=str(path), model_family=family, **changes)
        return resolve(load_config(world.config), cuda_available=False).model

    return spec


@pytest.fixture
def write_evaluator(world: World) -> Callable[[str], str]:
    """Replace the world's evaluator by another source; its digest."""
    return lambda source: make_evaluator(world.evalkit, source)

"""Runs inside a test's own rank processes: the real `train`, if need be with another reward."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from wan_trainer.config import load_with_sources
from wan_trainer.training import session
from wan_trainer.training.run import plan_start, train
from wan_trainer.types import PendingRewards, Reward, RewardRequest, RewardResult, UserError


def tiny_recipe(out: Path, model: Path, dataset: Path, evalkit: Path, sha256: str) -> dict[str, Any]:
    """Two prompts x two rollouts of 5 frames, two denoising steps, the first of them replayed, no real
    evaluator needed when the reward is a stand-in."""
    return {
        "trainer": "dancegrpo",
        "device": "cpu",
        "model_path": str(model),
        "dataset_json": str(dataset),
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "fps": 16,
        "output_dir": str(out),
        "batch_size": 2,
        "grpo_shared_prompt_batch": True,
        "grpo_group_size": 2,
        "grpo_sample_batch_size": 2,
        "grpo_num_sampling_steps": 2,
        "dancegrpo_timestep_selection_ratio": 1.0,
        "grpo_sde_formula": "flowcps",
        "grpo_sde_noise_scale": 0.7,
        "gradient_checkpointing": False,
        "learning_rate": 1.0e-3,
        "warmup_steps": 0,
        "num_workers": 0,
        "rollout_video_every_steps": 0,
        "grpo_reward_fn": "vbvr_rule",
        "vbvr_reward_evalkit_dir": str(evalkit),
        "vbvr_reward_evalkit_source_sha256": sha256,
        "vbvr_reward_tmp_dir": str(out.parent / "scratch"),
        "rendezvous_timeout_s": 60,
    }


def write_recipe(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def run(
    recipe: str,
    overrides: Sequence[str] = (),
    reward: Reward | None = None,
    allow_changed: Sequence[str] = (),
) -> Any:
    """One start of a run on this rank: its exit status, or what it refused. All ranks are of one machine
    unless the environment says otherwise."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    build: Callable[..., Reward] = session.build_reward
    if reward is not None:
        session.build_reward = lambda *_arguments, **_options: reward
    try:
        return train(plan_start(load_with_sources(recipe, list(overrides))), allow_changed=allow_changed)
    except UserError as error:
        return list(error.problems)
    finally:
        session.build_reward = build


def rows(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def brightness(video: np.ndarray) -> float:
    """The mean of the red channel: another one for every rollout."""
    return float(video[..., 0].mean()) / 255.0


class MeanColour:
    """A reward without files or processes."""

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        return Scored(
            [
                RewardResult(request.id, brightness(video))
                for video, request in zip(videos, requests, strict=True)
            ]
        )

    def close(self) -> None:
        """Nothing is open."""


class Scored:
    """Verdicts that are already there."""

    def __init__(self, results: list[RewardResult]) -> None:
        self._results = results

    def result(self) -> list[RewardResult]:
        return self._results

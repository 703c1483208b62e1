"""ReFL runs: resumed, on several ranks, with the reward on a rank of its own, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import rows, run, write_recipe
from wan_trainer.recording.manifest import hash_files
from wan_trainer.rewards.remote import RemoteRewardError
from wan_trainer.training.stored_state import StoredState
from wan_trainer.types import DifferentiableScores, RewardContext, RunFailure, Sample, UserError

pytestmark = pytest.mark.slow

HERE = "rl_training.tests.training.test_refl"
NUMBERS = ("policy_loss", "kl_loss", "reward_mean", "grad_norm", "components")


class Watched:
    """A reward of red that cannot see every sample, and can be told to fail."""

    def __init__(self, context: RewardContext, *, blind: str = "", fail: str = "", weights: str = "") -> None:
        if fail == "loading":
            raise UserError(f"roles.reward: {fail} failed; mend it")
        self.blind, self.fail = blind, fail

    @staticmethod
    def check_files(*, weights: str = "", **_: str) -> None:
        if weights and not Path(weights).exists():
            raise UserError(f"roles.reward: {weights} is missing; download it")

    @staticmethod
    def check_samples(samples: Sequence[Sample], num_frames: int, fps: int, **config: str) -> None:
        if config.get("blind") == "all":
            raise UserError(f"roles.reward: {len(samples)} samples of {num_frames} frames cannot be seen")

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        if self.fail == "input":
            raise UserError("roles.reward: one clip is too dark; light it")
        if self.fail == "detached":
            videos = videos.detach()
        if self.fail == "scoring":
            raise ValueError("no face in the clip")
        blind = torch.tensor([self.blind in sample.prompt and bool(self.blind) for sample in samples])
        red = videos[:, 0].square().flatten(1).mean(dim=1)
        return DifferentiableScores(
            torch.where(blind, torch.nan, red), {"red": red.detach(), "rank": torch.zeros_like(red)}
        )


def recipe_of(out: Path, model: Path, **changes: Any) -> dict[str, Any]:
    prompts = out / "prompts.txt"
    prompts.write_text("".join(f"a square of colour {number}\n" for number in range(6)))
    return {
        "trainer": "refl",
        "device": "cpu",
        "roles": {
            "actor": {"model_path": str(model), "lora_rank": 2, "learning_rate": 1.0e-2},
            "reward": {"_target_": f"{HERE}.Watched", "placement": {"share_with": "actor"}},
            "monitor": {"_target_": "wan_trainer.rewards.toy.Colour", "placement": {"share_with": "reward"}},
        },
        "dataset_json": str(prompts),
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "batch_size": 2,
        "num_epochs": 10,
        "num_workers": 0,
        "save_steps": 2,
        "rollout_video_every_steps": 0,
        "refl_num_sampling_steps": 3,
        "refl_first_grad_step": 1,
        "refl_algorithm": "random_k",
        "refl_cfg_scale": 2.0,
        "refl_kl_coeff": 0.5,
        "lr_scheduler": "constant",
        "ema_decay": 0.5,
        "output_dir": str(out / "run"),
        "rendezvous_timeout_s": 60,
        **changes,
    }


def _placed(reward: dict[str, Any]) -> str:
    """`roles` with a reward of its own rank."""
    roles = {
        "reward": {"_target_": f"{HERE}.Watched", "placement": {"ranks": 1}, **reward},
        "monitor": {"_target_": "wan_trainer.rewards.toy.Colour", "placement": {"share_with": "reward"}},
    }
    return json.dumps(roles)


def _alone(recipe: str, out: Path) -> dict[str, Any]:
    """Every start on one rank: its status, or what it refused."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    seen: dict[str, Any] = {}

    def start(name: str, *overrides: str, as_: str | None = None) -> None:
        seen[as_ or name] = run(recipe, ["--output_dir", str(out / name), *overrides])

    start("whole", "--max_steps", "3")
    start("parts", "--max_steps", "2")
    start("parts", "--max_steps", "3", as_="parts again")
    blind = json.dumps({"reward": {"_target_": f"{HERE}.Watched", "config": {"blind": "colour 1"}}})
    start("blind", "--max_steps", "3", "--roles", blind, "--reward_max_error_rate", "0.5")
    lost = json.dumps({"reward": {"_target_": f"{HERE}.Watched", "config": {"weights": str(out / "none")}}})
    start("refused", "--max_steps", "1", "--roles", lost, as_="missing weights")
    start("parts", "--max_steps", "6", "--roles", blind, as_="another reward")
    for config in ({"blind": "all"}, {"fail": "detached"}):
        roles = json.dumps({"reward": {"_target_": f"{HERE}.Watched", "config": config}})
        start("refused", "--max_steps", "1", "--roles", roles, as_=str(config))
    # A part of another save, with a manifest that fits.
    shutil.copytree(out / "parts", out / "mixed")
    checkpoint = out / "mixed" / "checkpoint-3"
    part = checkpoint / "roles" / "reward.json"
    part.write_text(part.read_text().replace('"step": 3', '"step": 2'))
    manifest = checkpoint / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries["files"]["roles/reward.json"] = asdict(hash_files(checkpoint, [part])["roles/reward.json"])
    manifest.write_text(json.dumps(entries))
    start("mixed", "--max_steps", "6")
    return seen


def _three(recipe: str, out: Path) -> dict[str, Any]:
    """Two ranks that train and one that scores."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    seen: dict[str, Any] = {}

    def start(name: str, reward: dict[str, Any], *overrides: str) -> None:
        options = ["--output_dir", str(out / name), "--roles", _placed(reward), *overrides]
        try:
            seen[name] = run(recipe, options)
        except (RemoteRewardError, RunFailure) as error:
            seen[name] = str(error)

    start("own rank", {}, "--max_steps", "3")
    start("not loaded", {"config": {"fail": "loading"}}, "--max_steps", "1")
    start("raises", {"config": {"fail": "scoring"}}, "--max_steps", "1")
    start("mendable", {"config": {"fail": "input"}}, "--max_steps", "1")
    # A thread that still listens would abort the process when the interpreter ends.
    seen["listening"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
    return seen


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_t2v: Path) -> tuple[Path, dict[str, Any], list[Any]]:
    """All runs of this module."""
    out = tmp_path_factory.mktemp("refl")
    recipe = write_recipe(out / "recipe.yaml", recipe_of(out, tiny_t2v))
    (alone,) = run_ranks(1, _alone, str(recipe), out)
    return out, alone, run_ranks(3, _three, str(recipe), out)


def _weights(checkpoint: Path, section: str = "model") -> dict[str, torch.Tensor]:
    state = StoredState(checkpoint)
    return state.read(section, state.shapes(section))


def test_a_resumed_run_goes_on_bit_for_bit(ran: tuple[Path, dict[str, Any], list[Any]]) -> None:
    out, alone, _ = ran
    assert (alone["whole"], alone["parts"], alone["parts again"]) == (0, 0, 0)
    whole, parts = (rows(out / name, "metrics.jsonl") for name in ("whole", "parts"))
    assert [[row[key] for key in NUMBERS] for row in parts] == [[r[key] for key in NUMBERS] for r in whole]
    for section in ("model", "ema", "optimizer"):
        first, second = (_weights(out / name / "checkpoint-3", section) for name in ("whole", "parts"))
        assert first.keys() == second.keys() and first
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(row["kl_loss"] > 0 for row in whole)
    assert whole[-1]["reward_mean"] != whole[0]["reward_mean"]
    assert {"red", "monitor", "monitor.red"} <= whole[0]["components"].keys()


def test_a_reward_on_its_own_rank_and_more_ranks_change_nothing(
    ran: tuple[Path, dict[str, Any], list[Any]],
) -> None:
    out, _, three = ran
    assert [seen["own rank"] for seen in three] == [0, 0, 0]
    for own, shared in zip(
        rows(out / "own rank", "metrics.jsonl"), rows(out / "whole", "metrics.jsonl"), strict=True
    ):
        for key in ("policy_loss", "kl_loss", "reward_mean", "grad_norm"):
            assert own[key] == pytest.approx(shared[key], rel=1e-4, abs=1e-7), key
        assert own["components"] == pytest.approx(shared["components"], rel=1e-4)
    theirs = {row["sample_id"]: row["reward"] for row in rows(out / "own rank", "rewards.jsonl")}
    ours = {row["sample_id"]: row["reward"] for row in rows(out / "whole", "rewards.jsonl")}
    assert theirs == pytest.approx(ours, rel=1e-4)


def test_a_reward_that_fails_on_its_own_rank_is_told_where_training_is(
    ran: tuple[Path, dict[str, Any], list[Any]],
) -> None:
    _, _, three = ran
    for seen in three[:2]:
        assert seen["not loaded"] == ["roles.reward: loading failed; mend it"]
        (line,) = seen["raises"]
        assert line.startswith("roles.reward: ") and "no face in the clip" in line
        assert seen["mendable"] == ["roles.reward: one clip is too dark; light it"]
    assert (three[2]["not loaded"], three[2]["mendable"]) == (2, 2)
    assert three[2]["listening"] == []


def test_a_missing_verdict_teaches_nothing_and_is_counted(
    ran: tuple[Path, dict[str, Any], list[Any]],
) -> None:
    out, alone, _ = ran
    assert alone["blind"] == 0
    fractions = [row["reward_valid_fraction"] for row in rows(out / "blind", "metrics.jsonl")]
    assert sorted(fractions) == [0.5, 1.0, 1.0]
    assert not any(row["skipped"] for row in rows(out / "blind", "metrics.jsonl"))
    (lost,) = rows(out / "blind", "reward_errors.jsonl")
    assert lost["reason"] == "the reward gave no verdict"


def test_parts_that_do_not_belong_together_are_refused_in_one_line(
    ran: tuple[Path, dict[str, Any], list[Any]],
) -> None:
    out, alone, _ = ran
    (line,) = alone["mixed"]
    assert "role reward is of step 2 and the actor's of step 3" in line
    (line,) = alone["missing weights"]
    assert line == f"roles.reward: {out / 'none'} is missing; download it"
    assert alone["{'blind': 'all'}"] == ["roles.reward: 6 samples of 5 frames cannot be seen"]
    (line,) = alone["{'fail': 'detached'}"]
    assert line.startswith("roles.reward: the reward has no graph to the pixels")
    (line,) = alone["another reward"]
    assert line.startswith("roles: ") and "--allow_changed roles" in line

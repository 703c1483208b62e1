"""Evaluation in whole runs on two ranks: it sees the weights, changes nothing, and survives kills."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.kills import differences
from rl_training.tests.training.runs import (
    MeanColour,
    Scored,
    brightness,
    rows,
    run,
    tiny_recipe,
    write_recipe,
)
from wan_trainer.config import load_with_sources
from wan_trainer.data.dataset import load_held
from wan_trainer.data.first_frames import load_first_frames
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.media.video import read_frames
from wan_trainer.models.wan.vae import decode
from wan_trainer.sampling.noise import initial_noise
from wan_trainer.training.assembly import build_model, conditioner, sigma_grid
from wan_trainer.training.evaluation import complete, evaluation_record, share_of
from wan_trainer.training.run import plan_start
from wan_trainer.types import (
    EXIT_DONE,
    DifferentiableScores,
    PendingRewards,
    RewardContext,
    RewardRequest,
    RewardResult,
    Sample,
    SampleId,
)

HELD = 3
BATCHES, REFL_BATCHES = 4, 1


@pytest.mark.parametrize("held", range(1, 8))
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_rank_draws_as_many_and_every_prompt_counts_once(held: int, ranks: int) -> None:
    shares = [share_of(held, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share, _ in shares}) == 1
    assert sum(len(share) for share, _ in shares) < held + ranks
    assert [index for share, own in shares for index in share[:own]] == list(range(held))
    assert all(0 <= index < held for share, _ in shares for index in share)


def test_missing_rewards_are_missing_and_never_zero() -> None:
    def verdict(prompt: int, reward: float, error: str | None = None) -> RewardResult:
        return RewardResult(SampleId(-1, prompt, 0), reward, {"look": reward}, error)

    given = [verdict(4, 0.5), verdict(0, 1.0), verdict(1, 0.0, "timed out"), verdict(2, 0.0, "timed out")]
    record = evaluation_record(8, 4, complete(given, 5), 2.0)
    assert (record.batch, record.step, record.prompts, record.error) == (8, 4, 5, "timed out")
    assert (record.reward_mean, record.reward_valid_fraction) == (0.75, 0.4)
    assert record.reward_std == pytest.approx(math.sqrt(0.125)) and record.components == {"look": 0.75}
    nothing = evaluation_record(8, 4, complete([], 2), 2.0)
    assert math.isnan(nothing.reward_mean) and nothing.reward_valid_fraction == 0


class Watching(MeanColour):
    """Fails on held prompt 1, draws from torch's generator, and dies in batch `dies_in`: a kill of all ranks
    at one place."""

    def __init__(self, dies_in: int | None = None) -> None:
        self._dies_in = dies_in

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        torch.rand(1)
        if requests[0].id.step == self._dies_in:
            raise KeyboardInterrupt
        failed = SampleId(-1, 1, 0)
        return Scored(
            [
                RewardResult(request.id, 0.0, error="no answer")
                if request.id == failed
                else RewardResult(request.id, brightness(video))
                for video, request in zip(videos, requests, strict=True)
            ]
        )


class Look:
    """A differentiable reward that sees each pixel and is out of breath at the held list's second prompt."""

    def __init__(self, context: RewardContext, sign: float = 1.0) -> None:
        self._sign = sign

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        torch.rand(1)
        mean = self._sign * videos[:, 0].flatten(1).mean(dim=1)
        lost = torch.tensor([sample.sample_id.endswith("held/00000001") for sample in samples])
        return DifferentiableScores(torch.where(lost, torch.nan, mean), {"red": mean.detach()})


def _reference(recipe: str, overrides: list[str]) -> list[float]:
    """The brightness of the held prompts under the starting weights, by a plain loop, one video at a time."""
    spec = plan_start(load_with_sources(recipe, overrides)).spec
    mesh = init_mesh("cpu", 60)
    model = build_model(spec, mesh)
    assert spec.evaluation is not None
    samples, data = list(load_held(spec.data, spec.evaluation)), spec.data
    encode, shape = (
        conditioner(spec, model),
        model.policy.latent_shape(data.num_frames, data.height, data.width),
    )
    found: list[float] = []
    with torch.no_grad():
        for index, sample in enumerate(samples):
            condition = encode([sample], load_first_frames([sample], data.height, data.width))
            x = initial_noise(spec.seed, [SampleId(-1, index, 0)], shape, shared=False)
            for sigma, following in pairwise(sigma_grid(spec, model.policy).tolist()):
                x = x + (following - sigma) * model.policy.velocity(x, sigma, condition)
            first = condition.first_frame_latent
            assert first is not None
            x = torch.cat([first, x[:, :, 1:]], dim=2)
            found.append(brightness(decode(model.components, x, batch_size=1)[0]))
    torch.distributed.destroy_process_group()
    return found


def _dying(recipe: str, overrides: list[str], reward: Watching) -> str:
    try:
        return str(run(recipe, overrides, reward))
    except KeyboardInterrupt:
        return "died"


def _every_run(grpo: str, refl: str, out: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def at(name: str, *more: str) -> list[str]:
        return ["--output_dir", str(out / name), *more]

    every = ["--eval_steps", "1"]
    seen["plain"] = run(grpo, at("plain"), Watching())
    seen["evaluated"] = run(grpo, at("evaluated", *every), Watching())
    # Behind the save and the evaluation of batch 2, before the next save.
    seen["killed"] = _dying(grpo, at("resumed", *every), Watching(dies_in=3))
    seen["resumed"] = run(grpo, at("resumed", *every), Watching())
    # Both ranks compute the same videos.
    peers = ["--tensor_parallel_size", "2"]
    seen["plain refl"] = run(refl, at("plain-refl", *peers))
    seen["evaluated refl"] = run(refl, at("evaluated-refl", *peers, *every))
    seen["brightness"] = _reference(grpo, at("evaluated", *every))
    return seen


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_ti2v: Path,
    tiny_t2v: Path,
    tiny_dataset: Path,
    tiny_evalkit: Any,
) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of all runs of two ranks, and what each came to."""
    out = tmp_path_factory.mktemp("evaluation")
    common = {"max_steps": BATCHES, "save_steps": 2, "ema_decay": 0.5, "eval_size": HELD}
    grpo = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit) | common
    grpo |= {"eval_dataset_json": str(tiny_dataset), "max_off_policy_steps": 1, "grpo_cfg_scale": 2.0}
    for name in ("prompts.txt", "held.txt"):
        (out / name).write_text("".join(f"{name} {index}\n" for index in range(4)))
    refl = {
        **{key: grpo[key] for key in ("device", "num_frames", "height", "width", "fps", "num_workers")},
        **{key: grpo[key] for key in ("batch_size", "learning_rate", "gradient_checkpointing")},
        **common,
        "max_steps": REFL_BATCHES,
        "trainer": "refl",
        "model_path": str(tiny_t2v),
        "dataset_json": str(out / "prompts.txt"),
        "eval_dataset_json": str(out / "held.txt"),
        "output_dir": str(out / "refl"),
        "num_epochs": 2,
        "rollout_video_every_steps": 0,
        "refl_num_sampling_steps": 2,
        "refl_cfg_scale": 2.0,
        "roles": {
            "reward": {"_target_": f"{__name__}.Look"},
            "monitor": {"_target_": f"{__name__}.Look", "config": {"sign": -1.0}},
        },
    }
    recipes = [
        str(write_recipe(out / name, values)) for name, values in (("grpo.yaml", grpo), ("refl.yaml", refl))
    ]
    return out, run_ranks(2, _every_run, *recipes, out)


def _scores(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in rows(run_dir, "evaluations.jsonl")
    ]


@pytest.mark.slow
def test_an_evaluation_changes_nothing_of_training(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    out, seen = ran
    for name in ("plain", "evaluated", "resumed", "plain refl", "evaluated refl"):
        assert [of_rank[name] for of_rank in seen] == [EXIT_DONE] * 2, name
    assert differences(out / "plain", out / "evaluated", BATCHES) == []
    assert differences(out / "plain-refl", out / "evaluated-refl", REFL_BATCHES) == []
    assert not rows(out / "plain", "evaluations.jsonl")
    phases = [(row["rank"], row["step"]) for row in rows(out / "evaluated", "timeline.jsonl")
              if row["phase"] == "evaluate"]  # fmt: skip
    assert sorted(phases) == [(rank, step) for rank in (0, 1) for step in (0, 0, 1, 2, 3)]


@pytest.mark.slow
def test_held_prompts_are_drawn_by_euler_steps_from_noise_of_their_own(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, seen = ran
    first, *later = _scores(out / "evaluated")
    expected = seen[0]["brightness"]
    # Prompt 1 has no reward: neither a zero nor the end of the run.
    assert first["reward_mean"] == pytest.approx((expected[0] + expected[2]) / 2, abs=1e-4)
    assert (first["prompts"], first["reward_valid_fraction"], first["error"]) == (3, 2 / 3, "no answer")
    # One batch waits for its update, unless a save has emptied the queue.
    assert [(row["batch"], row["step"]) for row in later] == [(1, 0), (2, 2), (3, 2), (4, 4)]
    means = {row["step"]: row["reward_mean"] for row in (first, *later)}
    assert [row["reward_mean"] for row in later] == [means[row["step"]] for row in later]
    assert len(set(means.values())) == 3, "the weights of the moment"


@pytest.mark.slow
def test_refl_scores_what_its_videos_show_on_peers_that_share_them(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, _ = ran
    videos = out / "evaluated-refl" / "rollout_videos"
    names = {path.name for path in videos.iterdir()}
    assert names == {f"eval-{batch:06d}-p{prompt:02d}.mp4" for batch in (0, 1) for prompt in range(HELD)}
    red = [brightness(read_frames(videos / f"eval-000000-p{prompt:02d}.mp4")) for prompt in (0, 2)]
    start, end = _scores(out / "evaluated-refl")
    assert start["reward_mean"] == pytest.approx(sum(red) / 2, abs=0.02)
    assert end["reward_mean"] != start["reward_mean"] and start["reward_valid_fraction"] == 2 / 3
    for row in (start, end):
        assert row["components"]["monitor"] == pytest.approx(-row["reward_mean"], abs=1e-6)


@pytest.mark.slow
def test_a_kill_doubles_no_evaluation_and_loses_none(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    out, seen = ran
    assert [of_rank["killed"] for of_rank in seen] == ["died"] * 2
    assert _scores(out / "resumed") == _scores(out / "evaluated")
    assert differences(out / "evaluated", out / "resumed", BATCHES) == []

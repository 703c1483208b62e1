"""Faults that the run-time ratio gate must stop, injected into whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import MeanColour, rows, run, tiny_recipe, write_recipe
from wan_trainer.algorithms import colocated
from wan_trainer.algorithms.grpo import Grpo
from wan_trainer.algorithms.ratio_gate import RatioGateError
from wan_trainer.models.wan.policy import WanPolicy
from wan_trainer.sampling.dtypes import DTYPES
from wan_trainer.training import session
from wan_trainer.types import EXIT_DONE, Rollout, Trajectory

pytestmark = pytest.mark.slow

NARROW = ["--trajectory_dtype", "bfloat16", "--max_steps", "2"]


def _log_probs_before_the_store(*arguments: Any) -> Trajectory:
    """The fault: log-probabilities of the latents as computed, and only then their rounding."""
    *before, spec, grid, keep, shape, device = arguments
    dtype = DTYPES[spec.trajectory_dtype]
    assert dtype is torch.bfloat16
    wide = replace(spec, trajectory_dtype="float32")
    trajectory = _sample(*before, wide, grid, keep, shape, device)
    latents = {index: latent.to(dtype) for index, latent in trajectory.latents.items()}
    return replace(trajectory, latents=latents)


_sample = colocated.sample
_prepare = Grpo.prepare
_build_model = session.build_model


def _outcome(recipe: str, overrides: list[str]) -> Any:
    try:
        return run(recipe, overrides, MeanColour())
    except RatioGateError as error:
        return str(error)


def _narrow_runs(recipe: str, out: Path) -> dict[str, Any]:
    """A sound run, and runs with the fault at depth 0 and 1."""
    seen = {"sound": _outcome(recipe, [*NARROW, "--output_dir", str(out / "sound")])}
    colocated.sample = _log_probs_before_the_store
    for depth in ("0", "1"):
        name = f"faulty-{depth}"
        overrides = [*NARROW, "--max_off_policy_steps", depth, "--output_dir", str(out / name)]
        seen[name] = _outcome(recipe, overrides)
    colocated.sample = _sample
    return seen


def _swap(policy: WanPolicy) -> None:
    """Let each expert answer for the other."""
    first, second = policy.transformer, policy.transformer_2
    assert second is not None
    policy.transformer, policy.transformer_2 = second, first


def _expert_runs(recipe: str, out: Path) -> dict[str, Any]:
    """A sound run of two experts, and one whose experts change places between rollout and replay."""
    seen: dict[str, Any] = {}
    models: list[WanPolicy] = []
    before: dict[str, torch.Tensor] = {}

    def build_model(*arguments: Any, **options: Any) -> Any:
        model = _build_model(*arguments, **options)
        models.append(model.policy)
        before.update((name, weight.to_local().detach().clone()) for name, weight in model.policy.trainable())
        return model

    def prepare_and_swap(self: Grpo, *arguments: Any) -> Rollout:
        rollout = _prepare(self, *arguments)
        _swap(models[-1])
        return rollout

    session.build_model = build_model
    seen["sound"] = _outcome(recipe, ["--max_steps", "1", "--output_dir", str(out / "experts")])
    after = dict(models[-1].trainable())
    seen["moved"] = sorted(name for name in before if not torch.equal(before[name], after[name].to_local()))
    seen["trained"] = sorted(before)
    seen["alike"] = [
        name
        for name, value in before.items()
        if name.startswith("transformer.")
        and value.std() > 0
        and torch.equal(value, before[name.replace("transformer.", "transformer_2.", 1)])
    ]
    Grpo.prepare = prepare_and_swap
    seen["swapped"] = _outcome(recipe, ["--max_steps", "1", "--output_dir", str(out / "swapped")])
    return seen


def _everything(narrow: str, experts: str, out: Path) -> dict[str, dict[str, Any]]:
    return {"narrow": _narrow_runs(narrow, out), "experts": _expert_runs(experts, out)}


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_ti2v: Path,
    tiny_a14b: Path,
    tiny_dataset: Path,
    tiny_evalkit: Any,
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """All runs of this module, in one process."""
    out = tmp_path_factory.mktemp("faults")
    one = tiny_recipe(out / "run", tiny_ti2v, tiny_dataset, *tiny_evalkit)
    two = {**tiny_recipe(out / "run", tiny_a14b, tiny_dataset, *tiny_evalkit), "grpo_num_sampling_steps": 6}
    paths = [write_recipe(out / f"{name}.yaml", values) for name, values in (("one", one), ("two", two))]
    (seen,) = run_ranks(1, _everything, *map(str, paths), out)
    return out, seen


def test_a_narrow_trajectory_replays_with_ratio_one(ran: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    out, seen = ran
    assert seen["narrow"]["sound"] == EXIT_DONE
    assert [row["ratio_max_dev"] for row in rows(out / "sound", "metrics.jsonl")] == [0.0, 0.0]


@pytest.mark.parametrize("depth", [0, 1])
def test_log_probs_taken_before_the_store_stop_the_run_at_its_first_update(
    ran: tuple[Path, dict[str, dict[str, Any]]], depth: int
) -> None:
    out, seen = ran
    message = seen["narrow"][f"faulty-{depth}"]
    assert isinstance(message, str) and "store dtype" in message and "bfloat16" in message
    run_dir = out / f"faulty-{depth}"
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["exit_status"]) == ("failed", 1)
    assert record["reason"].startswith("RatioGateError: replay of an unchanged policy differs")
    assert not list(run_dir.glob("checkpoint-*")) and not rows(run_dir, "metrics.jsonl")


def test_both_experts_differ_and_are_trained(ran: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    out, seen = ran
    experts = seen["experts"]
    assert experts["sound"] == EXIT_DONE and experts["alike"] == []
    (record,) = rows(out / "experts", "metrics.jsonl")
    assert record["ratio_max_dev"] == 0.0
    assert set(record["replayed_per_expert"]) == {"transformer", "transformer_2"}
    for expert in ("transformer.", "transformer_2."):
        moved = [name for name in experts["moved"] if name.startswith(expert)]
        trained = [name for name in experts["trained"] if name.startswith(expert)]
        assert len(moved) > 0.9 * len(trained) > 0


def test_experts_that_change_places_stop_the_run(ran: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    message = ran[1]["experts"]["swapped"]
    assert isinstance(message, str)
    assert "transformer " in message and "transformer_2 " in message

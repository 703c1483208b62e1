"""A whole run on real ranks: real evaluator, real videos, real checkpoints, at the smallest size."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor

from rl_training.tests.ranks import run_ranks
from rl_training.tests.tiny_fixtures import TinyEvalkit
from rl_training.tests.training.runs import MeanColour, Scored, rows, run
from wan_trainer.cli.main import main
from wan_trainer.config import load_with_sources
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.distributed.mesh import init_mesh
from wan_trainer.models.wan.directory import read_directory
from wan_trainer.recording.clock import Clock
from wan_trainer.recording.run_dir import NullRunLog
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.training import assembly, session
from wan_trainer.training.assembly import build_grpo, build_model, build_updater
from wan_trainer.training.checkpoint import read_train_state
from wan_trainer.training.observer import RunObserver
from wan_trainer.training.optimizer import UpdateResult
from wan_trainer.training.run import plan_start
from wan_trainer.training.session import local_prompts
from wan_trainer.types import PendingRewards, RewardRequest, RewardResult, RunFailure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe is, and the runs and refusals of this module."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def recipe(place: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit: TinyEvalkit) -> Path:
    """A GRPO recipe of two prompts x four rollouts and three denoising steps."""
    values: dict[str, Any] = {
        "trainer": "dancegrpo",
        "device": "cpu",
        "model_path": str(tiny_ti2v),
        "model_family": "ti2v-5b",
        "dataset_json": str(tiny_dataset),
        "num_frames": 5,
        "height": 32,
        "width": 32,
        "fps": 16,
        "output_dir": str(place / "run"),
        "batch_size": 2,
        "grpo_shared_prompt_batch": True,
        "grpo_group_size": 4,
        "grpo_sample_batch_size": 4,
        "grpo_num_sampling_steps": 4,
        "dancegrpo_timestep_selection_ratio": 1.0,
        "grpo_sde_formula": "flowcps",
        "grpo_sde_noise_scale": 0.7,
        "learning_rate": 5.0e-4,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "max_steps": 2,
        "save_steps": 2,
        "num_workers": 0,
        "wandb_project": None,
        "rollout_video_every_steps": 1,
        "grpo_reward_fn": "vbvr_rule",
        "vbvr_reward_evalkit_dir": str(tiny_evalkit.directory),
        "vbvr_reward_evalkit_source_sha256": tiny_evalkit.sha256,
        "vbvr_reward_prepared_width": 64,
        "vbvr_reward_prepared_height": 64,
        "vbvr_reward_fps": 16,
        "vbvr_reward_cpu_workers": 1,
        "vbvr_reward_cpu_threads_per_worker": 1,
        "vbvr_reward_tmp_dir": str(place / "scratch"),
        "rendezvous_timeout_s": 120,
    }
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _starts(recipe: str, out: str, first: str) -> list[tuple[Any, str]]:
    """Starts of one run, each after the other: what it came to, and the metrics it left. The run after its
    first start stays in `first`."""
    starts: list[tuple[list[str], list[str]]] = [
        ([], []),
        ([], []),
        (["--seed", "7", "--shuffle_raw_indices_seed", "42"], []),
        (
            ["--max_steps", "4", "--save_steps", "4", "--gradient_accumulation_steps", "4"],
            ["gradient_accumulation_steps"],
        ),
        # Where the prompts are read changes nothing.
        (["--max_steps", "3", "--num_workers", "1"], []),
    ]
    seen: list[tuple[Any, str]] = []
    for overrides, allowed in starts:
        came_to = run(recipe, overrides, allow_changed=allowed)
        seen.append((came_to, (Path(out) / "metrics.jsonl").read_text()))
        if len(seen) == 1:
            shutil.copytree(out, first)
    return seen


@pytest.fixture(scope="module")
def started(recipe: Path, place: Path) -> list[tuple[Any, str]]:
    """What every start of `place`/run came to."""
    (seen,) = run_ranks(1, _starts, str(recipe), str(place / "run"), str(place / "first"))
    return seen


def test_a_run_ends_with_everything_a_reader_needs(
    place: Path, started: list[tuple[Any, str]], tmp_path: Path
) -> None:
    run_dir = place / "first"
    assert started[0][0] == 0

    metrics = rows(run_dir, "metrics.jsonl")
    assert [row["batch"] for row in metrics] == [0, 1]
    assert all(row["ratio_max_dev"] == 0.0 and row["policy_age"] == 0 for row in metrics)
    assert all(np.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in metrics)
    rewards = rows(run_dir, "rewards.jsonl")
    assert len(rewards) == 2 * 2 * 4
    assert {(row["step"], row["prompt"], row["member"]) for row in rewards} == {
        (step, prompt, member) for step in range(2) for prompt in range(2) for member in range(4)
    }
    assert metrics[0]["reward_mean"] == pytest.approx(np.mean([row["reward"] for row in rewards[:8]]))
    assert {row["phase"] for row in rows(run_dir, "timeline.jsonl")} >= {"sample", "decode", "replay", "save"}
    assert (run_dir / "rollout_videos" / "step-000001-p01-m03.mp4").stat().st_size > 0
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["exit_status"]) == ("finished", 0)
    assert record["final_checkpoint"]["step"] == 2 and record["final_checkpoint"]["verified"]
    assert record["attention"]["backend"] == "native" and record["packages"]["torch"]
    assert len(record["evaluator"]["runtime"]["fingerprint"]) == 64
    assert record["code"]["sources"] and record["evaluator"]["source_sha256"] and record["dataset"]["sha256"]
    assert main(["verify", str(run_dir)]) == 0
    # The record leads to the model that the rest of a pipeline comes from.
    assert main(["export", str(run_dir), "--to", "diffusers", "--out", str(tmp_path / "exported")]) == 0
    assert read_directory(tmp_path / "exported", "ti2v-5b").experts == ("transformer",)
    assert (run_dir / "latest").read_text().strip() == "checkpoint-2"
    assert not list((place / "scratch").glob("scorer-*"))


def test_a_run_continues_completes_and_refuses_another_seed(
    place: Path, started: list[tuple[Any, str]]
) -> None:
    run_dir = place / "run"
    first, complete, other_seed, other_window, continued = started
    assert first[0] == 0
    assert complete == first, "a complete run says so"
    ((refused,), metrics) = other_seed
    assert refused.startswith("seed: 7 differs from 42") and "--allow_changed seed" in refused
    assert metrics == first[1]
    ((refused,), _) = other_window
    assert refused.startswith("gradient_accumulation_steps: 4 does not divide the 2 batches")
    assert continued[0] == 0 and continued[1].startswith(first[1])
    assert [row["batch"] for row in rows(run_dir, "metrics.jsonl")] == [0, 1, 2]
    assert read_train_state(run_dir / "checkpoint-3").step == 3


def _first_update(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Rewards, noise and full gradients of the first update, from the run's own assembly."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    start = plan_start(load_with_sources(recipe, overrides))
    spec, topology = start.spec, start.topology
    mesh = init_mesh("cpu", 60)
    dataset = load_dataset(spec.data)
    model = build_model(spec, mesh)
    updater = build_updater(spec, model, 2, 0)
    seen: dict[str, Any] = {}

    def keep_gradients(*, finite_loss: bool = True) -> UpdateResult:
        seen["gradients"] = {
            name: parameter.grad.full_tensor().flatten().tolist()
            for name, parameter in model.policy.trainable()
            if isinstance(parameter.grad, DTensor)
        }
        return UpdateResult(0.0, 0.0, False)

    updater.step = keep_gradients  # type: ignore[method-assign]
    log = NullRunLog(spec.output.output_dir)
    grpo = build_grpo(
        spec,
        topology,
        mesh,
        model,
        reward=MeanColour(),
        updater=updater,
        clock=Clock(mesh.rank),
        observer=RunObserver(log, every_steps=0, total_batches=2, fps=16),
        policy_version=0,
    )
    batch = next(
        iter(
            batches(
                dataset,
                spec.data,
                batch_size=topology.prompts,
                num_batches=2,
                start=0,
                local_prompts=local_prompts(topology, mesh),
                with_first_frames=True,
            )
        )
    )
    rollout = grpo.prepare(batch, 0)
    seen["prompts"] = [sample.sample_id for sample in batch.samples]
    seen["noise"] = {
        tuple(sample): chunk.trajectory.latents[0][row].flatten().tolist()
        for wave in rollout.waves
        for chunk in wave.chunks
        for row, sample in enumerate(chunk.trajectory.ids)
    }
    seen["rewards"] = {
        tuple(verdict.id): verdict.reward
        for wave in rollout.waves
        for pending in wave.pending
        for verdict in pending.result()
    }
    record = grpo.update(rollout)
    assert record is not None
    seen["ratio_max_dev"] = record.ratio_max_dev
    return seen


def _first_updates(recipe: str, changes: list[list[str]]) -> list[dict[str, Any]]:
    """`_first_update` under each list of overrides."""
    seen: list[dict[str, Any]] = []
    for overrides in changes:
        seen.append(_first_update(recipe, overrides))
        torch.distributed.destroy_process_group()
    return seen


def test_two_ranks_draw_the_same_noise_and_get_the_same_gradients(recipe: Path) -> None:
    # Equal chunks: two rollouts a call everywhere.
    chunks = ["--grpo_sample_batch_size", "2"]
    waves = [*chunks, "--grpo_shared_prompt_microbatch_size", "1"]
    ((alone,),) = run_ranks(1, _first_updates, str(recipe), [chunks])
    for pair in zip(*run_ranks(2, _first_updates, str(recipe), [chunks, waves]), strict=True):
        _compare(alone, pair)


def _compare(alone: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> None:
    assert all(seen["prompts"] == alone["prompts"] for seen in ranks)
    assert all(seen["ratio_max_dev"] == 0.0 for seen in [alone, *ranks])
    noise = {sample: values for seen in ranks for sample, values in seen["noise"].items()}
    assert noise == alone["noise"]
    rewards = {sample: value for seen in ranks for sample, value in seen["rewards"].items()}
    assert rewards == pytest.approx(alone["rewards"], abs=1e-6)
    assert len(set(rewards.values())) == 8
    for name, values in alone["gradients"].items():
        expected = torch.tensor(values, dtype=torch.float64)
        for seen in ranks:
            difference = torch.tensor(seen["gradients"][name], dtype=torch.float64) - expected
            assert difference.norm() <= 1e-5 * expected.norm() + 1e-12, name


def _refusals(recipe: str, scratch: str) -> dict[str, Any]:
    """What both ranks say where one of them has another configuration, other data, or a broken model."""
    second = os.environ["RANK"] == "1"
    seen: dict[str, Any] = {}
    new = ["--output_dir", f"{scratch}/run"]
    seen["config"] = run(recipe, [*new, "--learning_rate", "1e-3" if second else "1e-4"])

    whole = session.load_dataset

    def edited(spec: Any) -> Any:
        dataset = whole(spec)
        if second:
            dataset.digests["split_manifest_rl.json"] = "edited"
        return dataset

    session.load_dataset = edited
    seen["data"] = run(recipe, new)
    session.load_dataset = whole

    load = assembly.load_wan

    def elsewhere(spec: Any, *arguments: Any, **options: Any) -> Any:
        return load(dataclasses.replace(spec, path=Path(scratch) / "gone"), *arguments, **options)

    if second:
        assembly.load_wan = elsewhere
    seen["model"] = run(recipe, new)
    return seen


@pytest.fixture(scope="module")
def refused(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """`_refusals` of two ranks."""
    return run_ranks(2, _refusals, str(recipe), str(tmp_path_factory.mktemp("refused")))


def test_ranks_with_different_configs_are_refused_by_key(refused: list[dict[str, Any]]) -> None:
    for seen in refused:
        (line,) = seen["config"]
        assert line.startswith("learning_rate: rank 1 on ") and "start every node" in line


def test_nodes_with_different_copies_of_the_data_are_refused_by_file(refused: list[dict[str, Any]]) -> None:
    for seen in refused:
        (line,) = seen["data"]
        assert line.startswith("dataset_json: the content of split_manifest_rl.json: rank 1 on ")
        assert "edited" in line and line.endswith(": give every node the same files")


def test_what_stops_one_rank_stops_all_with_the_same_line(refused: list[dict[str, Any]]) -> None:
    # A disk that only one machine sees empty: the configurations agree, the files do not.
    first, second = (seen["model"] for seen in refused)
    assert first == second
    assert len(first) == 1 and "gone is not a directory" in first[0]


MISBEHAVING = '''
import hashlib as _hashlib
import json as _json
import os as _os
import pathlib as _pathlib
import time as _time

_score = evaluate_single_video
_LEDGER = _pathlib.Path(__file__).with_name("ledger.json")
_KINDS = ["sleep", "exit", "raise", "nan", "garbage"]


def evaluate_single_video(video_path, task_name, gt_info, device):
    """The first five clips ever seen each bring out another vice, also when they are tried again."""
    digest = _hashlib.sha256(open(video_path, "rb").read()).hexdigest()
    ledger = _json.loads(_LEDGER.read_text()) if _LEDGER.exists() else {}
    if digest not in ledger:
        ledger[digest] = _KINDS[len(ledger)] if len(ledger) < len(_KINDS) else "score"
        _LEDGER.write_text(_json.dumps(ledger))
    kind = ledger[digest]
    if kind == "sleep":
        _time.sleep(10_000)
    if kind == "exit":
        _os._exit(3)
    if kind == "raise":
        raise RuntimeError("a scorer that raises")
    if kind == "nan":
        return {"score": float("nan"), "dimensions": {}}
    if kind == "garbage":
        return "not a verdict"
    return _score(video_path, task_name, gt_info, device)
'''


TIMEOUT = ["--reward_timeout_s", "4"]


@pytest.fixture
def misbehaving(tmp_path: Path, tiny_evalkit: TinyEvalkit) -> list[str]:
    """Overrides that name an evaluator whose first five clips go wrong, each in another way."""
    directory = tmp_path / "evalkit"
    shutil.copytree(tiny_evalkit.directory, directory)
    source = directory / "run_evaluation.py"
    whole, main, entry = source.read_text().partition('\nif __name__ == "__main__":')
    source.write_text(whole + MISBEHAVING + main + entry)
    digest = source_sha256(directory)
    return ["--vbvr_reward_evalkit_dir", str(directory), "--vbvr_reward_evalkit_source_sha256", digest]


class _FiveOfEight(MeanColour):
    """A reward that misses the first five samples of a batch."""

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        results = super().submit(videos, requests).result()
        return Scored(
            [
                RewardResult(result.id, 0.0, error="no answer")
                if result.id.prompt * 4 + result.id.member < 5
                else result
                for result in results
            ]
        )


def _with_missing_rewards(recipe: str, out: str, misbehaving: list[str]) -> tuple[Any, str]:
    """A run that may miss nearly all rewards, with a scorer that fails; one that may not, and how it ends."""
    allowed = ["--output_dir", f"{out}/allowed", "--reward_max_error_rate", "0.9"]
    status = run(recipe, [*allowed, *misbehaving, *TIMEOUT])
    try:
        run(recipe, ["--output_dir", f"{out}/failed"], _FiveOfEight())
    except RunFailure as error:
        return status, str(error)
    return status, "no failure"


def test_a_scorer_that_fails_costs_its_samples_only_unless_too_many_are_missing(
    recipe: Path, tmp_path: Path, misbehaving: list[str]
) -> None:
    ((status, message),) = run_ranks(1, _with_missing_rewards, str(recipe), str(tmp_path), misbehaving)
    assert status == 0
    run_dir = tmp_path / "allowed"
    first, second = rows(run_dir, "metrics.jsonl")
    assert first["reward_valid_fraction"] == pytest.approx(3 / 8)
    assert second["reward_valid_fraction"] == 1.0
    assert np.isfinite(first["grad_norm"]) and first["grad_norm"] > 0, "the other samples still teach"
    reasons = [row["reason"] for row in rows(run_dir, "reward_errors.jsonl")]
    assert len(reasons) == 5
    for word in ("within 4 s", "exited with status 3", "a scorer that raises", "nan is not", "not a dict"):
        assert any(word in reason for reason in reasons), (word, reasons)

    assert "reward_max_error_rate" in message and "5 of 8" in message
    record = json.loads((tmp_path / "failed" / "run.json").read_text())
    assert (record["status"], record["exit_status"]) == ("failed", 1)
    assert "reward_max_error_rate" in record["reason"]

"""The parts outside the package: each against an independent reference, and all of them in one real run."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.tests.algorithms.parts import GRPO, SAMPLER, build, make_batch, relative_difference
from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import rows, run
from wan_trainer.algorithms.base import AlgorithmParts
from wan_trainer.cli import validate
from wan_trainer.cli.main import main
from wan_trainer.config import load_with_sources, trainer_root
from wan_trainer.config.specs import OwnRewardSpec, Target
from wan_trainer.digests import file_sha256
from wan_trainer.objectives.advantages import group_advantages
from wan_trainer.recording.identity import code_digest
from wan_trainer.rewards.build import build_part
from wan_trainer.sampling.transitions import rf_sde, transition_rule
from wan_trainer.targets import construct, source_digest
from wan_trainer.training.lr_schedule import learning_rate_schedule
from wan_trainer.types import RewardRequest, Sample, SampleId, UserError

EXAMPLE = trainer_root() / "examples" / "own_parts"
RECIPE = EXAMPLE / "train.yaml"


def own(target: Target) -> OwnRewardSpec:
    return OwnRewardSpec(target, workers=1, timeout_s=20.0)


def target(name: str, **arguments: object) -> Target:
    return Target(f"my_parts.{name}", json.dumps(arguments, sort_keys=True))


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example on Python's path for one test, and out of its memory after it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLE)])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]


@pytest.fixture
def flags(tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path) -> list[str]:
    """What the example's recipe must be told here: where the tiny parts are."""
    paths = {"model_path": tiny_ti2v, "dataset_json": tiny_dataset, "output_dir": tmp_path / "run"}
    return ["--device", "cpu", *(word for key, path in paths.items() for word in (f"--{key}", str(path)))]


def _one_after_another(starts: list[list[str]]) -> list[Any]:
    return [run(str(RECIPE), flags) for flags in starts]


def _before_and_after_a_change(starts: list[list[str]], prompts: Path, more: str, again: list[str]) -> Any:
    """What `starts` came to, and what `again` does once `prompts` has other lines."""
    statuses = _one_after_another(starts)
    prompts.write_text(more)
    return statuses, run(str(RECIPE), again)


def test_the_example_trains_with_five_parts_of_ones_own(tmp_path: Path, flags: list[str]) -> None:
    changes = {
        "grpo_loss": ["--grpo_loss", "{_target_: my_parts.loss.ClipHigher, widen: 3.0}"],
        "lr_scheduler": ["--lr_scheduler", "constant"],
        "trainer": ["--trainer", "dancegrpo"],
    }
    longer = [[*flags, "--max_steps", "4", *change] for change in changes.values()]
    for status, *refusals in run_ranks(2, _one_after_another, [flags, *longer]):
        assert status == 0
        for key, (line,) in zip(changes, refusals, strict=True):
            assert line.startswith(f"{key}: ") and f"--allow_changed {key}" in line, line

    metrics = rows(tmp_path / "run", "metrics.jsonl")
    assert [row["batch"] for row in metrics] == [0, 1]
    # The schedule: half the peak, then the peak.
    assert [row["lr"] for row in metrics] == pytest.approx([2.5e-4, 5e-4])
    # The transition and its density: an unchanged policy replays with ratio 1.
    assert all(row["ratio_max_dev"] == 0.0 and row["grad_norm"] > 0 for row in metrics)
    assert all(row["replayed_per_expert"] == {"transformer": row["replayed_steps"]} for row in metrics)
    # The reward: its component is the reward itself, another one for every rollout.
    rewards = rows(tmp_path / "run", "rewards.jsonl")
    assert len(rewards) == 2 * 2 * 4 and len({row["reward"] for row in rewards}) > 8
    assert all(row["components"] == {"colour": row["reward"]} for row in rewards)
    # The algorithm: advantages relative to the other members.
    first = [[r["reward"] for r in rewards[:8] if r["prompt"] == prompt] for prompt in (0, 1)]
    spread = np.mean([abs(r - (sum(g) - r) / 3) for g in first for r in g])
    assert metrics[0]["advantage_abs_mean"] == pytest.approx(2.0 * spread, rel=1e-5)

    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["algorithm"] == "my_parts.algorithm.LeaveOneOut" and record["evaluator"] is None
    assert record["sampler"]["kind"] == "my_parts.transition.FadingSde"
    assert record["targets"]["grpo_loss"] == {
        "path": "my_parts.loss.ClipHigher",
        "source": record["targets"]["trainer"]["source"],
    }


def test_the_built_in_algorithm_takes_the_other_four(tmp_path: Path, flags: list[str]) -> None:
    """And a prompt list without images, from which TI2V makes videos of the text alone."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\n\na blue ball\n")
    digest = file_sha256(prompts)
    grpo = [*flags, "--trainer", "dancegrpo", "--grpo_updates_per_rollout", "2", "--max_steps", "1"]
    grpo += ["--dataset_json", str(prompts)]
    losses = {"narrow": "null"} | {
        name: f"{{_target_: my_parts.loss.ClipHigher, widen: {widen}}}"
        for name, widen in (("same", 1.0), ("wide", 1000.0))
    }
    outs = {name: tmp_path / name for name in losses}
    starts = [[*grpo, "--output_dir", str(outs[name]), "--grpo_loss", loss] for name, loss in losses.items()]
    more = "a red ball\n\na blue ball\na green ball\n"
    again = [*starts[-1], "--max_steps", "2"]
    ((statuses, refused),) = run_ranks(1, _before_and_after_a_change, starts, prompts, more, again)
    assert statuses == [0, 0, 0]
    found: dict[str, tuple[float, ...]] = {}
    for name, out in outs.items():
        (row,) = rows(out, "metrics.jsonl")
        found[name] = (row["policy_loss"], row["grad_norm"], row["clip_fraction"])
    assert found["same"] == found["narrow"] and found["narrow"][2] > 0
    assert found["wide"] != found["narrow"], "the loss is the one that was named"
    assert {row["sample_id"] for row in rows(outs["wide"], "rewards.jsonl")} == {
        f"prompts/{line:08d}" for line in (0, 2)
    }
    assert json.loads((outs["wide"] / "run.json").read_text())["dataset"] == {
        "path": str(prompts),
        "sha256": digest,
        "manifests": {},
        "samples": 2,
    }
    assert [re.sub('".*?"', "...", line) for line in refused] == [
        "dataset_sha256: ... differs from ... of the run to go on from (data); restore it, choose another "
        "output_dir, or add --allow_changed dataset_sha256"
    ]


def test_schedule_is_the_formula(importable) -> None:
    own = learning_rate_schedule(target("schedule.inverse_power", power=0.5, warmup=4), 0)
    assert [own(update, 100) for update in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, (5 / 4) ** -0.5])
    assert own(63, 100) == pytest.approx(0.25)
    with pytest.raises(UserError, match="power -1 and warmup 1 must be above 0"):
        learning_rate_schedule(target("schedule.inverse_power", power=-1), 0)


def test_loss_is_the_formula(importable) -> None:
    loss: Any = construct("grpo_loss", target("loss.ClipHigher", widen=4.0))
    for log_ratio, advantage in ((0.03, 1.0), (0.05, 1.0), (0.05, -1.0), (-0.03, 1.0), (-0.03, -1.0)):
        ratio = math.exp(log_ratio)
        expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.99), 1.04))
        term = loss(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), 0.01)
        assert term.tolist() == pytest.approx([expected], rel=1e-6)


def test_transition_is_the_sde_of_the_same_coefficient(importable) -> None:
    rule = transition_rule(target("transition.FadingSde", power=2.0))
    x, v = torch.randn(2, 3, 2, 3, 2, 2, generator=torch.Generator().manual_seed(5))
    eta = torch.tensor([0.2, 0.5, 0.9])
    step = rule(x, v, 0.6, 0.5, eta)
    assert step.std.flatten().tolist() == pytest.approx([e * 0.36 * math.sqrt(0.1) for e in eta.tolist()])
    g, eps_hat = (eta * 0.36).reshape(3, 1, 1, 1, 1), x + 0.4 * v
    assert torch.allclose(step.mean, x - 0.1 * v - 0.5 * g**2 * 0.1 * eps_hat / 0.6, atol=1e-6)
    flat = transition_rule(target("transition.FadingSde", power=0.0))
    assert torch.equal(flat(x, v, 0.6, 0.5, eta).mean, rf_sde(x, v, 0.6, 0.5, eta).mean)


def test_a_transition_of_ones_own_has_the_gradients_of_its_built_in_twin(importable) -> None:
    built_in = replace(SAMPLER, kind="dancegrpo", eta=0.3, eta_range=None)
    own = replace(built_in, kind=target("transition.FadingSde", power=0.0))

    def reference(x_t: torch.Tensor, sigma: float, condition: object) -> torch.Tensor:
        return 0.1 * x_t

    grpo = replace(GRPO, kl_coeff=0.1)
    gradients = [build(sampler=s, grpo=grpo, reference=reference).gradient() for s in (built_in, own)]
    assert relative_difference(gradients[0], gradients[1]) < 1e-6


def test_a_leave_one_out_gradient_is_the_grpo_gradient_with_another_scale(importable) -> None:
    """For one prompt, r - mean of the others is G/(G-1)*(std + 1e-4) times GRPO's advantage."""
    setup = build(prompts=1)
    grpo = setup.gradient(make_batch(1))
    rewards = torch.tensor([[result.reward for result in setup.events.tables[0].results[0]]]).double()
    scale = 4 / 3 * (rewards.std() + 1e-4).item()

    again = build(prompts=1)
    parts = AlgorithmParts(
        policy=again.policy,
        rollouts=again.algorithm._rollouts,
        updater=again.updater,
        communicator=again.algorithm._communicator,
        clock=again.events,
        observer=again.events,
        grpo=GRPO,
        sampler=SAMPLER,
        accumulation=1,
        device=torch.device("cpu"),
    )
    own: Any = construct("trainer", target("algorithm.LeaveOneOut"), parts)
    batch = make_batch(1)
    own.update(own.prepare(batch, batch.step))
    expected = {name: scale * gradient for name, gradient in grpo.items()}
    assert relative_difference(again.updater.gradients[-1], expected) < 1e-5
    assert own.policy_version == 1


def test_a_missing_member_is_nobodys_baseline(importable) -> None:
    leave_one_out: Any = __import__("my_parts.algorithm", fromlist=["leave_one_out"]).leave_one_out
    rewards = torch.tensor([[1.0, math.nan, 3.0, 8.0], [2.0, math.nan, math.nan, math.nan]]).double()
    valid = ~rewards.isnan()
    assert leave_one_out(rewards, valid).tolist() == [[-4.5, 0.0, -1.5, 6.0], [0.0, 0.0, 0.0, 0.0]]
    normalised = group_advantages(rewards, valid, 5.0)
    assert (normalised.sign() == leave_one_out(rewards, valid).sign()).all()


def test_reward_is_the_mean_of_a_channel(importable) -> None:
    reward = build_part("grpo_reward_fn", own(target("reward.ColourReward", channel="green")), ["task"])
    videos = np.zeros((2, 3, 4, 4, 3), np.uint8)
    videos[1, -1, ..., 1] = 51
    requests = [RewardRequest(SampleId(0, 0, m), Sample("task/0", "task", "move")) for m in (0, 1)]
    results = reward.submit(videos, requests).result()
    reward.close()
    assert [(r.id.member, r.reward, r.error) for r in results] == [(0, 0.0, None), (1, 0.2, None)]
    with pytest.raises(UserError, match="channel is grey; it must be one of red, green, blue"):
        build_part("grpo_reward_fn", own(target("reward.ColourReward", channel="grey")), ["task"])


def test_preflight_tries_every_part(importable, flags: list[str], capsys, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    command = ["validate", "--config", str(RECIPE), "--nproc", "1", *flags]
    assert main(command) == 0, capsys.readouterr().err
    wrong = {
        "trainer": "{_target_: my_parts.algorithm.LeaveOneIn}",
        "lr_scheduler": "{_target_: my_parts.schedule.inverse_power, warmup: 0}",
        "grpo_loss": "{_target_: my_parts.loss.ClipHigher}",
        "grpo_sde_formula": "{_target_: my_parts.transitions.FadingSde}",
        "grpo_reward_fn": "{_target_: my_parts.reward.ColourReward, channel: grey}",
    }
    capsys.readouterr()
    assert main([*command, *(word for key, value in wrong.items() for word in (f"--{key}", value))]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 5, lines
    for key, words in (
        ("trainer", "did you mean LeaveOneOut?"),
        ("lr_scheduler", "warmup 0 must be above 0"),
        ("grpo_loss", "missing a required argument: 'widen'"),
        ("grpo_sde_formula", "no module my_parts.transitions"),
        ("grpo_reward_fn", "channel is grey"),
    ):
        assert any(f"error: {key}: " in line and words in line for line in lines), (key, lines)


def test_nodes_with_other_sources_are_told_apart(importable, flags: list[str], monkeypatch) -> None:
    """The roll call compares what each machine would import, not only its name."""
    reports: list[Any] = []
    monkeypatch.setattr(validate, "call_roll", lambda report, *_: reports.append(report) or [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["validate", "--config", str(RECIPE), "--nproc", "1", "--join", *flags]) == 0
    (report,) = reports
    assert report.values["the source of grpo_loss"] == source_digest(target("loss.ClipHigher"))
    assert report.version == code_digest(trainer_root() / "wan_trainer")


def test_showing_and_planning_import_nothing(flags: list[str], capsys) -> None:
    before = set(sys.modules)
    assert main(["plan", "--config", str(RECIPE), "--nodes", "1", "--nproc", "2", *flags]) == 0
    planned = capsys.readouterr().out
    assert "my_parts.transition.FadingSde, eta 0.5" in planned and "my_parts.reward.ColourReward" in planned
    assert main(["config", "--config", str(RECIPE), *flags]) == 0
    assert "_target_: my_parts.loss.ClipHigher" in capsys.readouterr().out
    assert not {name for name in set(sys.modules) - before if name.startswith("my_parts")}
    loaded = load_with_sources(RECIPE, ["--lr_scheduler", '{"_target_": "a.b", "power": 0.5}'])
    assert loaded.config.lr_scheduler == {"_target_": "a.b", "power": 0.5}


def test_the_code_on_the_page_is_the_examples() -> None:
    page = (trainer_root().parent / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (my_parts/\w+\.py)\n(.*?)```", page, re.DOTALL)
    written = {f"my_parts/{path.name}" for path in EXAMPLE.glob("my_parts/[a-z]*.py")}
    assert {name for name, _ in blocks} == written
    for name, code in blocks:
        assert code.strip() in (EXAMPLE / name).read_text(encoding="utf-8"), name

"""ReFL's quickstart learns, and only because of its reward: shortened runs of the product itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.ranks import free_port, run_ranks
from rl_training.tests.report.test_page import Page, charts
from rl_training.tests.training.runs import run as train
from wan_trainer.config import trainer_root
from wan_trainer.report.page import render_report
from wan_trainer.tiny.world import PromptWorld, build_prompt_world
from wan_trainer.types import EXIT_DONE

STEPS, SHORT = 10, 5
CONFIG = trainer_root() / "configs" / "quickstart_refl.yaml"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> PromptWorld:
    """The quickstart's model and prompts."""
    return build_prompt_world(tmp_path_factory.mktemp("world"))


def _flags(world: PromptWorld, run: Path, steps: int, *overrides: str) -> list[str]:
    flags = ["--device", "cpu", *world.overrides, "--output_dir", str(run), "--max_steps", str(steps)]
    return [*flags, "--save_steps", "0", *overrides]


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_reward_rises_and_the_report_tells_it(world: PromptWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = trainer_root().parent / "scripts" / "train" / "refl_multinode.fish"
    command = ["fish", str(launcher), "--nproc", "2", "--config", str(CONFIG), *_flags(world, run, STEPS)]
    rendezvous = {"MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in rendezvous}
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == EXIT_DONE, done.stderr[-4000:]
    rows = _rows(run)
    assert len(rows) == STEPS
    assert rows[-1]["reward_mean"] > rows[0]["reward_mean"] + 0.15
    assert all(row["ratio_max_dev"] is None and row["clip_fraction"] is None for row in rows)
    printed = done.stdout + done.stderr
    told = [line for line in printed.splitlines() if f"/{STEPS}  reward" in line]
    assert f"done: {STEPS} batches" in printed and len(told) == 3
    assert not any("ratio" in line or "clip" in line for line in told)
    held = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in held] == [0, STEPS]
    assert held[-1]["reward_mean"] > held[0]["reward_mean"] + 0.15

    record = json.loads((run / "run.json").read_text())
    assert (record["algorithm"], record["sampler"]["kind"]) == ("refl", "euler")
    page = Page(render_report(run))
    assert "wan_trainer.rewards.toy.Colour" in page.text and "Ratio" not in page.text
    labels = " ".join(charts(page))
    assert "Mean reward" in labels and "components blue, green, red" in labels and "|ratio" not in labels


@pytest.mark.slow
def test_a_negated_reward_falls(world: PromptWorld, tmp_path: Path) -> None:
    run, prompt = tmp_path / "run", tmp_path / "one.txt"
    # One noise and one prompt, so that a difference is the policy's.
    prompt.write_text("a red square\n")
    fixed = ["--refl_fixed_noise", "--dataset_json", str(prompt), "--dataset_size", "1", "--batch_size", "1"]
    flags = _flags(world, run, SHORT, *fixed, "--refl_weight", "-1", "--eval_steps", "0")
    assert run_ranks(1, train, str(CONFIG), flags, timeout_s=540) == [EXIT_DONE]
    rewards = [row["reward_mean"] for row in _rows(run)]
    assert rewards[-1] < rewards[0] - 0.01

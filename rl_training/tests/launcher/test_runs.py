"""The launcher with the real trainer: two machines that are this one, a stop, a missing machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training.tests.ranks import run_ranks
from rl_training.tests.training.runs import run
from wan_trainer.preflight.network import free_port
from wan_trainer.types import EXIT_DONE

LAUNCHER = Path(__file__).resolve().parents[3] / "scripts" / "train" / "grpo_multinode.fish"


@pytest.fixture
def config(tmp_path: Path, tiny_ti2v: Path, tiny_dataset: Path, tiny_evalkit) -> Callable[..., Path]:
    """Writes a config of two batches that two ranks share; keywords change it."""

    def write(name: str = "run.yaml", **changes: Any) -> Path:
        values: dict[str, Any] = {
            "device": "cpu",
            "model_path": str(tiny_ti2v),
            "dataset_json": str(tiny_dataset),
            "output_dir": str(tmp_path / "run"),
            "num_frames": 5,
            "height": 32,
            "width": 32,
            "fps": 16,
            "num_workers": 0,
            "batch_size": 1,
            "grpo_shared_prompt_batch": True,
            "grpo_group_size": 4,
            "grpo_sample_batch_size": 2,
            "grpo_num_sampling_steps": 3,
            "grpo_sde_formula": "flowcps",
            "grpo_reward_fn": "vbvr_rule",
            "max_steps": 2,
            "vbvr_reward_evalkit_dir": str(tiny_evalkit.directory),
            "vbvr_reward_evalkit_source_sha256": tiny_evalkit.sha256,
            "vbvr_reward_fps": 16,
            "vbvr_reward_cpu_workers": 1,
            "vbvr_reward_cpu_threads_per_worker": 1,
            "vbvr_reward_prepared_width": 64,
            "vbvr_reward_prepared_height": 64,
            "vbvr_reward_tmp_dir": str(tmp_path / "scratch"),
            "rendezvous_timeout_s": 120,
        }
        path = tmp_path / name
        path.write_text(yaml.safe_dump({**values, **changes}), encoding="utf-8")
        return path

    return write


def start(config: Path, nproc: int, *arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """One launcher, its output in one stream."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "WAN_TRAINER_PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        ["fish", str(LAUNCHER), "--nproc", str(nproc), "--config", str(config), *arguments],
        cwd=cwd,
        env={**kept, "MASTER_PORT": str(free_port()), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def node(rank: int, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_for_a_batch(launcher: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) < count:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.1)


@pytest.mark.slow
def test_two_machines_train_as_one_and_a_stopped_or_killed_run_goes_on_to_its_end(config, tmp_path):
    port, out = free_port(), tmp_path / "run"
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    path = config(max_steps=400)
    os.symlink(path, here / "linked.yaml")
    second = start(path, 1, cwd=there, **node(1, port))
    first = start(Path("./linked.yaml"), 1, cwd=here, **node(0, port))
    wait_for_a_batch(first, out, 2)
    # One machine is asked to stop, and not the one that saves.
    second.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], "\n".join(outputs)
    assert "Traceback" not in "".join(outputs)
    together = metrics(out)
    assert len(together) < 400

    # What one of them had left to do goes on; a launcher that is killed leaves nobody who could stop the
    # ranks: they stop by themselves.
    launcher = start(path, 1, cwd=tmp_path)
    wait_for_a_batch(launcher, out, len(together) + 1)
    launcher.kill()
    launcher.communicate(timeout=60)  # its output ends when the last rank does
    assert json.loads((out / "run.json").read_text())["exit_status"] == 75
    steps = [row["step"] for row in metrics(out)]
    assert len(together) < len(steps) < 400 and steps == list(range(1, len(steps) + 1))
    assert (out / "latest").read_text().strip() == f"checkpoint-{len(steps)}"

    # Both machines again, to the end.
    port, last = free_port(), str(len(steps) + 1)
    ending = [start(path, 1, "--max_steps", last, cwd=tmp_path, **node(rank, port)) for rank in (0, 1)]
    outputs = [process.communicate(timeout=120)[0] for process in ending]
    assert [process.returncode for process in ending] == [0, 0], "\n".join(outputs)
    assert len(metrics(out)) == len(steps) + 1

    alone = config("alone.yaml", output_dir=str(tmp_path / "alone"))
    assert run_ranks(2, run, str(alone)) == [EXIT_DONE] * 2
    for one, two in zip(metrics(tmp_path / "alone"), together[:2], strict=True):
        assert one["reward_mean"] == pytest.approx(two["reward_mean"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_machines_with_different_configs_are_refused_by_key(config, tmp_path):
    port = free_port()
    first = start(config(), 1, cwd=tmp_path, **node(0, port))
    other = config("other.yaml", grpo_clip_range=0.5)
    second = start(other, 1, "--learning_rate", "0.5", cwd=tmp_path, **node(1, port))
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert all(word in output for word in ("grpo_clip_range", "learning_rate", "node 1"))
    assert not (tmp_path / "run").exists()


def test_a_missing_machine_ends_in_one_line_within_the_configured_time(config, tmp_path):
    started, path = time.monotonic(), config(rendezvous_timeout_s=2)
    launchers = [start(path, 1, cwd=tmp_path, **node(rank, free_port())) for rank in (0, 1)]
    for launcher, named in zip(launchers, ("node 1 of 2 did not report", "node 0 at 127.0.0.1"), strict=True):
        output = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == 2
        (line,) = [line for line in output.splitlines() if ": error: " in line]
        assert named in line and "rendezvous_timeout_s 2" in line
    assert time.monotonic() - started < 60

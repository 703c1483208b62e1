# ruff: noqa: T201
"""What one-step-delayed replay hides of the reward's time: real torchrun training, depth 0 against depth 1.

    python benchmarks/overlap.py [--steps N] [--keep DIR]

Two gloo ranks train a small model under `torchrun -m wan_trainer.cli.train`. The judge is an external
evaluator checkout that sleeps for a fixed time a video: like a judge on another machine it takes no processor
time, so two cores are enough to see the overlap. A first run without the sleep measures rollout and replay;
the sleep is then set so that the reward takes a third of the synchronous step. Both sides have the same
recipe, seed and batches; the learning rate is 0, so that every reward must come out equal. A score is a hash
of the video's file: one different pixel would show.

Times are medians over the steady steps of rank 0, from timeline.jsonl: the queue fills in the first intervals
and drains in the last, which are dropped. The last line is one JSON object with both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from models import write_model

from wan_trainer.data.unpack import unpack
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.tiny.tasks import TASKS, write_archives

RANKS = 2
GROUP, PROMPTS = 4, len(TASKS)
ROLLOUTS_PER_RANK = GROUP * PROMPTS // RANKS
CALIBRATION_STEPS = 5
DROPPED_FIRST, DROPPED_LAST = 2, 1
RUN_TIMEOUT_S = 200

JUDGE = '''"""A judge of fixed latency, at the contract of the public evaluator."""

import hashlib
import os
import time

TASK_EVALUATOR_MAP = dict.fromkeys({tasks!r})


def evaluate_single_video(video_path, task_name, gt_info, device="cpu"):
    time.sleep(float(os.environ["JUDGE_LATENCY_S"]))
    with open(video_path, "rb") as video:
        digest = hashlib.sha256(video.read()).digest()
    return {{"score": int.from_bytes(digest[:4]) / 2**32, "dimensions": {{}}}}
'''


@dataclass(frozen=True)
class Side:
    """Median seconds of a steady step of rank 0. reward_s: from the start of its first to the end of its last
    score."""

    step_s: float
    rollout_s: float
    reward_s: float
    reward_wait_s: float
    replay_s: float


def build_world(root: Path, steps: int) -> dict[str, Any]:
    """Model, data and judge under `root`; the recipe that names them. One epoch is `steps` batches: its end
    would drain the queue in the middle of a run."""
    model = write_model(root / "model", heads=4, layers=4)
    samples = steps * PROMPTS
    write_archives(root / "archives", samples_per_task=samples // len(TASKS))
    unpack(
        root / "archives",
        root / "dataset",
        source_revision="tiny",
        expected_tasks=len(TASKS),
        expected_samples=samples,
        workers=1,
    )
    judge = root / "judge"
    (judge / "vbvr_bench").mkdir(parents=True)
    (judge / "vbvr_bench" / "__init__.py").write_text('"""No evaluators: the judge sleeps."""\n')
    (judge / "run_evaluation.py").write_text(JUDGE.format(tasks=sorted(task.name for task in TASKS)))
    return {
        "trainer": "dancegrpo",
        "device": "cpu",
        "seed": 3,
        "model_path": str(model),
        "model_family": "ti2v-5b",
        "dataset_json": str(root / "dataset" / "dataset.json"),
        "num_frames": 9,
        "height": 96,
        "width": 96,
        "fps": 16,
        "num_workers": 0,
        "batch_size": PROMPTS,
        "expected_global_prompts": PROMPTS,
        "grpo_shared_prompt_batch": True,
        "grpo_group_size": GROUP,
        # One call a batch: scoring starts when the rollout is over, so that depth 0 hides nothing of it.
        "grpo_sample_batch_size": ROLLOUTS_PER_RANK,
        "grpo_num_sampling_steps": 10,
        "dancegrpo_timestep_selection_ratio": 0.6,
        "grpo_sde_formula": "flowcps",
        "grpo_sde_noise_scale": 0.7,
        "learning_rate": 0.0,
        "num_epochs": 1000,
        "save_steps": 0,
        "grpo_reward_fn": "vbvr_rule",
        "vbvr_reward_evalkit_dir": str(judge),
        "vbvr_reward_evalkit_source_sha256": source_sha256(judge),
        "vbvr_reward_fps": 16,
        "vbvr_reward_prepared_width": 64,
        "vbvr_reward_prepared_height": 64,
        "vbvr_reward_cpu_workers": 1,
        "vbvr_reward_cpu_threads_per_worker": 1,
        "vbvr_reward_tmp_dir": str(root / "scratch"),
    }


def train(root: Path, name: str, recipe: dict[str, Any], *, depth: int, steps: int, latency_s: float) -> Path:
    """One real run; its output directory. Raises when it fails or takes longer than RUN_TIMEOUT_S."""
    out = root / name
    values = {**recipe, "output_dir": str(out), "max_steps": steps, "max_off_policy_steps": depth}
    config, log = root / f"{name}.yaml", root / f"{name}.log"
    config.write_text(yaml.safe_dump(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [*torchrun, "-m", "wan_trainer.cli.train", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUDGE_LATENCY_S": repr(latency_s)}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(RUN_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if status != 0:
        raise SystemExit(f"the run {name} ended with status {status}:\n{log.read_text()[-3000:]}")
    return out


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(run: Path) -> Side:
    """The steady state of a run. A step lasts from one optimizer update to the next."""
    spans = [span for span in read(run / "timeline.jsonl") if span["rank"] == 0]
    ends = sorted(span["end"] for span in spans if span["phase"] == "optimize")
    batches = range(1 + DROPPED_FIRST, len(ends) - DROPPED_LAST)

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    def total(phase: str, batch: int) -> float:
        return sum(s["end"] - s["start"] for s in spans if s["phase"] == phase and s["step"] == batch)

    def extent(batch: int) -> float:
        scored = [span for span in spans if span["phase"] == "score" and span["step"] == batch]
        return max(span["end"] for span in scored) - min(span["start"] for span in scored)

    return Side(
        step_s=median([ends[batch] - ends[batch - 1] for batch in batches]),
        rollout_s=median([total("prepare", batch) for batch in batches]),
        reward_s=median([extent(batch) for batch in batches]),
        reward_wait_s=median([total("reward_wait", batch) for batch in batches]),
        replay_s=median([total("replay", batch) + total("optimize", batch) for batch in batches]),
    )


def rewards(run: Path) -> dict[tuple[int, int, int], float]:
    return {(row["step"], row["prompt"], row["member"]): row["reward"] for row in read(run / "rewards.jsonl")}


def compare(root: Path, steps: int) -> dict[str, Any]:
    """Calibrate the judge, run both sides, and put them next to each other."""
    recipe = build_world(root, steps)
    probe = measure(train(root, "probe", recipe, depth=0, steps=CALIBRATION_STEPS, latency_s=0.0))
    # Of a synchronous step of which the reward is a third, the reward is half of the rest.
    wanted = (probe.rollout_s + probe.replay_s) / 2
    latency = (wanted - probe.reward_wait_s) / ROLLOUTS_PER_RANK
    print(f"without a judge: {asdict(probe)}; the judge takes {latency:.3f} s a video", flush=True)
    if latency <= 0:
        raise SystemExit("writing the videos alone takes longer than a third of the step: nothing to measure")
    runs = [
        train(root, name, recipe, depth=depth, steps=steps, latency_s=latency)
        for name, depth in (("synchronous", 0), ("delayed", 1))
    ]
    synchronous, delayed = (measure(run) for run in runs)
    first, second = (rewards(run) for run in runs)
    assert len(first) == steps * PROMPTS * GROUP and None not in first.values(), "a reward is missing"
    return {
        "machine": f"{os.cpu_count()} CPU cores, {RANKS} gloo ranks",
        "steps": steps,
        "judge_latency_s": round(latency, 4),
        "synchronous": asdict(synchronous),
        "delayed": asdict(delayed),
        "reward_share": round(synchronous.reward_wait_s / synchronous.step_s, 3),
        "equal_rewards": first == second,
        "step_over_bound": round(
            delayed.step_s / max(delayed.reward_s, delayed.rollout_s + delayed.replay_s), 3
        ),
        "speedup": round(synchronous.step_s / delayed.step_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="batches of each side")
    parser.add_argument("--keep", type=Path, help="keep runs and logs in this new directory")
    args = parser.parse_args()
    if args.steps < DROPPED_FIRST + DROPPED_LAST + 3:
        parser.error("--steps: at least 6, of which three are steady")
    root = args.keep.absolute() if args.keep else Path(tempfile.mkdtemp(prefix="overlap-"))
    root.mkdir(parents=True, exist_ok=not args.keep)
    try:
        result = compare(root, args.steps)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result))
    return 0 if result["equal_rewards"] else 1


if __name__ == "__main__":
    sys.exit(main())

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.config.specs import BatchSpec, ParallelSpec
from wan_trainer.media.video import write_video
from wan_trainer.recording.clock import Span
from wan_trainer.recording.identity import (
    AttentionIdentity,
    CodeIdentity,
    DatasetIdentity,
    EvaluatorIdentity,
    ModelIdentity,
)
from wan_trainer.recording.rows import reward_rows
from wan_trainer.recording.run_dir import RunFiles, RunWriter
from wan_trainer.recording.run_record import RunFacts, RunRecord, SamplerRecord
from wan_trainer.topology import resolve_topology
from wan_trainer.types import EvaluationRecord, RewardResult, RewardTable, Sample, SampleId, StepRecord

TASKS = ("reach_target", "push_block", "O-34_dot_to_dot", "<script>alert(1)</script>")


def clip(progress: float, seed: int) -> np.ndarray:
    """13 frames of a disc on its way from left to right; noisier the less the policy has learnt."""
    generator = np.random.default_rng(seed)
    frames = np.zeros((13, 96, 128, 3), np.uint8)
    rows, columns = np.mgrid[:96, :128]
    for index in range(13):
        centre = 14 + 100 * progress * index / 12
        disc = (rows - 48) ** 2 + (columns - centre) ** 2 < 12**2
        picture = np.where(disc[..., None], (220, 60, 50), (235, 235, 228)).astype(float)
        picture += generator.normal(0, 90 * (1 - progress), picture.shape)
        frames[index] = picture.clip(0, 255).astype(np.uint8)
    return frames


def facts(root: Path, seed: int) -> RunFacts:
    sampler = SamplerRecord("flowcps", (1.0, 0.94, 0.83, 0.62, 0.0), 0.7, None, 1.0, 5.0, 0.5, False, seed)
    config = {"learning_rate": 1e-4, "seed": seed, "negative_prompt": "<b>bad</b>", "num_frames": 13}
    return RunFacts(
        algorithm="grpo",
        device="cpu",
        config_path=Path("configs/quickstart.yaml"),
        config=config,
        sources={"learning_rate": "cli", "seed": "yaml", "negative_prompt": "yaml"},
        overrides=("--learning_rate", "1e-4"),
        contract_digests={},
        contract_values={},
        topology=resolve_topology(BatchSpec(batch_size=2), ParallelSpec(), 8, nodes=1, nproc=2),
        sampler=sampler,
        model=ModelIdentity(root / "model", "ti2v-5b", {}, {}),
        dataset=DatasetIdentity(root / "dataset.json", "ab", {}, 48),
        evaluator=EvaluatorIdentity(root, "c0ffee" * 10),
        attention=AttentionIdentity("native"),
        code=CodeIdentity("0123456789abcdef" * 2, True, "5eed", "--- a\n+++ b\n-<i>old</i>\n+new\n"),
    )


def fabricate(
    root: Path,
    batches: int,
    *,
    seed: int = 1,
    ranks: int = 2,
    finished: bool = True,
    delayed: bool = False,
    evaluations: int = 0,
) -> RunFiles:
    """A run directory as a trainer leaves it, written by the writers a trainer uses."""
    draw = random.Random(seed)
    record = RunRecord(root / "run.json")
    record.start(facts(root, seed), {"WAN_TRAINER_VLM_API_KEY": "hunter2"})
    log = RunWriter(root)
    samples = [Sample(f"{task}/s{index}", task, "<img src=x>") for index, task in enumerate(TASKS)]
    now = 1.79e9
    for batch in range(batches):
        progress = 1 - math.exp(-2.5 * batch / max(1, batches))
        groups: list[tuple[RewardResult, ...]] = []
        for prompt in range(len(samples)):
            results: list[RewardResult] = []
            for member in range(8):
                score = min(1.0, max(0.0, draw.gauss(0.25 + 0.5 * progress, 0.12)))
                scores = {"task_specific": score, "smoothness": 0.4 + 0.3 * score}
                result = RewardResult(SampleId(batch, prompt, member), score, scores, None, now, now + 0.4)
                if draw.random() < 0.01:
                    reason = f"scorer timed out after {draw.randint(30, 40)} s & <died>"
                    result = RewardResult(
                        SampleId(batch, prompt, member), math.nan, {}, reason, now, now + 30
                    )
                results.append(result)
            groups.append(tuple(results))
        log.rewards(reward_rows(samples, RewardTable(tuple(range(len(samples))), tuple(groups))))
        valid = [result.reward for group in groups for result in group if result.valid]
        if batch % 10 == 0 or batch == batches - 1:
            for member in range(2):
                path = log.files.rollout_video(SampleId(batch, 0, member))
                write_video(path, clip(0.15 + 0.85 * progress, batch * 10 + member), 16, preset="ultrafast")
        log.spans(step_spans(batch, ranks, now, draw))
        average = sum(valid) / len(valid)
        log.step(
            StepRecord(
                step=batch + 1,
                batch=batch,
                epoch=batch // 12,
                policy_loss=draw.gauss(0, 2e-3),
                kl_loss=0.0,
                reward_mean=average,
                reward_std=math.sqrt(sum((value - average) ** 2 for value in valid) / len(valid)),
                reward_valid_fraction=len(valid) / 32,
                zero_std_groups=0,
                advantage_abs_mean=0.8,
                ratio_mean=1.0,
                ratio_max_dev=0.2 * draw.random() if delayed else 0.0,
                clip_fraction=0.05 * draw.random() if delayed else 0.0,
                approx_kl=0.0,
                policy_age=int(delayed),
                policy_version=batch,
                grad_norm=math.nan if batch == 7 else abs(draw.gauss(0.6, 0.1)),
                lr=1e-4 * min(1.0, (batch + 1) / 5),
                prepare_s=1.6 + 0.1 * draw.random(),
                reward_wait_s=0.4,
                replay_s=1.3,
                step_s=3.5 + 0.2 * draw.random(),
                rollouts_per_s=9.0,
                peak_memory_gib=0.0,
                replayed_steps=16,
                components={"task_specific": average, "smoothness": 0.4 + 0.3 * average},
                skipped=batch == 7,
            )
        )
        now += 3.6
    for batch in range(0, evaluations * 10, 10):
        log.evaluation(EvaluationRecord(batch, batch, 6, 0.25 + batch / 100, 0.1, 1.0, {}, 3.0))
    log.close(0)
    if finished:
        record.finish(0)
    return log.files


def step_spans(batch: int, ranks: int, now: float, draw: random.Random) -> list[Span]:
    spans: list[Span] = []
    for rank in range(ranks):
        at = now + 0.05 * draw.random()
        spans.append(Span(rank, "prepare", batch, at, at + 1.7))
        for chunk in range(2):
            begin = at + 0.05 + 0.8 * chunk
            spans.append(Span(rank, "rollout", batch, begin, begin + 0.5))
            spans.append(Span(rank, "decode", batch, begin + 0.5, begin + 0.7))
        spans.append(Span(rank, "reward_wait", batch, at + 1.7, at + 2.1))
        spans.append(Span(rank, "update", batch, at + 2.1, at + 3.5))
        spans.append(Span(rank, "replay", batch, at + 2.15, at + 3.3))
    return spans


@pytest.fixture(scope="session")
def fabricate_run() -> Callable[..., RunFiles]:
    return fabricate


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFiles]:
    def make(batches: int, **options: object) -> RunFiles:
        return fabricate(tmp_path / "run", batches, **options)

    return make

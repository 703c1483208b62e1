"""A thousand videos, a twentieth of which bring their scorer down: every sample is accounted for once."""

from __future__ import annotations

import dataclasses
import random
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.config.specs import RuleRewardSpec
from wan_trainer.rewards import evalkit as evalkit_module
from wan_trainer.rewards import rule
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.rule import RuleReward
from wan_trainer.types import RewardRequest, SampleId

VIDEOS, BATCH = 1000, 125
KINDS = ("crash", "hang", "leak")
LEAK, LIMIT = 24 << 20, 40 << 20

EVALUATOR = f"""
    import os, time
    from pathlib import Path

    TASK_EVALUATOR_MAP = {{"draw": object}}
    LEAKED = []

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def evaluate_single_video(video_path, task_name, gt_info, device):
        kind, name = gt_info["prompt"].split(":")
        mark = Path(gt_info["gt_path"]) / name
        always = kind.endswith("_always")
        if kind.removesuffix("_always") in ("crash", "hang") and (always or not mark.exists()):
            mark.touch()
            if kind == "hang":
                time.sleep(1000)
            os._exit(1)
        if kind == "leak":
            LEAKED.append(b"x" * {LEAK})
        return {{"score": 0.5, "dimensions": {{"resident": resident(), "leaked": len(LEAKED)}}}}
"""


@pytest.mark.usefixtures("unmeasured")
def test_a_thousand_videos_with_broken_scorers(
    spec: RuleRewardSpec,
    make_request: Callable[..., RewardRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = tmp_path / "kit"
    (kit / "vbvr_bench").mkdir(parents=True)
    (kit / "run_evaluation.py").write_text(textwrap.dedent(EVALUATOR))

    def settings(*words: object, **named: object) -> object:
        made = evalkit_module.evaluator_settings(*words, **named)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(made, memory_limit=LIMIT)

    monkeypatch.setattr(rule, "evaluator_settings", settings)
    drawn = random.Random(11).sample(range(VIDEOS), VIDEOS // 20)
    faults = {index: KINDS[place % 3] for place, index in enumerate(drawn)}
    hopeless = {index for index in drawn[:6] if faults[index] == "crash"}
    assert min(list(faults.values()).count(kind) for kind in KINDS) >= 10
    sample = make_request("draw").sample
    requests = [
        RewardRequest(
            SampleId(index // BATCH, 0, index),
            dataclasses.replace(
                sample,
                prompt=f"{faults.get(index, 'well')}{'_always' if index in hopeless else ''}:{index}",
            ),
        )
        for index in range(VIDEOS)
    ]
    frames = np.zeros((BATCH, 2, 16, 16, 3), np.uint8)
    reward = RuleReward(
        dataclasses.replace(
            spec,
            evalkit_dir=kit,
            source_sha256=source_sha256(kit),
            prepared_width=16,
            prepared_height=16,
            workers=2,
            timeout_s=1.0,
            max_pending_jobs=2 * BATCH,
        ),
        ["draw"],
    )
    results = []
    try:
        for first in range(0, VIDEOS, BATCH):
            results += reward.submit(frames, requests[first : first + BATCH]).result()
    finally:
        reward.close()
    assert [result.id for result in results] == [request.id for request in requests]
    assert {result.id.member for result in results if not result.valid} == hopeless
    assert all("exited with status 1" in str(results[index].error) for index in hopeless)
    scored = [result for result in results if result.valid]
    assert {result.reward for result in scored} == {0.5}
    resident = [result.components["resident"] for result in scored]
    # Two leaks pass the limit, and the scorer that holds them scores no other sample.
    assert max(result.components["leaked"] for result in scored) == 2
    assert max(resident) < min(resident) + 4 * LEAK
    assert list(spec.tmp_dir.iterdir()) == []

"""The rule reward: what becomes a reward, what becomes a missing sample, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wan_trainer.config.specs import RewardPart, RewardSpec, RuleRewardSpec
from wan_trainer.media import read_frames
from wan_trainer.rewards.build import build_reward
from wan_trainer.rewards.evalkit import source_sha256
from wan_trainer.rewards.rule import RuleReward, ground_truth_info
from wan_trainer.types import RewardRequest, RewardResult, Sample, UserError

MakeReward = Callable[..., RuleReward]
MakeRequest = Callable[..., RewardRequest]
Clip = Callable[..., np.ndarray]


def _one(reward: RuleReward, video: np.ndarray, request: RewardRequest) -> RewardResult:
    (result,) = reward.submit(video[None], [request]).result()
    return result


def test_results_come_in_submission_order_and_never_mixed_up(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward(workers=3)
    order = list(range(24))
    random.Random(0).shuffle(order)
    pending = []
    for start in range(0, 24, 8):
        members = order[start : start + 8]
        # Odd members are slow, so that jobs finish in another order than they were given.
        requests = [make_request("slow" if member == 5 else "brightness", member) for member in members]
        videos = np.stack([clip((member + 1) / 26) for member in members])
        pending.append((requests, reward.submit(videos, requests)))
        videos[:] = 0  # the caller may reuse its buffer at once
    for requests, submission in pending:
        results = submission.result()
        assert [result.id for result in results] == [request.id for request in requests]
        for result in results:
            assert result.valid, result.error
            assert result.reward == pytest.approx((result.id.member + 1) / 26, abs=0.015)
            assert 0 < result.started < result.ended <= time.monotonic()


def test_submit_returns_at_once(make_reward: MakeReward, make_request: MakeRequest, clip: Clip) -> None:
    reward = make_reward()
    before = time.monotonic()
    pending = reward.submit(np.stack([clip(0.5)] * 3), [make_request("slow", member) for member in range(3)])
    submitted = time.monotonic() - before
    results = pending.result()
    assert submitted < 0.3 < 1.4 < time.monotonic() - before
    assert [result.valid for result in results] == [True] * 3
    assert pending.result() == results


BAD_ANSWERS = {
    "raise": "RuntimeError: first line second line",
    "sysexit": "SystemExit: quitting",
    "fetches": "the evaluator asked for models.invalid; scorers work offline",
    "fetches_by_number": "the evaluator asked for 192.0.2.1; scorers work offline",
    "nan": "score nan is not in [0, 1]",
    "inf": "score inf is not in [0, 1]",
    "above": "score 1.0001 is not in [0, 1]",
    "text": "score is '0.7', not a number",
    "none": "score is None, not a number",
    "nothing": "returned NoneType, not a dict",
    "bare": "returned float, not a dict",
    "swallowed": "reports: Traceback: division by zero",
    "unread": "read 0 frames",
    "exit": "exited with status 3 while scoring; it last printed: about to leave",
    "segfault": "ended by signal 11 (Segmentation fault) while scoring",
}


def test_a_bad_answer_costs_only_its_sample(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    """Each fault between two good samples, all on one scorer: the good ones keep their own scores."""
    tasks = [task for bad in BAD_ANSWERS for task in ("brightness", bad)] + ["brightness"]
    requests = [make_request(task, member) for member, task in enumerate(tasks)]
    shades = [(index + 1) / (len(tasks) + 2) for index in range(len(tasks))]
    results = make_reward().submit(np.stack([clip(shade) for shade in shades]), requests).result()
    for task, shade, result in zip(tasks, shades, results, strict=True):
        if task == "brightness":
            assert result.valid and result.reward == pytest.approx(shade, abs=0.015), result
            continue
        assert not result.valid and math.isnan(result.reward) and result.components == {}, result
        assert result.error is not None and BAD_ANSWERS[task] in result.error, result
        assert "\n" not in result.error and len(result.error) < 700


def test_a_hung_scorer_is_killed_with_its_children_and_replaced(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip, is_running: Callable[[int], bool]
) -> None:
    reward = make_reward(timeout_s=0.8)
    requests = [make_request("hang_child", 0), make_request("brightness", 1)]
    before = time.monotonic()
    hung, good = reward.submit(np.stack([clip(0.5), clip(0.5)]), requests).result()
    assert hung.error is not None and "no answer within 0.8 s while scoring" in hung.error
    assert good.valid
    assert 1.6 < time.monotonic() - before < 9.0  # two tries, then the next sample
    assert 1.6 < hung.ended - hung.started < 9.0
    sample = requests[0].sample
    assert sample.metadata is not None
    assert not is_running(int((sample.metadata.parent / "child").read_text()))


def test_the_deadline_counts_from_the_jobs_own_start(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward(timeout_s=1.5)
    requests = [make_request("slow", member) for member in range(4)]  # 2 s in the queue of one scorer
    results = reward.submit(np.stack([clip(0.5)] * 4), requests).result()
    assert [result.error for result in results] == [None] * 4


@pytest.mark.parametrize("task", ["raise_once", "exit_once"])
def test_a_sample_is_tried_a_second_time(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip, task: str
) -> None:
    result = _one(make_reward(), clip(0.5), make_request(task))
    assert result.valid and result.reward == pytest.approx(0.5, abs=0.015)


def test_printing_without_end_harms_nothing(
    make_reward: MakeReward,
    make_request: MakeRequest,
    clip: Clip,
    spec: RuleRewardSpec,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reward = make_reward()
    for member in range(3):  # 30 MB each, too fast to be seen while it lasts
        assert _one(reward, clip(0.5), make_request("flood", member)).valid
    assert _one(reward, clip(0.5), make_request("brightness")).valid
    (log,) = spec.tmp_dir.glob("*/scorer-0.log")
    assert log.stat().st_size < 1 << 20
    assert capfd.readouterr() == ("", "")


def test_relative_paths_resolve_in_the_checkout_every_time(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward()
    assert _one(reward, clip(0.5), make_request("relative")).reward == pytest.approx(0.625)
    assert _one(reward, clip(0.5), make_request("moves")).valid  # leaves the scorer in another directory
    assert _one(reward, clip(0.5), make_request("relative")).reward == pytest.approx(0.625)


def test_what_a_scorer_is_given(
    make_reward: MakeReward,
    make_request: MakeRequest,
    clip: Clip,
    tmp_path: Path,
    evalkit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    request = make_request("report", prompt="push the dot → rechts\n" + "long " * 2000)
    (tmp_path / "ocr" / "model").mkdir(parents=True)
    (tmp_path / "ocr" / "model" / "craft_mlt_25k.pth").write_bytes(b"weights")
    with pytest.raises(UserError, match=r"has no english_g2\.pth"):
        make_reward(easyocr_module_path=tmp_path / "ocr")
    (tmp_path / "ocr" / "model" / "english_g2.pth").write_bytes(b"weights")
    reward = make_reward(threads_per_worker=3, easyocr_module_path=tmp_path / "ocr")
    assert _one(reward, clip(0.5, frames=7), request).valid
    sample = request.sample
    assert sample.metadata is not None
    seen = json.loads((sample.metadata.parent / "report.json").read_text())
    environment = seen["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert environment[name] == "3"
    assert environment["EASYOCR_MODULE_PATH"] == str(tmp_path / "ocr")
    assert seen["cwd"] == str(evalkit) and seen["device"] == "cpu" and not seen["torch"]
    assert os.path.isabs(seen["video_path"]) and not os.path.exists(seen["video_path"])
    assert seen["frames"] == 7
    assert seen["gt_info"] == {
        "gt_video_path": str(sample.ground_truth_video),
        "gt_first_frame": str(sample.first_frame),
        "gt_final_frame": str(sample.final_frame),
        "prompt": sample.prompt,
        "gt_path": str(sample.metadata.parent),
        "metafile_path": [str(sample.metadata)],
    }


def test_the_video_is_prepared_as_the_spec_says(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip, spec: RuleRewardSpec
) -> None:
    reward = make_reward(keep_tmp=True, fps=4, max_duration_s=2.0, prepared_width=96, prepared_height=64)
    assert _one(reward, clip(1.0, frames=13, height=32, width=32), make_request("brightness", 7)).valid
    reward.close()
    (video,) = spec.tmp_dir.glob("kept-*/*.mp4")  # kept, and named by the rollout's identity
    assert video.stem.endswith("-3-1-7")
    frames = read_frames(video)
    assert frames.shape == (8, 64, 96, 3)  # 2 s at 4 a second; fitted and padded, never stretched
    assert frames[:, :, :12].max() < 20 and frames[:, :, 24:72].min() > 235


def test_weights_compose_the_score_and_its_dimensions(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward(weights=(("score", 2.0), ("motion", -1.0)))
    result = _one(reward, clip(0.5), make_request("dimensions"))
    assert set(result.components) == {"score", "motion", "wild"}  # a nan and a text are no components
    assert result.reward == pytest.approx(2 * result.components["score"] - 0.25)
    missing = _one(reward, clip(0.5), make_request("brightness"))
    assert missing.error == "reward component motion is missing; the evaluator gave score, task_specific"
    assert math.isnan(missing.reward)


def test_the_score_can_be_the_mean_of_the_dimensions(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward(("means", "weather"), task_specific_only=False, unsupported_score=0.5)
    result = _one(reward, clip(0.9), make_request("means"))
    assert result.reward == pytest.approx((0.25 + 0.75) / 2) and result.components["motion"] == 0.25
    assert _one(reward, clip(0.9), make_request("weather")).reward == 0.5
    none = _one(reward, clip(0.9), make_request("no_dimensions"))
    assert none.error == "reward component score is missing; the evaluator gave no dimension"


def test_a_negative_weight_negates_the_reward(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    result = _one(make_reward(weights=(("score", -1.0),)), clip(0.75), make_request("brightness"))
    assert result.valid and result.reward == -result.components["score"] == pytest.approx(-0.75, abs=0.015)


def test_unsupported_tasks_are_refused_before_the_first_step(
    make_reward: MakeReward, spec: RuleRewardSpec, scorers: Callable[[], list[int]]
) -> None:
    with pytest.raises(UserError, match=r"1 of the dataset's tasks: brightnes \(nearest: brightness\)"):
        make_reward(("brightness", "brightnes"))
    assert scorers() == [] and list(spec.tmp_dir.iterdir()) == []


def test_unsupported_tasks_score_as_asked_and_are_flagged(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reward = make_reward(("brightness", "weather"), unsupported_score=0.25)
    assert "1 of the dataset's tasks: weather" in caplog.text
    requests = [make_request("weather"), make_request("brightness")]
    unsupported, scored = reward.submit(np.stack([clip(0.9), clip(0.9)]), requests).result()
    assert unsupported.valid and unsupported.reward == 0.25
    assert unsupported.components == {"score": 0.25, "unsupported": 1.0}
    assert scored.components["unsupported"] == 0.0 and scored.reward == pytest.approx(0.9, abs=0.015)


def test_an_unannounced_task_is_missing(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    result = _one(make_reward(("brightness",)), clip(0.5), make_request("weather"))
    assert result.error == "the evaluator has no scorer for task weather"


def test_missing_ground_truth_is_missing_never_zero(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward, request = make_reward(), make_request("brightness")
    for field in ("first_frame", "final_frame", "ground_truth_video", "metadata"):
        paths = (Path("/nowhere/at/all"), None, Path("x.png"))
        changed = [dataclasses.replace(request.sample, **{field: path}) for path in paths]
        requests = [request._replace(sample=sample) for sample in changed]
        results = reward.submit(np.stack([clip(0.5)] * 3), requests).result()
        for result, expected in zip(results, ("missing: /nowhere", "has no", "not absolute"), strict=True):
            assert result.error is not None and expected in result.error and math.isnan(result.reward)


def test_a_prompt_list_sample_has_no_rule_reward() -> None:
    with pytest.raises(ValueError, match="cats/1 has no gt_video_path"):
        ground_truth_info(Sample("cats/1", "cats", "a cat"))


def test_a_full_queue_is_an_error_with_the_needed_number(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    reward = make_reward(max_pending_jobs=3)
    pending = reward.submit(np.stack([clip(0.5)] * 2), [make_request("slow", member) for member in (0, 1)])
    with pytest.raises(UserError, match=r"max_pending_jobs 3 cannot hold the 4 .* at least 4"):
        reward.submit(np.stack([clip(0.5)] * 2), [make_request("slow", member) for member in (2, 3)])
    pending.result()
    again = reward.submit(
        np.stack([clip(0.5)] * 3), [make_request("brightness", member) for member in range(3)]
    )
    assert all(result.valid for result in again.result())


def test_close_ends_everything_and_answers_what_is_open(
    make_reward: MakeReward,
    make_request: MakeRequest,
    clip: Clip,
    spec: RuleRewardSpec,
    scorers: Callable[[], list[int]],
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    reward = make_reward(workers=2, timeout_s=300.0)
    assert _one(reward, clip(0.5), make_request("brightness")).valid
    pending = reward.submit(np.stack([clip(0.5)] * 5), [make_request("hang", member) for member in range(5)])
    time.sleep(0.5)
    assert len(scorers()) == 2 and list(spec.tmp_dir.glob("*/*.mp4"))
    before = time.monotonic()
    reward.close()
    assert time.monotonic() - before < 5.0
    assert [result.error for result in pending.result()] == ["the reward was closed"] * 5
    assert scorers() == [] and list(spec.tmp_dir.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    reward.close()


def test_every_waiting_rollout_may_hold_a_descriptor(
    make_reward: MakeReward, spec: RuleRewardSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        make_reward(max_pending_jobs=900)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 900
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda _: (256, 256))
            with pytest.raises(
                UserError, match=r"max_pending_jobs 900 needs 1412 open files, the limit is 256"
            ):
                make_reward(max_pending_jobs=900)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"source_sha256": "0" * 64}, "wan-trainer evalkit-digest"),
        ({"device": "cuda"}, "vbvr_reward_device cuda"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    make_reward: MakeReward, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        make_reward(**changes)


def test_a_component_outside_the_unit_interval_carries_no_weight(
    make_reward: MakeReward, make_request: MakeRequest, clip: Clip
) -> None:
    result = _one(make_reward(weights=(("wild", 1.0),)), clip(0.5), make_request("dimensions"))
    assert result.error == "reward component wild 3.5 is not in [0, 1]" and result.components["wild"] == 3.5


def test_an_evaluator_that_does_not_import_is_the_users_error(
    spec: RuleRewardSpec, evalkit: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(evalkit, broken)
    (broken / "run_evaluation.py").write_text("import a_package_nobody_has")
    changed = dataclasses.replace(spec, evalkit_dir=broken, source_sha256=source_sha256(broken))
    with pytest.raises(
        UserError, match=r"does not import: ModuleNotFoundError.*install what the evaluator needs"
    ):
        RuleReward(changed, ["brightness"])
    assert list(spec.tmp_dir.iterdir()) == []


def test_build_reward_builds_from_the_specification(
    spec: RuleRewardSpec, make_request: MakeRequest, clip: Clip
) -> None:
    reward = build_reward(RewardSpec((RewardPart("vbvr_rule", spec),)), ["brightness"])
    try:
        (result,) = reward.submit(clip(0.5)[None], [make_request("brightness")]).result()
        assert result.valid
    finally:
        reward.close()

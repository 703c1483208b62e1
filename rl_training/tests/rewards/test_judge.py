"""The judge reward against a real HTTP service on loopback that speaks the OpenAI API."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rl_training.tests.rewards import judge_server as judges
from rl_training.tests.rewards.judge_server import Expected, JudgeServer
from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.media import write_image
from wan_trainer.rewards.judge import VlmReward
from wan_trainer.rewards.judge_rubric import rubrics_sha256
from wan_trainer.types import RewardRequest, Sample, SampleId, UserError

KEY = "sk-a-very-secret-key"
FRAMES, EDGE, FPS = 5, 32, 8
FIRST, FINAL = (200, 30, 30), (30, 30, 200)
RUBRIC = "---\ncriteria:\n  done: 60\n  tidy look: 40\n---\nHow bright is it?\n"

Make = Callable[..., VlmReward]
Serve = Callable[..., JudgeServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts judges; they are stopped at the end of the test."""
    running: list[JudgeServer] = []

    def start(**replies: judges.Reply) -> JudgeServer:
        server = JudgeServer(replies, Expected(FRAMES, FPS, 16))
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make(server, **changes): a judge reward with small, fast settings, closed at the end of the test."""
    rubrics = tmp_path / "rubrics"
    rubrics.mkdir()
    (rubrics / "light_task.md").write_text(RUBRIC)
    (rubrics / "plain.txt").write_text("How bright is it? Not done by any criteria.")
    made: list[VlmReward] = []

    def build(server: JudgeServer | str, tasks: tuple[str, ...] = ("Light", "plain"), **changes) -> VlmReward:
        spec = VlmRewardSpec(
            base_url=server if isinstance(server, str) else server.url,
            model=judges.MODEL,
            api_key=KEY,
            prompt_mode="task_specific",
            prompt_dir=rubrics,
            prompt_sha256=rubrics_sha256(rubrics),
            video_fps=FPS,
            video_num_frames=4,
            include_gt_first_frame=True,
            concurrency=8,
            max_pending_jobs=64,
            request_timeout_s=1.5,
            max_retries=2,
            retry_backoff_s=0.01,
            max_new_tokens=64,
            image_max_edge=16,
            jpeg_quality=90,
            score_max=100.0,
            use_structured_output=False,
            validate_service=False,
            error_score=None,
            log_first_n=0,
            timeout_s=10.0,
            weights=(("score", 1.0),),
        )
        assert KEY not in repr(spec)
        reward = VlmReward(dataclasses.replace(spec, **changes), tasks)
        made.append(reward)
        return reward

    yield build
    for reward in made:
        reward.close()


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., RewardRequest]:
    """A request whose instruction says how the judge behaves; its first and final frames differ in colour."""
    for name, colour in (("first", FIRST), ("final", FINAL)):
        write_image(tmp_path / f"{name}.png", np.full((24, 48, 3), colour, dtype=np.uint8))

    def request(instruction: str, member: int = 0, task: str = "Light") -> RewardRequest:
        sample = Sample(
            sample_id=f"{task}/{member:04d}",
            task=task,
            prompt=instruction,
            first_frame=tmp_path / "first.png",
            final_frame=tmp_path / "final.png",
            ground_truth_video=tmp_path / "absent.mp4",
        )
        return RewardRequest(SampleId(0, 0, member), sample)

    return request


def clips(*brightness: float) -> np.ndarray:
    """Even clips, uint8 (N, F, H, W, 3)."""
    level = np.array([round(255 * value) for value in brightness], dtype=np.uint8)
    return np.broadcast_to(level[:, None, None, None, None], (len(level), FRAMES, EDGE, EDGE, 3)).copy()


# instruction: the fault, requests that are sent, and why there is no verdict (None: there is one).
FAULTS: dict[str, tuple[judges.Reply | None, int, str | None]] = {
    "good": (None, 1, None),
    "slow": (judges.after(0.2), 1, None),
    "late once": (judges.first(1, judges.hang), 2, None),
    "late": (judges.hang, 3, "no answer within 1.5 s"),
    "trickles": (judges.trickle, 3, "no answer within 1.5 s"),
    "busy once": (judges.first(1, judges.status(429, Retry_After="0.1")), 2, None),
    "busy": (judges.status(429), 3, "429"),
    "broken twice": (judges.first(2, judges.status(500)), 3, None),
    "broken": (judges.status(503), 3, "503"),
    "refused": (judges.status(400, "too many tokens"), 1, "too many tokens"),
    "wrong key": (judges.status(401, f"the key {KEY} is not valid"), 1, "the key ******** is not valid"),
    "elsewhere": (judges.status(307, Location="http://127.0.0.1:9/v1"), 1, "307"),
    "closes once": (judges.first(1, judges.close), 2, None),
    "closes": (judges.close, 3, "(request 3)"),
    "no json": (judges.body(b'{"choices": [{"mess'), 3, "not JSON"),
    "no choice": (judges.body(b'{"choices": []}'), 3, "without a choice"),
    "a list": (judges.body(b"[1]"), 3, "without a choice"),
    "deep": (judges.body(b"[" * 100_000), 3, "not JSON"),
    "endless": (judges.endless, 3, "larger than"),
    "endless error": (judges.body(b"x" * (1 << 21), 500), 3, "larger than"),
    "zipped": (judges.ZIPPED, 3, "gzip"),
    "prose": (judges.text("It is quite bright."), 2, "no JSON object"),
    "prose once": (judges.first(1, judges.text("It is quite bright.")), 2, None),
    "silent": (judges.text(None), 2, "no JSON object"),
    "a number": (judges.text([{"type": "text", "text": "85"}]), 3, "other than text"),
    "above": (judges.changed(lambda answer: answer.update(score=101)), 2, "must be from 0 to 100"),
    "below": (judges.changed(lambda answer: answer.update(score=-1)), 2, "must be from 0 to 100"),
    "weights": (
        judges.changed(lambda answer: answer["criteria"]["done"].update(weight=50)),
        2,
        "has weight 60",
    ),
    "sum": (
        judges.changed(lambda answer: answer.update(score=answer["score"] / 2)),
        2,
        "marks of the criteria",
    ),
}


def test_every_fault_is_a_score_or_a_missing_sample_and_the_next_step_is_untouched(serve, make, ask, caplog):
    server = serve(**{name: fault for name, (fault, _, _) in FAULTS.items() if fault is not None})
    reward = make(server)
    requests = [ask(name, member) for member, name in enumerate(FAULTS)]
    brightness = [0.2 + 0.02 * member for member in range(len(FAULTS))]

    started = time.monotonic()
    pending = reward.submit(clips(*brightness), requests)
    assert time.monotonic() - started < 1.0, "submit returns at once"
    results = pending.result()
    assert time.monotonic() - started < 40

    assert [result.id for result in results] == [request.id for request in requests]
    for (name, (_, _, why)), result, level in zip(FAULTS.items(), results, brightness, strict=True):
        if why is None:
            assert result.valid and result.reward == pytest.approx(level, abs=0.02), (name, result)
            assert result.components["score"] == result.reward
            assert result.components["tidy look"] == pytest.approx(result.reward)
        else:
            assert not result.valid and math.isnan(result.reward), (name, result)
            assert result.error is not None and why in result.error and "\n" not in result.error, (
                name,
                result,
            )
        assert result.ended >= result.started >= started
    assert {name: server.counts[name] for name in FAULTS} == {
        name: sent for name, (_, sent, _) in FAULTS.items()
    }
    assert server.most_in_flight <= 8
    assert KEY not in "".join(str(result) for result in results) + caplog.text
    assert server.keys == {f"Bearer {KEY}"}
    assert server.violations == []

    again = reward.submit(clips(*[0.5] * 12), [ask("good", member) for member in range(12)]).result()
    assert all(result.valid for result in again)


def test_a_request_holds_the_rubric_the_first_frame_and_the_whole_clip(serve, make, ask):
    server = serve(repaired=judges.first(1, judges.text("bright")))
    reward = make(server, use_structured_output=True)
    moving = clips(0.1)
    moving[0, -1] = 255
    (result,) = reward.submit(moving, [ask("repaired")]).result()
    assert result.valid

    asked, again = server.seen
    assert asked.frames.shape == (FRAMES, EDGE, EDGE, 3) and asked.fps == FPS
    assert np.abs(asked.frames.astype(int) - moving[0]).max() < 8, "the rollout, every frame of it"
    assert asked.text.startswith("How bright is it?") and asked.instruction == "repaired"
    assert asked.image is not None and asked.image.shape == (8, 16, 3), "scaled down, in proportion"
    assert np.abs(asked.image.astype(int) - FIRST).max() < 12
    body = asked.body
    assert body["temperature"] == 0 and body["max_tokens"] == 64
    assert body["media_io_kwargs"]["video"]["num_frames"] == 4
    assert body["mm_processor_kwargs"] == {"do_sample_frames": False}
    assert body["response_format"]["json_schema"]["schema"] == asked.schema
    # The repair goes on in the same conversation.
    assert again.body["messages"][0] == body["messages"][0]
    assert again.body["messages"][1] == {"role": "assistant", "content": "bright"}
    assert "cannot be used" in again.body["messages"][2]["content"]


def test_an_image_is_never_enlarged_and_only_sent_where_it_is_asked_for(serve, make, ask):
    server = serve()
    server.expected = None
    small = make(server, image_max_edge=512)
    small.submit(clips(0.5), [ask("good")]).result()
    none = make(server, include_gt_first_frame=False)
    none.submit(clips(0.5), [ask("good")]).result()
    with_image, without = server.seen
    assert with_image.image is not None and with_image.image.shape == (24, 48, 3)
    assert without.image is None and "image" not in without.text


def test_verdicts_do_not_depend_on_the_order_of_requests(serve, make, ask):
    names = [f"sample {index}" for index in range(10)]
    delays = {name: judges.after(0.02 * (index * 7 % 5)) for index, name in enumerate(names)}
    server = serve(**delays)
    levels = np.linspace(0.1, 0.9, len(names))

    def rewards(order: np.ndarray, concurrency: int) -> dict[str, float]:
        reward = make(server, concurrency=concurrency)
        requests = [ask(names[index], int(index), ["Light", "plain"][index % 2]) for index in order]
        results = reward.submit(clips(*levels[order]), requests).result()
        assert [result.id.member for result in results] == list(order)
        return {names[result.id.member]: result.reward for result in results}

    plain = rewards(np.arange(10), 8)
    shuffled = rewards(np.random.default_rng(0).permutation(10), 1)
    assert plain == shuffled
    assert list(plain.values()) == sorted(plain.values()) and len(set(plain.values())) == 10
    assert set(server.counts.values()) == {2}, "once each time"


def test_a_sample_ends_at_its_deadline_whatever_its_request_may_take(serve, make, ask):
    server = serve(busy=judges.status(503), late=judges.hang)
    reward = make(server, timeout_s=1.0, request_timeout_s=60.0, retry_backoff_s=30.0, concurrency=1)
    started = time.monotonic()
    results = reward.submit(clips(0.1, 0.2, 0.3), [ask("late"), ask("busy", 1), ask("good", 2)]).result()
    assert time.monotonic() - started < 10
    assert [result.valid for result in results] == [False, False, True]
    assert all("reward_timeout_s 1" in str(result.error) for result in results[:2])
    assert "503" in str(results[1].error), "what happened before is told too"


def test_the_queue_refuses_more_than_it_holds_and_closing_ends_everything(serve, make, ask):
    reward = make(serve(late=judges.hang), max_pending_jobs=3, request_timeout_s=60.0, concurrency=1)
    waiting = reward.submit(clips(0.1, 0.2), [ask("late", 0), ask("late", 1)])
    with pytest.raises(UserError, match=r"vlm_reward_max_pending_jobs 3 cannot hold the 4 .* at least 4"):
        reward.submit(clips(0.1, 0.2), [ask("good", 2), ask("good", 3)])
    started = time.monotonic()
    reward.close()
    reward.close()
    results = waiting.result() + reward.submit(clips(0.3), [ask("good")]).result()
    assert time.monotonic() - started < 5
    assert [result.error for result in results] == ["the reward was closed"] * 3


def test_an_error_score_is_honoured_counted_and_announced(serve, make, ask, caplog):
    with caplog.at_level(logging.WARNING):
        reward = make(serve(refused=judges.status(400)), error_score=10.0)
    assert "vlm_reward_error_score 10" in caplog.text
    failed, judged = reward.submit(clips(0.5, 0.5), [ask("refused"), ask("good", 1)]).result()
    assert failed.valid and failed.reward == pytest.approx(0.1) and failed.components["failed"] == 1
    assert judged.reward == pytest.approx(0.5, abs=0.02) and judged.components["failed"] == 0


def test_criteria_can_be_weighed_where_every_rubric_has_them(serve, make, ask):
    weights = (("score", 0.5), ("tidy look", -0.25))
    reward = make(serve(), tasks=("Light",), weights=weights)
    (result,) = reward.submit(clips(0.8), [ask("good")]).result()
    assert result.reward == pytest.approx(0.25 * result.components["score"])
    with pytest.raises(UserError, match="tidy look is no criterion of rubric plain"):
        make(serve(), weights=weights)


def test_a_service_is_tried_before_the_run_and_its_first_answers_are_logged(serve, make, ask, caplog):
    server = serve(**{judges.TRIAL: judges.status(404, "no such model")})
    with pytest.raises(UserError, match=r"vlm_reward_base_url: .*no such model.*probe-judge"):
        make(server, validate_service=True)
    with pytest.raises(UserError, match="vlm_reward_base_url"):
        make("http://127.0.0.1:9/v1", validate_service=True)
    server = serve()
    reward = make(server, validate_service=True, log_first_n=2)
    assert len(server.seen) == 1
    reward.submit(clips(*[0.5] * 4), [ask("good", member) for member in range(4)]).result()
    assert caplog.text.count("it is as bright as that") == 2 and "Light/000" in caplog.text


def test_a_task_that_came_later_and_a_frame_that_is_gone_are_missing_samples(serve, make, ask, tmp_path):
    reward = make(serve(), tasks=("Light",))
    gone = ask("good", 1)
    gone = gone._replace(sample=dataclasses.replace(gone.sample, first_frame=tmp_path / "gone.png"))
    results = reward.submit(clips(0.1, 0.2, 0.3), [ask("good", 0, "plain"), gone, ask("good", 2)]).result()
    assert "no rubric for task plain" in str(results[0].error) and "gone.png" in str(results[1].error)
    assert results[2].valid

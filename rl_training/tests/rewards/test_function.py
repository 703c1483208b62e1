"""A scoring function of the user's own: found, bound, run in processes, and every way it can fail."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wan_trainer.config import trainer_root
from wan_trainer.config.specs import OwnRewardSpec, Target
from wan_trainer.rewards.build import build_part
from wan_trainer.rewards.function import FunctionReward
from wan_trainer.rewards.function_worker import is_scoring_function, scoring_function
from wan_trainer.types import RewardRequest, RewardResult, Sample, SampleId, UserError

SCORERS = '''
import functools, os, sys, time
import numpy as np

def brightness(frames, prompt, scale=1.0):
    assert frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[-1] == 3
    if not scale:
        return len(prompt)
    assert "torch" not in sys.modules and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return scale * frames.mean() / 255 + len(prompt)

class Counting:
    """Holds state from call to call, as a model that is loaded once does."""
    def __init__(self, start):
        self.calls = start
    def __call__(self, frames, prompt):
        self.calls += 1
        return np.float32(self.calls)

def moody(frames, prompt):
    if prompt == "hang":
        time.sleep(600)
    if prompt == "exit":
        os._exit(3)
    if prompt == "raise":
        raise ValueError("no face in any frame")
    if prompt == "text":
        return "0.5"
    if prompt == "nan":
        return float("nan")
    if prompt == "nothing":
        return None
    frames[:] = 0  # its own copy
    return 0.5

def picky(videos, prompt):
    return 0.0

def forks(frames, prompt):
    """A data loader, say, whose children come back: by returning, by raising, by leaving."""
    if prompt == "plain" or (child := os.fork()):
        if prompt != "plain":
            os.waitpid(child, 0)
        return frames.mean() / 25
    if prompt == "leave":
        sys.exit(0)
    if prompt == "raise":
        raise ValueError
    return 99.0

def timed(score):
    @functools.wraps(score)
    def inner(*arguments, **named):
        return score(*arguments, **named)
    return inner

@timed
def decorated(frames, prompt):
    return 0.25

bound = functools.partial(brightness, scale=0.0)

class Fixed:
    def __call__(self, frames, prompt):
        return 0.75

instance = Fixed()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside a configuration, importable as the run makes it."""
    name = f"own_scorers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SCORERS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return name


def build(path: str, timeout_s: float = 20.0, **arguments: Any) -> Any:
    spec = OwnRewardSpec(Target(path, json.dumps(arguments)), workers=1, timeout_s=timeout_s)
    return build_part("grpo_reward_fn", spec, ["task"])


def score(reward: Any, *prompts: str) -> list[RewardResult]:
    videos = np.stack([np.full((3, 4, 6, 3), 25 * index, np.uint8) for index in range(len(prompts))])
    requests = [
        RewardRequest(SampleId(1, index, 0), Sample(f"task/{index}", "task", prompt))
        for index, prompt in enumerate(prompts)
    ]
    results = reward.submit(videos, requests).result()
    assert [result.id for result in results] == [request.id for request in requests]
    return results


def test_a_function_scores_frames_and_prompt_in_a_process_of_its_own(module: str) -> None:
    reward = build(f"{module}.brightness", scale=2.0)
    assert isinstance(reward, FunctionReward)
    results = score(reward, "", "a", "bc")
    reward.close()
    reward.close()
    assert [result.reward for result in results] == pytest.approx([0.0, 50 / 255 + 1, 100 / 255 + 2])
    assert all(result.components == {"score": result.reward} and result.valid for result in results)
    assert all(result.ended > result.started > 0 for result in results)


def test_a_class_is_made_once_a_process(module: str) -> None:
    reward = build(f"{module}.Counting", start=5)
    assert [result.reward for result in score(reward, "a", "b")] == [6.0, 7.0]
    reward.close()


def test_whatever_takes_frames_and_a_prompt_scores(module: str) -> None:
    frames = np.zeros((1, 2, 2, 3), np.uint8)
    for name, expected in (("decorated", 0.25), ("bound", 6.0), ("instance", 0.75)):
        target = Target(f"{module}.{name}", "{}")
        assert is_scoring_function("grpo_reward_fn", target)
        assert scoring_function("grpo_reward_fn", target)(frames, "prompt") == expected


def test_a_child_that_comes_back_answers_for_no_sample(module: str) -> None:
    reward = build(f"{module}.forks")
    results = score(reward, "plain", "return", "plain", "raise", "plain", "leave", "plain")
    reward.close()
    assert [result.reward for result in results] == pytest.approx(range(7))


def test_whatever_a_function_does_costs_its_sample_only(module: str) -> None:
    reward = build(f"{module}.moody", timeout_s=1.5)
    results = score(reward, "hang", "exit", "raise", "text", "nan", "nothing", "fine")
    again = score(reward, "fine")
    reward.close()
    words = ["no answer within 1.5 s", "exited with status 3", "ValueError: no face", "'0.5'", "nan", "None"]
    for result, word in zip(results, words, strict=False):
        assert not result.valid and result.error is not None and word in result.error, result
    assert [results[-1].reward, again[0].reward] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("brightness", {"scal": 1.0}, "unexpected keyword argument 'scal'"),
        ("Counting", {}, "missing a required argument: 'start'"),
        ("brightnes", {}, "did you mean brightness?"),
        ("picky", {}, "picky takes videos, prompt; call the first parameter frames"),
    ],
)
def test_what_cannot_score_is_refused_before_a_process_starts(
    module: str, name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        build(f"{module}.{name}", **arguments)
    (line,) = refused.value.problems
    assert line.startswith("grpo_reward_fn: ") and words in line, line


def test_a_module_that_leaves_does_not_end_the_command(module: str, tmp_path: Path) -> None:
    leaving = "leaving_" + module
    (tmp_path / f"{leaving}.py").write_text(
        "import sys\ndef score(frames, prompt):\n    return 0.0\nsys.exit(0)\n"
    )
    with pytest.raises(UserError, match=r"raised SystemExit: 0 .*leaving_.* line 4"):
        build(f"{leaving}.score")


def test_a_function_that_loads_only_here_is_refused(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle = "fickle_" + module
    (tmp_path / f"{fickle}.py").write_text(
        "import os\nif os.environ['CUDA_VISIBLE_DEVICES'] == '':\n    raise RuntimeError('needs a GPU')\n"
        "def score(frames, prompt):\n    return 0.0\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"needs a GPU.*in a process of its own, without a GPU"):
        build(f"{fickle}.score")


def test_the_code_on_the_page_is_the_examples() -> None:
    root = trainer_root()
    page = (root.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    ((name, code),) = re.findall(r"```python\n# (my_rewards\.py)\n(.*?)```", page, re.DOTALL)
    example = root / "examples" / "own_reward" / name
    assert code.strip() in example.read_text(encoding="utf-8")

"""What is checked of a judge before a run, and `probe-judge`, against a service on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rl_training.tests.rewards.judge_server import MODEL, Expected, JudgeServer, text
from wan_trainer.cli.main import main
from wan_trainer.config import load_config
from wan_trainer.config.specs import BatchSpec, ParallelSpec, VlmRewardSpec
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.preflight.judge import check_judge
from wan_trainer.rewards.judge_rubric import rubrics_sha256
from wan_trainer.topology import Topology, resolve_topology
from wan_trainer.types import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILURE

TASKS = ("slide_square", "other-task")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """A judge that expects the clips of `recipe`."""
    running = JudgeServer(expected=Expected(frames=9, fps=16, longest_edge=512))
    yield running
    running.stop()


@pytest.fixture
def recipe(tmp_path: Path, tiny_dataset: Path, server: JudgeServer) -> Callable[..., Path]:
    """Writes a recipe with the judge of `server`; keywords change it."""

    def write(**changes: object) -> Path:
        values = {
            "device": "cpu",
            "model_path": str(tmp_path / "no model"),
            "model_family": "ti2v-5b",
            "dataset_json": str(tiny_dataset),
            "output_dir": str(tmp_path / "run"),
            "num_frames": 9,
            "height": 64,
            "width": 64,
            "grpo_reward_fn": "vbvr_vlm",
            "vlm_reward_base_url": server.url,
            "vlm_reward_model": MODEL,
            "vlm_reward_prompt_mode": "custom",
            "vlm_reward_max_retries": 0,
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def spec(recipe: Callable[..., Path]) -> Callable[..., VlmRewardSpec]:
    """The judge's specification."""

    def build(**changes: object) -> VlmRewardSpec:
        judge = resolve_here(load_config(recipe(**changes))).reward.judge
        assert judge is not None
        return judge

    return build


def errors(spec: VlmRewardSpec, kind: str = "error", **env: str) -> list[str]:
    """The findings of one kind."""
    findings = check_judge(spec, TASKS, topology(), 1, env)
    return [finding.message for finding in findings if finding.kind == kind]


def topology() -> Topology:
    """Eight processes of one machine, four rollouts each and step."""
    batch = BatchSpec(batch_size=8, shared_prompts=True)
    return resolve_topology(batch, ParallelSpec(), group_size=4, nodes=1, nproc=8)


def test_a_judge_that_is_there_passes_and_its_load_is_told(spec):
    assert errors(spec()) == []
    (note,) = errors(spec(), "note")
    assert (
        note.startswith("16 requests to the judge in flight") and "8 ranks x vlm_reward_concurrency 2" in note
    )


def test_a_service_is_expected_unless_the_launcher_starts_it(spec, server):
    down = spec(vlm_reward_base_url="http://127.0.0.1:9/v1")
    (line,) = errors(down)
    assert (
        line.startswith("vlm_reward_base_url: http://127.0.0.1:9/v1 does not answer") and "vllm.fish" in line
    )
    assert errors(down, WAN_TRAINER_VLM_START_SERVICE="1") == []
    assert len(errors(down, WAN_TRAINER_VLM_START_SERVICE="0")) == 1
    (line,) = errors(spec(vlm_reward_model="another"))
    assert line == f"vlm_reward_model: {server.url} serves {MODEL} and not another: name one of these"
    # An endpoint without a list of models may still be a judge.
    (line,) = errors(spec(vlm_reward_base_url=f"{server.url}/elsewhere"), "warning")
    assert "does not list its models" in line


def test_rubrics_are_pinned_and_there_for_every_task(spec, tmp_path):
    rubrics = tmp_path / "rubrics"
    place = {"vlm_reward_prompt_mode": "task_specific", "vlm_reward_prompt_dir": str(rubrics)}
    (line,) = errors(spec(**place))
    assert "is no directory" in line and "--vlm_reward_prompt_mode custom" in line
    rubrics.mkdir()
    (rubrics / "Slide-Square.md").write_text("How far did it slide?")
    (rubrics / "other_tasks.md").write_text("---\ncriteria: {a: 1}\n---\nElse?")
    digest = rubrics_sha256(rubrics)
    unpinned, unknown = errors(spec(**place))
    assert unpinned.startswith("vlm_reward_prompt_sha256: is missing") and digest in unpinned
    assert "no rubric for 1 of the dataset's tasks: other-task (nearest: other_tasks)" in unknown
    (rubrics / "other_tasks.md").rename(rubrics / "other_task.md")
    changed, broken = errors(spec(**place, vlm_reward_prompt_sha256=digest))
    assert f"the config pins {digest}" in changed
    assert broken.startswith("rubric other_task: the weights of its criteria sum to 1, vlm_reward_score_max")
    (rubrics / "other_task.md").write_text("Else?")
    (rubrics / "other_task.txt").write_text("Or else?")
    (line,) = errors(spec(**place, vlm_reward_prompt_sha256=rubrics_sha256(rubrics)))
    assert line == "rubric other_task: other_task.md and other_task.txt; keep one"
    (rubrics / "other_task.txt").unlink()
    assert errors(spec(**place, vlm_reward_prompt_sha256=rubrics_sha256(rubrics))) == []


def test_the_queue_and_the_score_of_failures_are_told(spec):
    (line,) = errors(spec(vlm_reward_max_pending_jobs=7))
    assert line.startswith("vlm_reward_max_pending_jobs") and "8" in line
    (line,) = errors(spec(vlm_reward_error_score=0), "warning")
    assert "while the service is down" in line and "--vlm_reward_error_score null" in line


def test_a_probe_shows_each_check_and_what_the_judge_cannot_tell_apart(recipe, server, capsys):
    assert main(["probe-judge", "--config", str(recipe()), "--samples", "2"]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "rubrics   the generic one, 2 tasks" in out
    assert f"service   {server.url} serves {MODEL}" in out
    assert "video at 16 fps of which 32 frames are sampled" in out
    assert out.count("sample    ") == 2 and out.count("  ground truth") == 2
    assert out.count("  black         0.0") == 2
    # This judge looks at brightness only: a still picture is as good to it as the ground truth.
    assert out.count("the static clip scores") == 2 and out.count("the black clip scores") == 0
    assert out.endswith("probe     every clip has a verdict\n")
    assert server.violations == [] and len(server.seen) == 6
    assert sum(seen.image is not None for seen in server.seen) == 6

    for seen in list(server.seen):
        server.replies[seen.instruction] = text("no idea")
    assert (
        main(["probe-judge", "--config", str(recipe(vlm_reward_error_score=0)), "--samples", "1"])
        == EXIT_FAILURE
    )
    out = capsys.readouterr().out
    assert out.count("no verdict: the judge's answer cannot be used") == 3 and "a clip has no verdict" in out


def test_a_probe_of_no_judge_is_bad_input(recipe, server, capsys):
    down = ["probe-judge", "--config", str(recipe(vlm_reward_base_url="http://127.0.0.1:9/v1"))]
    assert main(down) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("vlm_reward_base_url: http://127.0.0.1:9/v1 does not answer")
    assert main(["probe-judge", "--config", str(recipe()), "--samples", "0"]) == EXIT_BAD_INPUT

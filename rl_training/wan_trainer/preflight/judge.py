"""The judge of a run: its rubrics, its queue, and its service where that is already there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.preflight.finding import Finding
from wan_trainer.rewards.judge_rubric import load_rubrics
from wan_trainer.topology import Topology, check_pending
from wan_trainer.types import UserError

START_SERVICE = "WAN_TRAINER_VLM_START_SERVICE"
"""1: the launcher starts the service itself, after the checks."""

REACH_TIMEOUT_S = 10.0


def check_judge(
    spec: VlmRewardSpec, tasks: Collection[str], topology: Topology | None, depth: int, env: Mapping[str, str]
) -> list[Finding]:
    """Everything a judge needs before a run starts, one verdict aside: every rank asks for that itself."""
    problems: list[Finding] = []
    try:
        load_rubrics(spec, tasks)
    except UserError as error:
        problems += [Finding(line) for line in error.problems]
    if topology is not None:
        problems += _check_queue(spec, topology, depth)
    if spec.error_score is not None:
        line = (
            f"vlm_reward_error_score {spec.error_score:g}: a rollout without a verdict gets that score, also "
            "while the service is down; use --vlm_reward_error_score null to leave it out of its group"
        )
        problems.append(Finding(line, "warning"))
    return problems + check_service(spec, env)


def check_service(spec: VlmRewardSpec, env: Mapping[str, str]) -> list[Finding]:
    """Whether the service answers and serves the model; one that the launcher will start is not expected."""
    if env.get(START_SERVICE) == "1":
        return [
            Finding("the judge's service is started after these checks, and tried before training", "note")
        ]
    # The client takes a second to import; runs without a judge do not wait for it.
    from wan_trainer.rewards.judge_client import RequestFailed, served_models  # noqa: PLC0415

    try:
        names = served_models(spec, REACH_TIMEOUT_S)
    except RequestFailed as failure:
        if not failure.again:
            line = f"the judge at {spec.base_url} does not list its models ({failure}): not checked"
            return [Finding(line, "warning")]
        return [
            Finding(
                f"vlm_reward_base_url: {spec.base_url} does not answer ({failure}): start the service "
                "(scripts/serve/vllm.fish), or use scripts/train/grpo_vlm_eval_multinode.fish, which does"
            )
        ]
    if spec.model not in names:
        shown = ", ".join(names[:5]) or "no model"
        return [
            Finding(
                f"vlm_reward_model: {spec.base_url} serves {shown} and not {spec.model}: name one of these"
            )
        ]
    return []


def _check_queue(spec: VlmRewardSpec, topology: Topology, depth: int) -> list[Finding]:
    line = check_pending("vlm_reward_max_pending_jobs", spec.max_pending_jobs, topology, depth)
    # The ranks of one tensor-parallel group share their rollouts, and one of them submits.
    submitting = topology.nproc // topology.tp
    requests = submitting * spec.concurrency
    note = (
        f"{requests} requests to the judge in flight from this node ({submitting} ranks x "
        f"vlm_reward_concurrency {spec.concurrency})"
    )
    return [Finding(note, "note")] + ([] if line is None else [Finding(line)])

"""`wan-trainer probe-judge`: asks the judge about clips whose worth is known, before a run does."""

# ruff: noqa: T201
from __future__ import annotations

import argparse

from wan_trainer.config.family import known_family
from wan_trainer.config.load import load_with_sources
from wan_trainer.config.specs import VlmRewardSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.preflight.checks import resolve_here
from wan_trainer.preflight.judge import check_service
from wan_trainer.rewards.clips import GROUND_TRUTH
from wan_trainer.rewards.judge_probe import probe_judge
from wan_trainer.rewards.judge_rubric import load_rubrics, rubrics_sha256
from wan_trainer.rewards.probe import Probe
from wan_trainer.types import EXIT_DONE, EXIT_FAILURE, Sample, UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; unknown ones are configuration overrides."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe (YAML)")
    parser.add_argument("--samples", type=int, default=2, help="samples to ask about (default 2)")
    # The launcher hands over the trainer's arguments.
    parser.add_argument("--allow_changed", action="append", default=[], help=argparse.SUPPRESS)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """0 when every clip got a verdict, 1 when one did not, 2 when the judge cannot be asked at all."""
    if args.samples < 1:
        raise UserError(f"--samples is {args.samples}; ask about 1 or more")
    config = load_with_sources(args.config, rest).config
    # No model is needed here: shapes are checked by the rules that all families share.
    spec = resolve_here(config, known_family(config) or "t2v-1.3b")
    judge = spec.reward.judge
    if judge is None:
        raise UserError("grpo_reward_fn: names no judge; name vbvr_vlm there or in reward_monitor")
    dataset = load_dataset(spec.data)
    rubrics = load_rubrics(judge, dataset.tasks)
    print(f"rubrics   {_rubrics(judge)}, {len(rubrics)} tasks", flush=True)
    problems = [finding.message for finding in check_service(judge, {}) if finding.kind == "error"]
    if problems:
        raise UserError(*problems)
    print(f"service   {judge.base_url} serves {judge.model}", flush=True)
    print(f"request   {_request(judge)}", flush=True)
    complete = True
    for probe in probe_judge(judge, spec.data, _spread(dataset, args.samples)):
        print("\n".join(_lines(probe)), flush=True)
        complete = complete and all(result.valid for result in probe.results.values())
    print("probe     " + ("every clip has a verdict" if complete else "a clip has no verdict: see above"))
    return EXIT_DONE if complete else EXIT_FAILURE


def _spread(dataset: Dataset, count: int) -> list[Sample]:
    """Samples evenly spread over the dataset, and so over its tasks."""
    count = min(count, len(dataset))
    return [dataset[index * len(dataset) // count] for index in range(count)]


def _rubrics(judge: VlmRewardSpec) -> str:
    if judge.prompt_mode == "custom" or judge.prompt_dir is None:
        return "the generic one"
    return f"{judge.prompt_dir} with digest {rubrics_sha256(judge.prompt_dir)}"


def _request(judge: VlmRewardSpec) -> str:
    image = f"image up to {judge.image_max_edge} px, " if judge.include_gt_first_frame else ""
    return (
        f"rubric, {image}video at {judge.video_fps} fps of which {judge.video_num_frames} frames are sampled"
    )


def _lines(probe: Probe) -> list[str]:
    lines = [f"sample    {probe.sample.sample_id}"]
    for name, result in probe.results.items():
        parts = ", ".join(f"{key} {value:.3f}" for key, value in result.components.items())
        shown = f"{result.reward:.3f} ({parts})" if result.valid else f"no verdict: {result.error}"
        lines.append(f"  {name:<14}{shown}  {result.ended - result.started:.1f} s")
    return lines + [
        f"warning   {probe.sample.sample_id}: the {name} clip scores {reward:.3f}, the ground truth "
        f"{probe.results[GROUND_TRUTH].reward:.3f}: sharpen the rubric of {probe.sample.task}, or use "
        "another judge"
        for name, reward in probe.suspicious.items()
    ]

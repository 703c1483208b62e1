"""The dataset and the evaluator of a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from wan_trainer.config.specs import DataSpec, EvalSpec, Family, RuleRewardSpec
from wan_trainer.data.dataset import HELD, check_ground_truth, load_dataset, load_held
from wan_trainer.data.image_rule import takes_first_frames
from wan_trainer.media import kept_frames
from wan_trainer.preflight.finding import Finding
from wan_trainer.preflight.machine import check_scratch
from wan_trainer.rewards.evalkit import (
    check_checkout,
    missing_ocr_models,
    supported_tasks,
    unsupported_message,
)
from wan_trainer.rewards.runtime import scorer_runtime
from wan_trainer.topology import Topology, check_pending
from wan_trainer.types import Sample, UserError

_SAMPLED = 16


def check_dataset(
    spec: DataSpec, family: Family | None, *, needs_ground_truth: bool, held: EvalSpec | None = None
) -> tuple[list[Finding], tuple[str, ...]]:
    """The descriptor, the number of samples and the files of a few; also the names of all tasks.

    family: None when it is not known. held: check the held prompts of this evaluation instead. Only a few
    samples are opened: a dataset of 50,000 on shared storage would take minutes.
    """
    try:
        key = "dataset_json" if held is None else HELD
        dataset = load_dataset(spec) if held is None else load_held(spec, held)
    except UserError as error:
        return [Finding(line) for line in error.problems], ()
    problems: list[Finding] = []
    tasks = dataset.tasks
    try:
        if family is not None:
            takes_first_frames(dataset, family, key)
    except UserError as error:
        problems += [Finding(line) for line in error.problems]
    try:
        if needs_ground_truth:
            check_ground_truth(dataset, key)
    except UserError as error:
        problems += [Finding(line) for line in error.problems]
        # That no evaluator knows the names of prompt lists would be said beside it.
        tasks = ()
    for index in range(0, len(dataset), max(1, len(dataset) // _SAMPLED)):
        try:
            problems += _check_sample(dataset[index], key)
        except UserError as error:
            problems += [Finding(line) for line in error.problems]
    return problems, tasks


def _check_sample(sample: Sample, key: str) -> list[Finding]:
    files = (
        sample.first_frame,
        sample.reference_video,
        sample.ground_truth_video,
        sample.final_frame,
        sample.metadata,
    )
    return [
        Finding(
            f"{key}: {path} of sample {sample.sample_id} is missing or empty: unpack its task again, "
            "or mend the prompt list"
        )
        for path in files
        if path is not None and not (path.is_file() and path.stat().st_size)
    ]


def check_evaluator(spec: RuleRewardSpec, tasks: Sequence[str]) -> list[Finding]:
    """The pinned evaluator: its digest, that it imports, the tasks it knows, EasyOCR's models and ffprobe."""
    problems: list[Finding] = []
    try:
        check_checkout(spec.evalkit_dir, spec.source_sha256)
        problems += _check_tasks(spec, tasks)
    except UserError as error:
        problems += [Finding(line) for line in error.problems]
    ocr = spec.easyocr_module_path
    if ocr is not None and not ocr.is_dir():
        line = f"vbvr_reward_easyocr_module_path: {ocr} is not a directory"
        problems.append(Finding(f"{line}: put EasyOCR's models there, or set null"))
    elif ocr is not None:
        models = missing_ocr_models(ocr)
        problems += [] if models is None else [Finding(models)]
    problems += [Finding(line) for line in scorer_runtime(import_all=False).problems]
    if shutil.which("ffprobe") is None and _mentions(spec.evalkit_dir, "ffprobe"):
        line = f"the evaluator in {spec.evalkit_dir} calls ffprobe, which is not on PATH: install ffmpeg"
        problems.append(Finding(line))
    return problems + check_scratch("vbvr_reward_tmp_dir", spec.tmp_dir)


def _check_tasks(spec: RuleRewardSpec, tasks: Sequence[str]) -> list[Finding]:
    if not tasks:
        return []
    names = supported_tasks(spec.evalkit_dir, tasks, easyocr_module_path=spec.easyocr_module_path)
    if not names.unknown:
        return []
    if spec.unsupported_score is None or not names.known:
        return [Finding(unsupported_message(names.unknown))]
    line = (
        f"{len(names.unknown)} of {len(tasks)} tasks have no scorer (first: {next(iter(names.unknown))}) and "
        f"all score vbvr_reward_unsupported_score {spec.unsupported_score:g}: their groups teach nothing"
    )
    return [Finding(line, "warning")]


def _mentions(directory: Path, word: str) -> bool:
    sources: Sequence[Path] = [directory / "run_evaluation.py", *directory.glob("vbvr_bench/**/*.py")]
    return any(
        word in path.read_text(encoding="utf-8", errors="replace") for path in sources if path.is_file()
    )


def check_clip_length(data: DataSpec, reward: RuleRewardSpec) -> list[Finding]:
    """A rollout longer than the evaluator's limit loses its tail, and with it the judged final frame."""
    kept = kept_frames(data.num_frames, reward.fps, reward.max_duration_s)
    if kept == data.num_frames:
        return []
    # Rounded up: a bound that is short by a digit would cut the last frame after all.
    seconds = math.ceil(10_000 * data.num_frames / reward.fps) / 10_000
    line = (
        f"a rollout of {data.num_frames} frames at {reward.fps} fps lasts {seconds:g} s, the evaluator sees "
        f"the first {kept} frames ({reward.max_duration_s:g} s) and never the final one: set "
        f"--vbvr_reward_max_duration_seconds {seconds:g}, or --num_frames {(kept - 1) // 4 * 4 + 1}"
    )
    return [Finding(line, "warning")]


def check_queue(reward: RuleRewardSpec, topology: Topology, depth: int) -> list[Finding]:
    """The scoring queue of a rank must hold all rollouts that can wait for a verdict at once."""
    line = check_pending("vbvr_reward_max_pending_jobs", reward.max_pending_jobs, topology, depth)
    return [] if line is None else [Finding(line)]

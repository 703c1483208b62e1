# ruff: noqa: T201
"""Score generated clips of sliding squares; the command line and the names of the public VBVR evaluator.

    python run_evaluation.py --videos DIR --gt DIR --out results.json

`--videos` holds <task>/<sample id>.mp4, `--gt` holds <task>/<sample id>/{first_frame.png, metadata.json,
video/}.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path

import numpy as np
from vbvr_bench.evaluators import TASK_EVALUATOR_MAP


class NumpyEncoder(json.JSONEncoder):
    """JSON for numpy scalars and arrays."""

    def default(self, o):
        if isinstance(o, np.generic):
            return o.item()
        if isinstance(o, np.ndarray):
            return o.tolist()
        return super().default(o)


def evaluate_single_video(video_path, task_name, gt_info, device="cpu"):
    """{"score", "dimensions", "details"} of one clip; with "error", and score 0, when it could not be scored.

    gt_info: gt_video_path, gt_first_frame, gt_final_frame, prompt, gt_path, metafile_path.
    """
    try:
        evaluator = TASK_EVALUATOR_MAP[task_name](device=device)
        return evaluator.evaluate(video_path, gt_info)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong with one clip is that clip's verdict
        traceback.print_exc()
        return {"score": 0.0, "dimensions": {}, "error": f"{type(error).__name__}: {error}"}


def collect_videos(videos_dir):
    """[(task name, sample id, path)] of the clips under `videos_dir`, sorted."""
    paths = sorted(Path(videos_dir).glob("*/*.mp4"))
    return [(path.parent.name, path.stem, path.resolve()) for path in paths]


def find_gt_info(gt_dir, task_name, sample_id):
    """The ground truth of one sample, or None when it is incomplete."""
    sample = Path(gt_dir).resolve() / task_name / sample_id
    info = {
        "gt_video_path": str(sample / "video" / "ground_truth.mp4"),
        "gt_first_frame": str(sample / "first_frame.png"),
        "gt_final_frame": str(sample / "video" / "final_frame.png"),
        "gt_path": str(sample),
        "metafile_path": [str(sample / "metadata.json")],
    }
    prompt = sample / "video" / "prompt.txt"
    needed = [info["gt_video_path"], info["gt_first_frame"], info["gt_final_frame"], *info["metafile_path"]]
    if not prompt.is_file() or not all(Path(path).is_file() for path in needed):
        return None
    return info | {"prompt": prompt.read_text()}


def init_results(videos_dir, gt_dir):
    """An empty result table."""
    return {"videos_dir": str(videos_dir), "gt_dir": str(gt_dir), "samples": [], "summary": {}}


def aggregate_score(samples):
    """Mean score over the samples that could be scored, None without one."""
    scores = [sample["score"] for sample in samples if "error" not in sample]
    return float(np.mean(scores)) if scores else None


def finalize_summary(results):
    """Fill in the means per task and over all; returns `results`."""
    tasks = sorted({sample["task_name"] for sample in results["samples"]})
    by_task = {
        task: aggregate_score([sample for sample in results["samples"] if sample["task_name"] == task])
        for task in tasks
    }
    results["summary"] = {
        "mean_score": aggregate_score(results["samples"]),
        "tasks": by_task,
        "errors": sum("error" in sample for sample in results["samples"]),
    }
    return results


def print_results(results):
    """The summary, one line a task."""
    for task, score in results["summary"]["tasks"].items():
        print(f"{task:48s} {'-' if score is None else format(score, '.3f')}")
    mean = results["summary"]["mean_score"]
    print(f"{'all':48s} {'-' if mean is None else format(mean, '.3f')}")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", required=True)
    parser.add_argument("--gt", required=True)
    parser.add_argument("--out")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    results = init_results(args.videos, args.gt)
    for task_name, sample_id, path in collect_videos(args.videos):
        gt_info = find_gt_info(args.gt, task_name, sample_id)
        if gt_info is None:
            verdict = {"score": 0.0, "dimensions": {}, "error": "no ground truth"}
        else:
            verdict = evaluate_single_video(str(path), task_name, gt_info, args.device)
        results["samples"].append({"task_name": task_name, "sample_id": sample_id, **verdict})
    finalize_summary(results)
    print_results(results)
    if args.out:
        Path(args.out).write_text(json.dumps(results, cls=NumpyEncoder, indent=2))
    return 0 if results["samples"] and not results["summary"]["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())

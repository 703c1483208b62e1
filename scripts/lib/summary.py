"""What scripts/quickstart prints at the end of a run; standard library only.

summary.py RUN_DIR        the paths of the results and how the reward moved
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
from pathlib import Path


def rewards(metrics: Path) -> list[float]:
    """reward_mean of every step in order; a step without a valid reward (null) is left out."""
    values: list[float] = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        value = json.loads(line).get("reward_mean")
        if isinstance(value, int | float) and value == value:
            values.append(float(value))
    return values


def fifths(values: list[float]) -> tuple[float, float]:
    """Mean of the first and of the last fifth of the values, at least one value each."""
    count = max(1, len(values) // 5)
    return sum(values[:count]) / count, sum(values[-count:]) / count


def main(run_dir: Path) -> int:
    """Print the summary; 1 when the run left no metrics."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        print(f"quickstart: {metrics} is missing: the run left no metrics", file=sys.stderr)
        return 1
    latest = (
        (run_dir / "latest").read_text(encoding="utf-8").strip() if (run_dir / "latest").is_file() else ""
    )
    rows = {
        "report": run_dir / "report.html",
        "videos": run_dir / "rollout_videos",
        "metrics": metrics,
        "checkpoint": run_dir / latest if latest else (run_dir / "latest").resolve(),
    }
    print()
    for name, path in rows.items():
        print(f"  {name:<11}{path}" + ("" if path.exists() else "  (missing)"))
    values = rewards(metrics)
    if values:
        first, last = fifths(values)
        print(f"  {'reward':<11}{first:.3f} -> {last:.3f}  (first to last fifth of {len(values)} steps)")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

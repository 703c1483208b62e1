"""The report of a run: one HTML page that holds everything it shows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from wan_trainer.recording.jsonl import JsonObject, write_atomic
from wan_trainer.recording.progress import format_duration
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.report import charts, timeline
from wan_trainer.report.run_data import Metrics, RunData, fifths, load_run, mean, number, text
from wan_trainer.report.sheets import sheet_groups
from wan_trainer.topology import describe_ranks

_SHOWN_TASKS = 100
_SHOWN_REASONS = 30
_LONGEST_VALUE = 160
_LONGEST_DIFF = 20_000


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page, and what it means."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """One line of the run's identity."""

    label: str
    value: str


@dataclass(frozen=True)
class Setting:
    """One config key. chosen: it is not a default."""

    key: str
    value: str
    source: str
    chosen: bool


@dataclass(frozen=True)
class TaskRow:
    """Rewards of one task, as text."""

    task: str
    rollouts: int
    missing: int
    mean: str
    first: str
    last: str
    change: str


def render_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of `run_dir` to `out` (default: report.html inside it) and return its path.

    A run in progress, or one with missing or torn files, is reported as far as it goes; the page names what
    is missing. Raises UserError when `run_dir` is not a run.
    """
    run = load_run(run_dir)
    path = out if out is not None else RunFiles(run_dir).report
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _page(run).encode("utf-8", errors="replace"))
    return path


def _page(run: RunData) -> str:
    environment = Environment(
        loader=PackageLoader("wan_trainer.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = show
    environment.filters["duration"] = format_duration
    pictures = {
        "reward": charts.reward_chart(run.metrics),
        "evaluation": charts.evaluation_chart(run.evaluations),
        "components": charts.component_chart(run.metrics),
        "ratio": charts.ratio_chart(run.metrics),
        "optimization": charts.optimization_chart(run.metrics),
        "time": charts.time_chart(run.metrics),
        "timeline": timeline.timeline_chart(run.spans),
    }
    code = _mapping(run.record, "code")
    return environment.get_template("report.html").render(
        name=run.root.resolve().name,
        status=text(run.record, "status", "unknown"),
        reason=text(run.record, "reason"),
        tiles=_tiles(run.metrics),
        facts=_facts(run),
        notes=run.notes,
        charts={name: Markup(svg) if svg else None for name, svg in pictures.items()},
        policy=_policy_note(run.metrics),
        # An algorithm without a ratio writes updates that have none.
        has_ratio=pictures["ratio"] is not None or not len(run.metrics),
        evaluation=_evaluation_note(run.evaluations),
        phases=timeline.phase_times(run.spans),
        tasks=_task_rows(run),
        hidden_tasks=max(0, len(run.tasks) - _SHOWN_TASKS),
        errors=run.errors[:_SHOWN_REASONS],
        error_count=sum(entry.count for entry in run.errors),
        hidden_reasons=max(0, len(run.errors) - _SHOWN_REASONS),
        groups=sheet_groups(run),
        settings=_settings(run.record),
        starts=_starts(run.record),
        packages=sorted((key, _short(value)) for key, value in _mapping(run.record, "packages").items()),
        diff=text(code, "diff")[:_LONGEST_DIFF],
        written=_when(time.time()),
    )


def show(value: float, digits: int = 3) -> str:
    """A number for people: a dash when there is none, few digits otherwise."""
    if not math.isfinite(value):
        return "–"
    if value != 0 and (abs(value) < 10**-digits or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:,.{digits}f}".replace(",", "\u202f")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else "–"


def _mapping(row: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def _when(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _short(value: object) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 1] + "…"


def _tiles(metrics: Metrics) -> list[Tile]:
    count = len(metrics)
    if not count:
        return []
    first, last = fifths(count)
    reward = metrics["reward_mean"]
    before, after = mean(reward[first]), mean(reward[last])
    trend = (
        f"{show(before)} → {show(after)}, first and last fifth"
        if count >= 5
        else "too few updates for a trend"
    )
    shown = _signed(after - before) if count >= 5 else show(mean(reward))
    deviations = [value for value in metrics["ratio_max_dev"] if math.isfinite(value)]
    valid = mean(metrics["reward_valid_fraction"])
    skipped = sum(value > 0 for value in metrics["skipped"])
    memory = max((value for value in metrics["peak_memory_gib"] if math.isfinite(value)), default=0.0)
    tiles = [
        Tile("Reward change" if count >= 5 else "Mean reward", shown, trend),
        Tile(
            "Updates",
            str(int(metrics.last("step"))),
            f"epoch {show(metrics.last('epoch'), 0)}, {skipped} skipped",
        ),
        *_ratio_tiles(deviations),
        Tile("Valid rewards", f"{100 * valid:.1f}%" if math.isfinite(valid) else "–", "of all rollouts"),
        Tile("Time per update", f"{show(mean(metrics['step_s'][last]), 1)} s", "mean of the last fifth"),
        Tile("Rollouts per second", show(mean(metrics["rollouts_per_s"][last]), 2), "mean of the last fifth"),
    ]
    # The CPU reports no device memory.
    return [*tiles, Tile("Peak memory", f"{show(memory, 1)} GiB", "of one device")] if memory > 0 else tiles


def _ratio_tiles(deviations: Sequence[float]) -> list[Tile]:
    """Nothing for an algorithm without a ratio."""
    if not deviations:
        return []
    shown = show(max(deviations)) if max(deviations) else "0"
    return [Tile("Largest |ratio − 1|", shown, "first pass, whole run")]


def _policy_note(metrics: Metrics) -> str:
    ages = {int(value) for value in metrics["policy_age"] if math.isfinite(value)}
    if not ages:
        return ""
    if ages == {0}:
        return (
            "On-policy: each rollout is replayed by the policy that drew it. The first pass then has a ratio"
            " of 1, up to arithmetic; only further passes over the same rollouts can be clipped."
        )
    return (
        f"Off-policy: when a rollout is replayed, the policy that drew it is up to {max(ages)}"
        f" update{'s' if max(ages) > 1 else ''} old, so the ratio leaves 1 and clipping is at work."
    )


def _evaluation_note(evaluations: Metrics) -> str:
    """What the chart of the evaluations shows, in numbers."""
    if not len(evaluations):
        return ""
    reward, valid = evaluations["reward_mean"], evaluations["reward_valid_fraction"]
    prompts, first = show(evaluations.last("prompts"), 0), show(evaluations["batch"][0], 0)
    missing = "" if min(valid) == 1 else f" Of some, rewards are missing: down to {100 * min(valid):.1f}%."
    return (
        f"{prompts} held prompts, each from the same noise at every evaluation; the band is one standard "
        f"deviation over the prompts. {show(reward[0])} after batch {first}, {show(reward[-1])} after batch "
        f"{show(evaluations.last('batch'), 0)}.{missing}"
    )


def _facts(run: RunData) -> list[Fact]:
    record = run.record
    model, code, sampler = (_mapping(record, key) for key in ("model", "code", "sampler"))
    dataset, topology, evaluator = (_mapping(record, key) for key in ("dataset", "topology", "evaluator"))
    start, end = number(record, "start"), number(record, "end")
    reward = _mapping(_mapping(record, "targets"), "roles.reward")
    last_span = max((span.end for span in run.spans), default=math.nan)
    finish = end if math.isfinite(end) else last_span
    commit = text(code, "commit")
    dirty = " with uncommitted changes" if code.get("dirty") else ""
    draw = _listed(sampler, ["kind", "eta", "cfg_scale", "seed"])
    steps = sampler.get("sigmas")
    if isinstance(steps, Sequence):
        draw += f", {len(steps) - 1} steps"
    samples = number(dataset, "samples")
    facts = [
        Fact("Directory", str(run.root)),
        Fact("Recipe", text(record, "config_path")),
        Fact("Algorithm", text(record, "algorithm")),
        Fact("Model", " · ".join(item for item in (text(model, "family"), text(model, "path")) if item)),
        Fact("Device", text(record, "device")),
        Fact("Topology", _layout(topology)),
        Fact("Sampler", draw),
        Fact("Data", f"{text(dataset, 'path')} ({show(samples, 0)} samples)" if dataset else ""),
        Fact("Reward", text(reward, "path")),
        Fact("Evaluator", text(evaluator, "source_sha256")[:12]),
        Fact("Commit", f"{commit[:12]}{dirty}" if commit else ""),
        Fact("Started", _when(start) if math.isfinite(start) else ""),
        Fact("Duration", format_duration(finish - start) if finish >= start else ""),
    ]
    return [fact for fact in facts if fact.value]


def _layout(topology: Mapping[str, object]) -> str:
    """Ranks as `plan` prints them; empty for a record that lacks a number of them."""
    names = ("nodes", "nproc", "tp", "dp_replicate", "dp_shard")
    numbers = [value for name in names if isinstance(value := topology.get(name), int)]
    return describe_ranks(*numbers) if len(numbers) == len(names) else ""


def _listed(row: Mapping[str, object], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {_short(row[key])}" for key in keys if key in row)


def _task_rows(run: RunData) -> list[TaskRow]:
    rows: list[TaskRow] = []
    for task, rewards in list(run.tasks.items())[:_SHOWN_TASKS]:
        first, last = mean(rewards.first), mean(rewards.last)
        change = _signed(last - first)
        numbers = (show(rewards.mean), show(first), show(last), change)
        rows.append(TaskRow(task, rewards.rollouts, rewards.missing, *numbers))
    return rows


def _settings(record: JsonObject) -> list[Setting]:
    config, sources = _mapping(record, "config"), _mapping(record, "sources")
    settings: list[Setting] = []
    for key, value in config.items():
        source = text(sources, key, "?")
        settings.append(Setting(key, _short(value), source, source not in ("default", "?")))
    return sorted(settings, key=lambda item: (not item.chosen, item.key))


def _starts(record: JsonObject) -> list[tuple[str, str, str, str, str]]:
    starts = record.get("starts")
    rows: list[tuple[str, str, str, str, str]] = []
    for entry in starts if isinstance(starts, list) else []:
        if isinstance(entry, Mapping):
            batch = show(number(entry, "start_batch"), 0)
            end = number(entry, "end")
            times = (_when(number(entry, "start")), _when(end))
            rows.append((*times, batch, text(entry, "status", "?"), text(entry, "reason")))
    return rows

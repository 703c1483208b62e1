"""The charts of a report that are drawn from metrics.jsonl, one value an optimizer update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from wan_trainer.report.figures import (
    INK,
    MUTED,
    SERIES,
    as_svg,
    drawing,
    new_figure,
    plot,
    smoothed,
    step_axis,
    thinned,
)
from wan_trainer.report.run_data import Metrics, fifths, mean


def _finite(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def reward_chart(metrics: Metrics) -> str | None:
    """Mean reward and its spread per update, smoothed, with the means of the first and the last fifth."""
    steps, reward = metrics["step"], metrics["reward_mean"]
    if not _finite(reward):
        return None
    with drawing("reward"):
        figure, (axes,) = new_figure(3.3)
        middle, spread = thinned(steps, reward), thinned(steps, metrics["reward_std"])
        if len(spread.x) == len(middle.x) > 1:
            low, high = middle.y - spread.y, middle.y + spread.y
            axes.fill_between(middle.x, low, high, color=SERIES[0], alpha=0.14, lw=0, label="± std")
        many = len(metrics) >= 8
        axes.plot(middle.x, middle.y, ".-", color=SERIES[0], alpha=0.5 if many else 1, lw=1, label="mean")
        if many:
            plot(axes, steps, smoothed(reward).tolist(), SERIES[0], "smoothed")
        if len(metrics) >= 5:
            for part in fifths(len(metrics)):
                level = mean(reward[part])
                ends = [steps[part][0], steps[part][-1]]
                axes.plot(ends, [level, level], color=INK, lw=2.2)
                axes.annotate(
                    f"{level:.3f}",
                    (sum(ends) / 2, level),
                    xytext=(0, 9),
                    textcoords="offset points",
                    ha="center",
                    weight="bold",
                )
        axes.set_ylabel("reward")
        axes.legend(ncols=3, loc="upper left", bbox_to_anchor=(0, 1.14), borderaxespad=0)
        step_axis(axes)
        return as_svg(figure, f"Mean reward and its spread over {len(metrics)} updates.")


def evaluation_chart(evaluations: Metrics) -> str | None:
    """Mean reward of the held prompts and its spread, one point an evaluation."""
    if not _finite(evaluations["reward_mean"]):
        return None
    with drawing("evaluation"):
        figure, (axes,) = new_figure(2.6)
        mean_, spread = (np.asarray(evaluations[name]) for name in ("reward_mean", "reward_std"))
        batches = np.asarray(evaluations["batch"])
        axes.fill_between(batches, mean_ - spread, mean_ + spread, color=SERIES[2], alpha=0.14, lw=0)
        axes.plot(batches, mean_, ".-", color=SERIES[2], lw=1.8)
        axes.set_ylabel("reward")
        step_axis(axes, "batch")
        return as_svg(figure, f"Mean reward of the held prompts at {len(evaluations)} evaluations.")


def component_chart(metrics: Metrics) -> str | None:
    """Mean raw score of each reward component, when there are several."""
    names = list(metrics.components)[: len(SERIES)]
    if len(names) < 2:
        return None
    with drawing("components"):
        figure, (axes,) = new_figure(2.6)
        for name, colour in zip(names, SERIES, strict=False):
            plot(axes, metrics["step"], metrics.components[name], colour, literal(name))
        axes.set_ylabel("raw score")
        axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.18), borderaxespad=0)
        step_axis(axes)
        return as_svg(figure, f"Mean raw score of the reward components {', '.join(names)}.")


def ratio_chart(metrics: Metrics) -> str | None:
    """Largest deviation of the importance ratio from 1 in the first pass, and the fraction clipped."""
    if not _finite(metrics["ratio_max_dev"]) and not _finite(metrics["clip_fraction"]):
        return None
    with drawing("ratio"):
        figure, (ratio, clip) = new_figure(2.5, columns=2)
        deviations = metrics["ratio_max_dev"]
        plot(ratio, metrics["step"], deviations, SERIES[1])
        ratio.set_title("largest |ratio − 1|, first pass")
        _from_zero(ratio, deviations)
        plot(clip, metrics["step"], [100 * value for value in metrics["clip_fraction"]], SERIES[2])
        clip.set_title("clipped, %")
        _from_zero(clip, metrics["clip_fraction"])
        for axes in (ratio, clip):
            step_axis(axes)
        return as_svg(figure, "Largest |ratio − 1| and clipped fraction.")


def optimization_chart(metrics: Metrics) -> str | None:
    """Policy loss, KL term, gradient norm and learning rate."""
    panels = (
        ("policy_loss", "policy loss", SERIES[0]),
        ("kl_loss", "KL loss", SERIES[3]),
        ("grad_norm", "gradient norm", SERIES[1]),
        ("lr", "learning rate", SERIES[2]),
    )
    if not any(_finite(metrics[name]) for name, _, _ in panels):
        return None
    with drawing("optimization"):
        figure, grid = new_figure(4.4, rows=2, columns=2)
        for axes, (name, title, colour) in zip(grid, panels, strict=True):
            plot(axes, metrics["step"], metrics[name], colour)
            axes.set_title(title)
            axes.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
            step_axis(axes, "optimizer update" if name in ("grad_norm", "lr") else "")
            if name != "policy_loss":
                _from_zero(axes, metrics[name])
        return as_svg(figure, "Policy loss, KL loss, gradient norm and learning rate per optimizer update.")


def time_chart(metrics: Metrics) -> str | None:
    """Seconds per update, stacked: preparing rollouts, waiting for rewards, replay, and the rest.

    Without a ratio, the reward is differentiated where others replay.
    """
    if not _finite(metrics["step_s"]):
        return None
    waits = {"reward wait": metrics["reward_wait_s"]}
    parts = (
        {"prepare (rollout, decode)": metrics["prepare_s"], **waits, "replay": metrics["replay_s"]}
        if _finite(metrics["ratio_max_dev"])
        else {
            "prepare (rollout)": metrics["prepare_s"],
            **waits,
            "decode, reward, gradient, update": metrics["replay_s"],
        }
    )
    with drawing("time"):
        figure, (axes,) = new_figure(2.8)
        steps = np.asarray(metrics["step"])
        layers = [np.nan_to_num(np.asarray(values)) for values in parts.values()]
        layers.append(np.clip(np.nan_to_num(np.asarray(metrics["step_s"])) - sum(layers), 0, None))
        points = [thinned(steps.tolist(), layer.tolist()) for layer in layers]
        colours = (SERIES[0], SERIES[1], SERIES[2], SERIES[7])
        labels = (*parts, "rest")
        if len(points[0].x) == 1:
            base = 0.0
            for point, colour, label in zip(points, colours, labels, strict=True):
                axes.bar(point.x, point.y, bottom=base, width=0.4, color=colour, label=label)
                base += float(point.y[0])
            axes.set_xlim(points[0].x[0] - 2, points[0].x[0] + 2)
        else:
            axes.stackplot(points[0].x, [point.y for point in points], colors=colours, labels=labels, lw=0)
            axes.margins(x=0)
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, 1.16), borderaxespad=0)
        step_axis(axes)
        return as_svg(figure, "Seconds per optimizer update by phase, stacked.")


def _from_zero(axes: Axes, values: Sequence[float]) -> None:
    """Start the axis at zero, so that a curve that is zero throughout does not float in the middle."""
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    axes.set_ylim(bottom=0, top=None if highest > 0 else 1)
    if highest == 0 and len(values):
        axes.set_yticks([0])
        axes.text(0.5, 0.5, "0 throughout", transform=axes.transAxes, ha="center", color=MUTED)


def literal(label: str) -> str:
    """A label shown as it is: a dollar sign would start a formula, a leading underscore would hide it."""
    return label.replace("$", r"\$").lstrip("_")

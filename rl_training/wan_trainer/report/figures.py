"""Charts as SVG that takes its colours and its font from the page, so that they fit a light and a dark one.

Matplotlib writes literal colours only. Each role therefore gets one colour that nothing else uses, which
becomes the page's CSS variable afterwards.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

# Stand-ins: colour in the figure -> CSS variable in the page.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0{index}0a0b" for index in range(1, 9))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line"} | {
    colour: f"--series-{index}" for index, colour in enumerate(SERIES, start=1)
}
_MAX_POINTS = 400
_STYLE: dict[RcKeyType, object] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


# What matplotlib adds and a page does not want: metadata, a style for the whole page, its own fonts, and the
# names of groups, which repeat from chart to chart.
_TIDY = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"<metadata>.*?</metadata>", ""),
        (r"<style .*?</style>", ""),
        (r"xlink:href", "href"),
        (r"font-family: [^;\"]*;? ?", ""),
        (r' id="[A-Za-z.0-9]+_\d+"', ""),
        (r' transform="rotate\(-?0 [^"]*"', ""),
        (r"\n\s*", " "),
    )
)


class Points(NamedTuple):
    """One curve."""

    x: np.ndarray
    y: np.ndarray


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Matplotlib settings of one chart; `name` keeps the identifiers in its SVG apart from other charts'."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure as wide as the page's column and `height` inches high, with its axes in reading order."""
    figure = Figure(figsize=(9.6, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def thinned(x: Sequence[float], y: Sequence[float]) -> Points:
    """At most 400 points: neighbours are averaged in a longer curve, values without a number left out."""
    steps, values = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    finite = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(steps) <= _MAX_POINTS:
        return Points(steps, values)
    parts = np.array_split(np.arange(len(steps)), _MAX_POINTS)
    return Points(
        np.array([steps[part].mean() for part in parts]), np.array([values[part].mean() for part in parts])
    )


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Centred moving mean over a fifteenth of the values (at least 3), nan values left out."""
    data = np.asarray(values, dtype=float)
    half = max(1, len(data) // 30)
    result = np.full(len(data), math.nan)
    for index in range(len(data)):
        window = data[max(0, index - half) : index + half + 1]
        window = window[np.isfinite(window)]
        if len(window):
            result[index] = window.mean()
    return result


def plot(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, label: str | None = None) -> None:
    """Draw a curve; a single point becomes a dot, because a line of one point is invisible."""
    points = thinned(x, y)
    axes.plot(points.x, points.y, color=colour, label=label, marker="o" if len(points.x) == 1 else "", ms=5)


def step_axis(axes: Axes, label: str = "optimizer update") -> None:
    """Whole numbers on the x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set_xlabel(label)
    axes.tick_params(length=0)


def as_svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element for an HTML page: no prolog, no metadata, no network names, labelled."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    opening, body = buffer.getvalue().partition("<svg")[2].split(">", 1)
    view = re.search(r'viewBox="[^"]*"', opening)
    assert view is not None, opening
    for pattern, replacement in _TIDY:
        body = pattern.sub(replacement, body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return f'<svg role="img" aria-label="{html.escape(title)}" class="chart" {view.group(0)}>{body.strip()}'

"""The timeline of the last steps: what each rank did when, and how long each phase took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from wan_trainer.recording.clock import Span
from wan_trainer.report.charts import literal
from wan_trainer.report.figures import MUTED, SERIES, as_svg, drawing, new_figure

_SHOWN_RANKS = 8
_SHOWN_STEPS = 3
# What scorers did beside their rank: in a strip of its own, so that it hides nothing and overlap shows.
_SCORE = "score"
# Narrower bars would be invisible: a share of the whole width.
_NARROWEST = 1 / 1500


@dataclass(frozen=True)
class PhaseTime:
    """Time of one phase in the last steps: seconds a step and rank (mean), and the longest single span."""

    phase: str
    mean_s: float
    longest_s: float
    longest_rank: int


def last_steps(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last three batches that the timeline holds."""
    steps = sorted({span.step for span in spans})[-_SHOWN_STEPS:]
    return [span for span in spans if span.step in steps]


def phase_times(spans: Sequence[Span]) -> list[PhaseTime]:
    """Phases of the last steps, the longest first. Nested phases are counted in those around them too."""
    shown = last_steps(spans)
    shares = len({(span.rank, span.step) for span in shown})
    times: list[PhaseTime] = []
    for phase in _phases(shown):
        own = [span for span in shown if span.phase == phase]
        longest = max(own, key=lambda span: span.end - span.start)
        total = sum(span.end - span.start for span in own)
        times.append(PhaseTime(phase, total / shares, longest.end - longest.start, longest.rank))
    return times


def timeline_chart(spans: Sequence[Span]) -> str | None:
    """Bars of up to 8 ranks over the last steps. Nested spans lie on top of those around them; a strip below
    shows when scorers worked."""
    shown = last_steps(spans)
    if not shown:
        return None
    ranks = sorted({span.rank for span in shown})
    count = min(_SHOWN_RANKS, len(ranks))
    chosen = [ranks[index * len(ranks) // count] for index in range(count)]
    shown = [span for span in shown if span.rank in chosen]
    begin = min(span.start for span in shown)
    width = max(max(span.end for span in shown) - begin, 1e-3)
    colours = {phase: SERIES[index % len(SERIES)] for index, phase in enumerate(_phases(shown))}
    with drawing("timeline"):
        figure, (axes,) = new_figure(1.2 + 0.36 * count)
        for (depth, phase), bars in sorted(_bars(shown, chosen, begin, width).items()):
            # One path for all spans of a phase: thousands of separate ones would make the page heavy.
            shape = Path.make_compound_path(*bars)
            axes.add_patch(PathPatch(shape, facecolor=colours[phase], linewidth=0, zorder=2 + depth))
        axes.set_xlim(0, width)
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_yticks(range(count), [f"rank {rank}" for rank in chosen])
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_xlabel("seconds")
        for step in sorted({span.step for span in shown}):
            start = min(span.start for span in shown if span.step == step) - begin
            axes.annotate(
                f"batch {step}", (start, -0.6), xytext=(0, 4), textcoords="offset points", color=MUTED
            )
        handles = [Patch(color=colour, label=literal(phase)) for phase, colour in colours.items()]
        figure.legend(handles=handles, ncols=6, loc="outside upper left")
        return as_svg(figure, f"Timeline of the last batches on {count} of {len(ranks)} ranks.")


def _bars(
    spans: Sequence[Span], ranks: Sequence[int], begin: float, width: float
) -> dict[tuple[int, str], list[Path]]:
    """Rectangles by depth and phase; one row a rank."""
    bars: dict[tuple[int, str], list[Path]] = {}
    for row, rank in enumerate(ranks):
        own = [span for span in spans if span.rank == rank]
        boxes = [
            (span, depth, row - 0.4 + 0.1 * min(3, depth), row + 0.4 - 0.1 * min(3, depth))
            for span, depth in nested([span for span in own if span.phase != _SCORE])
        ]
        boxes += [(span, 0, row + 0.43, row + 0.53) for span in own if span.phase == _SCORE]
        for span, depth, low, high in boxes:
            left = span.start - begin
            right = max(span.end - begin, left + width * _NARROWEST)
            corners = [(left, low), (right, low), (right, high), (left, high), (left, low)]
            bars.setdefault((depth, span.phase), []).append(Path(corners, closed=True))
    return bars


def nested(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """The spans of one rank with the number of spans around each, outer ones first."""
    found: list[tuple[Span, int]] = []
    around: list[Span] = []
    for span in sorted(spans, key=lambda item: (item.start, -item.end)):
        around = [outer for outer in around if outer.end >= span.end]
        found.append((span, len(around)))
        around.append(span)
    return found


def _phases(spans: Sequence[Span]) -> list[str]:
    """Phases by the time they take, longest first."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.phase] = totals.get(span.phase, 0.0) + span.end - span.start
    return sorted(totals, key=lambda phase: -totals[phase])

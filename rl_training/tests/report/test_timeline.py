from wan_trainer.recording.clock import Span
from wan_trainer.report.timeline import _bars, last_steps, nested, phase_times, timeline_chart


def test_nesting_depth() -> None:
    spans = [
        Span(0, "rollout", 0, 1.0, 4.0),
        Span(0, "decode", 0, 2.0, 3.0),
        Span(0, "prepare", 0, 1.0, 5.0),
        Span(0, "update", 0, 5.0, 7.0),
        Span(0, "replay", 0, 5.5, 7.0),
    ]
    depths = [(span.phase, depth) for span, depth in nested(spans)]
    assert depths == [("prepare", 0), ("rollout", 1), ("decode", 2), ("update", 0), ("replay", 1)]


def test_phase_times_are_per_batch_and_rank_of_the_last_three() -> None:
    spans = [
        Span(rank, "prepare", step, 10.0 * step, 10.0 * step + step + rank)
        for step in range(1, 6)
        for rank in (0, 1)
    ]
    assert {span.step for span in last_steps(spans)} == {3, 4, 5}
    (time,) = phase_times(spans)
    assert time.mean_s == (3 + 4 + 4 + 5 + 5 + 6) / 6
    assert (time.longest_s, time.longest_rank) == (6.0, 1)


def test_no_spans_no_chart() -> None:
    assert timeline_chart([]) is None
    assert phase_times([]) == []


def test_a_span_of_no_length_is_drawn() -> None:
    assert timeline_chart([Span(0, "$x_", 0, 5.0, 5.0)]) is not None


def test_scoring_is_a_strip_below_the_bars_and_hides_none() -> None:
    spans = [
        Span(0, "sample", 0, 0.0, 2.0),
        Span(0, "score", 0, 1.0, 4.0),
        Span(0, "replay", 0, 2.0, 3.0),
    ]
    bars = _bars(spans, [0], 0.0, 4.0)
    low, high = {}, {}
    for (depth, phase), (path,) in bars.items():
        assert depth == 0
        low[phase], high[phase] = path.vertices[:, 1].min(), path.vertices[:, 1].max()
    assert high["sample"] == high["replay"] < low["score"]

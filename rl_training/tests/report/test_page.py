import argparse
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from wan_trainer.cli import report as command
from wan_trainer.recording.run_dir import RunFiles
from wan_trainer.report.page import render_report, show
from wan_trainer.types import SampleId, UserError

MakeRun = Callable[..., RunFiles]
_VOID = {"meta", "img", "br", "input", "link", "hr"}
_FETCHING = {"src", "href", "action", "poster", "srcset", "data"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects what a reader and a browser would see."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def charts(page: Page) -> list[str]:
    return [str(item["aria-label"]) for item in page.tags("svg")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, fabricate_run: MakeRun) -> tuple[RunFiles, Page]:
    """A whole run and its page, which no test changes."""
    files = fabricate_run(tmp_path_factory.mktemp("report") / "run", 12, evaluations=3)
    path = render_report(files.root)
    assert path == files.report
    return files, Page(path)


def test_a_finished_run_is_told_whole(finished: tuple[RunFiles, Page]) -> None:
    files, page = finished
    path = files.report
    assert path.stat().st_size < 2_000_000
    for words in (
        "finished",
        "ti2v-5b",
        "configs/quickstart.yaml",
        "1 node x 2 processes = 2; data parallel 2: 1 x 2 (replicas x shards)",
        "0123456789ab with uncommitted",
    ):
        assert words in page.text
    assert "Please note" not in page.text
    assert len(charts(page)) == 7
    assert "6 held prompts" in page.text and "0.250 after batch 0, 0.450 after batch 20." in page.text
    metrics = [json.loads(line)["reward_mean"] for line in files.metrics.read_text().splitlines()]
    first, last = sum(metrics[:2]) / 2, sum(metrics[-2:]) / 2
    assert f"+{last - first:.3f}" in page.text
    assert f"{first:.3f} → {last:.3f}" in page.text
    assert "On-policy" in page.text
    assert "scorer timed out after" in page.text


def test_the_page_needs_no_network(finished: tuple[RunFiles, Page]) -> None:
    page = finished[1]
    assert not re.search(r"https?://|url\((?!#)|@import|//cdn", page.source)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed"}
    for _, attributes in page.elements:
        for name in _FETCHING & attributes.keys():
            assert str(attributes[name]).startswith(("#", "data:image/jpeg;base64,"))


def test_text_of_a_run_is_never_markup(make_run: MakeRun) -> None:
    files = make_run(3)
    with files.reward_errors.open("a") as file:
        row = {
            "step": 1,
            "task": "t",
            "sample_id": '"><img src=x>',
            "member": 0,
            "reason": "<svg onload=alert(1)>",
        }
        file.write(json.dumps(row) + "\n")
    (files.videos / "step-000002-p00-m01.mp4").write_bytes(b"<b>no video</b>")
    page = Page(render_report(files.root))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "b", "i"}
    assert not any("onload" in attributes for _, attributes in page.elements)
    assert all("src" in item and str(item["src"]).startswith("data:") for item in page.tags("img"))
    for words in ("<script>alert(1)</script>", "<svg onload=alert(1)>", "<b>bad</b>", "<i>old</i>"):
        assert words in page.text


def test_the_page_is_accessible(finished: tuple[RunFiles, Page]) -> None:
    page = finished[1]
    assert page.tags("html")[0]["lang"] == "en"
    assert page.tags("title")
    assert all(item["role"] == "img" and item["aria-label"] for item in page.tags("svg"))
    assert all(item["alt"] for item in page.tags("img"))
    assert all(item.get("scope") in ("col", "row") for item in page.tags("th"))
    assert len(page.tags("caption")) == len(page.tags("table"))
    identifiers = [str(item["id"]) for _, item in page.elements if "id" in item]
    assert len(identifiers) == len(set(identifiers)), "clip paths of one chart would cut another"
    assert "prefers-color-scheme: dark" in page.source


def test_rollouts_first_best_latest_carry_their_names_and_rewards(finished: tuple[RunFiles, Page]) -> None:
    files, page = finished
    rows = [json.loads(line) for line in files.rewards.read_text().splitlines()]
    rewards = {SampleId(row["step"], row["prompt"], row["member"]): row for row in rows}
    shown = [sample for sample in rewards if files.rollout_video(sample).exists()]
    best = max(shown, key=lambda sample: rewards[sample]["reward"] or -1)
    section = page.text[
        page.text.index("Rollouts First recorded batch (0)") : page.text.index("Reward by task")
    ]
    after_best = section[section.index("Best of the run") :]
    row = rewards[best]
    expected = (
        f"{row['sample_id']} · batch {best.step}, prompt 0, member {best.member} reward {row['reward']:.3f}"
    )
    assert after_best.startswith(f"Best of the run {expected}")
    assert "Latest recorded batch (11)" in section
    assert len(page.tags("img")) == 2 + 4 + 2


@pytest.mark.parametrize("batches", [0, 1])
def test_short_runs_render(make_run: MakeRun, batches: int) -> None:
    page = Page(render_report(make_run(batches, finished=False).root))
    assert "in progress, or it was killed" in page.text
    assert len(charts(page)) == (6 if batches else 0)
    if batches == 0:
        assert "no optimizer update has been recorded yet" in page.text
        assert "rollout_videos/ is empty" in page.text
        assert "there is no timeline" in page.text
    else:
        assert "too few updates for a trend" in page.text


def test_damage_is_named_and_the_rest_shown(make_run: MakeRun) -> None:
    files = make_run(6, delayed=True)
    for path in (files.metrics, files.rewards, files.timeline):
        with path.open("ab") as file:
            file.write(b'{"step": 9, "tor')
    files.rollout_video(SampleId(0, 0, 0)).write_bytes(
        files.rollout_video(SampleId(0, 0, 0)).read_bytes()[:200]
    )
    files.reward_errors.unlink(missing_ok=True)
    files.record.write_text('{"status": ')
    page = Page(render_report(files.root))
    for name in ("metrics.jsonl", "rewards.jsonl", "timeline.jsonl"):
        assert f"{name}: 1 damaged line was left out" in page.text
    assert "run.json is not valid JSON" in page.text
    assert "step-000000-p00-m00.mp4 cannot be shown" in page.text
    assert (
        "Off-policy: when a rollout is replayed, the policy that drew it is up to 1 update old" in page.text
    )
    assert len(charts(page)) == 6


def test_metrics_alone_are_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    files = make_run(6)
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_bytes(files.metrics.read_bytes())
    page = Page(render_report(other, tmp_path / "deep" / "page.html"))
    assert not (other / "report.html").exists()
    for words in ("run.json is missing", "rewards.jsonl is missing or empty", "No rollout videos"):
        assert words in page.text
    assert len(charts(page)) == 5


def test_a_long_run_stays_small(make_run: MakeRun) -> None:
    files = make_run(1, ranks=32)
    (line,) = files.metrics.read_text().splitlines()
    row = json.loads(line)
    with files.metrics.open("w") as file:
        for step in range(1, 8001):
            row |= {
                "step": step,
                "batch": step - 1,
                "reward_mean": math.sin(step),
                "ratio_max_dev": step % 7 / 10,
            }
            file.write(json.dumps(row) + "\n")
    with files.timeline.open("w") as file:
        for number in range(20_000):
            start = number * 0.01
            span = {"rank": number % 32, "phase": f"p{number % 12}", "step": number // 8000}
            file.write(json.dumps(span | {"start": start, "end": start + 0.3}) + "\n")
    path = render_report(files.root)
    assert path.stat().st_size < 2_000_000
    assert "on 8 of 32 ranks" in Page(path).source


def test_a_directory_that_is_no_run_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds neither run\.json nor metrics\.jsonl"):
        render_report(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        render_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_path(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_run(0)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command.run(parser.parse_args([str(files.root)]), []) == 0
    assert capsys.readouterr().out == f"{files.report}\n"
    with pytest.raises(UserError, match="choose a place for it with --out"):
        command.run(parser.parse_args([str(files.root), "--out", str(files.root)]), [])


def test_numbers_for_people() -> None:
    shown = [show(value) for value in (0.0, 0.12345, 1.5e-7, 12345.6789, -2.5, math.nan)]
    assert shown == ["0.000", "0.123", "1.50e-07", "12\u202f345.679", "-2.500", "–"]

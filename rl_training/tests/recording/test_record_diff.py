"""`wan-trainer record-diff`: only what differs between two runs, by group, with its status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wan_trainer.cli.main import main
from wan_trainer.recording.identity import AttentionIdentity, CodeIdentity, EvaluatorIdentity
from wan_trainer.recording.run_record import RunFacts, RunRecord

Diff = Callable[[RunFacts], tuple[int, str]]


@pytest.fixture
def diff(tmp_path: Path, facts: RunFacts, capsys: pytest.CaptureFixture[str]) -> Diff:
    """Status and output of the command for a run of `facts` and one of other facts, on another host."""
    RunRecord(tmp_path / "first" / "run.json").start(facts, {"MASTER_ADDR": "10.0.0.1"})

    def compare(other: RunFacts) -> tuple[int, str]:
        second = RunRecord(tmp_path / "second" / "run.json")
        second.start(other, {"MASTER_ADDR": "10.0.0.2"})
        second.finish(0)
        status = main(["record-diff", str(tmp_path / "first"), str(tmp_path / "second" / "run.json")])
        return status, capsys.readouterr().out

    return compare


def test_equal_runs_are_equal_wherever_and_whenever_they_ran(
    diff: Diff, facts: RunFacts, tmp_path: Path
) -> None:
    moved = replace(
        facts,
        config={**facts.config, "output_dir": "elsewhere", "wandb_run_name": "again"},
        model=replace(facts.model, path=tmp_path / "other disk"),
        dataset=replace(facts.dataset, path=tmp_path / "other disk"),
        config_path=tmp_path / "other.yaml",
        start_batch=7,
    )
    assert diff(moved) == (0, "no differences\n")


def test_what_differs_is_printed_by_group_with_both_sides(
    diff: Diff, facts: RunFacts, tmp_path: Path
) -> None:
    other = replace(
        facts,
        config={"learning_rate": 2e-5, "vlm_reward_api_key": "other", "seed": 3, "new_key": None},
        sources={"learning_rate": "yaml", "seed": "yaml"},
        code=CodeIdentity("f01", True, "abd", "diff --git b a"),
        dataset=replace(facts.dataset, sha256="ab", samples=13),
        model=replace(facts.model, weights={"vae/weights.safetensors": 6}),
        evaluator=EvaluatorIdentity(tmp_path, "cd", {"packages": {"numpy": "2"}}),
        attention=AttentionIdentity("_flash_3_hub", "kernels-community/flash-attn3", 1, "c0ffee"),
        topology=replace(facts.topology, world=4),
        sampler=replace(facts.sampler, eta=0.3, sigmas=(1.0, 0.6, 0.0)),
    )
    status, text = diff(other)
    assert status == 1
    assert text.splitlines() == [
        "config",
        "  learning_rate: 1e-05 (cli) | 2e-05 (yaml)",
        "  new_key: (absent) | null",
        "code",
        "  commit: f00 | f01",
        "  sources: abc | abd",
        "  diff: sha256 67c8b7bdffc0 | sha256 9221fd9bac29",
        "dataset",
        f"  sha256: {facts.dataset.sha256} | ab",
        "  samples: 12 | 13",
        "model",
        "  weights.vae/weights.safetensors: 5 | 6",
        "evaluator",
        "  runtime.packages.numpy: (absent) | 2",
        "attention",
        "  backend: native | _flash_3_hub",
        "  repository: (absent) | kernels-community/flash-attn3",
        "  version: (absent) | 1",
        "  commit: (absent) | c0ffee",
        "topology",
        "  world: 2 | 4",
        "sampler",
        "  sigmas: [1.0, 0.5, 0.0] | [1.0, 0.6, 0.0]",
        "  eta: 0.7 | 0.3",
    ]


def test_packages_and_an_absent_evaluator_differ_too(diff: Diff, facts: RunFacts, tmp_path: Path) -> None:
    _, text = diff(replace(facts, evaluator=None))
    assert "evaluator\n  directory" not in text and "source_sha256: cd | (absent)" in text
    first = json.loads((tmp_path / "first" / "run.json").read_text())
    first["packages"] |= {"numpy": "1.0", "only-here": "3"}
    (tmp_path / "first" / "run.json").write_text(json.dumps(first))
    _, text = diff(facts)
    assert text.startswith("packages\n  numpy: 1.0 | 2") and text.endswith("only-here: 3 | (absent)\n")


def test_what_is_no_run_is_one_line(
    tmp_path: Path, diff: Diff, facts: RunFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    diff(facts)
    RunRecord(tmp_path / "refused" / "run.json").finish(2, "no such model")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    for name, line in {"nowhere": "is not there", "refused": "never began", "torn": "not valid JSON"}.items():
        assert main(["record-diff", str(tmp_path / "first"), str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1

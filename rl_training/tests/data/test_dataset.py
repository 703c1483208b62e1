"""dataset.json, manifests and prompt lists."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_training.tests.data.archives import TASKS
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.unpack import unpack
from wan_trainer.types import UserError

Spec = Callable[..., DataSpec]


@pytest.fixture
def materialized(dataset_root: Path, tmp_path: Path) -> Path:
    """The directory that `unpack` makes of both archives."""
    unpack(dataset_root, tmp_path / "data", expected_tasks=2, expected_samples=6)
    return tmp_path / "data"


def describe(folder: Path, *sources: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps(sources))
    return folder / "dataset.json"


def problems(spec: DataSpec) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load_dataset(spec)
    assert all("\n" not in line and line for line in caught.value.problems)
    return caught.value.problems


def edit(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_an_unpacked_data_set_is_read_in_manifest_order(materialized: Path, spec: Spec) -> None:
    dataset = load_dataset(spec(materialized / "dataset.json", dataset_size=6))
    assert dataset.tasks == tuple(sorted(TASKS))
    ids = [f"{task}/sample_{index:04d}" for task in sorted(TASKS) for index in range(3)]
    assert dataset.sample_ids() == ids == [sample.sample_id for sample in dataset]
    sample = dataset[4]
    folder = materialized / "raw" / TASKS[0] / "sample_0001"
    assert sample.task == TASKS[0]
    assert sample.prompt == "Move square 1 → the right, 请."
    assert sample.first_frame == folder / "first_frame.png"
    assert sample.ground_truth_video == folder / "video" / "ground_truth.mp4"
    assert sample.final_frame == folder / "video" / "final_frame.png"
    assert sample.metadata == folder / "metadata.json"
    assert folder.is_absolute() and sample.negative_prompt is None
    assert dataset[1:3] == [dataset[1], dataset[2]]
    assert set(dataset.digests) == {"dataset.json", "split_manifest_rl.json"}


def test_an_unpacked_data_set_can_be_moved(materialized: Path, tmp_path: Path, spec: Spec) -> None:
    shutil.move(materialized, tmp_path / "elsewhere")
    dataset = load_dataset(spec(tmp_path / "elsewhere" / "dataset.json"))
    assert dataset[0].first_frame == tmp_path / "elsewhere/raw" / TASKS[1] / "sample_0000" / "first_frame.png"


def test_the_digest_follows_the_content(materialized: Path, spec: Spec) -> None:
    before = load_dataset(spec(materialized / "dataset.json")).digests
    edit(materialized / "split_manifest_rl.json", lambda entries: entries[0]["rl"].pop())
    after = load_dataset(spec(materialized / "dataset.json")).digests
    assert before["dataset.json"] == after["dataset.json"]
    assert before["split_manifest_rl.json"] != after["split_manifest_rl.json"]


def test_a_wrong_size_is_named_with_both_numbers(materialized: Path, spec: Spec) -> None:
    (line,) = problems(spec(materialized / "dataset.json", dataset_size=50_000))
    assert "dataset_size 50000" in line and "lists 6 samples" in line and "set dataset_size to 6" in line


def test_the_config_overrides_the_descriptors_video_shape(materialized: Path, spec: Spec) -> None:
    """The descriptor may name another shape than the run's; the data set loads all the same."""
    path = materialized / "dataset.json"
    edit(path, lambda sources: sources[0].update(num_frames=161, height=256, width=256, fps=24))
    wanted = spec(path)
    assert len(load_dataset(wanted)) == 6 and (wanted.num_frames, wanted.height) == (5, 32)
    edit(path, lambda sources: sources[0].update(num_frames=0))
    assert "num_frames" in problems(wanted)[0]


@pytest.mark.parametrize(
    ("check_files", "found"),
    [("all", 2), (True, 2), ("sample", 1), ("none", 0), (False, 0), (None, 1)],
)
def test_which_files_are_looked_for(
    materialized: Path, spec: Spec, check_files: str | bool | None, found: int
) -> None:
    path = materialized / "dataset.json"

    def set_checks(sources: list[dict[str, Any]]) -> None:
        del sources[0]["check_files"]
        if check_files is not None:
            sources[0]["check_files"] = check_files

    edit(path, set_checks)
    raw = materialized / "raw"
    (raw / TASKS[0] / "sample_0001" / "metadata.json").unlink()  # in the middle of its task
    (raw / TASKS[1] / "sample_0002" / "video" / "ground_truth.mp4").write_bytes(b"")  # the last of its task
    (raw / TASKS[1] / "sample_0000" / "video" / "prompt.txt").write_bytes(b"")  # an empty prompt is fine
    if found == 0:
        assert len(load_dataset(spec(path))) == 6
        return
    lines = problems(spec(path))
    assert len(lines) == found
    assert all("missing or empty" in line and "wan-trainer unpack" in line for line in lines)
    assert any("ground_truth.mp4" in line and f"{TASKS[1]}/sample_0002" in line for line in lines)


def test_long_lists_of_problems_are_cut(materialized: Path, spec: Spec) -> None:
    edit(materialized / "dataset.json", lambda sources: sources[0].update(check_files="all"))
    shutil.rmtree(materialized / "raw")
    lines = problems(spec(materialized / "dataset.json"))
    assert len(lines) == 21 and "10 more problems" in lines[-1]


def test_only_allowed_task_splits_count(materialized: Path, spec: Spec) -> None:
    path = materialized / "dataset.json"
    manifest = materialized / "split_manifest_rl.json"
    edit(manifest, lambda entries: entries[0].update(split="Out-of-Domain_50"))
    assert load_dataset(spec(path)).tasks == (TASKS[0],)
    edit(path, lambda sources: sources[0].update(allowed_task_splits=None))
    assert load_dataset(spec(path)).tasks == tuple(sorted(TASKS))
    edit(path, lambda sources: sources[0].update(allowed_task_splits=["Other"]))
    (line,) = problems(spec(path))
    assert str(manifest) in line and "Other" in line and "In-Domain_50" in line and "Out-of-Domain_50" in line


def test_another_split_is_another_list(materialized: Path, spec: Spec) -> None:
    path = materialized / "dataset.json"
    edit(
        materialized / "split_manifest_rl.json", lambda entries: [e.update(val=e["rl"][:1]) for e in entries]
    )
    edit(path, lambda sources: sources[0].update(split="val"))
    assert len(load_dataset(spec(path))) == 2
    edit(path, lambda sources: sources[0].update(split="test"))
    (line,) = problems(spec(path))
    assert "no list 'test'" in line and "['rl', 'source', 'val']" in line


def test_samples_may_lie_in_several_roots(materialized: Path, spec: Spec) -> None:
    other = materialized / "other" / TASKS[0]
    other.mkdir(parents=True)
    shutil.move(materialized / "raw" / TASKS[0] / "sample_0001", other)
    path = materialized / "dataset.json"
    edit(path, lambda sources: sources[0].update(data_roots=["raw", "other"], check_files="all"))
    dataset = load_dataset(spec(path))
    assert dataset[4].metadata == other / "sample_0001" / "metadata.json"
    assert dataset[3].metadata == materialized / "raw" / TASKS[0] / "sample_0000" / "metadata.json"


@pytest.mark.parametrize("name", ["../../etc", "/etc", "", ".", "a/b"])
def test_manifests_cannot_lead_outside(materialized: Path, spec: Spec, name: str) -> None:
    edit(materialized / "split_manifest_rl.json", lambda entries: entries[0].update(rl=[name]))
    (line,) = problems(spec(materialized / "dataset.json"))
    assert "cannot name a directory" in line


def test_an_id_that_occurs_twice_is_refused(materialized: Path, spec: Spec) -> None:
    edit(materialized / "dataset.json", lambda sources: sources.append(sources[0]))
    lines = problems(spec(materialized / "dataset.json"))
    assert len(lines) == 6 and f"{TASKS[1]}/sample_0000 occurs twice" in lines[0]


def test_malformed_descriptions_name_file_place_and_value(
    materialized: Path, tmp_path: Path, spec: Spec
) -> None:
    good = json.loads((materialized / "dataset.json").read_text())[0]
    for change, words in (
        ({"format": "webdataset"}, ["format", "webdataset"]),
        ({"check_file": "all"}, ["check_file", "Extra inputs"]),
        ({"check_files": "some"}, ["check_files", "'some'"]),
        ({"data_roots": "raw"}, ["data_roots", "'raw'"]),
        ({"fps": -1}, ["fps", "-1"]),
    ):
        path = describe(tmp_path / "bad", {**good, **change})
        (line,) = problems(spec(path))
        assert str(path) in line and all(word in line for word in ("entry 0", *words)), line
    path = describe(tmp_path / "bad", {**good, "fps": 0, "width": 0})
    assert len(problems(spec(path))) == 2
    assert "lists no source" in problems(spec(describe(tmp_path / "bad")))[0]
    path.write_text("[{]")
    assert "not JSON" in problems(spec(path))[0]
    path.write_bytes(b"[\xff]")
    assert "not UTF-8" in problems(spec(path))[0]
    path.unlink()
    assert "No such file" in problems(spec(path))[0]
    edit(materialized / "split_manifest_rl.json", lambda entries: entries[1].update(rl=[1], task=None))
    (line,) = problems(spec(materialized / "dataset.json"))
    assert "split_manifest_rl.json" in line and "entry 1, task" in line


def test_a_manifest_without_samples_is_refused(materialized: Path, spec: Spec) -> None:
    edit(materialized / "split_manifest_rl.json", lambda entries: [entry.update(rl=[]) for entry in entries])
    assert "hold no sample" in problems(spec(materialized / "dataset.json"))[0]


def test_a_list_in_a_descriptor_may_have_another_task_and_fewer_checks(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "my prompts.txt").write_text("a cat\n\na dog\n")
    path = describe(tmp_path, {"format": "prompt_list", "path": "my prompts.txt", "task": "mine"})
    dataset = load_dataset(spec(path))
    assert dataset.sample_ids() == ["mine/00000000", "mine/00000002"]
    assert set(dataset.digests) == {"dataset.json", "my prompts.txt"}
    (tmp_path / "a.jsonl").write_text("\n".join(['{"prompt": "a", "image": "no.png"}'] * 3))
    for check_files, found in (("none", 0), ("sample", 2), ("all", 3)):
        source = {"format": "prompt_list", "path": "a.jsonl", "check_files": check_files}
        if found == 0:
            assert len(load_dataset(spec(describe(tmp_path, source)))) == 3
        else:
            assert len(problems(spec(describe(tmp_path, source)))) == found
    path = describe(tmp_path, {"format": "prompt_list", "path": "none.txt"})
    assert "none.txt: No such file" in problems(spec(path))[0]
    path = describe(tmp_path, {"format": "prompt_list", "path": "list.csv"})
    assert ".txt or a .jsonl" in problems(spec(path))[0]


def test_several_sources_follow_each_other(materialized: Path, spec: Spec) -> None:
    (materialized / "a.txt").write_text("one\ntwo\n")
    (materialized / "b.txt").write_text("three\n")
    path = materialized / "dataset.json"
    lists = [{"format": "prompt_list", "path": f"{name}.txt"} for name in "ab"]
    edit(path, lambda sources: sources.__setitem__(slice(0, 0), lists))
    dataset = load_dataset(replace(spec(path), dataset_size=9))
    assert dataset.sample_ids()[:4] == ["a/00000000", "a/00000001", "b/00000000", f"{TASKS[1]}/sample_0000"]


def test_a_prompt_that_vanished_is_named_when_it_is_needed(materialized: Path, spec: Spec) -> None:
    dataset = load_dataset(spec(materialized / "dataset.json"))
    prompt = materialized / "raw" / TASKS[1] / "sample_0001" / "video" / "prompt.txt"
    prompt.unlink()
    with pytest.raises(UserError, match=str(prompt)):
        dataset[1]

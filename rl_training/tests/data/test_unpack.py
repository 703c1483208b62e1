"""Unpacking real archives: whole, hostile, damaged, interrupted and changed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training.tests.data.archives import TASKS, Files, Members, tree, write_archive
from wan_trainer.data.layout import ARCHIVE_FOLDER, PUBLIC_REVISION
from wan_trainer.data.unpack import UnpackSummary, unpack
from wan_trainer.types import UserError

MembersOf = Callable[[str], Members]


def unpack_both(root: Path, output: Path, **options: Any) -> UnpackSummary:
    return unpack(root, output, expected_tasks=2, expected_samples=6, **options)


def one_task(tmp_path: Path, members: Members, task: str = TASKS[0]) -> tuple[Path, Path]:
    """(dataset root, archive) of a root with this one archive."""
    archive = tmp_path / "one" / ARCHIVE_FOLDER / f"{task}.tar.gz"
    write_archive(archive, members)
    return tmp_path / "one", archive


def refusal(root: Path, output: Path) -> str:
    """What unpacking one archive of three samples complains about; each problem is one line."""
    with pytest.raises(UserError) as caught:
        unpack(root, output, expected_tasks=1, expected_samples=3)
    assert all("\n" not in line for line in caught.value.problems)
    assert not (output / "dataset.json").exists()
    return str(caught.value)


def test_every_file_lands_in_its_place(
    dataset_root: Path, contents: dict[str, dict[str, Files]], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    summary = unpack_both(dataset_root, output, workers=2)
    expected = {
        f"{task}/{sample}/{file}": content
        for task, samples in contents.items()
        for sample, files in samples.items()
        for file, content in files.items()
    }
    assert tree(output / "raw") == expected
    assert (summary.tasks, summary.samples, summary.written, summary.kept, summary.unused) == (2, 6, 30, 0, 0)


def test_the_descriptions_say_what_is_there(dataset_root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    summary = unpack_both(dataset_root, output)
    assert summary.dataset_json == output / "dataset.json"
    samples = ["sample_0000", "sample_0001", "sample_0002"]
    assert json.loads((output / "split_manifest_rl.json").read_text()) == [
        {"task": task, "source": f"{ARCHIVE_FOLDER}/{task}.tar.gz", "split": "In-Domain_50", "rl": samples}
        for task in sorted(TASKS)
    ]
    record = json.loads((output / "materialization.json").read_text())
    assert record["source_revision"] == PUBLIC_REVISION == "ca0aaffea93b07d269c6fe2fbfe533f1fdab9aa1"
    assert (record["tasks"], record["samples"]) == (2, 6)
    for entry in record["archives"]:
        assert entry["size_bytes"] == (dataset_root / entry["archive"]).stat().st_size
        assert entry["samples"] == 3
    (source,) = json.loads((output / "dataset.json").read_text())
    assert source["format"] == "vbvr_pro" and source["split"] == "rl"
    assert source["data_roots"] == ["raw"] and source["split_manifest"] == "split_manifest_rl.json"


def test_two_runs_give_identical_outputs(dataset_root: Path, tmp_path: Path) -> None:
    unpack_both(dataset_root, tmp_path / "a", workers=1)
    unpack_both(dataset_root, tmp_path / "b", workers=4)
    first = tree(tmp_path / "a")
    assert first == tree(tmp_path / "b")
    again = unpack_both(dataset_root, tmp_path / "a")
    assert (again.written, again.kept) == (0, 30)
    assert tree(tmp_path / "a") == first


def test_counts_must_be_as_expected(dataset_root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds 2 task archives, 50 are expected; pass --expected-tasks 2"):
        unpack(dataset_root, tmp_path / "out")
    with pytest.raises(UserError, match=r"hold 6 samples, 50000 are expected; pass --expected-samples 6"):
        unpack(dataset_root, tmp_path / "out", expected_tasks=2)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_wrong_root_or_worker_count_is_named(tmp_path: Path, dataset_root: Path) -> None:
    with pytest.raises(UserError, match=rf"the dataset root is the one that holds {ARCHIVE_FOLDER}"):
        unpack(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="workers 0"):
        unpack_both(dataset_root, tmp_path / "out", workers=0)


def test_an_archive_that_cannot_name_a_task_is_refused(tmp_path: Path, members: MembersOf) -> None:
    root, archive = one_task(tmp_path, members(TASKS[0]))
    archive.rename(archive.with_name("-- rm; x.tar.gz"))
    assert "cannot name a task" in refusal(root, tmp_path / "out")


def link(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


INSIDE = f"{TASKS[0]}/group_task/sample_0009/first_frame.png"


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.txt",
        f"{TASKS[0]}/group_task/../../../escaped.txt",
        f"{TASKS[0]}/group_task/../first_frame.png",
        "/tmp/escaped.txt",
        "//escaped.txt",
        f"{TASKS[0]}\\..\\escaped.txt",
        f"{TASKS[1]}/group_task/sample_0009/first_frame.png",
        f"{TASKS[0]}/group_task/.hidden/first_frame.png",
        f"{TASKS[0]}/group_task/a b;c/first_frame.png",
    ],
)
def test_members_that_lead_elsewhere_refuse_the_archive(
    tmp_path: Path, members: MembersOf, name: str
) -> None:
    root, _ = one_task(tmp_path, {name: b"gotcha", **members(TASKS[0])})
    before = set(tmp_path.rglob("*"))
    assert "refused member" in refusal(root, tmp_path / "deep" / "down" / "out")
    assert not list(tmp_path.rglob("escaped*"))
    added = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "deep") for path in added)
    assert not Path("/tmp/escaped.txt").exists() and not Path("/escaped.txt").exists()


@pytest.mark.parametrize(
    "member",
    [
        link(INSIDE, tarfile.SYMTYPE, "/etc/passwd"),
        link(INSIDE, tarfile.SYMTYPE, "final_frame.png"),
        link(INSIDE, tarfile.LNKTYPE, f"{TASKS[0]}/group_task/sample_0000/first_frame.png"),
        link(INSIDE, tarfile.CHRTYPE),
        link(INSIDE, tarfile.BLKTYPE),
        link(INSIDE, tarfile.FIFOTYPE),
        link(f"{TASKS[0]}/group_task", tarfile.SYMTYPE, "/tmp"),
    ],
    ids=["symlink out", "symlink in", "hardlink", "char device", "block device", "fifo", "linked directory"],
)
def test_links_and_devices_refuse_the_archive(
    tmp_path: Path, members: MembersOf, member: tarfile.TarInfo
) -> None:
    root, _ = one_task(tmp_path, {"special": member, **members(TASKS[0])})
    assert "only plain files are accepted" in refusal(root, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_symlink() and (path.is_file() or path.is_dir())


def test_directories_and_unknown_files_are_no_harm(tmp_path: Path, members: MembersOf) -> None:
    extra: Members = {
        "dir": link(f"{TASKS[0]}/", tarfile.DIRTYPE),
        f"{TASKS[0]}/README.md": b"hello",
        f"{TASKS[0]}/group_task/sample_0000/video/notes.txt": b"hello",
        **{f"./{name}": content for name, content in members(TASKS[0]).items()},
    }
    root, _ = one_task(tmp_path, extra)
    summary = unpack(root, tmp_path / "out", expected_tasks=1, expected_samples=3)
    assert (summary.samples, summary.unused) == (3, 2)
    assert len(tree(tmp_path / "out" / "raw")) == 15


def test_duplicate_samples_are_refused_by_name(tmp_path: Path, members: MembersOf) -> None:
    twice = {name.replace("group_task", "other_task"): content for name, content in members(TASKS[0]).items()}
    root, _ = one_task(tmp_path, {**members(TASKS[0]), **twice})
    assert "sample sample_0000 is there twice" in refusal(root, tmp_path / "out")


def test_incomplete_samples_are_refused_by_name(tmp_path: Path, members: MembersOf) -> None:
    some = {
        name: content
        for name, content in members(TASKS[0]).items()
        if name.removeprefix(f"{TASKS[0]}/group_task/")
        not in ("sample_0001/video/ground_truth.mp4", "sample_0002/metadata.json")
    }
    root, _ = one_task(tmp_path, some)
    complaint = refusal(root, tmp_path / "out")
    assert "sample sample_0001 is incomplete, it lacks video/ground_truth.mp4" in complaint
    assert "sample sample_0002 is incomplete, it lacks metadata.json" in complaint


def test_many_incomplete_samples_are_counted(tmp_path: Path) -> None:
    root, _ = one_task(tmp_path, {f"{TASKS[0]}/g/s{index}/metadata.json": b"{}" for index in range(9)})
    complaint = refusal(root, tmp_path / "out")
    assert len(complaint.split("\n")) == 6 and "9 samples are incomplete in all" in complaint


@pytest.mark.parametrize("file", ["first_frame.png", "video/ground_truth.mp4"])
def test_empty_media_are_refused(tmp_path: Path, members: MembersOf, file: str) -> None:
    name = f"{TASKS[0]}/group_task/sample_0001/{file}"
    root, _ = one_task(tmp_path, {**members(TASKS[0]), name: b""})
    assert f"'{name}' is empty" in refusal(root, tmp_path / "out")


def test_an_empty_prompt_is_a_prompt(tmp_path: Path, members: MembersOf) -> None:
    name = f"{TASKS[0]}/group_task/sample_0001/video/prompt.txt"
    root, _ = one_task(tmp_path, {**members(TASKS[0]), name: b""})
    unpack(root, tmp_path / "out", expected_tasks=1, expected_samples=3)
    assert (tmp_path / "out" / "raw" / TASKS[0] / "sample_0001" / "video" / "prompt.txt").read_bytes() == b""


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95, 0.9999])
def test_a_truncated_archive_leaves_whole_files_and_can_be_resumed(
    dataset_root: Path, tmp_path: Path, share: float
) -> None:
    unpack_both(dataset_root, tmp_path / "clean")
    archive = dataset_root / ARCHIVE_FOLDER / f"{TASKS[0]}.tar.gz"
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * share)])
    output = tmp_path / "out"
    with pytest.raises(UserError) as caught:
        unpack_both(dataset_root, output)
    (line,) = caught.value.problems
    assert str(archive) in line and "truncated or damaged" in line and "\n" not in line
    clean = tree(tmp_path / "clean" / "raw")
    partial = tree(output / "raw")
    assert all(clean[name] == found for name, found in partial.items())
    assert not (output / "dataset.json").exists()
    archive.write_bytes(content)
    resumed = unpack_both(dataset_root, output)
    assert resumed.kept == len(partial)
    assert tree(output / "raw") == clean


def test_a_flipped_byte_in_an_archive_is_found(dataset_root: Path, tmp_path: Path) -> None:
    archive = dataset_root / ARCHIVE_FOLDER / f"{TASKS[0]}.tar.gz"
    content = bytearray(archive.read_bytes())
    content[-6] ^= 0xFF  # the checksum of the compressed stream
    archive.write_bytes(content)
    with pytest.raises(UserError, match="truncated or damaged"):
        unpack_both(dataset_root, tmp_path / "out")


def test_every_problem_of_every_archive_is_named_at_once(dataset_root: Path, tmp_path: Path) -> None:
    for task in TASKS:
        archive = dataset_root / ARCHIVE_FOLDER / f"{task}.tar.gz"
        archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises(UserError) as caught:
        unpack_both(dataset_root, tmp_path / "out")
    assert len(caught.value.problems) == 2


def test_a_changed_file_is_found_by_verification(dataset_root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    unpack_both(dataset_root, output)
    assert unpack_both(dataset_root, output, verify_existing=True).kept == 30
    changed = output / "raw" / TASKS[0] / "sample_0001" / "metadata.json"
    longer = output / "raw" / TASKS[1] / "sample_0002" / "video" / "prompt.txt"
    changed.write_bytes(changed.read_bytes()[:-1] + b" ")
    longer.write_bytes(longer.read_bytes() + b"!")
    with pytest.raises(UserError) as caught:
        unpack_both(dataset_root, output, verify_existing=True)
    assert len(caught.value.problems) == 2
    for path in (changed, longer):
        assert f"{path}: differs from" in str(caught.value)
        path.unlink()
    assert unpack_both(dataset_root, output, verify_existing=True).written == 2
    unpack_both(dataset_root, tmp_path / "clean")
    assert tree(output / "raw") == tree(tmp_path / "clean" / "raw")


def test_a_lost_or_resized_file_comes_back_without_verification(dataset_root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    unpack_both(dataset_root, output)
    before = tree(output / "raw")
    sample = output / "raw" / TASKS[0] / "sample_0001"
    (sample / "first_frame.png").unlink()
    (sample / "metadata.json").write_bytes(b"")
    assert unpack_both(dataset_root, output).written == 2
    assert tree(output / "raw") == before


def test_archives_made_anew_replace_what_is_there(
    dataset_root: Path, tmp_path: Path, members: MembersOf
) -> None:
    output = tmp_path / "out"
    unpack_both(dataset_root, output)
    name = f"{TASKS[0]}/group_task/sample_0000/metadata.json"
    changed = b'{"seed": 7}'  # as long as what was there
    write_archive(dataset_root / ARCHIVE_FOLDER / f"{TASKS[0]}.tar.gz", {**members(TASKS[0]), name: changed})
    assert unpack_both(dataset_root, output).written == 1
    assert (output / "raw" / TASKS[0] / "sample_0000" / "metadata.json").read_bytes() == changed


def test_a_damaged_record_only_costs_time(dataset_root: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    unpack_both(dataset_root, output)
    (output / ".unpack" / f"{TASKS[0]}.json").write_bytes(b"")
    assert unpack_both(dataset_root, output).kept == 30


def test_two_revisions_never_mix(dataset_root: Path, tmp_path: Path) -> None:
    unpack_both(dataset_root, tmp_path / "out", source_revision="first")
    with pytest.raises(UserError, match="holds revision first, not second"):
        unpack_both(dataset_root, tmp_path / "out", source_revision="second")


def test_two_runs_at_once_are_refused(dataset_root: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".unpack").mkdir(parents=True)
    with (tmp_path / "out" / ".unpack" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another unpack is at work"):
            unpack_both(dataset_root, tmp_path / "out")
    assert unpack_both(dataset_root, tmp_path / "out").samples == 6


def test_what_the_file_system_refuses_is_one_line(dataset_root: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "out" / "raw" / TASKS[0]
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a directory must be")
    with pytest.raises(UserError, match="finished files are kept"):
        unpack_both(dataset_root, tmp_path / "out")


RUN = """
import signal, sys
from pathlib import Path
from wan_trainer.data.unpack import unpack
# A shell starts background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
unpack(Path(sys.argv[1]), Path(sys.argv[2]), expected_tasks=2, expected_samples=120, workers=2)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two archives of 60 samples, about 8 MB, which take long enough to be stopped half-way."""
    root = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    for task in TASKS:
        big: Members = {}
        for index in range(60):
            for file in (
                "first_frame.png",
                "metadata.json",
                "video/ground_truth.mp4",
                "video/final_frame.png",
            ):
                big[f"{task}/g/s{index:03d}/{file}"] = rng.bytes(16_000)
            big[f"{task}/g/s{index:03d}/video/prompt.txt"] = b"go"
        write_archive(root / ARCHIVE_FOLDER / f"{task}.tar.gz", big)
    return root


@pytest.fixture(scope="module")
def clean(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run makes of them."""
    output = tmp_path_factory.mktemp("clean")
    unpack(many, output, expected_tasks=2, expected_samples=120)
    return output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_stopped_unpack_is_resumed(many: Path, clean: Path, tmp_path: Path, number: int) -> None:
    output = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", RUN, str(many), str(output)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((output / "raw").glob("*/*"))) < 10:
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.01)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) != 0
    assert not (output / "dataset.json").exists()
    expected = tree(clean / "raw")
    partial = tree(output / "raw")
    assert 0 < len(partial) < len(expected)
    assert all(expected[name] == content for name, content in partial.items())
    summary = unpack(many, output, expected_tasks=2, expected_samples=120)
    assert summary.kept == len(partial) and summary.written == len(expected) - len(partial)
    assert tree(output) == tree(clean)
    shutil.rmtree(output)

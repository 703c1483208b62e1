"""Batches: in this process, and read ahead by real worker processes that get real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.data.stream import StreamOrder
from wan_trainer.data.unpack import unpack
from wan_trainer.media import fill_and_crop
from wan_trainer.types import PromptBatch, UserError

Spec = Callable[..., DataSpec]


@pytest.fixture
def dataset_json(dataset_root: Path, tmp_path: Path) -> Path:
    return unpack(dataset_root, tmp_path / "data", expected_tasks=2, expected_samples=6).dataset_json


def collect(dataset: Dataset, spec: DataSpec, start: int = 0, **changes: Any) -> list[PromptBatch]:
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_batches": 6,
        "local_prompts": [0, 1, 2, 3],
        "with_first_frames": True,
    }
    return list(batches(dataset, spec, start=start, **(options | changes)))


def same(a: PromptBatch, b: PromptBatch) -> bool:
    return (
        (a.step, a.epoch, a.samples) == (b.step, b.epoch, b.samples)
        and a.first_frames.keys() == b.first_frames.keys()
        and all(torch.equal(a.first_frames[prompt], b.first_frames[prompt]) for prompt in a.first_frames)
    )


def test_position_is_the_step(dataset_json: Path, spec: Spec) -> None:
    dataset, order = load_dataset(spec(dataset_json)), StreamOrder(6, 42, shuffle=True)
    run = collect(dataset, spec(dataset_json))
    assert [batch.step for batch in run] == list(range(6))
    for batch in run:
        epoch, indices = order.batch(batch.step, 4)
        assert batch.epoch == epoch
        assert batch.samples == tuple(dataset[index] for index in indices)


def test_a_resumed_run_goes_on_exactly_where_it_was(dataset_json: Path, spec: Spec) -> None:
    dataset = load_dataset(spec(dataset_json))
    run = collect(dataset, spec(dataset_json))
    for start in (1, 4, 6, 9):
        rest = collect(dataset, spec(dataset_json), start=start)
        assert len(rest) == max(0, 6 - start)
        assert all(same(a, b) for a, b in zip(run[start:], rest, strict=True))


def test_ranks_see_the_same_prompts_and_their_own_frames(dataset_json: Path, spec: Spec) -> None:
    dataset = load_dataset(spec(dataset_json))
    alone = collect(dataset, spec(dataset_json))
    ranks = [collect(dataset, spec(dataset_json), local_prompts=[rank, (rank + 1) % 4]) for rank in range(2)]
    for step, whole in enumerate(alone):
        for rank in range(2):
            part = ranks[rank][step]
            assert part.samples == whole.samples
            assert set(part.first_frames) == {rank, (rank + 1) % 4}
            for prompt, frame in part.first_frames.items():
                assert torch.equal(frame, whole.first_frames[prompt])


def test_first_frames_fill_the_training_size(dataset_json: Path, spec: Spec) -> None:
    wanted = spec(dataset_json, height=48, width=32)
    (batch, *_) = collect(load_dataset(wanted), wanted)
    for prompt, frame in batch.first_frames.items():
        assert frame.shape == (3, 48, 32) and frame.dtype == torch.uint8 and frame.is_contiguous()
        path = batch.samples[prompt].first_frame
        assert path is not None
        expected = fill_and_crop(np.asarray(Image.open(path)), 48, 32)
        assert torch.equal(frame, torch.from_numpy(expected).permute(2, 0, 1))


def test_manifest_order_without_shuffling(dataset_json: Path, spec: Spec) -> None:
    wanted = spec(dataset_json, shuffle=False)
    dataset = load_dataset(wanted)
    seen = [sample.sample_id for batch in collect(dataset, wanted, num_batches=3) for sample in batch.samples]
    assert seen == dataset.sample_ids() * 2


def test_only_what_is_needed_is_read(dataset_json: Path, spec: Spec) -> None:
    """Target videos and other prompts' frames are never opened; without frames no image is."""
    dataset = load_dataset(spec(dataset_json))
    whole = collect(dataset, spec(dataset_json), local_prompts=[2])
    for path in dataset_json.parent.rglob("*.mp4"):
        path.write_bytes(b"not a video")
    needed = {batch.samples[2].first_frame for batch in whole}
    for path in set(dataset_json.parent.rglob("*.png")) - needed:
        path.write_bytes(b"not an image")
    assert all(map(same, whole, collect(dataset, spec(dataset_json), local_prompts=[2])))
    for path in needed:
        assert path is not None
        path.unlink()
    bare = collect(dataset, spec(dataset_json), with_first_frames=False)
    assert [batch.samples for batch in bare] == [batch.samples for batch in whole]
    assert all(batch.first_frames == {} for batch in bare)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_cannot_be_read_is_one_line(dataset_json: Path, spec: Spec, num_workers: int) -> None:
    wanted = spec(dataset_json, num_workers=num_workers, shuffle=False, persistent_workers=False)
    dataset = load_dataset(wanted)
    bad = dataset[5].first_frame
    assert bad is not None
    bad.write_bytes(b"not an image")
    stream = batches(
        dataset, wanted, batch_size=4, num_batches=6, start=0, local_prompts=range(4), with_first_frames=True
    )
    assert next(stream).step == 0
    with pytest.raises(UserError) as caught:
        next(stream)
    (line,) = caught.value.problems
    assert str(bad) in line and "not a readable image" in line and "\n" not in line


def test_a_prompt_without_image_is_refused_by_an_image_family(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "list.txt").write_text("a cat\n")
    (tmp_path / "dataset.json").write_text(json.dumps([{"format": "prompt_list", "path": "list.txt"}]))
    wanted = spec(tmp_path / "dataset.json")
    options = {"batch_size": 1, "num_batches": 2, "local_prompts": [0]}
    assert len(collect(load_dataset(wanted), wanted, with_first_frames=False, **options)) == 2
    with pytest.raises(UserError, match="list/00000000 has no image"):
        collect(load_dataset(wanted), wanted, **options)


def test_workers_change_nothing_and_leave_nothing(dataset_json: Path, spec: Spec) -> None:
    """Same batches in the same order, the run's random generator untouched, every process gone afterwards."""
    dataset = load_dataset(spec(dataset_json))
    wanted = spec(dataset_json, num_workers=2, prefetch_factor=1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = collect(dataset, wanted, start=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}
    assert all(map(same, run, collect(dataset, spec(dataset_json), start=1)))
    assert len(run) == 5
    assert not worker_pids(os.getpid())


def worker_pids(parent: int) -> list[int]:
    """Live processes that `parent` spawned to load data (not multiprocessing's own tracker)."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if int(status[1]) == parent and status[0] != "Z" and b"spawn_main" in command:
            found.append(int(entry.name))
    return found


TRAINER = '''
"""A rank that is told to stop by a signal to its process group, and first uses up its data."""
import dataclasses, json, os, signal, sys, time
import torch
from pathlib import Path
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.data.loader import batches


class Telling(Dataset):
    """Says in each prompt how many threads torch has where it is read."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return dataclasses.replace(sample, prompt=str(torch.get_num_threads()))


def main():
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append("TERM"))
    signal.signal(signal.SIGINT, lambda *_: stopped.append("INT"))
    spec = DataSpec(Path(sys.argv[1]), None, 5, 32, 32, 16, True, 42, 1, 2, True)
    plain = load_dataset(spec)
    dataset = Telling(plain._rows, plain.digests)
    stream = batches(
        dataset, spec, batch_size=4, num_batches=40, start=0, local_prompts=[0], with_first_frames=True
    )
    steps, threads = [], set()
    for batch in stream:
        steps.append(batch.step)
        threads |= {sample.prompt for sample in batch.samples}
        print(json.dumps({"step": batch.step}), flush=True)
        if batch.step == 3:
            deadline = time.monotonic() + 60
            while len(stopped) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
        if batch.step == 11:
            break
    print(json.dumps({"steps": steps, "threads": sorted(threads), "stopped": sorted(stopped)}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
'''


def start_trainer(tmp_path: Path, dataset_json: Path) -> subprocess.Popen[str]:
    """A running trainer in a process group of its own, whose worker does not run Python yet."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(dataset_json)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    deadline = time.monotonic() + 60
    while not worker_pids(process.pid):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


def at_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line) == {"step": step}:
            return
    raise AssertionError(f"the trainer ended early with {process.wait()}")


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_workers_outlive_signals_to_the_group_and_die_with_the_rank(
    dataset_json: Path, tmp_path: Path
) -> None:
    process = start_trainer(tmp_path, dataset_json)
    workers = worker_pids(process.pid)
    assert len(workers) == 1
    # A worker takes seconds to start, and must not hear a signal meanwhile.
    os.killpg(process.pid, signal.SIGTERM)
    at_step(process, 3)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    last = {}
    for line in process.stdout:
        last = json.loads(line)
        if "steps" in last:
            break
    assert last == {"steps": list(range(12)), "threads": ["1"], "stopped": ["INT", "TERM"]}
    assert sorted(worker_pids(process.pid)) == sorted(workers)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_gone(workers, 30) == []


def test_a_worker_whose_rank_dies_while_it_starts_ends(dataset_json: Path, tmp_path: Path) -> None:
    process = start_trainer(tmp_path, dataset_json)
    workers = worker_pids(process.pid)
    time.sleep(0.5)  # by then it has read what it is to do, and imports
    process.kill()
    process.communicate(timeout=60)  # its output ends when the last of them does
    assert wait_until_gone(workers, 60) == []


def test_a_dead_worker_ends_the_run_at_once(dataset_json: Path, spec: Spec) -> None:
    wanted = spec(dataset_json, num_workers=1, prefetch_factor=1)
    stream = batches(
        load_dataset(wanted),
        wanted,
        batch_size=1,
        num_batches=100,
        start=0,
        local_prompts=[0],
        with_first_frames=True,
    )
    next(stream)
    (worker,) = worker_pids(os.getpid())
    os.kill(worker, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(stream)
    assert time.monotonic() - started < 20


FAILING_TRAINER = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.loader import batches

if __name__ == "__main__":
    spec = DataSpec(Path(sys.argv[1]), None, 5, 32, 32, 16, True, 42, 2, 1, True)
    stream = batches(
        load_dataset(spec), spec, batch_size=1, num_batches=100, start=0, local_prompts=[0],
        with_first_frames=True,
    )
    for batch in stream:
        if batch.step == 1 and sys.argv[2] == "consumer":
            raise OSError("no space left")
        if batch.step == 1:
            os.kill(active_children()[0].pid, signal.SIGKILL)
"""


@pytest.mark.parametrize(("who", "words"), [("consumer", "no space left"), ("worker", "DataLoader worker")])
def test_a_rank_that_fails_does_not_wait_for_workers_that_ignore_signals(
    dataset_json: Path, tmp_path: Path, who: str, words: str
) -> None:
    """The interpreter ends its children with SIGTERM, which they ignore, and then joins them."""
    script = tmp_path / "trainer.py"
    script.write_text(FAILING_TRAINER)
    done = subprocess.run(
        [sys.executable, str(script), str(dataset_json), who], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1
    assert words in done.stderr

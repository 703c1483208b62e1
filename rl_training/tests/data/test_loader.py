"""Batches: in this process, and read ahead by real worker processes that get real signals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_training.tests.ranks import start_ranks
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import Dataset, load_dataset
from wan_trainer.data.loader import batches
from wan_trainer.data.stream import StreamOrder
from wan_trainer.data.unpack import unpack
from wan_trainer.media import fill_and_crop
from wan_trainer.types import PromptBatch, Sample, UserError

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


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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


class Telling(Dataset):
    """Says in each prompt how many threads torch has where it is read."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return dataclasses.replace(sample, prompt=str(torch.get_num_threads()))


def train(dataset_json: Path, wanted: DataSpec, log: Path) -> None:
    """A rank in a process group of its own that is told to stop by signals to that group, and first uses up
    its data. Its progress goes to `log`."""
    os.setsid()
    os.environ.pop("OMP_NUM_THREADS")
    stopped: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append("TERM"))
    signal.signal(signal.SIGINT, lambda *_: stopped.append("INT"))
    plain = load_dataset(wanted)
    stream = batches(
        Telling(plain._rows, plain.digests),
        wanted,
        batch_size=4,
        num_batches=40,
        start=0,
        local_prompts=[0],
        with_first_frames=True,
    )
    steps: list[int] = []
    threads: set[str] = set()
    with log.open("w", buffering=1) as out:
        for batch in stream:
            steps.append(batch.step)
            threads |= {sample.prompt for sample in batch.samples}
            out.write(json.dumps({"step": batch.step}) + "\n")
            if batch.step == 3:
                deadline = time.monotonic() + 60
                while len(stopped) < 2 and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)
            if batch.step == 11:
                break
        out.write(json.dumps({"steps": steps, "threads": sorted(threads), "stopped": sorted(stopped)}) + "\n")
        time.sleep(600)


@dataclass(frozen=True)
class Trainer:
    """A running `train`, whose worker does not run Python yet."""

    process: BaseProcess
    pid: int
    workers: list[int]
    log: Path

    def says(self, key: str, last: int | None = None) -> dict[str, Any]:
        """The line of its log that has `key`, with the value `last` if one is given."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.is_alive():
            for line in self.log.read_text().splitlines() if self.log.exists() else []:
                said = json.loads(line)
                if key in said and last in (None, said[key]):
                    return said
            time.sleep(0.02)
        raise AssertionError(f"the trainer said no {key}, exit code {self.process.exitcode}")


@pytest.fixture
def trainer(dataset_json: Path, spec: Spec, tmp_path: Path) -> Iterator[Trainer]:
    log = tmp_path / "log"
    wanted = spec(dataset_json, num_workers=1)
    (process,) = start_ranks(1, train, dataset_json, wanted, log).processes
    assert process.pid is not None
    try:
        deadline = time.monotonic() + 60
        while not (workers := worker_pids(process.pid)):
            assert time.monotonic() < deadline and process.is_alive()
            time.sleep(0.01)
        yield Trainer(process, process.pid, workers, log)
    finally:
        process.kill()
        process.join()


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.1)
    return [pid for pid in pids if is_alive(pid)]


def test_workers_outlive_signals_to_the_group_and_die_with_the_rank(trainer: Trainer) -> None:
    assert len(trainer.workers) == 1
    # A worker takes seconds to start, and must not hear a signal meanwhile.
    os.killpg(trainer.pid, signal.SIGTERM)
    trainer.says("step", 3)
    os.killpg(trainer.pid, signal.SIGINT)
    last = trainer.says("steps")
    assert last == {"steps": list(range(12)), "threads": ["1"], "stopped": ["INT", "TERM"]}
    assert worker_pids(trainer.pid) == trainer.workers
    trainer.process.kill()
    assert wait_until_gone(trainer.workers, 30) == []


def test_a_worker_whose_rank_dies_while_it_starts_ends(trainer: Trainer) -> None:
    time.sleep(0.5)  # by then it has read what it is to do, and imports
    trainer.process.kill()
    trainer.process.join()
    assert wait_until_gone(trainer.workers, 60) == []


FAILING_TRAINER = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import load_dataset
from wan_trainer.data.loader import batches

if __name__ == "__main__":
    spec = DataSpec(Path(sys.argv[1]), None, 5, 32, 32, 16, True, 42, int(sys.argv[3]), 1, True)
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


# Of two workers one dies, and the other is there to be waited for.
@pytest.mark.parametrize(
    ("who", "workers", "words"), [("consumer", 1, "no space left"), ("worker", 2, "DataLoader worker")]
)
def test_a_rank_that_fails_does_not_wait_for_workers_that_ignore_signals(
    dataset_json: Path, tmp_path: Path, who: str, workers: int, words: str
) -> None:
    """The interpreter ends its children with SIGTERM, which they ignore, and then joins them. A worker that
    died is noticed long before the loader's own time-out."""
    script = tmp_path / "trainer.py"
    script.write_text(FAILING_TRAINER)
    command = [sys.executable, str(script), str(dataset_json), who, str(workers)]
    # Coverage would be measured in each process, of what the other tests run in this one.
    environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 1
    assert words in done.stderr

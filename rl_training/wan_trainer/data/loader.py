"""Batches of prompts: what each step needs, read ahead by worker processes.

The position of the stream is the step. A batch carries all prompts of the step on every rank, and the first
frames of the prompts this rank samples. Target videos are never opened: a rule or judge reward reads them
by path.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from wan_trainer.config.specs import DataSpec
from wan_trainer.data.dataset import Dataset
from wan_trainer.data.first_frames import first_frame
from wan_trainer.data.stream import StreamOrder
from wan_trainer.types import PromptBatch, Sample, UserError

# A worker that reads nothing for so long hangs on a dead file system; the run then fails instead of
# standing still.
READ_TIMEOUT_S = 900
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Request:
    """One step, and the prompts whose first frames this rank needs."""

    step: int
    local_prompts: tuple[int, ...]


@dataclass(frozen=True)
class _Loaded:
    """A step as a worker sends it.

    Frames are NumPy arrays, which travel through a pipe: tensors would take shared memory, of which a
    container often has 64 MB, and a file descriptor each.
    """

    step: int
    epoch: int
    samples: tuple[Sample, ...]
    first_frames: dict[int, np.ndarray]


@dataclass(frozen=True)
class _Failure:
    """A UserError on its way from a worker: raised there, it would come back wrapped in a traceback."""

    problems: tuple[str, ...]


class _Steps(TorchDataset[_Loaded | _Failure]):
    """Maps a request to what it asks for; runs in the workers."""

    def __init__(self, dataset: Dataset, spec: DataSpec, batch_size: int, with_first_frames: bool) -> None:
        self._dataset = dataset
        self._order = StreamOrder(len(dataset), spec.shuffle_seed, spec.shuffle)
        self._height, self._width = spec.height, spec.width
        self._batch_size = batch_size
        self._with_first_frames = with_first_frames

    def __getitem__(self, request: _Request) -> _Loaded | _Failure:
        epoch, indices = self._order.batch(request.step, self._batch_size)
        try:
            samples = tuple(self._dataset[index] for index in indices)
            wanted = request.local_prompts if self._with_first_frames else ()
            frames = {
                prompt: first_frame(samples[prompt], self._height, self._width)
                for prompt in dict.fromkeys(wanted)
            }
        except UserError as error:
            return _Failure(error.problems)
        return _Loaded(request.step, epoch, samples, frames)


def batches(
    dataset: Dataset,
    spec: DataSpec,
    *,
    batch_size: int,
    num_batches: int,
    start: int,
    local_prompts: Sequence[int],
    with_first_frames: bool,
) -> Iterator[PromptBatch]:
    """The batches of steps start, start + 1, ..., num_batches - 1, in order.

    batch_size: prompts of a step over all ranks. num_batches: length of the whole run, not of what is left.
    local_prompts: indices of this rank's prompts in each batch. with_first_frames: false for a run that does
    not start from images, which opens none. Raises UserError when a file of a sample cannot be read.
    """
    assert batch_size > 0 and start >= 0, (batch_size, start)
    steps = _Steps(dataset, spec, batch_size, with_first_frames)
    prompts = tuple(local_prompts)
    assert all(0 <= prompt < batch_size for prompt in prompts), (prompts, batch_size)
    requests = [_Request(step, prompts) for step in range(start, num_batches)]
    return _iterate(steps, requests, spec)


def _iterate(steps: _Steps, requests: Sequence[_Request], spec: DataSpec) -> Iterator[PromptBatch]:
    workers = spec.num_workers
    loader = DataLoader(
        steps,
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_unchanged,
        prefetch_factor=spec.prefetch_factor if workers else None,
        persistent_workers=spec.persistent_workers and workers > 0,
        timeout=READ_TIMEOUT_S if workers else 0,
        worker_init_fn=partial(_outlive_the_process_group, os.getpid()),
        # Not fork: torch, gloo and NCCL have threads by now, and a forked child inherits their locks
        # without the threads that would release them. A spawned one starts from nothing.
        multiprocessing_context="spawn" if workers else None,
        # Its own generator: the loader draws a seed when it starts, which must not move the run's generator.
        generator=torch.Generator().manual_seed(0),
    )
    with _stop_signals_blocked():
        iterator = iter(loader)
    # Workers do not hear SIGTERM, with which an interpreter that ends by an error tells them to go: it would
    # wait for them for ever. The loader's own way of ending them must come before.
    end_workers = partial(_end_workers, iterator)
    atexit.register(end_workers)
    try:
        for loaded in iterator:
            if isinstance(loaded, _Failure):
                raise UserError(*loaded.problems)
            frames = {prompt: torch.from_numpy(frame) for prompt, frame in loaded.first_frames.items()}
            yield PromptBatch(loaded.step, loaded.epoch, loaded.samples, frames)
    finally:
        atexit.unregister(end_workers)
        end_workers()


def _end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of a loader's iterator, if it has any; may be called twice."""
    shutdown: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _unchanged(loaded: Any) -> Any:
    return loaded


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Processes started here are born with SIGINT and SIGTERM blocked, before their Python has run."""
    # It would be started with the first of them, and unblocks both signals when it is.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlive_the_process_group(rank_pid: int, worker: int) -> None:
    """A stop signal goes to the whole process group; the rank still needs its data to reach a safe point.

    Workers end when the rank closes them or is gone. The loader's own watchdog would not notice a rank that
    died while they started, which takes seconds: it compares with the parent it finds then.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_pid:
        os._exit(1)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)

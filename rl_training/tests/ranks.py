"""Run a function of a test module on several gloo ranks: real processes, real collectives."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    arguments: tuple[Any, ...],
    out: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch  # noqa: PLC0415 - only in the rank's process

    torch.set_num_threads(1)
    try:
        out.send((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        out.send((False, traceback.format_exc()))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        out.close()


@dataclass(frozen=True)
class Ranks:
    """Processes that `start_ranks` started; `ends` bring (True, result) or (False, traceback) of each."""

    processes: list[BaseProcess]
    ends: list[Connection]
    port: int


def start_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Ranks:
    """Start what `run_ranks` waits for."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rl_training.tests.warm"])
    port = free_port()
    ranks = Ranks([], [], port)
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=_enter, args=(function, rank, world, port, arguments, send), daemon=False
        )
        process.start()
        send.close()
        ranks.ends.append(receive)
        ranks.processes.append(process)
    return ranks


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Call `function(*arguments)` in `world` processes that find RANK, WORLD_SIZE and so on in their
    environment.

    Returns their results in rank order. A failure is raised with the rank's traceback, and so is a process
    that gave its result and does not end, as one does whose data workers do not. Results must
    be picklable; return numbers, lists or cloned CPU tensors' `.tolist()` rather than live tensors.
    """
    ranks = start_ranks(world, function, *arguments)
    processes, ends = ranks.processes, ranks.ends
    results: list[Any] = []
    failures: list[str] = []
    try:
        for rank, end in enumerate(ends):
            if not end.poll(timeout_s):
                failures.append(f"rank {rank}: no answer within {timeout_s:g} s")
                continue
            try:
                passed, value = end.recv()
            except EOFError:
                failures.append(f"rank {rank}: died without an answer")
                continue
            if passed:
                results.append(value)
            else:
                failures.append(f"rank {rank}:\n{value}")
    finally:
        for rank, process in enumerate(processes):
            process.join(timeout=30 if not failures else 1)
            if process.is_alive():
                process.kill()
                process.join()
                failures.append(f"rank {rank}: had to be killed")
    assert not failures, "\n".join(failures)
    return results

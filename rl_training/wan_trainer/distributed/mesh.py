"""Rendezvous and the device mesh: axes dp_replicate, dp_shard and tp always exist, size 1 allowed."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wan_trainer.distributed.exchange import Exchange
from wan_trainer.types import UserError, first_line

AXES = ("dp_replicate", "dp_shard", "tp")

# How long one collective may wait for its peers. Longer than any reward deadline: a rank that waits for its
# own scorers keeps the others waiting in the gather.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
# How long a rank that only scores may have nothing to do.
_IDLE = timedelta(days=30)

_ALONE = "start ranks with scripts/train/grpo_multinode.fish, or unset WORLD_SIZE and RANK to run one process"


# A process may join run after run (tests, notebooks). Each has its own keys in the store: in those of the run
# before, ranks would find the addresses of connections that are closed. The server stays up between them.
_runs = itertools.count()
_stores: list[Store] = []


class RendezvousError(RuntimeError):
    """Not every process of the run arrived in time."""


@dataclass(frozen=True)
class Mesh:
    """This process's place in the run.

    Ranks are global unless named local; dp ranks enumerate replicas and shards. Where a reward has ranks of
    its own, rank and world count those of this rank's role, and `exchange` reaches the others: the ranks that
    train come first in it.
    """

    device_mesh: DeviceMesh
    device: torch.device
    rank: int
    world: int
    local_rank: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    exchange: Exchange | None = None
    scores: bool = False


def init_mesh(
    device: str, timeout_s: float, *, tp: int = 1, dp_replicate: int = 1, reward_ranks: int = 0
) -> Mesh:
    """Join the run that torchrun describes in the environment, or a run of one process when there is none.

    reward_ranks: the last ranks, which score and do not train; tp and dp_replicate are of the others.
    Raises RendezvousError, naming the ranks that are missing, when they do not all arrive within `timeout_s`,
    and UserError when the environment does not describe a rank.
    """
    rank = environment_number("RANK", 0)
    world = environment_number("WORLD_SIZE", 1)
    local_rank = environment_number("LOCAL_RANK", 0)
    if rank >= world:
        raise UserError(f"RANK is {rank}, outside 0..{world - 1} (WORLD_SIZE is {world}); {_ALONE}")
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world > 1 and unset:
        raise UserError(f"WORLD_SIZE is {world} and {' and '.join(unset)} not set; {_ALONE}")
    actors = world - reward_ranks
    assert actors > 0 and actors % (tp * dp_replicate) == 0, (world, reward_ranks, tp, dp_replicate)

    target = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    store = _rendezvous(rank, world, timeout_s)
    exchange, scores = None, False
    if reward_ranks:
        everyone = dist.ProcessGroupGloo(PrefixStore("exchange", store), rank, world, _IDLE)
        exchange, scores = Exchange(everyone, rank, COLLECTIVE_TIMEOUT), rank >= actors  # pyright: ignore[reportArgumentType] - its stub lacks the base class
        store = PrefixStore("reward" if scores else "actor", store)
        rank, world = (rank - actors, reward_ranks) if scores else (rank, actors)
        tp, dp_replicate = (1, 1) if scores else (tp, dp_replicate)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    shape = (dp_replicate, world // (tp * dp_replicate), tp)
    return Mesh(
        device_mesh=init_device_mesh(target.type, shape, mesh_dim_names=AXES),
        device=target,
        rank=rank,
        world=world,
        local_rank=local_rank,
        dp_rank=rank // tp,
        dp_size=world // tp,
        tp_rank=rank % tp,
        tp_size=tp,
        exchange=exchange,
        scores=scores,
    )


def environment_number(name: str, default: int) -> int:
    """A number that torchrun sets for every rank; `default`, for a run of one process, when it is not set."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UserError(f"{name} is '{text}', a number that the launcher sets for each rank; {_ALONE}")
    return int(text) if text else default


def _rendezvous(rank: int, world: int, timeout_s: float) -> Store:
    """A store that every rank of the run has joined."""
    prefix = f"wan_trainer/{next(_runs)}"
    if world == 1:
        return HashStore()
    timeout = timedelta(seconds=timeout_s)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    # torchrun's agent on the first machine already serves a store there; without it rank 0 serves one.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # Not waiting for the workers here: the wait below can name the ranks that are missing.
        store: Store = TCPStore(
            host, port, world, serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"rank {rank} could not reach the rendezvous at {address} within {timeout_s:g} s "
            f"({first_line(error)}): "
            "check MASTER_ADDR and MASTER_PORT, that the first machine is running, and that no firewall is "
            "between"
        ) from error
    _stores.append(store)
    store = PrefixStore(prefix, store)
    store.set(f"arrived/{rank}", os.environ.get("GROUP_RANK", "0"))
    try:
        store.wait([f"arrived/{peer}" for peer in range(world)], timeout)
    except (dist.DistError, RuntimeError) as error:
        missing = [peer for peer in range(world) if not store.check([f"arrived/{peer}"])]
        raise RendezvousError(
            f"rank {rank} waited {timeout_s:g} s at {address} but ranks {missing} of {world} did not "
            "arrive: start the "
            "launcher on every machine with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and its own "
            "RANK, "
            "or raise --rendezvous_timeout_s"
        ) from error
    return store

"""The few collectives the trainer uses, over the data-parallel ranks or the whole run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast

import torch
import torch.distributed as dist

from wan_trainer.distributed.mesh import Mesh
from wan_trainer.types import Condition, UserError


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel ranks as an algorithm sees them (`algorithms.protocols.Communicator`)."""

    mesh: Mesh

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self.mesh.dp_size

    def gather_objects[T](self, value: T) -> list[T]:
        """The values of all data-parallel ranks, in rank order, on every rank."""
        return gather_objects(self.mesh, value)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> torch.Tensor:
        """A new tensor: the sum or maximum over the data-parallel ranks."""
        return all_reduce(self.mesh, tensor, op)


@dataclass(frozen=True)
class TensorParallelPeers:
    """The ranks of one tensor-parallel group as an algorithm sees them (`algorithms.protocols.Peers`)."""

    mesh: Mesh

    @property
    def leads(self) -> bool:
        """True on tp rank 0."""
        return self.mesh.tp_rank == 0

    def share(self, condition: Condition | None) -> Condition:
        """tp rank 0's condition, bit for bit, on every rank of the group.

        Encoders whose kernels are chosen by trial need not agree in the last bit, and peers must: the
        parameters that each of them holds whole would drift apart.
        """
        group = self.mesh.device_mesh.get_group("tp")
        header: list[dict[str, tuple[torch.Size, torch.dtype]] | None] = [None]
        own: dict[str, torch.Tensor] = {}
        if condition is not None:
            values = ((field.name, getattr(condition, field.name)) for field in fields(condition))
            own = {name: tensor.contiguous() for name, tensor in values if tensor is not None}
            header = [{name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}]
        dist.broadcast_object_list(header, group=group, group_src=0)
        assert header[0] is not None
        shared: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in header[0].items():
            if name not in own:
                own[name] = torch.empty(shape, dtype=dtype, device=self.mesh.device)
            dist.broadcast(own[name], group=group, group_src=0)
            shared[name] = own[name]
        return Condition(**shared)

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """tp rank 0's values, on every rank of the group.

        A backward pass on a GPU adds up in no fixed order, and what peers hold whole must not drift apart.
        """
        values = tensor.contiguous()
        dist.broadcast(values, group=self.mesh.device_mesh.get_group("tp"), group_src=0)
        return values


def gather_objects[T](mesh: Mesh, value: T) -> list[T]:
    """The values of all data-parallel ranks, in rank order, on every rank.

    Of tensor-parallel peers the first speaks for all; what the others send is dropped.
    """
    return gather_from_every_rank(mesh, value)[:: mesh.tp_size]


def gather_from_every_rank[T](mesh: Mesh, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of the run, tensor-parallel peers included, in rank order, on every rank.

    group: all ranks, in a group of its own when another thread than training asks.
    """
    gathered: list[T | None] = [None] * mesh.world
    dist.all_gather_object(gathered, value, group=group)
    values = [item for item in gathered if item is not None]
    assert len(values) == mesh.world
    return values


def all_reduce(mesh: Mesh, tensor: torch.Tensor, op: Literal["sum", "max"]) -> torch.Tensor:
    """A new tensor: the "sum" or "max" of `tensor` over the data-parallel ranks."""
    reduced = tensor.detach().clone()
    if op == "max":
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return reduced
    assert op == "sum", op
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return reduced / mesh.tp_size


def agree(mesh: Mesh, flag: bool) -> bool:
    """True on every rank as soon as one rank says so."""
    vote = torch.tensor(1.0 if flag else 0.0)
    return bool(all_reduce(mesh, vote.to(mesh.device), "max").item() > 0)


def barrier(mesh: Mesh) -> None:
    """Wait for every rank of the run."""
    agree(mesh, False)


def differences_from_first(mesh: Mesh, values: Mapping[str, str]) -> list[str]:
    """One line for every key whose value on some node differs from rank 0's; the same list on every rank."""
    gathered: list[tuple[str, dict[str, str]] | None] = [None] * mesh.world
    dist.all_gather_object(gathered, (socket.gethostname(), dict(values)))
    first = gathered[0]
    assert first is not None
    lines: list[str] = []
    for rank, entry in enumerate(gathered):
        assert entry is not None
        host, theirs = entry
        for key in sorted(first[1].keys() | theirs.keys()):
            mine = first[1].get(key, "absent")
            other = theirs.get(key, "absent")
            if mine != other:
                lines.append(f"{key}: rank {rank} on {host} has {other}, rank 0 on {first[0]} has {mine}")
    return lines


def require_same_files(mesh: Mesh, key: str, digests: Mapping[str, str]) -> None:
    """Raise SharedUserError when the files behind the configuration key `key` differ between nodes."""
    lines = differences_from_first(
        mesh, {f"{key}: the content of {name}": digest for name, digest in digests.items()}
    )
    if lines:
        raise SharedUserError(*(f"{line}: give every node the same files" for line in lines))


class SharedUserError(UserError):
    """A UserError that every rank of the run raises at the same place; one of each machine need print it."""


def from_first_rank[T](mesh: Mesh, function: Callable[[], T]) -> T:
    """What `function()` returns on rank 0, on every rank.

    Raises SharedUserError on every rank when it raises a UserError there.
    """
    value: T | None = None
    problems: tuple[str, ...] = ()
    if mesh.rank == 0:
        try:
            value = function()
        except UserError as error:
            problems = error.problems
    outcome: list[object] = [value, problems]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1]:
        raise SharedUserError(*cast(tuple[str, ...], outcome[1]))
    return cast(T, outcome[0])


def on_every_rank[T](mesh: Mesh, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `function()` returns on this rank; it must not communicate. group: as in `gather_from_every_rank`.

    Raises SharedUserError on every rank as soon as one rank raises a UserError: the others would otherwise
    wait for it in the next collective.
    """
    value: T | None = None
    problems: tuple[str, ...] = ()
    try:
        value = function()
    except UserError as error:
        problems = error.problems
    everywhere: list[tuple[str, ...]] = [()] * mesh.world
    dist.all_gather_object(everywhere, problems, group=group)
    lines = dict.fromkeys(line for part in everywhere for line in part)
    if lines:
        raise SharedUserError(*lines)
    return cast(T, value)

"""The rendezvous address: it resolves, node 0 can open the port, the other nodes have a route to it."""

from __future__ import annotations

import os
import socket

from wan_trainer.preflight.finding import Finding
from wan_trainer.preflight.rollcall import listen


def check_rendezvous(address: str, port: int, nodes: int, rank: int) -> list[Finding]:
    """MASTER_ADDR and MASTER_PORT as this node sees them; whether node 0 answers is for the roll call."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        line = f"MASTER_ADDR {address} does not resolve ({error})"
        return [Finding(f"{line}: set an address or a name that every node can resolve")]
    if rank == 0:
        return [*_check_port(port), *(_check_own_address(address, found) if nodes > 1 else [])]
    return _check_route(address, found)


def free_port() -> int:
    """A port that is free now, to name in a remedy."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _check_port(port: int) -> list[Finding]:
    try:
        listen(port).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        line = f"MASTER_PORT {port} cannot be opened ({reason})"
        return [Finding(f"{line}: set MASTER_PORT={free_port()}, which is free, on all nodes")]
    return []


def _check_own_address(address: str, found: list[tuple]) -> list[Finding]:
    for family, _, _, _, target in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((target[0], 0))
            except OSError:
                continue
            return []
    line = (
        f"MASTER_ADDR {address} is {found[0][4][0]}, no address of this machine, but RANK is 0 here: set it "
        "to the address of the machine with RANK 0 (behind address translation this may be right)"
    )
    return [Finding(line, "warning")]


def _check_route(address: str, found: list[tuple]) -> list[Finding]:
    reason = ""
    for family, _, _, _, target in found:
        # Connecting a datagram socket asks the kernel for a route and sends nothing.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            return []
    return [
        Finding(f"MASTER_ADDR {address} has no route from here ({reason}): check the network of this node")
    ]

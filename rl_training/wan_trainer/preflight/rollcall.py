"""The roll call of the machines, before torchrun starts on any of them.

torchrun would wait too, but its time-out ends in a traceback that does not say which machine is missing, and
each machine would have loaded the model before a differing configuration is noticed. Here node 0 listens on
MASTER_PORT, the others report to it, and all of them get the same verdict: go on, or the lines that say who
is missing or differs. One JSON object a line in each direction; the standard library is enough.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_POLL_S = 0.25
_MAX_LINE = 1 << 20
# How long node 0 waits for a connected peer to say who it is, and for peers to hang up after the verdict.
_PEER_S = 10.0
# How much longer than node 0's own wait the others listen for its verdict.
_GRACE_S = 15.0


@dataclass(frozen=True)
class NodeReport:
    """What one machine says about itself. `values` are its config values by key, in JSON types."""

    node: int
    host: str
    nodes: int
    nproc: int
    version: str
    values: Mapping[str, object] = field(default_factory=dict[str, object])


def differences(mine: NodeReport, other: NodeReport) -> list[str]:
    """One line per setting in which `other` differs from node 0, naming the node and the key."""
    who = f"node {other.node} ({other.host})"
    pairs: dict[str, tuple[object, object]] = {
        "WORLD_SIZE": (mine.nodes, other.nodes),
        "--nproc": (mine.nproc, other.nproc),
        "the version of the code": (mine.version, other.version),
    }
    for key in sorted(mine.values.keys() | other.values.keys()):
        pairs[key] = (mine.values.get(key), other.values.get(key))
    return [
        f"{who} differs from node {mine.node} ({mine.host}) in {key}: {theirs!r} instead of {ours!r}; "
        "start every node with the same configuration"
        for key, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def call_roll(report: NodeReport, address: str, port: int, timeout_s: float) -> list[str]:
    """Wait for every machine of the run; empty when all are there and agree, else what is wrong.

    Node 0 waits `timeout_s` for the others; they wait as long for node 0 and then for its verdict.
    """
    if report.nodes == 1:
        return []
    # Through JSON once, so that a tuple here equals the list that arrives from elsewhere.
    report = NodeReport(**json.loads(json.dumps(asdict(report))))
    if report.node == 0:
        return _host(report, port, timeout_s)
    return _join(report, address, port, timeout_s)


def listen(port: int) -> socket.socket:
    """A listening socket as torchrun's store will open one: all interfaces, both address families.

    Raises OSError when the port is taken.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
            )
        except OSError as error:
            if not _no_ipv6(error):
                raise
    return socket.create_server(("0.0.0.0", port), backlog=512)


def _no_ipv6(error: OSError) -> bool:
    # Containers often have IPv6 compiled in and no address: bind then says "cannot assign", never "in use".
    return "in use" not in str(error) and "denied" not in str(error).lower()


def _host(report: NodeReport, port: int, timeout_s: float) -> list[str]:
    try:
        server = listen(port)
    except OSError as error:
        return [
            f"MASTER_PORT {port} cannot be opened on node 0 ({error}): set it to a free port on all nodes"
        ]
    peers: dict[int, tuple[NodeReport, socket.socket]] = {}
    with server:
        problems = _gather(report, server, peers, time.monotonic() + timeout_s)
        missing = [str(node) for node in range(1, report.nodes) if node not in peers]
        if missing and not problems:
            problems = [_missing_line(missing, report.nodes, timeout_s)]
        for peer, _ in peers.values():
            problems += differences(report, peer)
        for _, connection in peers.values():
            _answer(connection, problems)
    return problems


def _gather(
    report: NodeReport,
    server: socket.socket,
    peers: dict[int, tuple[NodeReport, socket.socket]],
    deadline: float,
) -> list[str]:
    """Fill `peers` until all are there or the deadline has passed; two nodes of one number end it at once."""
    while len(peers) < report.nodes - 1 and (left := deadline - time.monotonic()) > 0:
        _stop_when_orphaned()
        server.settimeout(min(_POLL_S, left))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        peer = _read_report(connection, min(_PEER_S, left))
        if peer is None:
            connection.close()  # a port scanner or a health probe, not one of ours
            continue
        known = peers.get(peer.node)
        if known is not None and not _hung_up(known[1]):
            hosts = f"{known[0].host} and {peer.host}"
            line = f"node {peer.node} reported twice, from {hosts}: give each its own RANK"
            _answer(connection, [line])
            return [line]
        peers[peer.node] = (peer, connection)
    return []


def _hung_up(connection: socket.socket) -> bool:
    """True when the launcher at the other end is gone, for example because it was started anew."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _join(report: NodeReport, address: str, port: int, timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    hello = json.dumps(asdict(report)).encode() + b"\n"
    reached = False
    while time.monotonic() < deadline:
        _stop_when_orphaned()
        try:
            with socket.create_connection((address, port), timeout=_PEER_S) as connection:
                connection.sendall(hello)
                reached = True
                verdict = _read_line(connection, deadline + _GRACE_S)
        except OSError:
            verdict = None
        if verdict is not None and isinstance(verdict.get("problems"), list):
            return [str(line) for line in verdict["problems"]]
        # Nobody listens yet, or node 0 hung up without a verdict because it was restarted: try again.
        time.sleep(_POLL_S)
    what = "answered without a verdict" if reached else "did not answer"
    return [
        f"node 0 at {address}:{port} {what} within rendezvous_timeout_s {timeout_s:g}: start it, or look at "
        "its preflight; check MASTER_ADDR, MASTER_PORT and the firewall, or raise rendezvous_timeout_s"
    ]


def _missing_line(missing: list[str], nodes: int, timeout_s: float) -> str:
    plural = "s" if len(missing) > 1 else ""
    return (
        f"node{plural} {', '.join(missing)} of {nodes} did not report within rendezvous_timeout_s "
        f"{timeout_s:g}: start the launcher there with RANK={missing[0]}, look at its preflight, or raise "
        "rendezvous_timeout_s"
    )


def _read_report(connection: socket.socket, timeout_s: float) -> NodeReport | None:
    message = _read_line(connection, time.monotonic() + timeout_s)
    if message is None or message.keys() != NodeReport.__dataclass_fields__.keys():
        return None
    report = NodeReport(**message)
    return report if isinstance(report.node, int) and report.node > 0 else None


def _read_line(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """One JSON object, or None when the peer hangs up, sends something else or takes too long."""
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > _MAX_LINE:
            return None
        _stop_when_orphaned()
        connection.settimeout(min(_POLL_S, left))
        try:
            block = connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return None
        if not block:
            return None
        data += block
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _answer(connection: socket.socket, problems: list[str]) -> None:
    with connection:
        try:
            connection.settimeout(_PEER_S)
            connection.sendall(json.dumps({"problems": problems}).encode() + b"\n")
            # The peer hangs up first: a connection closed here would linger on the port torchrun needs next.
            connection.recv(1)
        except OSError:
            return


_PARENT = os.getppid()


def _stop_when_orphaned() -> None:
    """End with the launcher: a shell that was killed leaves its foreground child behind."""
    if os.getppid() != _PARENT:
        raise KeyboardInterrupt

"""The roll call of the nodes over real loopback sockets, one thread a node."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from wan_trainer.preflight.network import free_port
from wan_trainer.preflight.rollcall import NodeReport, call_roll, differences, listen


def report(node: int, nodes: int = 2, **values: object) -> NodeReport:
    return NodeReport(node, f"host{node}", nodes, nproc=4, version="abc", values=values)


def roll(*reports: NodeReport, timeout_s: float = 10.0, port: int | None = None) -> list[list[str]]:
    """Each node's verdict."""
    number = port or free_port()
    with ThreadPoolExecutor(len(reports)) as pool:
        futures: list[Future[list[str]]] = [
            pool.submit(call_roll, each, "127.0.0.1", number, timeout_s) for each in reports
        ]
        return [future.result() for future in futures]


def test_equal_nodes_go_on_and_the_port_is_free_again():
    port = free_port()
    reports = [report(node, 3, learning_rate=1e-5, adam_betas=(0.9, 0.95)) for node in (2, 0, 1)]
    assert roll(*reports, port=port) == [[], [], []]
    # torchrun opens the same port next.
    listen(port).close()


def test_one_node_needs_nobody():
    assert call_roll(report(0, 1), "127.0.0.1", 1, 0.0) == []


def test_a_node_that_differs_is_named_with_the_key_on_every_node():
    verdicts = roll(report(0, seed=1, lr=0.1), report(1, seed=2, lr=0.1))
    assert verdicts[0] == verdicts[1]
    (line,) = verdicts[0]
    assert "node 1 (host1)" in line and "in seed" in line and "2 instead of 1" in line


def test_a_key_that_one_node_does_not_have_is_a_difference():
    (line,) = differences(report(0, seed=1), report(1, seed=1, extra=3))
    assert "in extra" in line


def test_another_number_of_processes_is_a_difference():
    other = NodeReport(1, "host1", 2, nproc=8, version="abc")
    (line,) = roll(report(0), other)[0]
    assert "--nproc" in line and "8 instead of 4" in line


def test_node_zero_names_the_missing_nodes_in_time():
    started = time.monotonic()
    verdicts = roll(report(0, 4), report(2, 4), timeout_s=1.0)
    assert time.monotonic() - started < 5
    assert verdicts[0] == verdicts[1]
    (line,) = verdicts[0]
    assert "nodes 1, 3 of 4" in line and "rendezvous_timeout_s 1" in line


def test_a_node_names_the_missing_node_zero_in_time():
    started = time.monotonic()
    (line,) = call_roll(report(1), "127.0.0.1", free_port(), 1.0)
    assert 0.9 < time.monotonic() - started < 5
    assert "node 0" in line and "did not answer" in line and "rendezvous_timeout_s 1" in line


def test_two_nodes_of_one_number_are_refused():
    verdicts = roll(report(0, 3), report(1, 3), report(1, 3))
    assert all("node 1 reported twice" in verdict[0] for verdict in verdicts)


def test_strangers_at_the_port_are_ignored():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        node0 = pool.submit(call_roll, report(0), "127.0.0.1", port, 10.0)
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"", b"[1, 2]\n", b'{"node": 1}\n'):
            send_when_open(port, message)
        node1 = pool.submit(call_roll, report(1), "127.0.0.1", port, 10.0)
        assert node0.result() == node1.result() == []


def test_a_node_that_was_started_anew_takes_the_place_of_its_first_start():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        node0 = pool.submit(call_roll, report(0, 3), "127.0.0.1", port, 15.0)
        fields = {"node": 1, "host": "host1", "nodes": 3, "nproc": 4, "version": "abc", "values": {}}
        send_when_open(port, json.dumps(fields).encode() + b"\n")
        time.sleep(0.3)
        others = [pool.submit(call_roll, report(node, 3), "127.0.0.1", port, 15.0) for node in (1, 2)]
        assert [node0.result(), *(other.result() for other in others)] == [[], [], []]


def test_an_occupied_port_is_one_line():
    with socket.create_server(("", 0)) as taken:
        (line,) = call_roll(report(0), "127.0.0.1", taken.getsockname()[1], 1.0)
    assert "MASTER_PORT" in line


def send_when_open(port: int, message: bytes) -> None:
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(message)
            return
        except ConnectionRefusedError:
            time.sleep(0.02)
    pytest.fail("node 0 never listened")

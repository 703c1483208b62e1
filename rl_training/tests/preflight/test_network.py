"""Rendezvous checks against real sockets."""

from __future__ import annotations

import socket

from wan_trainer.preflight.checks import check_network
from wan_trainer.preflight.network import check_rendezvous, free_port


def test_a_free_port_of_this_machine_passes():
    for address in ("127.0.0.1", "localhost"):
        assert check_rendezvous(address, free_port(), nodes=2, rank=0) == []


def test_an_occupied_port_names_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = check_rendezvous("127.0.0.1", port, nodes=1, rank=0)
    assert problem.kind == "error"
    assert str(port) in problem.message
    offered = int(problem.message.split("MASTER_PORT=")[1].split(",")[0])
    socket.create_server(("127.0.0.1", offered)).close()


def test_a_name_that_does_not_resolve_is_one_line():
    for rank in (0, 1):
        (problem,) = check_rendezvous("no-such-host.invalid", 29500, nodes=2, rank=rank)
        assert "does not resolve" in problem.message


def test_a_refused_connection_is_fine_for_other_nodes():
    assert check_rendezvous("127.0.0.1", free_port(), nodes=2, rank=1) == []


def test_a_foreign_address_on_node_zero_is_a_warning():
    # TEST-NET-1 is never an address of a machine.
    (problem,) = check_rendezvous("192.0.2.7", free_port(), nodes=2, rank=0)
    assert problem.kind == "warning" and "192.0.2.7" in problem.message


def test_no_route_is_an_error():
    # A datagram socket may not send to the broadcast address unless asked: the kernel has no route for us.
    found = check_rendezvous("255.255.255.255", 29500, nodes=2, rank=1)
    assert [problem.kind for problem in found] == ["error"]


def test_a_bad_port_in_the_environment_is_one_line():
    (problem,) = check_network(1, 0, {"MASTER_PORT": "abc"})
    assert "MASTER_PORT" in problem.message

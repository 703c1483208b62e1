"""The differentiable rewards of a ReFL run, on the ranks that train or on ranks of their own."""

from __future__ import annotations

import signal
from contextlib import suppress

from wan_trainer.config.specs import RolesSpec, RunSpec
from wan_trainer.distributed.mesh import Mesh
from wan_trainer.rewards.differentiable import build_differentiable
from wan_trainer.rewards.remote import Close, RemoteReward, serve_rewards, wait_until_loaded
from wan_trainer.topology import Topology
from wan_trainer.training.first_failure import first_failure
from wan_trainer.training.start import Start, shared_values
from wan_trainer.types import DifferentiableReward, RewardContext, RunFailure

REWARD, MONITOR = "roles.reward", "roles.monitor"


def differentiable_rewards(start: Start, roles: RolesSpec, mesh: Mesh) -> dict[str, DifferentiableReward]:
    """The rewards of a rank that trains, by the configuration key that names them.

    Raises UserError when one cannot be used, also where it is loaded by a rank of its own.
    """
    remote = _placed(roles, with_actor=False)
    built = _build(start.spec, roles, mesh, _placed(roles, with_actor=True))
    if remote:
        assert mesh.exchange is not None
        server = server_of(mesh.rank, start.topology)
        wait_until_loaded(mesh.exchange, server, shared_values(start))
        built |= {name: RemoteReward(mesh.exchange, server, name) for name in remote}
    return built


def score_for_actors(mesh: Mesh, start: Start) -> int:
    """The whole life of a rank of the reward: load it, score, and end when those that train end."""
    refl, topology = start.spec.refl, start.topology
    assert refl is not None and mesh.exchange is not None
    # Those that train decide when a signal ends the run, and score until then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    own = mesh.exchange.rank
    try:
        return serve_rewards(
            mesh.exchange,
            [rank for rank in range(topology.world) if server_of(rank, topology) == own],
            shared_values(start),
            lambda: _build(start.spec, refl.roles, mesh, _placed(refl.roles, with_actor=False)),
            mesh.device,
        )
    except RuntimeError as error:
        # Usually one that trains is gone, and its own line comes first.
        raise RunFailure(first_failure(start.spec.output.output_dir, own, error)) from error


def close_scoring(mesh: Mesh, topology: Topology, status: int) -> None:
    """Let the ranks of the reward end with `status`."""
    if mesh.exchange is None:
        return
    # Where one is gone already, that is why the run ends, and has been said.
    with suppress(RuntimeError):
        mesh.exchange.send(server_of(mesh.rank, topology), Close(status))


def server_of(rank: int, topology: Topology) -> int:
    """The rank, in the exchange, that scores for the training rank `rank`: equal, contiguous shares."""
    return topology.world + rank * topology.reward_ranks // topology.world


def _placed(roles: RolesSpec, *, with_actor: bool) -> list[str]:
    """The rewards on the ranks that train, or on their own."""
    shared = {REWARD: roles.reward_ranks == 0}
    if roles.monitor is not None:
        shared[MONITOR] = roles.reward_ranks == 0 or not roles.monitor_with_reward
    return [name for name, here in shared.items() if here == with_actor]


def _build(spec: RunSpec, roles: RolesSpec, mesh: Mesh, names: list[str]) -> dict[str, DifferentiableReward]:
    context = RewardContext(mesh.device, spec.data.fps)
    return {name: build_differentiable(name, roles.targets[name], context) for name in names}

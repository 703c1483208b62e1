"""A differentiable reward on ranks of its own: pixels travel there, dR/dpixels travels back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wan_trainer.distributed.exchange import Exchange
from wan_trainer.types import (
    DifferentiableReward,
    DifferentiableScores,
    Sample,
    UserError,
    first_line,
)


@dataclass(frozen=True)
class Ask:
    """Whether the rewards are loaded."""


@dataclass(frozen=True)
class Ready:
    """They are, or `problems`, lines for the user, say why not."""

    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """Score the pixels beside this message. differentiate: their gradient will be asked for."""

    name: str
    samples: tuple[Sample, ...]
    differentiate: bool


@dataclass(frozen=True)
class Scored:
    """The verdicts; failure: what the reward raised instead."""

    components: Mapping[str, list[float]]
    failure: str | None = None


@dataclass(frozen=True)
class Differentiate:
    """Send the gradient of the pixels scored last, for the gradient of the rewards beside this message."""


@dataclass(frozen=True)
class Close:
    """No more is to be scored; status: with which the run ends."""

    status: int


class RemoteRewardError(RuntimeError):
    """The reward failed on its own rank."""


class RemoteReward:
    """A `DifferentiableReward` whose work is done by rank `server` of the exchange.

    name: which of the rewards that the server holds.
    """

    def __init__(self, exchange: Exchange, server: int, name: str) -> None:
        self._exchange = exchange
        self._server = server
        self._name = name

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """See `types.DifferentiableReward`. Backward asks the server once; score again before another."""
        components: dict[str, torch.Tensor] = {}

        def ask(pixels: torch.Tensor, differentiate: bool) -> torch.Tensor:
            message = Score(self._name, tuple(samples), differentiate)
            self._exchange.send(self._server, message, pixels)
            _, scored, reward = self._exchange.receive(self._server)
            assert isinstance(scored, Scored), scored
            if scored.failure is not None or reward is None:
                raise RemoteRewardError(f"{self._name} failed on its own rank: {scored.failure}")
            components.update({name: torch.tensor(values) for name, values in scored.components.items()})
            return reward.to(pixels.device)

        def differentiated(gradient: torch.Tensor) -> torch.Tensor:
            self._exchange.send(self._server, Differentiate(), gradient)
            _, scored, pixels = self._exchange.receive(self._server)
            assert isinstance(scored, Scored), scored
            if scored.failure is not None or pixels is None:
                raise RemoteRewardError(f"{self._name} failed on its own rank: {scored.failure}")
            return pixels.to(gradient.device)

        reward: Any = _Asked.apply(videos, ask, differentiated)
        return DifferentiableScores(reward, components)


class _Asked(torch.autograd.Function):
    """The rewards of pixels, and the pixels' gradient, both computed elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        videos: torch.Tensor,
        ask: Callable[[torch.Tensor, bool], torch.Tensor],
        differentiated: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.differentiated = differentiated
        return ask(videos, ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.differentiated(gradients[0]), None, None


def wait_until_ready(exchange: Exchange, server: int) -> None:
    """Raise UserError with what keeps the server from scoring."""
    exchange.send(server, Ask())
    _, ready, _ = exchange.receive(server)
    assert isinstance(ready, Ready), ready
    if ready.problems:
        raise UserError(*ready.problems)


def serve_rewards(
    exchange: Exchange,
    clients: Sequence[int],
    build: Callable[[], Mapping[str, DifferentiableReward]],
    device: torch.device,
) -> int:
    """Load the rewards and score for `clients` until each has closed; the exit status of the run.

    It sends answers only, so that a client may close whenever it has none to come.
    """
    ready = Ready()
    rewards: Mapping[str, DifferentiableReward] = {}
    try:
        rewards = build()
    except UserError as error:
        ready = Ready(error.problems)
    held: dict[int, _Held] = {}
    open_clients, status = set(clients), 0
    while open_clients:
        client, message, tensor = exchange.receive()
        if isinstance(message, Close):
            open_clients.discard(client)
            status = max(status, message.status)
            continue
        if isinstance(message, Ask):
            exchange.send(client, ready)
            continue
        try:
            if isinstance(message, Score):
                assert tensor is not None
                held[client] = _score(rewards[message.name], message, tensor.to(device))
                reply, answer = Scored(held[client].components), held[client].reward.detach()
            else:
                assert isinstance(message, Differentiate) and tensor is not None, message
                reply, answer = Scored({}), held.pop(client).gradient(tensor.to(device))
        except Exception as error:  # noqa: BLE001 - the reward is the user's code; its client says what it was
            reply, answer = Scored({}, f"{type(error).__name__}: {first_line(error)}"), None
        exchange.send(client, reply, answer)
    return status


@dataclass(frozen=True)
class _Held:
    """The graph of what one client had scored last."""

    pixels: torch.Tensor
    reward: torch.Tensor
    components: Mapping[str, list[float]]

    def gradient(self, of_reward: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(self.reward, of_reward.to(self.reward.dtype))
        assert self.pixels.grad is not None
        return self.pixels.grad


def _score(reward: DifferentiableReward, message: Score, pixels: torch.Tensor) -> _Held:
    pixels.requires_grad_(message.differentiate)
    with torch.set_grad_enabled(message.differentiate):
        scores = reward.score(pixels, message.samples)
    components = {name: [float(value) for value in values] for name, values in scores.components.items()}
    return _Held(pixels, scores.reward, components)

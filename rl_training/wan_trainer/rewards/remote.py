"""A differentiable reward on ranks of its own: pixels travel there, dR/dpixels travels back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wan_trainer.distributed.exchange import Exchange, Inbox
from wan_trainer.types import (
    DifferentiableReward,
    DifferentiableScores,
    Sample,
    UserError,
    first_line,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """Whether the rewards are loaded. values: what must be the same on both sides, by name."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class Loaded:
    """They are, or `problems`, lines for the user, say why not."""

    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """Score the pixels beside this message. differentiate: their gradient is asked for next."""

    name: str
    samples: tuple[Sample, ...]
    differentiate: bool


@dataclass(frozen=True)
class Answer:
    """The components of the rewards, or the gradient, beside this message; or why there are none.

    problems: lines that the user can mend. failure: anything else that the reward raised.
    """

    components: Mapping[str, list[float]] = field(default_factory=dict[str, list[float]])
    problems: tuple[str, ...] = ()
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

    name: which of the rewards that the server holds. What has a gradient is differentiated before anything
    else is asked: the server holds one graph.
    """

    def __init__(self, exchange: Exchange, server: int, name: str) -> None:
        self._exchange = exchange
        self._server = server
        self._name = name

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """See `types.DifferentiableReward`. Raises what the reward raised: UserError or RemoteRewardError."""
        components: dict[str, torch.Tensor] = {}

        def ask(pixels: torch.Tensor, differentiate: bool) -> torch.Tensor:
            answer, reward = self._answer(Score(self._name, tuple(samples), differentiate), pixels)
            components.update({name: torch.tensor(values) for name, values in answer.components.items()})
            return reward

        def differentiated(gradient: torch.Tensor) -> torch.Tensor:
            return self._answer(Differentiate(), gradient)[1]

        reward: Any = _Asked.apply(videos, ask, differentiated)
        return DifferentiableScores(reward, components)

    def _answer(self, message: object, tensor: torch.Tensor) -> tuple[Answer, torch.Tensor]:
        self._exchange.send(self._server, message, tensor)
        _, answer, result = self._exchange.receive(self._server)
        assert isinstance(answer, Answer), answer
        if answer.problems:
            raise UserError(*answer.problems)
        if answer.failure is not None or result is None:
            raise RemoteRewardError(f"{self._name} failed on its own rank: {answer.failure}")
        return answer, result.to(tensor.device)


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


def wait_until_loaded(exchange: Exchange, server: int, values: Mapping[str, str]) -> None:
    """Raise UserError with what keeps the server from scoring, or differs there from `values`."""
    exchange.send(server, Ask(values))
    _, loaded, _ = exchange.receive(server)
    assert isinstance(loaded, Loaded), loaded
    if loaded.problems:
        raise UserError(*loaded.problems)


def serve_rewards(
    exchange: Exchange,
    clients: Sequence[int],
    values: Mapping[str, str],
    build: Callable[[], Mapping[str, DifferentiableReward]],
    device: torch.device,
) -> int:
    """Load the rewards and score for `clients` until each has closed; the exit status of the run.

    It sends answers only, so that a client may close whenever it has none to come. Raises RuntimeError when a
    client is gone without closing.
    """
    inbox = Inbox(exchange, clients, Close)
    problems: tuple[str, ...] = ()
    rewards: Mapping[str, DifferentiableReward] = {}
    try:
        rewards = build()
    except UserError as error:
        problems = error.problems
    open_clients, status = set(clients), 0
    while open_clients:
        client, message, tensor = inbox.next()
        if isinstance(message, Close):
            open_clients.discard(client)
            status = max(status, message.status)
        elif isinstance(message, Ask):
            other = [name for name in values if message.values.get(name) != values[name]]
            differing = tuple(
                f"{name}: differs on the rank of the reward; start every node with the same configuration"
                for name in other
            )
            exchange.send(client, Loaded(problems + differing))
        else:
            assert isinstance(message, Score) and tensor is not None, message
            status = max(
                status, _serve(exchange, inbox, open_clients, client, message, rewards, tensor.to(device))
            )
    inbox.close()
    return status


def _serve(
    exchange: Exchange,
    inbox: Inbox,
    open_clients: set[int],
    client: int,
    message: Score,
    rewards: Mapping[str, DifferentiableReward],
    pixels: torch.Tensor,
) -> int:
    """One request and the gradient that follows; the status with which the client closed instead, or 0."""
    pixels.requires_grad_(message.differentiate)
    scored: list[DifferentiableScores] = []

    def score() -> tuple[Answer, torch.Tensor]:
        with torch.set_grad_enabled(message.differentiate):
            scored.append(rewards[message.name].score(pixels, message.samples))
        components = scored[0].components.items()
        return Answer({name: [float(value) for value in values] for name, values in components}), scored[
            0
        ].reward

    exchange.send(client, *_attempt(score))
    if not scored or not message.differentiate:
        return 0
    # The client asks for nothing else in between, and others wait: one graph at a time.
    _, then, gradient = inbox.next(client)
    if isinstance(then, Close):
        open_clients.discard(client)
        return then.status
    assert isinstance(then, Differentiate) and gradient is not None, then

    def differentiate() -> tuple[Answer, torch.Tensor]:
        torch.autograd.backward(scored[0].reward, gradient.to(scored[0].reward))
        if pixels.grad is None:
            raise UserError(
                f"{message.name}: its gradient does not reach the pixels; compute the reward from the videos"
            )
        return Answer(), pixels.grad

    exchange.send(client, *_attempt(differentiate))
    return 0


def _attempt(work: Callable[[], tuple[Answer, torch.Tensor]]) -> tuple[Answer, torch.Tensor | None]:
    """What the reward, the user's code, gives or raises."""
    try:
        answer, tensor = work()
        return answer, tensor.detach()
    except UserError as error:
        return Answer(problems=error.problems), None
    except Exception as error:  # noqa: BLE001 - the client says what it was
        _log.exception("the reward failed")
        return Answer(failure=f"{type(error).__name__}: {first_line(error)}"), None

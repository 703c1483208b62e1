"""Small real parts around GRPO: a trainable velocity field, a decoder, rewards, an updater."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from wan_trainer.algorithms.colocated import ColocatedRollouts
from wan_trainer.algorithms.grpo import Grpo
from wan_trainer.config.specs import GrpoSpec, SamplerSpec
from wan_trainer.sampling.schedule import sigmas
from wan_trainer.types import (
    Condition,
    PromptBatch,
    RewardRequest,
    RewardResult,
    RewardTable,
    Sample,
)

SHAPE = (3, 2, 4, 4)
SAMPLER = SamplerSpec(
    kind="flowcps",
    eta=0.7,
    eta_range=None,
    num_steps=6,
    flow_shift=3.0,
    cfg_scale=1.0,
    share_group_init_noise=True,
    replay_ratio=0.6,
    trajectory_dtype="float32",
    seed=5,
)
GRPO = GrpoSpec(
    group_size=4,
    sample_batch_size=4,
    train_sample_batch_size=4,
    clip_range=1e-4,
    stale_clip_range=1e-2,
    depth=0,
    kl_coeff=0.0,
    adv_clip_max=5.0,
    updates_per_rollout=1,
    ratio_gate_tolerance=1e-5,
    sync_each_backward=False,
    reward_max_error_rate=0.2,
    fail_on_reward_error=False,
)


class Field(nn.Module):
    """A velocity field: per expert a channel mixing and a text projection; the boundary is at sigma 0.9."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, generator=generator))

        self.mix = nn.ParameterDict({name: draw(3, 3) for name in ("transformer", "transformer_2")})
        self.text = nn.ParameterDict({name: draw(3, 5) for name in ("transformer", "transformer_2")})
        self.frozen: set[str] = set()
        self.calls: list[tuple[float, int, bool]] = []
        self.sigma_offset = 0.0

    def expert_for(self, sigma: float) -> str:
        return "transformer" if sigma >= 0.9 else "transformer_2"

    def freeze(self, expert: str) -> None:
        """Leave an expert out of training."""
        self.frozen.add(expert)
        for weights in (self.mix, self.text):
            weights[expert].requires_grad_(False)

    def trains_at(self, sigma: float) -> bool:
        return self.expert_for(sigma) not in self.frozen

    def velocity(self, x_t: torch.Tensor, sigma: float, condition: Condition) -> torch.Tensor:
        self.calls.append((sigma, len(x_t), torch.is_grad_enabled()))
        assert self.training == torch.is_grad_enabled()
        expert = self.expert_for(sigma)
        if torch.is_grad_enabled():
            sigma += self.sigma_offset
        text = condition.text.mean(1) @ self.text[expert].T
        mixed = torch.einsum("dc,ncfhw->ndfhw", self.mix[expert], x_t)
        return torch.tanh(mixed + text[:, :, None, None, None]) * (0.5 + sigma) + x_t


@dataclass
class Events:
    """What happened, in order."""

    log: list[str] = field(default_factory=list)
    tables: list[RewardTable] = field(default_factory=list)

    def wants_videos(self, batch: PromptBatch) -> bool:
        return True

    def videos(self, batch: PromptBatch, videos: np.ndarray, requests: Sequence[RewardRequest]) -> None:
        assert videos.dtype == np.uint8 and len(videos) == len(requests)
        self.log.append("videos")

    def rewards(self, batch: PromptBatch, table: RewardTable) -> None:
        self.log.append("rewards")
        self.tables.append(table)

    def add(self, phase: str, step: int, started: float, ended: float) -> None:
        self.log.append(phase)

    @contextlib.contextmanager
    def span(self, phase: str, step: int) -> Iterator[None]:
        self.log.append(phase)
        yield


class OneRank:
    """The communicator of a run of one process."""

    dp_rank, dp_size = 0, 1

    def gather_objects[T](self, value: T) -> list[T]:
        return [value]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor.detach().clone()


@dataclass(frozen=True)
class Applied:
    """The result of one update of `Sgd`."""

    grad_norm: float
    lr: float
    skipped: bool


class Sgd:
    """Plain gradient descent that keeps every gradient it applied, and every word about synchronisation."""

    def __init__(self, policy: nn.Module, lr: float = 0.0) -> None:
        self.policy, self.lr, self.updates = policy, lr, 0
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.syncs: list[bool] = []

    def zero_grad(self) -> None:
        self.policy.zero_grad(set_to_none=True)

    def set_gradient_sync(self, is_last: bool) -> None:
        self.syncs.append(is_last)

    def step(self, *, finite_loss: bool = True) -> Applied:
        gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.policy.named_parameters()
        }
        reached = any(p.grad is not None for p in self.policy.parameters())
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        applied = math.isfinite(norm) and reached and finite_loss
        if applied:
            self.gradients.append(gradient)
            with torch.no_grad():
                for name, p in self.policy.named_parameters():
                    p -= self.lr * gradient[name]
        self.updates += 1
        self.zero_grad()
        return Applied(grad_norm=norm, lr=self.lr, skipped=not applied)


@dataclass
class Scores:
    """A reward: the mean brightness of the first channel. `alter` may change the verdicts of a submission."""

    alter: Callable[[list[RewardResult]], list[RewardResult]] = lambda results: results
    events: Events = field(default_factory=Events)

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> Verdicts:
        self.events.log.append("submit to reward")
        results = [
            RewardResult(
                id=request.id,
                reward=float(video[..., 0].mean()) / 255,
                components={"brightness": float(video.mean()) / 255},
            )
            for video, request in zip(videos, requests, strict=True)
        ]
        return Verdicts(self.alter(results), self.events)

    def close(self) -> None:
        pass


@dataclass
class Verdicts:
    """Finished rewards; asking for them is an event."""

    results: list[RewardResult]
    events: Events

    def result(self) -> list[RewardResult]:
        self.events.log.append("result")
        return self.results


def encode(samples: Sequence[Sample], first_frames: torch.Tensor | None) -> Condition:
    """Text keyed by the prompt's own characters."""
    rows = []
    for sample in samples:
        generator = torch.Generator().manual_seed(sum(map(ord, sample.prompt)))
        rows.append(torch.randn(4, 5, generator=generator))
    return Condition(text=torch.stack(rows))


def decode(x0: torch.Tensor) -> np.ndarray:
    """Channels become colours."""
    return (x0.permute(0, 2, 3, 4, 1).sigmoid() * 255).round().byte().numpy()


def make_batch(prompts: int = 2, step: int = 3) -> PromptBatch:
    samples = tuple(Sample(f"task/{i}", "task", "move " * i + f"prompt {i}") for i in range(prompts))
    return PromptBatch(step=step, epoch=1, samples=samples, first_frames={})


@dataclass
class Setup:
    """A whole GRPO around one policy, and its parts."""

    algorithm: Grpo
    policy: Field
    updater: Sgd
    events: Events
    encoded: list[int]

    def gradient(self, batch: PromptBatch | None = None) -> dict[str, torch.Tensor]:
        """The gradient of one prepared and replayed batch."""
        batch = batch or make_batch()
        assert self.algorithm.update(self.algorithm.prepare(batch, batch.step)) is not None
        return self.updater.gradients[-1]


def build(
    *,
    policy: Field | None = None,
    sampler: SamplerSpec = SAMPLER,
    grpo: GrpoSpec = GRPO,
    alter: Callable[[list[RewardResult]], list[RewardResult]] = lambda results: results,
    wave: int | None = None,
    prompts: int = 2,
    lr: float = 0.0,
    accumulation: int = 1,
    communicator: object = None,
    reference: Callable[..., torch.Tensor] | None = None,
) -> Setup:
    policy = policy or Field()
    events, updater, encoded = Events(), Sgd(policy, lr), []

    def count_and_encode(samples: Sequence[Sample], first_frames: torch.Tensor | None) -> Condition:
        encoded.append(len(samples))
        return encode(samples, first_frames)

    ranks = communicator or OneRank()
    rollouts = ColocatedRollouts(
        policy=policy,
        condition=count_and_encode,
        decode=decode,
        reward=Scores(alter, events),
        sampler=sampler,
        grid=sigmas(sampler.num_steps, 3.0),
        latent_shape=SHAPE,
        group_size=grpo.group_size,
        chunk_size=grpo.sample_batch_size,
        prompts_per_wave=wave or prompts,
        communicator=ranks,
        device="cpu",
        clock=events,
        observer=events,
    )
    algorithm = Grpo(
        policy=policy,
        rollouts=rollouts,
        updater=updater,
        communicator=ranks,
        clock=events,
        observer=events,
        grpo=grpo,
        sampler=sampler,
        accumulation=accumulation,
        device=torch.device("cpu"),
        reference=reference,
    )
    return Setup(algorithm, policy, updater, events, encoded)


def without(*missing: tuple[int, int], error: str = "scorer timed out") -> Callable[..., list[RewardResult]]:
    """Verdicts whose (prompt, member) is in `missing` become errors."""

    def alter(results: list[RewardResult]) -> list[RewardResult]:
        return [
            replace(r, reward=float("nan"), error=error) if (r.id.prompt, r.id.member) in missing else r
            for r in results
        ]

    return alter


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest ||difference|| / ||gradient|| over the tensors."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-30)) for n in one)

"""Records that travel between the floors of the package.

This module stays torch-free at run time: tensors appear in annotations only, so that the command line,
the configuration and the spawned scorer processes can import these names in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


# Exit statuses of every command and of the launcher; 75 is EX_TEMPFAIL: the same command goes on from there.
EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Something the user can mend. Each problem is one line: the value, the rule it breaks, and the remedy.

    The command line prints the lines without a traceback and exits with status 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFailure(RuntimeError):
    """The run cannot go on, and why in words for its user. Raised on every rank at the same place."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters; the name of its type when it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(":") if text else type(error).__name__


class SampleId(NamedTuple):
    """Identity of one rollout.

    `step` is the position of its batch in the run, `prompt` the index of the prompt in the GLOBAL batch of
    that step (never a rank-local index: those made ranks share noise), `member` its index in the group.
    """

    step: int
    prompt: int
    member: int


@dataclass(frozen=True)
class Sample:
    """One row of a dataset. Paths are absolute; a text-to-video prompt list has no media paths.

    `sample_id` ("task/id") is the identity of the prompt, never its text. `ground_truth_video` is the answer
    that a rule reward compares with, `reference_video` what a prompt list offers to any other reward.
    """

    sample_id: str
    task: str
    prompt: str
    first_frame: Path | None = None
    ground_truth_video: Path | None = None
    final_frame: Path | None = None
    metadata: Path | None = None
    negative_prompt: str | None = None
    reference_video: Path | None = None


@dataclass(frozen=True)
class PromptBatch:
    """All prompts of one step, the same on every rank, and the first frames this rank needs.

    `first_frames[prompt]` is uint8 (3, H, W) RGB at the training size, for the prompts assigned to this rank.
    """

    step: int
    epoch: int
    samples: tuple[Sample, ...]
    first_frames: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Condition:
    """What the velocity is conditioned on, for N samples.

    text, negative_text: (N, L, D) prompt embeddings; negative_text is None unless CFG is on.
    image_latent: (N, 4 + z, F, h, w) mask and latent channels (I2V-A14B), else None.
    first_frame_latent: (N, z, 1, h, w) the pinned, normalised latent of the first frame (TI2V-5B), else None.
    """

    text: torch.Tensor
    negative_text: torch.Tensor | None = None
    image_latent: torch.Tensor | None = None
    first_frame_latent: torch.Tensor | None = None

    def select(self, index: Sequence[int]) -> Condition:
        """The condition of the rows `index`, in that order; rows may repeat."""
        rows = list(index)

        def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows]

        return Condition(
            text=self.text[rows],
            negative_text=take(self.negative_text),
            image_latent=take(self.image_latent),
            first_frame_latent=take(self.first_frame_latent),
        )


@dataclass(frozen=True)
class StoredStep:
    """One replayable denoising step of N samples, exactly as the rollout took it.

    index: denoising index i (0 = noisiest). sigma, sigma_next: Python floats, stored and never re-derived.
    old_log_prob: (N,) float32, of the behaviour policy, computed on x_next AFTER rounding to the storage
    dtype. The latents live in `Trajectory.latents` under `index` and `index + 1`.
    """

    index: int
    sigma: float
    sigma_next: float
    old_log_prob: torch.Tensor


@dataclass(frozen=True)
class Trajectory:
    """What replay needs of N rollouts.

    ids: the N samples. latents: denoising index -> (N, C, F, H, W) in the storage dtype, each needed latent
    once. steps: the replayed steps in denoising order. eta: (N,) float32. x0: (N, C, F, H, W) float32, or
    None once decoded.
    """

    ids: tuple[SampleId, ...]
    latents: Mapping[int, torch.Tensor]
    steps: tuple[StoredStep, ...]
    eta: torch.Tensor
    x0: torch.Tensor | None


class RewardRequest(NamedTuple):
    """What a reward is told about one rollout."""

    id: SampleId
    sample: Sample


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one rollout.

    reward: the weighted reward, nan when missing. components: named raw scores. error: why it is missing,
    else None. started, ended: `time.monotonic()` of the scoring work itself (comparable across processes of
    one machine).
    """

    id: SampleId
    reward: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def valid(self) -> bool:
        """True when the reward is a finite number and no error was reported."""
        return self.error is None and math.isfinite(self.reward)


class PendingRewards(Protocol):
    """Rewards being computed elsewhere."""

    def result(self) -> list[RewardResult]:
        """Block until every sample of the submission has a verdict or its deadline passed; submission order.

        A failure of the scorer is a result with `error` set, never an exception.
        """
        ...


class Reward(Protocol):
    """A source of rewards. It never sees the trainer."""

    def submit(self, videos: np.ndarray, requests: Sequence[RewardRequest]) -> PendingRewards:
        """Start scoring and return at once. `videos` is uint8 (N, F, H, W, 3) RGB, one row a request."""
        ...

    def close(self) -> None:
        """End every process and delete every temporary file the reward owns."""
        ...


@dataclass(frozen=True)
class RewardContext:
    """What a differentiable reward is told when it is built. fps: frames a second of the videos it scores."""

    device: torch.device
    fps: int


@dataclass(frozen=True)
class DifferentiableScores:
    """The verdicts of a differentiable reward on N videos.

    reward: (N,) float32, with a graph that reaches the videos; nan where there is no verdict. components:
    named raw scores, (N,) float32 without a graph.
    """

    reward: torch.Tensor
    components: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])


class DifferentiableReward(Protocol):
    """A frozen model of what a good video is, whose gradient reaches the pixels."""

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """Score float32 (N, 3, F, H, W) RGB in [0, 1], one sample a row; `videos` may require a gradient."""
        ...


@dataclass(frozen=True)
class RewardTable:
    """All rewards of one wave, the same on every rank: rewards[prompt][member], nan where missing."""

    prompts: tuple[int, ...]
    results: tuple[tuple[RewardResult, ...], ...]


@dataclass(frozen=True)
class Chunk:
    """Rollouts of one rank that are sampled or replayed in one batched call."""

    trajectory: Trajectory
    condition: Condition


@dataclass(frozen=True)
class Wave:
    """The prompts whose rewards are gathered together, and this rank's rollouts of them.

    prompts: global prompt indices, the same on every rank. pending: one submission per rollout chunk;
    none on the ranks whose rollouts a tensor-parallel peer submits.
    """

    prompts: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    pending: tuple[PendingRewards, ...]


@dataclass(frozen=True)
class Rollout:
    """One prepared batch: what `prepare` returns and `update` consumes."""

    batch: PromptBatch
    policy_version: int
    waves: tuple[Wave, ...]
    prepare_s: float


@dataclass(frozen=True)
class EvaluationRecord:
    """One line of evaluations.jsonl: the held prompts under the weights of that moment.

    batch: batches drawn before it; step: optimizer updates. Means are over the valid rewards of all
    `prompts`. error: the most frequent reason why rewards are missing, None when all are there.
    """

    batch: int
    step: int
    prompts: int
    reward_mean: float
    reward_std: float
    reward_valid_fraction: float
    components: Mapping[str, float]
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. Times in seconds, memory in GiB; means are over valid samples of all ranks.

    step: number of optimizer updates done, this one included. batch: position of the batch in the run.
    ratio_max_dev: largest |ratio - 1| of the first pass. policy_age: updates between rollout and replay.
    components: mean raw score per reward component. skipped: nothing was changed, because the gradient was
    not finite or no replayed step reached a trained expert. replayed_steps: S of the loss constant P*G*S;
    replayed_per_expert: the same by routed expert; frozen_steps: those of them routed to a frozen expert,
    which run no forward. replayed_samples: valid samples x steps x passes that the ratio statistics are
    over; without any, ratio_mean and ratio_max_dev are nan.
    """

    step: int
    batch: int
    epoch: int
    policy_loss: float
    kl_loss: float
    reward_mean: float
    reward_std: float
    reward_valid_fraction: float
    zero_std_groups: int
    advantage_abs_mean: float
    ratio_mean: float
    ratio_max_dev: float
    clip_fraction: float
    approx_kl: float
    policy_age: int
    policy_version: int
    grad_norm: float
    lr: float
    prepare_s: float
    reward_wait_s: float
    replay_s: float
    step_s: float
    rollouts_per_s: float
    peak_memory_gib: float
    replayed_steps: int
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    replayed_per_expert: Mapping[str, int] = field(default_factory=dict[str, int])
    skipped: bool = False
    frozen_steps: int = 0
    replayed_samples: int = 0

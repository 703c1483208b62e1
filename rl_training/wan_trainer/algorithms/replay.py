"""Replaying the stored steps of scored rollouts: losses, backward passes, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_trainer.algorithms.protocols import Policy, Updater
from wan_trainer.algorithms.rechunk import rechunk
from wan_trainer.algorithms.statistics import ReplayStatistics
from wan_trainer.config.specs import TransitionChoice
from wan_trainer.objectives.surrogate import PolicyLoss, clipped_surrogate, ratio_statistics
from wan_trainer.sampling.sampler import Velocity, free_mask, replay_transition, stored_log_prob
from wan_trainer.sampling.transitions import kl
from wan_trainer.types import Chunk, SampleId, StoredStep, Wave


@dataclass(frozen=True)
class ScoredWave:
    """A wave and what its rewards say. advantages (P, G) float32, valid (P, G) bool, on the CPU."""

    wave: Wave
    advantages: torch.Tensor
    valid: torch.Tensor

    def rows(self, ids: Sequence[SampleId], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantage (N,) and validity (N,) of the samples `ids`, on `device`."""
        position = {prompt: row for row, prompt in enumerate(self.wave.prompts)}
        prompts, members = [position[i.prompt] for i in ids], [i.member for i in ids]
        return self.advantages[prompts, members].to(device), self.valid[prompts, members].to(device)


class Replayer:
    """Accumulates the gradient of the GRPO objective over waves of rollouts.

    reference: the frozen policy of the KL term, needed when kl_coeff > 0. chunk_size: samples per backward.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Velocity | None,
        updater: Updater,
        kind: TransitionChoice,
        kl_coeff: float,
        chunk_size: int,
        loss: PolicyLoss = clipped_surrogate,
    ) -> None:
        assert kl_coeff == 0 or reference is not None, "a KL term needs a reference policy"
        self._policy = policy
        self._reference = reference if kl_coeff > 0 else None
        self._updater = updater
        self._kind: TransitionChoice = kind
        self._kl_coeff = kl_coeff
        self._chunk_size = chunk_size
        self._loss = loss

    def accumulate(
        self, scored: ScoredWave, clip_range: float, scale: float, statistics: ReplayStatistics, is_last: bool
    ) -> None:
        """Backward through every chunk and replayed step of one wave, each loss sum times `scale`.

        is_last: no wave of this rollout follows in this pass. All ranks run the same number of backwards at
        the same sigmas in the same order: shares are equal, and the replayed steps are a function of the
        batch. A step routed to a frozen expert has nothing to differentiate, so its forward is not run and
        its statistics stay empty; that too depends on sigma alone.
        """
        chunks = scored.wave.chunks
        samples = sum(len(chunk.trajectory.ids) for chunk in chunks)
        last_chunk = (samples - 1) // self._chunk_size
        positions = trained_positions(self._policy, chunks[0].trajectory.steps)
        steps = [chunks[0].trajectory.steps[position] for position in positions]
        last_use = {self._policy.expert_for(step.sigma): step.index for step in steps}
        for number, chunk in enumerate(rechunk(chunks, self._chunk_size)):
            advantages, valid = scored.rows(chunk.trajectory.ids, chunk.trajectory.eta.device)
            for position in positions:
                step = chunk.trajectory.steps[position]
                final = last_use[self._policy.expert_for(step.sigma)] == step.index
                self._updater.set_gradient_sync(is_last and number == last_chunk and final)
                new, divergence = self._evaluate(chunk, step)
                losses = self._loss(new, step.old_log_prob, advantages, clip_range)
                loss = torch.where(valid, losses, 0.0).sum()
                kl_loss = self._kl_coeff * torch.where(valid, divergence, 0.0).sum()
                torch.autograd.backward((loss + kl_loss) * scale)
                ratio = ratio_statistics(new.detach(), step.old_log_prob, valid, clip_range)
                statistics.add(position, valid, ratio, loss.detach(), kl_loss.detach())

    def _evaluate(self, chunk: Chunk, step: StoredStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability under the current policy and divergence from the reference (0 without one), both
        (N,).
        """
        condition, trajectory, kind = chunk.condition, chunk.trajectory, self._kind
        reference = None
        if self._reference is not None:
            # Before the policy's forward: no activations are held meanwhile, and a reference that shares the
            # policy's modules comes between no forward and its backward.
            with torch.no_grad():
                reference = replay_transition(self._reference, condition, trajectory, step, kind)
        transition = replay_transition(self._policy.velocity, condition, trajectory, step, kind)
        new = stored_log_prob(condition, trajectory, step, kind, transition)
        if reference is None:
            return new, torch.zeros_like(new)
        mask = free_mask(condition, transition.mean.shape[1:], transition.mean.device)
        return new, kl(kind, transition, reference, mask)


def trained_positions(policy: Policy, steps: Sequence[StoredStep]) -> tuple[int, ...]:
    """Positions of those of the replayed `steps` whose velocity depends on a trained parameter."""
    return tuple(position for position, step in enumerate(steps) if policy.trains_at(step.sigma))

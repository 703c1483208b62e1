"""Rollouts drawn by the ranks that train, with the weights that are trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from wan_trainer.algorithms.encoding import PromptEncoder
from wan_trainer.algorithms.protocols import (
    Communicator,
    Conditioner,
    Decoder,
    Observer,
    Peers,
    PhaseClock,
    Policy,
)
from wan_trainer.config.specs import SamplerSpec
from wan_trainer.recording.clock import naming
from wan_trainer.sampling.sampler import sample
from wan_trainer.sampling.schedule import replay_steps
from wan_trainer.topology import assign
from wan_trainer.types import (
    Chunk,
    Condition,
    PendingRewards,
    PromptBatch,
    Reward,
    RewardRequest,
    Rollout,
    SampleId,
    Trajectory,
    Wave,
)


class ColocatedRollouts:
    """A `RolloutSource` in the training process: condition, sample, decode, submit, chunk by chunk.

    grid: (T+1,) sigmas. latent_shape: (C, F, h, w). chunk_size: rollouts per batched call. prompts_per_wave:
    global prompts whose rewards are gathered together; it divides the batch. peers: the ranks that share this
    rank's rollouts, None when there are none. Their leader alone conditions, decodes, submits and observes:
    the others need no reward, and their rollouts come back without a submission.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        condition: Conditioner,
        decode: Decoder,
        reward: Reward | None,
        sampler: SamplerSpec,
        grid: torch.Tensor,
        latent_shape: Sequence[int],
        group_size: int,
        chunk_size: int,
        prompts_per_wave: int,
        communicator: Communicator,
        device: torch.device | str,
        clock: PhaseClock,
        observer: Observer,
        peers: Peers | None = None,
    ) -> None:
        encode = PromptEncoder(condition, clock, peers)
        assert reward is not None or not encode.leads, "whoever decodes rollouts submits them"
        self._policy = policy
        self._encode = encode
        self._decode = decode
        self._reward = reward
        self._sampler = sampler
        self._grid = grid
        self._latent_shape = tuple(latent_shape)
        self._group_size = group_size
        self._chunk_size = chunk_size
        self._prompts_per_wave = prompts_per_wave
        self._communicator = communicator
        self._device = device
        self._clock = clock
        self._observer = observer
        self._leads = encode.leads

    # no_grad, not inference_mode: autograd refuses to save inference tensors when the steps are replayed.
    @torch.no_grad()
    def collect(self, batch: PromptBatch, step: int, policy_version: int) -> Rollout:
        """Draw this rank's share of `batch`, wave by wave; scoring runs on after the return."""
        started = time.monotonic()
        assert batch.step == step, (batch.step, step)
        assert len(batch.samples) % self._prompts_per_wave == 0, (len(batch.samples), self._prompts_per_wave)
        self._policy.eval()
        spec = self._sampler
        keep = replay_steps(spec.num_steps, spec.replay_ratio, spec.seed, step)
        waves: list[Wave] = []
        for first in range(0, len(batch.samples), self._prompts_per_wave):
            prompts = tuple(range(first, first + self._prompts_per_wave))
            ranks = self._communicator
            share = assign(len(prompts), self._group_size, ranks.dp_rank, ranks.dp_size)
            ids = [SampleId(step, prompts[prompt], member) for prompt, member in share]
            encoded, row_of = self._encode(batch, ids)
            chunks: list[Chunk] = []
            pending: list[PendingRewards] = []
            for start in range(0, len(ids), self._chunk_size):
                part = ids[start : start + self._chunk_size]
                condition = encoded.select([row_of[i.prompt] for i in part])
                with naming(batch.samples[i.prompt].sample_id for i in part):
                    trajectory = self._draw(batch, part, condition, keep)
                    if self._leads:
                        pending.append(self._submit(batch, trajectory))
                # x0 was needed for decoding only; a delayed rollout would carry it for a whole step.
                chunks.append(Chunk(trajectory=replace(trajectory, x0=None), condition=condition))
            waves.append(Wave(prompts=prompts, chunks=tuple(chunks), pending=tuple(pending)))
        return Rollout(
            batch=batch,
            policy_version=policy_version,
            waves=tuple(waves),
            prepare_s=time.monotonic() - started,
        )

    def _draw(
        self, batch: PromptBatch, ids: Sequence[SampleId], condition: Condition, keep: Sequence[int]
    ) -> Trajectory:
        with self._clock.span("sample", batch.step):
            return sample(
                self._policy.velocity,
                condition,
                ids,
                self._sampler,
                self._grid,
                keep,
                self._latent_shape,
                self._device,
            )

    def _submit(self, batch: PromptBatch, trajectory: Trajectory) -> PendingRewards:
        assert self._reward is not None
        assert trajectory.x0 is not None
        with self._clock.span("decode", batch.step):
            videos = self._decode(trajectory.x0)
        requests = [RewardRequest(i, batch.samples[i.prompt]) for i in trajectory.ids]
        with self._clock.span("submit", batch.step):
            pending = self._reward.submit(videos, requests)
        self._observer.videos(batch, videos, requests)
        return pending

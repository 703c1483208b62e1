"""Conditions of the prompts that a rank needs, each encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_trainer.algorithms.protocols import Conditioner, Peers, PhaseClock
from wan_trainer.types import Condition, PromptBatch, SampleId


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes the prompts of a batch. peers: the ranks that share this rank's rollouts, None without any."""

    condition: Conditioner
    clock: PhaseClock
    peers: Peers | None = None

    @property
    def leads(self) -> bool:
        """True on the rank that encodes and observes for its peers; in GRPO it alone decodes and submits."""
        return self.peers is None or self.peers.leads

    def __call__(self, batch: PromptBatch, ids: Sequence[SampleId]) -> tuple[Condition, dict[int, int]]:
        """The condition of the distinct prompts of `ids`, and each prompt's row in it."""
        prompts = sorted({i.prompt for i in ids})
        frames = torch.stack([batch.first_frames[p] for p in prompts]) if batch.first_frames else None
        with self.clock.span("condition", batch.step):
            encoded = self.condition([batch.samples[p] for p in prompts], frames) if self.leads else None
            if self.peers is not None:
                encoded = self.peers.share(encoded)
        assert encoded is not None
        return encoded, {prompt: row for row, prompt in enumerate(prompts)}

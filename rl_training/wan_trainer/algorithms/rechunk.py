"""Regrouping rollouts, so that replay may use another chunk size than the rollout did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from wan_trainer.types import Chunk, Condition, StoredStep, Trajectory


def rechunk(chunks: Sequence[Chunk], size: int) -> Iterator[Chunk]:
    """The rollouts of `chunks`, in order, `size` at a time (the last one may be smaller).

    A chunk that already has the right rows is passed on as it is; others are copied one at a time.
    """
    rows = [(chunk, row) for chunk in chunks for row in range(len(chunk.trajectory.ids))]
    for start in range(0, len(rows), size):
        pieces: list[tuple[Chunk, list[int]]] = []
        for chunk, row in rows[start : start + size]:
            if pieces and pieces[-1][0] is chunk:
                pieces[-1][1].append(row)
            else:
                pieces.append((chunk, [row]))
        parts = [_select(chunk, chosen) for chunk, chosen in pieces]
        yield parts[0] if len(parts) == 1 else _concatenate(parts)


def _select(chunk: Chunk, rows: list[int]) -> Chunk:
    """Consecutive rows of a chunk; the chunk itself when these are all."""
    trajectory = chunk.trajectory
    if len(rows) == len(trajectory.ids):
        return chunk
    part = slice(rows[0], rows[-1] + 1)
    return Chunk(
        trajectory=Trajectory(
            ids=trajectory.ids[part],
            latents={index: latent[part] for index, latent in trajectory.latents.items()},
            steps=tuple(replace(step, old_log_prob=step.old_log_prob[part]) for step in trajectory.steps),
            eta=trajectory.eta[part],
            x0=None,
        ),
        condition=chunk.condition.select(rows),
    )


def _concatenate(chunks: Sequence[Chunk]) -> Chunk:
    trajectories = [chunk.trajectory for chunk in chunks]
    first = trajectories[0]
    assert all(_grid(trajectory) == _grid(first) for trajectory in trajectories), "chunks of different steps"
    return Chunk(
        trajectory=Trajectory(
            ids=tuple(i for trajectory in trajectories for i in trajectory.ids),
            latents={index: torch.cat([t.latents[index] for t in trajectories]) for index in first.latents},
            steps=tuple(
                StoredStep(
                    index=step.index,
                    sigma=step.sigma,
                    sigma_next=step.sigma_next,
                    old_log_prob=torch.cat([t.steps[position].old_log_prob for t in trajectories]),
                )
                for position, step in enumerate(first.steps)
            ),
            eta=torch.cat([trajectory.eta for trajectory in trajectories]),
            x0=None,
        ),
        condition=_concatenate_conditions([chunk.condition for chunk in chunks]),
    )


def _grid(trajectory: Trajectory) -> list[tuple[int, float, float]]:
    return [(step.index, step.sigma, step.sigma_next) for step in trajectory.steps]


def _concatenate_conditions(conditions: Sequence[Condition]) -> Condition:
    def join(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        assert len(present) in (0, len(tensors)), "conditions of different kinds"
        return torch.cat(present) if present else None

    return Condition(
        text=torch.cat([condition.text for condition in conditions]),
        negative_text=join([condition.negative_text for condition in conditions]),
        image_latent=join([condition.image_latent for condition in conditions]),
        first_frame_latent=join([condition.first_frame_latent for condition in conditions]),
    )

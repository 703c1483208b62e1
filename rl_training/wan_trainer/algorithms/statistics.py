"""Replay metrics, accumulated on the device and reduced over ranks once per pass."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan_trainer.algorithms.protocols import Communicator
from wan_trainer.objectives.surrogate import RatioStatistics

_COUNT, _RATIO, _CLIPPED, _KL_ESTIMATE, _LOSS, _KL_LOSS = range(6)


@dataclass(frozen=True)
class ReplaySummary:
    """One pass over one rollout, over all ranks; every list has one entry per replayed step.

    samples: valid samples. The sums over them: ratio, clipped (ratios outside the clip range), kl_estimate,
    loss, kl_loss. deviation: largest |ratio - 1| over all samples, valid or not; inf when a ratio is not
    finite.
    """

    samples: list[float]
    ratio: list[float]
    clipped: list[float]
    kl_estimate: list[float]
    loss: list[float]
    kl_loss: list[float]
    deviation: list[float]


class ReplayStatistics:
    """Sums of one pass over one rollout, per replayed step. Nothing waits for the device until `reduce`."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self._sums = torch.zeros(num_steps, 6, dtype=torch.float64, device=device)
        self._deviation = torch.zeros(num_steps, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        position: int,
        valid: torch.Tensor,
        ratio: RatioStatistics,
        loss: torch.Tensor,
        kl_loss: torch.Tensor,
    ) -> None:
        """Count one chunk at replayed step `position`. valid: (N,) bool; loss, kl_loss: its sums."""
        entries = [valid.sum(), ratio.ratio, ratio.clipped, ratio.kl, loss, kl_loss]
        self._sums[position] += torch.stack([entry.double() for entry in entries])
        self._deviation[position] = torch.maximum(self._deviation[position], ratio.deviation)

    def reduce(self, communicator: Communicator) -> ReplaySummary:
        """The totals of all ranks, the same on each: a decision taken on them is an agreed one."""
        columns = [_floats(column) for column in communicator.all_reduce(self._sums, "sum").T]
        return ReplaySummary(
            samples=columns[_COUNT],
            ratio=columns[_RATIO],
            clipped=columns[_CLIPPED],
            kl_estimate=columns[_KL_ESTIMATE],
            loss=columns[_LOSS],
            kl_loss=columns[_KL_LOSS],
            deviation=_floats(communicator.all_reduce(self._deviation, "max")),
        )


def _floats(vector: torch.Tensor) -> list[float]:
    return [float(value) for value in vector.cpu()]


def mean_over_samples(sums: Sequence[list[float]], samples: Sequence[list[float]]) -> float:
    """Total of `sums` over the total of `samples`; 0 when no sample was valid."""
    count = sum(map(sum, samples))
    return sum(map(sum, sums)) / count if count else 0.0


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory this process has had allocated: on its CUDA device, else in resident host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

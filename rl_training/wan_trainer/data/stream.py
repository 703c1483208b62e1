"""The order in which a run sees its data.

The stream of sample indices is the concatenation of one permutation per epoch. Batch b is the positions
[b * B, (b + 1) * B): nothing is dropped at the end of an epoch, and the only state of the stream is the step.
It knows nothing of ranks, so a run resumes at any number of them with no sample lost or repeated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class StreamOrder:
    """The endless stream over `size` samples; `shuffle` false keeps the manifest's order in every epoch."""

    size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.size > 0, self.size

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, sample index) at a position of the stream."""
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return epoch, offset
        return epoch, int(epoch_permutation(self.size, self.seed, epoch)[offset])

    def batch(self, step: int, batch_size: int) -> tuple[int, list[int]]:
        """(epoch of its first sample, the sample indices) of batch `step`; it may reach into later epochs."""
        located = [self.locate(step * batch_size + offset) for offset in range(batch_size)]
        return located[0][0], [index for _, index in located]


# A batch touches two epochs at most, unless it is larger than the data set.
@lru_cache(maxsize=4)
def epoch_permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `range(size)` for one epoch, int64, keyed by (seed, epoch) alone.

    Ranks the raw 64-bit output of PCG64, which NumPy promises never to change; `Generator.permutation` has no
    such promise, and an order that moves with a NumPy upgrade would repeat and skip samples on resume.
    """
    key = hashlib.blake2b(f"wan_trainer stream order seed={seed} epoch={epoch}".encode(), digest_size=16)
    generator = np.random.PCG64(int.from_bytes(key.digest(), "big"))
    order = np.argsort(generator.random_raw(size), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order

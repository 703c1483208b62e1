"""Keyed randomness: every draw is a pure function of (run seed, purpose, identity of the sample).

Nothing comes from a shared stream, so a sample has the same noise on any rank, in any chunk and at any world
size, and resuming needs no random state. Draws are made on the CPU and so are equal on every kind of device.

The generator is Philox with a 128-bit key. A `torch.Generator` on the CPU keeps only the low 32 bits of its
seed: among the 30,000 draws of one 5B step two would coincide in every ninth step.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from wan_trainer.types import SampleId


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A fresh generator for `purpose` and `key`; different purposes or keys never share a stream."""
    text = "/".join(str(int(part)) for part in (seed, *key))
    digest = blake2b(text.encode(), digest_size=16, person=purpose.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def initial_noise(seed: int, ids: Sequence[SampleId], shape: Sequence[int], shared: bool) -> torch.Tensor:
    """Standard normal x at sigma 1, (N, *shape) float32 on the CPU.

    shared: the members of a prompt's group start from one draw, keyed by (seed, step, prompt); otherwise the
    member is part of the key.
    """
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    keys = [(i.step, i.prompt) if shared else (i.step, i.prompt, i.member) for i in ids]
    for key in keys:
        if key not in rows:
            rows[key] = _normal(keyed_generator(seed, "initial noise", *key), shape)
    return torch.stack([rows[key] for key in keys])


def step_noise(seed: int, ids: Sequence[SampleId], index: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal noise of denoising step `index`, (N, *shape) float32 on the CPU, one draw a sample."""
    return torch.stack(
        [_normal(keyed_generator(seed, "step noise", i.step, i.prompt, i.member, index), shape) for i in ids]
    )


def group_eta(
    seed: int, ids: Sequence[SampleId], eta: float, eta_range: tuple[float, float] | None
) -> torch.Tensor:
    """Noise scale of each sample, (N,) float32 on the CPU.

    With a range: one uniform draw per (step, prompt), shared by the members of the group. A draw per
    member or request would compare rollouts of different randomness within one group.
    """
    if eta_range is None:
        return torch.full((len(ids),), eta, dtype=torch.float32)
    low, high = eta_range
    draws = [keyed_generator(seed, "group eta", i.step, i.prompt).random() for i in ids]
    return torch.tensor([low + (high - low) * draw for draw in draws], dtype=torch.float32)


def _normal(generator: np.random.Generator, shape: Sequence[int]) -> torch.Tensor:
    return torch.as_tensor(generator.standard_normal(tuple(shape), dtype=np.float32))

"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Ema:
    """`average = decay * average + (1 - decay) * weight` after every applied update, from the first weights.

    After n updates it is decay^n * w_0 + (1 - decay) * sum_i decay^(n - i) * w_i: it starts at w_0 and needs
    no bias correction. `averages`: float32, by parameter name, sharded like the parameters, so that they are
    saved and loaded as these are, at any number of ranks. They cost 4 bytes a trained parameter, divided over
    the ranks that share it.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        """parameters: names and trained parameters, on their device and filled. decay: in (0, 1)."""
        assert 0 < decay < 1, decay
        self._decay = decay
        self._parameters = dict(parameters)
        self.averages = {
            name: parameter.detach().clone().float() for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Count the weights as they are now; elementwise on each rank's own shards, without communication."""
        for name, parameter in self._parameters.items():
            # A lerp loses less than the two products when decay is close to 1.
            _local(self.averages[name]).lerp_(_local(parameter).float(), 1.0 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights as they are now."""
        for name, parameter in self._parameters.items():
            self.averages[name].copy_(parameter)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

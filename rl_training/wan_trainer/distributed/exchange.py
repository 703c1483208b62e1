"""Messages between ranks of different roles: tensors and small objects, from one rank to another.

The ranks of a role have collectives of their own. What passes between roles goes through host memory over
gloo: a video of pixels each way a step, which takes a fraction of what it takes to score it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

_HEADER, _BODY = 1, 2
_DTYPES = (torch.uint8, torch.float32, torch.float64)
_LONGEST = 8


@dataclass(frozen=True)
class Exchange:
    """A rank's way to the ranks of other roles. rank: its own number in `group`, which holds all of them."""

    group: ProcessGroup
    rank: int

    def send(self, to: int, message: object, tensor: torch.Tensor | None = None) -> None:
        """Send an object and, if given, a tensor beside it; returns once both are on their way."""
        text = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        header = torch.zeros(2 + _LONGEST + 1, dtype=torch.int64)
        header[0] = text.numel()
        header[1] = -1
        if tensor is not None:
            assert tensor.dim() <= _LONGEST, tensor.shape
            header[1] = _DTYPES.index(tensor.dtype)
            header[2] = tensor.dim()
            header[3 : 3 + tensor.dim()] = torch.tensor(tensor.shape)
        self.group.send([header], to, _HEADER).wait()
        self.group.send([text], to, _BODY).wait()
        if tensor is not None and tensor.numel():
            self.group.send([tensor.detach().cpu().contiguous()], to, _BODY).wait()

    def receive(self, source: int | None = None) -> tuple[int, Any, torch.Tensor | None]:
        """The next message of `source`, or of whoever sends first: sender, object, tensor on the CPU."""
        header = torch.zeros(2 + _LONGEST + 1, dtype=torch.int64)
        if source is None:
            work = self.group.recv_anysource([header], _HEADER)
            work.wait()
            source = int(work._source_rank())
        else:
            self.group.recv([header], source, _HEADER).wait()
        numbers = [int(number) for number in header]
        text = torch.empty(numbers[0], dtype=torch.uint8)
        self.group.recv([text], source, _BODY).wait()
        tensor = None
        if numbers[1] >= 0:
            tensor = torch.empty(numbers[3 : 3 + numbers[2]], dtype=_DTYPES[numbers[1]])
            if tensor.numel():
                self.group.recv([tensor], source, _BODY).wait()
        # From a rank of this run, started with the same code.
        return source, pickle.loads(text.numpy().tobytes()), tensor

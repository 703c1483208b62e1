"""Messages between ranks of different roles: tensors and small objects, from one rank to another.

The ranks of a role have collectives of their own. What passes between roles goes through host memory over
gloo: a video of pixels each way a step, which takes a fraction of what it takes to score it.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

_HEADER, _BODY = 1, 2
_DTYPES = (torch.uint8, torch.float32, torch.float64)
_DIMS = 8


class Message(NamedTuple):
    """What a rank sent: an object, and a tensor on the CPU beside it or None."""

    source: int
    value: Any
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class Exchange:
    """A rank's way to the ranks of other roles.

    rank: its own number in `group`, which holds all of them. patience: how long an answer may take.
    """

    group: ProcessGroup
    rank: int
    patience: timedelta

    def send(self, to: int, value: object, tensor: torch.Tensor | None = None) -> None:
        """Send an object and, if given, a tensor beside it; returns once both are on their way."""
        text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        header = torch.zeros(3 + _DIMS, dtype=torch.int64)
        header[0], header[1] = text.numel(), -1
        if tensor is not None:
            assert tensor.dim() <= _DIMS and tensor.dtype in _DTYPES, (tensor.shape, tensor.dtype)
            header[1], header[2] = _DTYPES.index(tensor.dtype), tensor.dim()
            header[3 : 3 + tensor.dim()] = torch.tensor(tensor.shape)
        self.group.send([header], to, _HEADER).wait()
        self.group.send([text], to, _BODY).wait()
        if tensor is not None and tensor.numel():
            self.group.send([tensor.detach().cpu().contiguous()], to, _BODY).wait()

    def receive(self, source: int) -> Message:
        """The next message of `source`. Raises RuntimeError when it is gone, or longer than `patience`."""
        return self._receive(source, self.patience)

    def _receive(self, source: int, patience: timedelta | None) -> Message:
        header = torch.zeros(3 + _DIMS, dtype=torch.int64)
        first = self.group.recv([header], source, _HEADER)
        _ = first.wait() if patience is None else first.wait(patience)
        length, dtype, dims, *shape = (int(number) for number in header)
        text = torch.empty(length, dtype=torch.uint8)
        self.group.recv([text], source, _BODY).wait()
        tensor = None
        if dtype >= 0:
            tensor = torch.empty(shape[:dims], dtype=_DTYPES[dtype])
            if tensor.numel():
                self.group.recv([tensor], source, _BODY).wait()
        # From a rank of this run, started with the same code.
        return Message(source, pickle.loads(text.numpy().tobytes()), tensor)


class Inbox:
    """The messages of several ranks as they come, however long that takes.

    A receive from whoever is first would not notice that a rank is gone: one thread waits for each. last: the
    type of the message after which a rank sends no other.
    """

    def __init__(self, exchange: Exchange, sources: Sequence[int], last: type) -> None:
        self._arrived: queue.SimpleQueue[Message | RuntimeError] = queue.SimpleQueue()
        self._held: deque[Message] = deque()
        self._exchange = exchange
        self._last = last
        self._threads = [
            threading.Thread(target=self._listen, args=(source,), name=f"rank {source}", daemon=True)
            for source in sources
        ]
        for thread in self._threads:
            thread.start()

    def next(self, source: int | None = None) -> Message:
        """The next message, of `source` if given; others are kept.

        Raises RuntimeError when a rank is gone.
        """
        for message in tuple(self._held):
            if source in (None, message.source):
                self._held.remove(message)
                return message
        while True:
            message = self._arrived.get()
            if isinstance(message, RuntimeError):
                raise message
            if source in (None, message.source):
                return message
            self._held.append(message)

    def close(self) -> None:
        """Wait for the threads, once every rank has sent its last message.

        One that still received would end the process when the interpreter does.
        """
        for thread in self._threads:
            thread.join()

    def _listen(self, source: int) -> None:
        try:
            while True:
                message = self._exchange._receive(source, None)
                self._arrived.put(message)
                if isinstance(message.value, self._last):
                    return
        except RuntimeError as error:
            self._arrived.put(error)

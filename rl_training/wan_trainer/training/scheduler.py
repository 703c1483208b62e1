"""Delayed replay as the depth of a queue: 0 is on-policy, 1 one-step-delayed, k updates behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator


class ReplayScheduler[B, R, S]:
    """Prepares a batch (B) into a rollout (R) and replays it (S, a step record) `depth` batches later.

    With depth > 0 the rewards of a rollout are computed while the next one is prepared. Every batch that is
    pushed is updated exactly once and in order; after `drain` none is pending. `update` may return None
    while gradients accumulate; that is not yielded.
    """

    def __init__(self, prepare: Callable[[B, int], R], update: Callable[[R], S | None], depth: int) -> None:
        assert depth >= 0, depth
        self._prepare = prepare
        self._update = update
        self._depth = depth
        self._pending: deque[R] = deque()

    @property
    def pending(self) -> int:
        """Rollouts that are prepared and not yet updated."""
        return len(self._pending)

    def push(self, batch: B, step: int) -> Iterator[S]:
        """Prepare `batch` now; the records of the updates that are due come as they are iterated."""
        self._pending.append(self._prepare(batch, step))
        return self._update_down_to(self._depth)

    def drain(self) -> Iterator[S]:
        """Update everything that is pending."""
        return self._update_down_to(0)

    def _update_down_to(self, depth: int) -> Iterator[S]:
        while len(self._pending) > depth:
            record = self._update(self._pending.popleft())
            if record is not None:
                yield record

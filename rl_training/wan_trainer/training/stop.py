"""A stop that all ranks agree on: SIGTERM and SIGINT are noted, and acted upon between two batches."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

from wan_trainer.distributed.collectives import agree
from wan_trainer.distributed.mesh import Mesh

_PR_SET_PDEATHSIG = 1


class AgreedStop:
    """Turns a signal that may reach only some ranks into a decision all ranks take at the same batch."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked = False

    def install(self) -> None:
        """Note SIGTERM and SIGINT from now on instead of dying of them; the end of torchrun counts as one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # A torchrun that is killed cannot end its ranks: they would train on, unseen, and hold the lock.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def requested(self) -> bool:
        """True on every rank once any rank was signalled.

        A collective: call it at the same place on all ranks.
        """
        return agree(self._mesh, self._asked)

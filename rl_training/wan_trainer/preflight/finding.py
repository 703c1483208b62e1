"""What a check reports: one line with the value, the rule it breaks and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A finding. Only an error keeps a run from starting; a note says what was counted or skipped."""

    message: str
    kind: Kind = "error"

    def line(self, node: str) -> str:
        """The line a user reads; `node` says on which machine the check ran."""
        return f"{node}: {self.kind}: {self.message}"

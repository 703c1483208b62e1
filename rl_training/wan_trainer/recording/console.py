"""Where messages for people go: rank 0's standard error, so that standard output stays for results."""

from __future__ import annotations

from rich.console import Console


def console_for(rank: int) -> Console:
    """A console on standard error for rank 0, and a silent one for the others.

    Markup and highlighting are off: messages hold paths and prompts, whose brackets are not styles.
    """
    return Console(stderr=True, quiet=rank != 0, markup=False, highlight=False, soft_wrap=True)

"""The nearest known word to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def suggest(word: str, known: Collection[str], prefix: str = "") -> str:
    """`; did you mean X?` for a word close to a known one, else an empty text."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""

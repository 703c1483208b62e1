"""Widths and depths of a network, read off its state dict: every size loads without a setting."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def width(state: Mapping[str, torch.Tensor], key: str) -> int:
    """The output channels of the layer with this weight; KeyError when it is missing."""
    return state[key].shape[0]


def block_count(state: Mapping[str, torch.Tensor], prefix: str) -> int:
    """How many numbered modules are under `prefix`: one more than the highest number."""
    numbers = [key.removeprefix(prefix).partition(".")[0] for key in state if key.startswith(prefix)]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)

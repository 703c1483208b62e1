"""What is trained, counted by kind of module, for the top of a log and for the record of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

# What tells one layer of a kind from the next: its block, and self- from cross-attention.
_PLACE = re.compile(r"^(blocks\.\d+\.(attn[12]\.)?)?")
_ADAPTER = re.compile(r"\.lora_([AB])\.")


@dataclass(frozen=True)
class ModuleCount:
    """The trained parameters of one kind of module of an expert; numbers of all shards together.

    module: to_q, ffn.net.2, and so on. layers: how many of them. elements: numbers, those of lora_A and
    lora_B among them.
    """

    expert: str
    module: str
    layers: int
    elements: int
    lora_a: int
    lora_b: int

    def __str__(self) -> str:
        """In words, without the expert."""
        counts = f"{self.elements:,}"
        if self.lora_a or self.lora_b:
            counts = f"lora_A {self.lora_a:,} + lora_B {self.lora_b:,}"
        return f"{self.module} x {self.layers} ({counts})"


def trained_modules(trainable: Iterable[tuple[str, nn.Parameter]]) -> list[ModuleCount]:
    """The counts of named parameters, in the order of the model. The embedders count as one module."""
    layers: dict[tuple[str, str], dict[str, int]] = {}
    sides: dict[tuple[str, str], dict[str, int]] = {}
    for name, parameter in trainable:
        expert, _, rest = name.partition(".")
        side = _ADAPTER.search(rest)
        layer = rest[: side.start()] if side else rest.removesuffix(".weight").removesuffix(".bias")
        kind = _PLACE.sub("", layer)
        kind = "condition_embedder" if kind.startswith("condition_embedder.") else kind
        own = layers.setdefault((expert, kind), {})
        own[layer] = own.get(layer, 0) + parameter.numel()
        if side:
            totals = sides.setdefault((expert, kind), {})
            totals[side[1]] = totals.get(side[1], 0) + parameter.numel()
    return [
        ModuleCount(
            expert,
            kind,
            len(own),
            sum(own.values()),
            sides.get((expert, kind), {}).get("A", 0),
            sides.get((expert, kind), {}).get("B", 0),
        )
        for (expert, kind), own in layers.items()
    ]


def describe_trained(counts: Iterable[ModuleCount]) -> list[str]:
    """One line for each expert that has trained parameters."""
    lines: dict[str, list[str]] = {}
    for count in counts:
        lines.setdefault(count.expert, []).append(str(count))
    return [f"{expert} trains {', '.join(parts)}" for expert, parts in lines.items()]

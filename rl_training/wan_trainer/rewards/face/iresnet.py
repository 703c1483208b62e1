"""The improved residual network (IResNet) of ArcFace: a face crop in, an embedding out.

Modules are named as in the published PyTorch checkpoints of ArcFace, so that those load unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from wan_trainer.rewards.face.structure import block_count, width

CROP = 112
_EPS = 1e-5


@dataclass(frozen=True)
class IResNetShape:
    """What tells one IResNet from another: IResNet-100 is 64, (64, 128, 256, 512), (3, 13, 30, 3), 512."""

    stem: int
    widths: Sequence[int]
    blocks: Sequence[int]
    embedding: int

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> IResNetShape:
        """The shape that a state dict has; raises KeyError with the key that is missing for it."""
        return cls(
            stem=width(state, "conv1.weight"),
            widths=[width(state, f"layer{stage}.0.conv1.weight") for stage in range(1, 5)],
            blocks=[block_count(state, f"layer{stage}.") for stage in range(1, 5)],
            embedding=width(state, "fc.weight"),
        )


class IResNet(nn.Module):
    """Maps (N, 3, 112, 112) RGB in [-1, 1] to (N, D) embeddings that are not normalised.

    Source: the IBasicBlock network of "Improved Residual Networks for Image and Video Recognition"
    (Duta et al., 2020) as used by ArcFace (Deng et al., 2019). Inference only: dropout is left out.
    """

    def __init__(self, shape: IResNetShape) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, shape.stem, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(shape.stem, eps=_EPS)
        self.prelu = nn.PReLU(shape.stem)
        before = [shape.stem, *shape.widths]
        for stage, (width_, count) in enumerate(zip(shape.widths, shape.blocks, strict=True)):
            blocks = [
                _Block(before[stage], width_, 2),
                *(_Block(width_, width_, 1) for _ in range(count - 1)),
            ]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        last = shape.widths[-1]
        self.bn2 = nn.BatchNorm2d(last, eps=_EPS)
        self.fc = nn.Linear(last * (CROP // 16) ** 2, shape.embedding)
        self.features = nn.BatchNorm1d(shape.embedding, eps=_EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.bn1(self.conv1(x)))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.features(self.fc(self.bn2(x).flatten(1)))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps=_EPS)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=_EPS)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, eps=_EPS)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs, eps=_EPS)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(self.bn1(x))
        y = self.bn3(self.conv2(self.prelu(self.bn2(y))))
        return y + (x if self.downsample is None else self.downsample(x))

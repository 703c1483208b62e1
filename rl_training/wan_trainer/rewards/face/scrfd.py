"""SCRFD, the face detector: an image in; scores, boxes and five keypoints on three strides out.

Modules are named as in SCRFD's training checkpoints (backbone, neck, bbox_head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from wan_trainer.rewards.face.structure import block_count, width

STRIDES = (8, 16, 32)
ANCHORS = 2  # a position of a stride has two anchors, which differ in training only


@dataclass(frozen=True)
class ScrfdShape:
    """What tells one SCRFD from another: 10g_bnkps is 56, (56, 88, 88, 224), (3, 4, 2, 3), 56, 80, 3."""

    stem: int
    widths: Sequence[int]
    blocks: Sequence[int]
    neck: int
    head: int
    head_convs: int

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> ScrfdShape:
        """The shape that a state dict has; raises KeyError with the key that is missing for it."""
        head = f"bbox_head.cls_stride_convs.({STRIDES[0]}, {STRIDES[0]})."
        return cls(
            stem=width(state, "backbone.stem.6.weight"),
            widths=[width(state, f"backbone.layer{stage}.0.conv1.weight") for stage in range(1, 5)],
            blocks=[block_count(state, f"backbone.layer{stage}.") for stage in range(1, 5)],
            neck=width(state, "neck.lateral_convs.0.conv.weight"),
            head=width(state, f"{head}0.conv.weight"),
            head_convs=block_count(state, head),
        )


class Scrfd(nn.Module):
    """Maps (N, 3, H, W) RGB, (value - 127.5) / 128, to nine outputs: scores, boxes, keypoints by stride.

    H and W are multiples of 32. A stride s has P = H/s * W/s * 2 rows, row by row and anchor last: scores
    (N, P, 1) in [0, 1], boxes (N, P, 4) and keypoints (N, P, 10) as distances from the position in units of
    the stride. Source: "Sample and Computation Redistribution for Efficient Face Detection" (Guo et al.).
    """

    def __init__(self, shape: ScrfdShape) -> None:
        super().__init__()
        self.backbone = _Backbone(shape)
        self.neck = _PathAggregation(shape.widths[1:], shape.neck)
        self.bbox_head = _Head(shape)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.bbox_head(self.neck(self.backbone(x)))


class _Backbone(nn.Module):
    def __init__(self, shape: ScrfdShape) -> None:
        super().__init__()
        half = shape.stem // 2
        channels = ((3, half, 2), (half, half, 1), (half, shape.stem, 1))
        layers = [
            layer for inputs, outputs, stride in channels for layer in _conv_bn(inputs, outputs, stride)
        ]
        self.stem = nn.Sequential(*layers)
        before = [shape.stem, *shape.widths]
        for stage, (width_, count) in enumerate(zip(shape.widths, shape.blocks, strict=True)):
            first = _Block(before[stage], width_, 1 if stage == 0 else 2)
            rest = (_Block(width_, width_, 1) for _ in range(count - 1))
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *rest))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = functional.max_pool2d(self.stem(x), 3, stride=2, padding=1)
        features: list[torch.Tensor] = []
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
            features.append(x)
        return features[1:]  # strides 8, 16, 32


def _conv_bn(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU()


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False),
                nn.Conv2d(inputs, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class _ConvModule(nn.Module):
    """A convolution under the name `conv`, with a norm `bn` and a ReLU when it is one of the head's."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=not norm)
        self.bn = nn.BatchNorm2d(outputs) if norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x if self.bn is None else torch.relu(self.bn(x))


class _PathAggregation(nn.Module):
    def __init__(self, inputs: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList(_ConvModule(width_, outputs, 1) for width_ in inputs)
        self.fpn_convs = nn.ModuleList(_ConvModule(outputs, outputs, 3) for _ in inputs)
        self.downsample_convs = nn.ModuleList(_ConvModule(outputs, outputs, 3, 2) for _ in inputs[1:])
        self.pafpn_convs = nn.ModuleList(_ConvModule(outputs, outputs, 3) for _ in inputs[1:])

    def forward(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        levels = [conv(x) for conv, x in zip(self.lateral_convs, features, strict=True)]
        for i in range(len(levels) - 1, 0, -1):
            size = levels[i - 1].shape[2:]
            levels[i - 1] = levels[i - 1] + functional.interpolate(levels[i], size=size, mode="nearest")
        levels = [conv(x) for conv, x in zip(self.fpn_convs, levels, strict=True)]
        for i, conv in enumerate(self.downsample_convs):
            levels[i + 1] = levels[i + 1] + conv(levels[i])
        return [levels[0], *(conv(x) for conv, x in zip(self.pafpn_convs, levels[1:], strict=True))]


class _Head(nn.Module):
    def __init__(self, shape: ScrfdShape) -> None:
        super().__init__()
        self.names = [str((stride, stride)) for stride in STRIDES]
        self.cls_stride_convs = nn.ModuleDict()
        for name in self.names:
            channels = [shape.neck, *[shape.head] * (shape.head_convs - 1)]
            convs = [_ConvModule(inputs, shape.head, 3, norm=True) for inputs in channels]
            self.cls_stride_convs[name] = nn.Sequential(*convs)
        self.stride_cls = self._branches(shape.head, 1)
        self.stride_reg = self._branches(shape.head, 4)
        self.stride_kps = self._branches(shape.head, 10)

    def _branches(self, inputs: int, size: int) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Conv2d(inputs, ANCHORS * size, 3, padding=1) for name in self.names})

    def forward(self, levels: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        shared = {
            name: self.cls_stride_convs[name](level) for name, level in zip(self.names, levels, strict=True)
        }
        rows: list[torch.Tensor] = []
        for branches, size in ((self.stride_cls, 1), (self.stride_reg, 4), (self.stride_kps, 10)):
            for name, x in shared.items():
                y = branches[name](x).permute(0, 2, 3, 1).reshape(len(x), -1, size)
                rows.append(y.sigmoid() if size == 1 else y)
        return tuple(rows)

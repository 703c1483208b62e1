"""Tiny face networks with the published ones' key names, and pictures of faces that they can find.

The detector's weights are set, not drawn: it finds a red dot as a small face and a green dot as a large one,
and looks at nothing else. Who somebody is, is a pattern in the blue channel, which only the embedding sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from wan_trainer.media.video import write_video
from wan_trainer.rewards.face.alignment import TEMPLATE
from wan_trainer.rewards.face.iresnet import IResNet, IResNetShape
from wan_trainer.rewards.face.scrfd import Scrfd, ScrfdShape

SIZE = 128
SMALL, LARGE = 32, 64  # pixels of a face with a red, and with a green dot


def tiny_scrfd() -> Scrfd:
    """The dot finder: layers pass channels 0 (red) and 1 (green) on, coarser strides their means."""
    network = Scrfd(
        ScrfdShape(stem=4, widths=(4, 4, 4, 4), blocks=(1, 2, 1, 1), neck=4, head=4, head_convs=2)
    )
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
                inner_of_block = ".layer" in name and "downsample" not in name
                if (
                    not inner_of_block
                    and "downsample_convs" not in name
                    and not name.startswith("bbox_head.stride_")
                ):
                    middle = module.kernel_size[0] // 2
                    for channel in range(2):
                        module.weight[channel, channel, middle, middle] = 1
        for channel, (stride, size) in enumerate(((8, SMALL), (16, LARGE))):
            heads = {kind: _head(network, kind, stride) for kind in ("cls", "reg", "kps")}
            heads["cls"].weight[0, channel, 1, 1] = 20
            heads["reg"].bias.fill_(size / 2 / stride)
            keypoints = (torch.tensor(TEMPLATE) - 56) / 112 * size / stride
            heads["kps"].bias.copy_(keypoints.flatten().repeat(2))
        for stride in (8, 16, 32):
            _head(network, "cls", stride).bias.fill_(-10)
        for level in range(3):  # a level's own lateral sees its own dot only
            weight = cast(nn.Conv2d, network.get_submodule(f"neck.lateral_convs.{level}.conv")).weight
            for channel in range(2):
                weight[channel, channel] = float(level == channel)
    return network.eval()


def _head(network: Scrfd, kind: str, stride: int) -> nn.Conv2d:
    return cast(nn.Conv2d, network.get_submodule(f"bbox_head.stride_{kind}.({stride}, {stride})"))


def tiny_iresnet(seed: int = 0) -> IResNet:
    """Random weights; batch statistics of random pictures, so that embeddings of two pictures differ."""
    generator = torch.Generator().manual_seed(seed)
    network = IResNet(IResNetShape(stem=6, widths=(4, 6, 6, 8), blocks=(1, 2, 1, 1), embedding=16))
    for key, value in network.state_dict().items():
        if value.is_floating_point() and "running" not in key:
            drawn = torch.randn(value.shape, generator=generator)
            matrix = value.ndim > 1
            value.copy_(drawn / value[0].numel() ** 0.5 if matrix else drawn * 0.1 + ("bias" not in key))
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    pictures = nn.functional.interpolate(
        torch.rand(16, 3, 9, 9, generator=generator) * 2 - 1, size=(112, 112)
    )
    with torch.no_grad():
        network.train()(pictures)
    return network.eval()


def write_networks(directory: Path) -> Path:
    """Both networks as safetensors, under the names that `NAMES` has."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tiny_scrfd().state_dict(), directory / NAMES["detection"])
    save_file(tiny_iresnet().state_dict(), directory / NAMES["recognition"])
    return directory


NAMES = {"detection": "scrfd.safetensors", "recognition": "iresnet.safetensors"}


def put_face(frame: torch.Tensor, x: int, y: int, person: int, size: int) -> None:
    """Draw a person's face into float32 (3, H, W), its middle at x, y (multiples of its stride)."""
    generator = torch.Generator().manual_seed(person)
    pattern = torch.rand(1, 1, 6, 6, generator=generator)
    pattern = nn.functional.interpolate(pattern, size=(size, size), mode="bilinear")[0, 0]
    half = size // 2
    top, left = y - half, x - half
    rows = slice(max(top, 0), min(top + size, frame.shape[1]))
    columns = slice(max(left, 0), min(left + size, frame.shape[2]))
    frame[2, rows, columns] = pattern[
        rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
    ]
    stride, channel = (8, 0) if size == SMALL else (16, 1)
    frame[channel, y - 2 : y + stride - 1, x - 2 : x + stride - 1] = 1


def video(person: int | None, frames: int = 4, size: int = SMALL, start: int = 40) -> torch.Tensor:
    """float32 (3, F, SIZE, SIZE) of one person who moves to the right, or of nobody."""
    clip = torch.zeros(frames, 3, SIZE, SIZE)
    step = 8 if size == SMALL else 16
    for index, frame in enumerate(clip):
        if person is not None:
            put_face(frame, (start + index * step - 32) % 64 + 32, 64, person, size)
    return clip.transpose(0, 1)


def write_clip(path: Path, clip: torch.Tensor) -> Path:
    """Write float32 (3, F, H, W) as a video of hardly any loss."""
    frames = (clip.permute(1, 2, 3, 0) * 255).round().numpy().astype(np.uint8)
    write_video(path, frames, 8, crf=1)
    return path

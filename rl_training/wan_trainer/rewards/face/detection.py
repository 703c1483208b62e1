"""Where the faces of a batch of frames are: SCRFD's outputs, decoded; the largest face of each frame."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from torchvision.ops import batched_nms

from wan_trainer.rewards.face.scrfd import ANCHORS, STRIDES
from wan_trainer.types import UserError

_log = logging.getLogger(__name__)

_NMS_IOU = 0.4  # as published with the detector
_FRAMES_AT_ONCE = 96  # bounds the memory of a large batch; a video of 81 frames goes in one
_VALUES = (1, 4, 10)  # of a score, a box and five keypoints


@dataclass(frozen=True)
class Faces:
    """The largest face of every frame that has one.

    frame: (K,) int64 indices of the frames with a face, ascending. boxes: (K, 4) float32, x1 y1 x2 y2.
    keypoints: (K, 5, 2) float32, x and y of left eye, right eye, nose, left and right corner of the mouth as
    they appear in the picture. scores: (K,) float32. In pixels of the frame; integers are pixel centres.
    """

    frame: torch.Tensor
    boxes: torch.Tensor
    keypoints: torch.Tensor
    scores: torch.Tensor


class FaceDetector(Protocol):
    """Finds faces; it has no gradient."""

    def detect(self, frames: torch.Tensor) -> Faces:
        """The largest face of each frame of float32 (M, 3, H, W) RGB in [0, 1]."""
        ...


class ScrfdDetector:
    """An SCRFD network with keypoints and its pre- and post-processing.

    network: maps (N, 3, size, size) to nine outputs as `Scrfd` does, or with rows (P x N, C) instead of
    (N, P, C), as published ONNX files have them. size: side of the square that a frame is fitted into, a
    multiple of 32 pixels. threshold: lowest score of a face. Raises UserError when the network is no SCRFD
    with keypoints.
    """

    def __init__(self, network: nn.Module, size: int, threshold: float, device: torch.device) -> None:
        self._network = network.to(device)
        self._size = size
        self._threshold = threshold
        self._anchors = anchor_centres(size, device)
        self._layout = self._find_layout(device)

    @torch.no_grad()
    def detect(self, frames: torch.Tensor) -> Faces:
        """See `FaceDetector`."""
        found = [self._detect(chunk) for chunk in frames.detach().split(_FRAMES_AT_ONCE)]
        offsets = [index * _FRAMES_AT_ONCE for index in range(len(found))]
        return Faces(
            frame=torch.cat([part.frame + offset for part, offset in zip(found, offsets, strict=True)]),
            boxes=torch.cat([part.boxes for part in found]),
            keypoints=torch.cat([part.keypoints for part in found]),
            scores=torch.cat([part.scores for part in found]),
        )

    def _detect(self, frames: torch.Tensor) -> Faces:
        images, scale = letterbox(frames, self._size)
        scores, boxes, keypoints = decode(self.outputs(images), self._anchors)
        return largest_faces(scores, boxes / scale.repeat(2), keypoints / scale, self._threshold)

    @property
    def batched(self) -> bool:
        """Whether the network takes several images at a time."""
        return self._layout is not None

    def outputs(self, images: torch.Tensor) -> list[torch.Tensor]:
        """The network's nine outputs, (N, P, C) each, for (N, 3, size, size) normalised as by `letterbox`."""
        if self._layout is None:
            singles = [_batch_first(self._run(image[None]), 1) for image in images]
            return [torch.cat(parts) for parts in zip(*singles, strict=True)]
        return self._layout(self._run(images), len(images))

    def _run(self, images: torch.Tensor) -> list[torch.Tensor]:
        outputs: torch.Tensor | Sequence[torch.Tensor] = self._network(images)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    def _find_layout(self, device: torch.device) -> _Layout | None:
        """How the rows of a batch lie in the network's outputs: found out on two noise images.

        The published ONNX graphs were traced with one image. With several, those flatten the batch between
        position and anchor, and a wrong guess would silently give a frame the faces of its neighbours.
        """
        noise = torch.rand(2, 3, self._size, self._size, generator=torch.Generator().manual_seed(0))
        images = noise.to(device) * 2 - 1
        with torch.no_grad():
            singles = [self._run(image[None]) for image in images]
            self._check_outputs(singles[0])
            expected = [torch.cat(both) for both in zip(*(_batch_first(s, 1) for s in singles), strict=True)]
            try:
                outputs = self._run(images)
            except RuntimeError:  # the graph has a fixed batch of one
                outputs = []
        for layout in (_batch_first, _position_first) if outputs else ():
            if all(map(_close, layout(outputs, 2), expected)):
                return layout
        _log.warning("Face: the detector takes one image at a time; a batch of frames is slow")
        return None

    def _check_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        rows = [len(anchors) for anchors in self._anchors]
        needed = [count * values for values in _VALUES for count in rows]
        if [output.numel() for output in outputs] != needed:
            shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
            raise UserError(
                f"Face: the detection network gives {shapes}, and scores, boxes and five keypoints on "
                f"strides {', '.join(map(str, STRIDES))} are needed; name an SCRFD with keypoints (bnkps)"
            )


class _Layout(Protocol):
    def __call__(self, outputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]: ...


def _batch_first(outputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
    values = _values(outputs)
    return [output.reshape(batch, -1, size) for output, size in zip(outputs, values, strict=True)]


def _position_first(outputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
    values = _values(outputs)
    return [
        output.reshape(-1, batch, ANCHORS, size).transpose(0, 1).reshape(batch, -1, size)
        for output, size in zip(outputs, values, strict=True)
    ]


def _values(outputs: Sequence[torch.Tensor]) -> list[int]:
    return [values for values in _VALUES for _ in STRIDES][: len(outputs)]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def letterbox(frames: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit frames into the top left of a black square and normalise them to (value - 127.5) / 128.

    frames: float32 (M, 3, H, W) in [0, 1]. Returns (M, 3, size, size) and the scale, (2,): x and y factors
    from the frame to the square.
    """
    height, width = frames.shape[-2:]
    factor = size / max(height, width)
    inner = max(1, int(height * factor)), max(1, int(width * factor))
    resized = functional.interpolate(frames, size=inner, mode="bilinear", align_corners=False)
    padded = functional.pad(resized, (0, size - inner[1], 0, size - inner[0]))
    scale = frames.new_tensor([inner[1] / width, inner[0] / height])
    return (padded * 255 - 127.5) / 128, scale


def anchor_centres(size: int, device: torch.device) -> list[torch.Tensor]:
    """(P, 2) x and y of the rows of each stride, in pixels of the square: row by row, anchor last."""
    centres: list[torch.Tensor] = []
    for stride in STRIDES:
        along = torch.arange(size // stride, device=device, dtype=torch.float32) * stride
        y, x = torch.meshgrid(along, along, indexing="ij")
        centres.append(torch.stack([x, y], dim=-1).reshape(-1, 2).repeat_interleave(ANCHORS, dim=0))
    return centres


def decode(
    outputs: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (N, P), boxes (N, P, 4) and keypoints (N, P, 5, 2) of all strides together, in the square.

    outputs: three scores, boxes, keypoints, each (N, P_s, C). A box is the distances to its left, top, right
    and bottom edge from its row's centre, a keypoint its offset, both in strides.
    """
    count = len(STRIDES)
    scores, boxes, keypoints = outputs[:count], outputs[count : 2 * count], outputs[2 * count :]
    corners: list[torch.Tensor] = []
    points: list[torch.Tensor] = []
    for stride, centre, box, offset in zip(STRIDES, anchors, boxes, keypoints, strict=True):
        corners.append(torch.cat([centre - box[..., :2] * stride, centre + box[..., 2:] * stride], dim=-1))
        points.append(centre[:, None] + offset.unflatten(-1, (5, 2)) * stride)
    return torch.cat([score[..., 0] for score in scores], 1), torch.cat(corners, 1), torch.cat(points, 1)


def largest_faces(
    scores: torch.Tensor, boxes: torch.Tensor, keypoints: torch.Tensor, threshold: float
) -> Faces:
    """The largest box of each frame that reaches the threshold and is not suppressed by a better one.

    scores (N, P), boxes (N, P, 4), keypoints (N, P, 5, 2). Of equally large boxes the best score wins, then
    the first row.
    """
    # Five keypoints within a pixel are no face, and have no similarity transform.
    spread = keypoints.amax(2) - keypoints.amin(2)
    frame, row = torch.nonzero((scores >= threshold) & (spread.amax(-1) >= 1), as_tuple=True)
    scores, boxes, keypoints = scores[frame, row], boxes[frame, row], keypoints[frame, row]
    kept = batched_nms(boxes, scores, frame, _NMS_IOU)  # best score first
    area = (boxes[kept, 2] - boxes[kept, 0]) * (boxes[kept, 3] - boxes[kept, 1])
    kept = kept[torch.argsort(area, descending=True, stable=True)]
    kept = kept[torch.argsort(frame[kept], stable=True)]
    first = torch.ones_like(kept, dtype=torch.bool)
    first[1:] = frame[kept][1:] != frame[kept][:-1]
    kept = kept[first]
    return Faces(frame[kept], boxes[kept], keypoints[kept], scores[kept])

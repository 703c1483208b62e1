"""A face, turned and scaled to the template that ArcFace networks were trained on."""

from __future__ import annotations

import torch
from torch.nn import functional

from wan_trainer.rewards.face.iresnet import CROP

# x and y of the five keypoints in a crop of 112 x 112 (Deng et al., 2019; the same in every implementation).
TEMPLATE = (
    (38.2946, 51.6963),
    (73.5318, 51.5014),
    (56.0252, 71.7366),
    (41.5493, 92.3655),
    (70.7299, 92.2041),
)


def similarity_transforms(keypoints: torch.Tensor) -> torch.Tensor:
    """The similarity transforms, (K, 2, 3), that bring keypoints nearest to the template in the crop.

    keypoints: (K, 5, 2) x and y in pixels, not all the same point. Rotation, one scale and a shift that
    minimise the squared distance: Umeyama (1991), whose solution in the plane is one complex factor.
    """
    target = torch.tensor(TEMPLATE, dtype=keypoints.dtype, device=keypoints.device)
    source_mean, target_mean = keypoints.mean(1), target.mean(0)
    source, target = keypoints - source_mean[:, None], target - target_mean
    power = source.square().sum((1, 2))
    cosine = (source * target).sum((1, 2)) / power
    sine = (source[..., 0] * target[:, 1] - source[..., 1] * target[:, 0]).sum(1) / power
    linear = torch.stack([torch.stack([cosine, -sine], 1), torch.stack([sine, cosine], 1)], 1)
    shift = target_mean - (linear @ source_mean[..., None])[..., 0]
    return torch.cat([linear, shift[..., None]], dim=2)


def crop_faces(frames: torch.Tensor, transforms: torch.Tensor) -> torch.Tensor:
    """The crops, (K, 3, 112, 112), that the transforms map to, with a gradient in `frames`.

    frames: (K, 3, H, W), one a transform; transforms: (K, 2, 3), from the frame to the crop. Bilinear, and 0
    outside the frame, like a warp of OpenCV: a face much larger than the crop is sampled, not averaged.
    """
    along = torch.arange(CROP, dtype=frames.dtype, device=frames.device)
    y, x = torch.meshgrid(along, along, indexing="ij")
    linear, shift = transforms[..., :2].to(frames.dtype), transforms[..., 2].to(frames.dtype)
    positions = torch.stack([x, y], dim=-1).reshape(1, -1, 2) - shift[:, None]
    # A row vector times the transposed inverse: the place in the frame that a crop's pixel shows.
    source = positions @ torch.linalg.inv(linear).transpose(1, 2)
    height, width = frames.shape[-2:]
    grid = (2 * source + 1) / source.new_tensor([width, height]) - 1
    grid = grid.reshape(len(frames), CROP, CROP, 2)
    return functional.grid_sample(frames, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

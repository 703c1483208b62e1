"""From faces in frames to unit vectors, with a gradient in the pixels."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wan_trainer.rewards.face.alignment import crop_faces, similarity_transforms
from wan_trainer.rewards.face.iresnet import CROP
from wan_trainer.types import UserError

_FACES_AT_ONCE = 16  # an IResNet-100 keeps about 1 GiB of activations for so many


class FaceEmbedder:
    """An ArcFace network and its pre-processing. network: maps (N, 3, 112, 112) in [-1, 1] to (N, D).

    Raises UserError when it does not, or when it mixes the rows of a batch.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._network = network.to(device)
        crops = torch.rand(2, 3, CROP, CROP, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
        dtype = next((tensor.dtype for tensor in network.state_dict().values()), crops.dtype)
        _check_batch(network, crops.to(dtype))

    def embed(self, videos: torch.Tensor, index: torch.Tensor, keypoints: torch.Tensor) -> torch.Tensor:
        """Unit embeddings (K, D) of K faces.

        videos: (N, 3, F, H, W) RGB in [0, 1]. index: (K,) frames with a face, counted n * F + f. keypoints:
        (K, 5, 2) in pixels, of `Faces`. Activations are kept for one chunk of faces only.
        """
        transforms = similarity_transforms(keypoints)
        chunks = zip(index.split(_FACES_AT_ONCE), transforms.split(_FACES_AT_ONCE), strict=True)
        return torch.cat([self._embed_lightly(videos, *chunk) for chunk in chunks])

    def _embed_lightly(
        self, videos: torch.Tensor, index: torch.Tensor, transforms: torch.Tensor
    ) -> torch.Tensor:
        found = checkpoint(
            self._embed, videos, index, transforms, use_reentrant=False, preserve_rng_state=False
        )
        assert isinstance(found, torch.Tensor)
        return found

    def _embed(self, videos: torch.Tensor, index: torch.Tensor, transforms: torch.Tensor) -> torch.Tensor:
        num_frames = videos.shape[2]
        frames = videos[index // num_frames, :, index % num_frames]
        crops = crop_faces(frames, transforms) * 2 - 1  # (x - 127.5) / 127.5
        return functional.normalize(self._network(crops))


@torch.no_grad()
def _check_batch(network: nn.Module, crops: torch.Tensor) -> None:
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            both = network(crops)
            single = torch.cat([network(crop[None]) for crop in crops])
    except RuntimeError as error:
        raise UserError(
            f"Face: the recognition network does not take a batch of {CROP} x {CROP} crops "
            f"({str(error).splitlines()[0][:200]}); name an ArcFace network"
        ) from error
    rule = f"the recognition network must map (N, 3, {CROP}, {CROP}) to (N, D), row by row"
    if not isinstance(both, torch.Tensor) or both.ndim != 2 or both.shape != single.shape:
        raise UserError(f"Face: {rule}; name an ArcFace network")
    if not torch.allclose(both, single, rtol=1e-3, atol=1e-3 * float(single.abs().max())):
        raise UserError(f"Face: {rule}, and this one mixes the rows of a batch; name an ArcFace network")

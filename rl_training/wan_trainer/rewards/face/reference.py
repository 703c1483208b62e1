"""The face of a reference video as one embedding, read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from wan_trainer.media.video import probe_video, read_frames
from wan_trainer.types import Sample, UserError

MAX_FRAMES = 32  # evenly spaced; a face's mean embedding hardly changes with more

# float32 (F, 3, H, W) RGB in [0, 1] -> unit embeddings (K, D) of the frames with a face.
EmbedFrames = Callable[[torch.Tensor], torch.Tensor]


class ReferenceFaces:
    """The embeddings of reference videos, kept by path until the file changes."""

    def __init__(self, embed: EmbedFrames, device: torch.device) -> None:
        self._embed = embed
        self._device = device
        self._kept: dict[Path, tuple[tuple[int, int], torch.Tensor]] = {}

    def embedding(self, sample: Sample) -> torch.Tensor:
        """The unit mean (D,) of the unit embeddings of the sample's reference video.

        Raises UserError when the sample has no reference video, or that cannot be read or has no face.
        """
        path = sample.reference_video
        if path is None:
            raise UserError(
                f"sample {sample.sample_id}: has no reference_video, which the face reward needs; name "
                "one in the prompt list"
            )
        try:
            found = path.stat()
        except OSError as error:
            said = f"reference_video {path} cannot be read: {error.strerror}"
            raise UserError(f"sample {sample.sample_id}: {said}; put it there") from None
        version = (found.st_mtime_ns, found.st_size)
        kept = self._kept.get(path)
        if kept is None or kept[0] != version:
            kept = self._kept[path] = (version, self._read(path, sample.sample_id))
        return kept[1]

    @torch.no_grad()
    def _read(self, path: Path, sample_id: str) -> torch.Tensor:
        count = probe_video(path).num_frames
        spaced = np.linspace(0, count - 1, min(count, MAX_FRAMES)).round().astype(int).tolist()
        # A container that does not count its frames is read to its end.
        frames = torch.from_numpy(read_frames(path, spaced or None)).to(self._device)
        embeddings = self._embed(frames.permute(0, 3, 1, 2).float() / 255)
        if not len(embeddings):
            raise UserError(
                f"sample {sample_id}: no face is found in its reference_video {path}; use a video that shows "
                "the face larger and from the front, or remove the sample"
            )
        return functional.normalize(embeddings.mean(0), dim=0)

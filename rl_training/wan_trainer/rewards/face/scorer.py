"""Detection, embedding and comparison together: from videos to one cosine each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wan_trainer.rewards.face.detection import FaceDetector, ScrfdDetector
from wan_trainer.rewards.face.embedding import FaceEmbedder
from wan_trainer.rewards.face.iresnet import IResNet, IResNetShape
from wan_trainer.rewards.face.options import FaceOptions
from wan_trainer.rewards.face.reference import ReferenceFaces
from wan_trainer.rewards.face.scrfd import Scrfd, ScrfdShape
from wan_trainer.rewards.face.weights import load_network
from wan_trainer.types import DifferentiableScores, Sample, UserError


class FaceScorer:
    """The loaded networks and the reference faces seen so far. See `Face`."""

    def __init__(self, options: FaceOptions, device: torch.device) -> None:
        network = load_network(options.detection_file, lambda state: Scrfd(ScrfdShape.of(state)))
        self._detector: FaceDetector = ScrfdDetector(
            network, options.detection_size, options.detection_threshold, device
        )
        network = load_network(options.recognition_file, lambda state: IResNet(IResNetShape.of(state)))
        self._embedder = FaceEmbedder(network, device)
        self._references = ReferenceFaces(self._embed_frames, device)
        self._no_face = options.no_face

    def score(self, videos: torch.Tensor, samples: Sequence[Sample]) -> DifferentiableScores:
        """See `Face.score`."""
        num_videos, _, num_frames = videos.shape[:3]
        assert len(samples) == num_videos
        references = torch.stack([self._references.embedding(sample) for sample in samples])
        faces = self._detector.detect(videos.detach().transpose(1, 2).flatten(0, 1))
        row, column = faces.frame // num_frames, faces.frame % num_frames
        # One pixel of each frame, times 0: the graph reaches the videos even when no frame has a face.
        cosines = (videos[:, 0, :, 0, 0] * 0).nan_to_num()
        if len(faces.frame):
            embeddings = self._embedder.embed(videos, faces.frame, faces.keypoints)
            # Each frame has a place of its own, so that no sum depends on an order of additions.
            cosines = cosines.index_put((row, column), (embeddings * references[row]).sum(1))
        found = torch.zeros(num_videos, num_frames, dtype=torch.bool, device=videos.device)
        found[row, column] = True
        counts = found.sum(1)
        similarity = cosines.sum(1) / counts.clamp(min=1)
        missing = counts == 0
        components = {
            "similarity": similarity.detach().masked_fill(missing, torch.nan),
            "face_frames": counts / num_frames,
        }
        reward = torch.where(missing, self._faceless_reward(missing, samples), similarity)
        return DifferentiableScores(reward, components)

    def _faceless_reward(self, missing: torch.Tensor, samples: Sequence[Sample]) -> float:
        if not isinstance(self._no_face, str):
            return float(self._no_face)
        if self._no_face == "error" and bool(missing.any()):
            without = [s.sample_id for s, none in zip(samples, missing.tolist(), strict=True) if none]
            raise UserError(
                f"Face: no_face: error, and the generated video of {', '.join(without)} shows no face; "
                "set no_face to missing or a number to go on"
            )
        return torch.nan

    def _embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        faces = self._detector.detect(frames)
        if not len(faces.frame):
            return frames.new_empty(0)
        return self._embedder.embed(frames.transpose(0, 1)[None], faces.frame, faces.keypoints)

"""Face likeness: the cosine of ArcFace embeddings of a video's faces and those of its reference video."""

from wan_trainer.rewards.face.reward import Face

__all__ = ["Face"]

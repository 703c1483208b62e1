"""VideoAlign's reward model (VideoReward) as a differentiable reward. It imports torch when it is built."""

from wan_trainer.rewards.videoalign.reward import VideoAlign

__all__ = ["VideoAlign"]

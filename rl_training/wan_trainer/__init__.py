"""wan_trainer: torchrun-native GRPO and ReFL training for Wan2.1 and Wan2.2 video models."""

__version__ = "0.1.0"

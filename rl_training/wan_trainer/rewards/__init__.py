"""Rewards: what scores a rollout. A reward never sees the trainer. Start at `build.build_reward`."""

"""Rollout dispatcher: buffers RL samples and streams balanced micro-batches to DP ranks."""

__version__ = "0.1.0"

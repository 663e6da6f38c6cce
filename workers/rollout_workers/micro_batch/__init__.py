"""Micro-batches as torch tensors, made from the received bytes."""

"""Micro-batches: the input of one forward and backward pass, made from received bytes."""

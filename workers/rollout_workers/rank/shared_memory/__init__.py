"""Micro-batches whose samples lie in shared memory, made what they are when carried."""

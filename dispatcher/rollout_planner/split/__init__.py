"""Splits the samples of a step over DP ranks and micro-batches."""

"""Delivery of steps to DP ranks: the header first, then one micro-batch at a time."""

"""Delivery of steps to DP ranks: a header, then one micro-batch at a time."""

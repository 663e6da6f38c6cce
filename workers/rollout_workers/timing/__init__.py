"""Measures the time of each micro-batch on this rank, and its share blocked in collectives."""

"""Measured times of steps, as DP ranks report them: waits, cost of samples, speeds of ranks."""

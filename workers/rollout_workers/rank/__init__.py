"""A DP rank's client without torch: steps and micro-batches as they arrive, and commits."""

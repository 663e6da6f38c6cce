"""What each micro-batch took on this rank, and how much of that it was blocked in collectives."""

"""DP ranks: their generation, and where each stands."""

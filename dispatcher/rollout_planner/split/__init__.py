"""Who trains on what: the chosen samples over DP ranks and micro-batches."""

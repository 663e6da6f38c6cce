"""Loss normalisation: weights of tokens, and scales for a whole step over all DP ranks."""

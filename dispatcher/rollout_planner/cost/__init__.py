"""What a sample costs: arithmetic on its tokens, or the FLOPs of a given transformer."""

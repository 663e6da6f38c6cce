"""`dispatcher demo`: trains for real on this machine, once a strategy, and compares."""

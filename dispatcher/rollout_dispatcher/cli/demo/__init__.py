"""`dispatcher demo`: trains on this machine once per strategy, and compares."""

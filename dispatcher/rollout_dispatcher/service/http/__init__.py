"""The HTTP plane: pushes in JSON, health, status, metrics."""

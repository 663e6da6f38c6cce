"""What becomes of steps as they go: the last of them for `/debug/steps`, all of them on record."""

"""Which samples of the window a step takes."""

"""Which pushed samples come in, which are blocked at a cap, and what each push is told."""

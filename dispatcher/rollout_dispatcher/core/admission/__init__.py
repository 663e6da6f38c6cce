"""Which pushed samples come in, which are held back at a cap, and what each push is told."""

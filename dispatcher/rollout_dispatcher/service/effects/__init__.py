"""What the core decides is performed: frames, plans, deadlines, lines in the log."""

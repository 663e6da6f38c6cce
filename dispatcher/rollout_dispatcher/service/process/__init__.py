"""What `dispatcher serve` does to its own process: signals, logs, memory."""

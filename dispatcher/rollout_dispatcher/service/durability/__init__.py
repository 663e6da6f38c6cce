"""What waits until it is durable, and how the core goes on from a journal."""

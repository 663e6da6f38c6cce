"""The sample plane without I/O: frames, messages, and their order in a session."""

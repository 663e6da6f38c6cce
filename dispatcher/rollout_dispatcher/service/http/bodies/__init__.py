"""Request bodies: received, decompressed and read as JSON, a bounded piece at a time."""

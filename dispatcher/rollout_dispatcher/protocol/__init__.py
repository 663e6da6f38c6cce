"""The wire protocol without IO: bytes to messages and back, and each state's legal messages."""

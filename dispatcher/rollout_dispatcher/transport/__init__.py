"""Sockets under asyncio: plain and TLS, without joining or copying buffers."""

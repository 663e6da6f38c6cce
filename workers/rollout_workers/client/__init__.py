"""Shared by both clients: connection, credentials, heartbeats, reconnecting."""

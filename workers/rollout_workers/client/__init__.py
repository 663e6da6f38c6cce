"""What both clients share: connection, credentials, heartbeats, reconnecting."""

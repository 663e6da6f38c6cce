"""Connections of the sample plane, and the client that each belongs to."""

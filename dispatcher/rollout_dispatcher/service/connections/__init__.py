"""Connections of the sample plane, and the client of each."""

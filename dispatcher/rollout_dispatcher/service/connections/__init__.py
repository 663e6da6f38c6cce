"""Connections of the sample plane, and which of them speaks for which client."""

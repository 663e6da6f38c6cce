"""Descriptors of others: closed where nobody waits, also those that nobody has taken."""

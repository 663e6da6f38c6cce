"""Producers: who is there, what they pushed before, and what all have agreed to end."""

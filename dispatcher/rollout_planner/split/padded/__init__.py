"""Padded micro-batches of any count under a budget of padded tokens."""

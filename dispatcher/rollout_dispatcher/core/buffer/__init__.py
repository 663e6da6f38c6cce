"""Accepted samples that are not planned yet: groups, caps, freshness."""

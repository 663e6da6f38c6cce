"""The sample buffer: accepted samples not planned yet, their groups, caps and staleness."""

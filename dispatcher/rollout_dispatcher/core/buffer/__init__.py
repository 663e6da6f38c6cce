"""What is accepted and not yet planned: samples, groups, caps, freshness."""

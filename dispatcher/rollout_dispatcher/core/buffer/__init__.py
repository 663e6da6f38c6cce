"""What is accepted and not yet planned: admission, caps, groups, freshness."""

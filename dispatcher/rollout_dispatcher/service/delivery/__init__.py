"""Steps on their way to DP ranks: announced, then handed out a micro-batch at a time."""

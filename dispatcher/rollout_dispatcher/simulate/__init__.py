"""Simulated runs: a trace of lengths through the core and planner of `dispatcher serve`."""

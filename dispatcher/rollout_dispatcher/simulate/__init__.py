"""Simulation: runs a trace of lengths through the core and the planner."""

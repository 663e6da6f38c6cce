"""Decides when to plan a step, calls the planner, and opens or rejects its plan."""

"""When a step is planned, what the planner is asked, and what becomes of its answer."""

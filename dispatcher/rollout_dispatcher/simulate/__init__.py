"""What-if runs: a length trace through the very core and planner that serve."""

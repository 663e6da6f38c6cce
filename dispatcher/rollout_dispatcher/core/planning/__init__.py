"""Planning: the trigger of a step, the planner's input, and its result."""

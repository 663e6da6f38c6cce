"""`dispatcher top`: a live view of one dispatcher, for an operator on a terminal."""

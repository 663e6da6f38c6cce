"""Over what the loss of a step is averaged: a module, and a line in the table, for each way."""

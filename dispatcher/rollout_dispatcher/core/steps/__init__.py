"""The step ledger: open steps from plan to commit, and those kept for a rewind."""

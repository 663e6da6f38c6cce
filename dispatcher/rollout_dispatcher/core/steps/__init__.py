"""The step ledger: open steps from plan to commit, and steps retained for a rewind."""

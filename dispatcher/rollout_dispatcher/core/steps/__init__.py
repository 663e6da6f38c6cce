"""The step ledger: open steps from plan to commit, and committed steps kept for a rewind."""
